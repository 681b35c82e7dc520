"""``beam-llm schema``: the JSON Schemas, from the models."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from beam_llm.cli.names import unknown_transform
from beam_llm.registry import TRANSFORMS, TransformSpec
from beam_llm.schemas import file_name, published


def show_schema(name: str | None, draft: str | None, out: str | None, *, pipeline: bool) -> int:
    """Prints schemas, or writes them as files.

    Args:
      name: A transform; all of them when absent.
      draft: The draft of JSON Schema. Default: 2020-12, and draft-07 for a pipeline.
      out: A folder for the files; when absent, the schema is printed.
      pipeline: Whether the schema of a whole pipeline file is meant.

    Returns:
      The exit code.
    """
    if pipeline:
        if name is not None:
            print("beam-llm schema: --pipeline takes no NAME", file=sys.stderr)
            return 2
        from beam_llm.pipeline_schema import FILE_NAME, pipeline_schema

        try:
            documents = {FILE_NAME: pipeline_schema(draft or "draft-07")}
        except FileNotFoundError as error:
            print(f"beam-llm schema: {error}: reinstall apache-beam[yaml]", file=sys.stderr)
            return 1
    elif name is not None and name not in TRANSFORMS:
        print(f"beam-llm schema: {unknown_transform(name)}", file=sys.stderr)
        return 2
    else:
        specs = [TRANSFORMS[name]] if name else list(TRANSFORMS.values())
        documents = dict(_documents(specs, draft))

    if out is None:
        shown = list(documents.values())
        print(text_of(shown[0] if len(shown) == 1 else shown), end="")
        return 0
    try:
        for file, document in documents.items():
            path = Path(out) / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text_of(document), encoding="utf-8")
            print(f"wrote {path}")
            if pipeline:
                print("In a pipeline file beside it, the first line lets an editor check it:")
                print(f"# yaml-language-server: $schema={file}")
    except OSError as error:
        print(f"beam-llm schema: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def text_of(document: Any) -> str:
    """Writes a schema as it is printed and published."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _documents(
    specs: list[TransformSpec], draft: str | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    for spec in specs:
        yield file_name(spec, draft or "2020-12"), published(spec, draft or "2020-12")
