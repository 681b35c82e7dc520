"""``beam-llm new``: a pipeline to start from."""

from __future__ import annotations

import sys
from pathlib import Path

_FOLDER = Path(__file__).with_name("templates")
_NAME = "PIPELINE.yaml"


def template(kind: str, file: str = _NAME) -> str:
    """Gives the text of a pipeline.

    Args:
      kind: The name of a file in `templates`: chat, completions or streaming.
      file: The name that its comments call it by.

    Returns:
      The text.
    """
    text = (_FOLDER / f"{kind}.yaml").read_text(encoding="utf-8")
    return text.replace(_NAME, file)


def write_new(kind: str, file: str | None) -> int:
    """Writes a pipeline.

    Args:
      kind: The name of a file in `templates`: chat, completions or streaming.
      file: Where to; printed when absent or ``-``.

    Returns:
      The exit code.
    """
    if file is None or file == "-":
        print(template(kind), end="")
        return 0
    path = Path(file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as stream:
            stream.write(template(kind, file))
    except FileExistsError:
        print(f"beam-llm new: {file} is there already, and is left alone", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"beam-llm new: {file} cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    print(f"wrote {file}. Next:\n  beam-llm validate {file}\n  beam-llm run {file}")
    return 0
