"""Writes what follows from the configuration models: tables, reference pages and schemas.

    python docs/generate.py           # rewrites what differs
    python docs/generate.py --check   # writes nothing; exits 1 where a file would change

- In the pages of `docs/`, a table stands between `<!-- generated NAME -->` and
  `<!-- /generated -->`. NAME is a section of the configuration (`Sampling`), a transform
  (`VLLMChat`: the knobs that are not shared), or `shared` (the knobs that all transforms have
  that ask a model).
- `docs/reference/NAME.md` is a page for each transform, wholly generated.
- `schemas/` holds the published JSON Schemas.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import yaml

from beam_llm.cli.schema import text_of
from beam_llm.config import LLMConfig
from beam_llm.knobs import Knob, knobs, least, value_words, walk
from beam_llm.registry import TRANSFORMS, TransformSpec
from beam_llm.schemas import DRAFTS, file_name, published
from beam_llm_expansion.settings import Settings

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
SCHEMAS = ROOT / "schemas"
EXAMPLES = ROOT / "yaml_examples"

_BLOCK = re.compile(r"(<!-- generated (\w+) -->\n).*?(<!-- /generated -->)", re.DOTALL)


def _tables() -> dict[str, list[Knob]]:
    """All tables of the pages, by name."""
    found: dict[str, list[Knob]] = {}
    for spec in TRANSFORMS.values():
        for knob in walk(spec.config):
            if knob.is_section:
                found[_title(knob)] = knob.children()
    asking = [spec for spec in TRANSFORMS.values() if issubclass(spec.config, LLMConfig)]
    first, *others = (knobs(spec.config) for spec in asking)
    shared = [knob for knob in first if all(knob in other for other in others)]
    for name, spec in TRANSFORMS.items():
        own = knobs(spec.config)
        found[name] = [knob for knob in own if spec not in asking or knob not in shared]
    return {**found, "shared": shared, "service": knobs(Settings)}


def _title(section: Knob) -> str:
    rule = section.rule if "properties" in section.rule else section.rule["items"]
    return str(rule["title"])


def table(rows: Sequence[Knob], anchor: Callable[[Knob], str]) -> str:
    """Writes knobs as a Markdown table, or as a list where they all say the same.

    Args:
      rows: The knobs.
      anchor: Gives the heading on the same page that a section is described under.

    Returns:
      The Markdown.
    """
    if len(rows) > 1 and all(f".{knob.name}`" in knob.description for knob in rows):
        return ", ".join(f"`{knob.name}`" for knob in rows) + "\n"
    lines = [
        "| knob | type | default | what it does | example |",
        "| --- | --- | --- | --- | --- |",
    ]
    for knob in rows:
        words = knob.description
        if knob.deprecated:
            words = f"**Deprecated {knob.deprecated}.** {words}"
        cells = (
            f"`{knob.name}`",
            _type(knob, anchor),
            "required" if knob.required else _code(knob.default),
            words,
            _code(knob.example),
        )
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _type(knob: Knob, anchor: Callable[[Knob], str]) -> str:
    words = knob.type_words()
    if knob.is_section:
        words = f"[{words}](#{anchor(knob)})"
    return f"{words} ({knob.unit})" if knob.unit else words


def _code(value: object) -> str:
    words = value_words(value)
    return f"`{words}`" if words else ""


def with_tables(page: str) -> str:
    """Gives the text of a page with its tables written anew."""
    tables = _tables()

    def block(match: re.Match[str]) -> str:
        return match[1] + table(tables[match[2]], lambda knob: knob.name) + match[3]

    return _BLOCK.sub(block, page)


def reference(spec: TransformSpec) -> str:
    """Writes the reference page of a transform."""
    top = knobs(spec.config)
    example = [{"type": spec.name, "config": least(spec.config)}]
    schemas = ", ".join(
        f"[{draft}](../../schemas/{file_name(spec, draft)})" for draft in reversed(DRAFTS)
    )
    module, _, name = spec.builder.partition(":")
    error = next((k for k in top if k.name == "error_handling"), None)
    outputs = ", ".join(f"`{output}`" for output in spec.outputs)
    if error is not None:
        outputs += "; and the one that `error_handling.output` names, for failed rows"
    lines = [
        f"# {spec.name}",
        "",
        spec.doc,
        "",
        "| | |",
        "| --- | --- |",
        f"| inputs | {', '.join(f'`{name}`' for name in spec.inputs)} |",
        f"| outputs | {outputs} |",
        f"| in Python | `{module.partition('.')[0]}.{name}` |",
        f"| in other languages | `{spec.urn}` |",
        f"| JSON Schema | {schemas} |",
        "",
        "How to use it: [Transforms](../transforms.md). In a terminal:"
        f" `beam-llm explain {spec.name}`.",
        "",
        "## Example",
        "",
        "The least that it takes:",
        "",
        "```yaml",
        yaml.safe_dump(example, sort_keys=False, allow_unicode=True, width=88).rstrip(),
        "```",
        "",
    ]
    users = [f.name for f in sorted(EXAMPLES.glob("*.yaml")) if _uses(f, spec.name)]
    if users:
        links = ", ".join(f"[{name}](../../yaml_examples/{name})" for name in users)
        lines += [f"Pipelines that run: {links}.", ""]
    lines += [
        "## Knobs",
        "",
        "Absent, null and an empty section all mean the default.",
        "",
        table(top, _dotted_anchor),
    ]
    for section in (knob for knob in walk(spec.config) if knob.is_section):
        lines += [
            f"### {'.'.join(section.path)}",
            "",
            section.description,
            "",
            table(section.children(), _dotted_anchor),
        ]
    return "\n".join(lines)


def _dotted_anchor(knob: Knob) -> str:
    return "".join(knob.path)  # GitHub drops the points of a heading


def _uses(file: Path, name: str) -> bool:
    return re.search(rf"^\s*-?\s*type: {name}$", file.read_text("utf-8"), re.MULTILINE) is not None


def files() -> Iterator[tuple[Path, str]]:
    """Every file that is generated, wholly or in part, as it should be."""
    for page in sorted(DOCS.glob("*.md")):
        yield page, with_tables(page.read_text(encoding="utf-8"))
    for spec in TRANSFORMS.values():
        yield REFERENCE / f"{spec.name}.md", reference(spec)
        for draft in DRAFTS:
            yield SCHEMAS / file_name(spec, draft), text_of(published(spec, draft))


def main() -> int:
    """Rewrites the files, or checks them."""
    parser = argparse.ArgumentParser(description="Writes what follows from the models.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on drift")
    check = parser.parse_args().check
    wanted = dict(files())
    drifted = [f for f, text in wanted.items() if not f.exists() or f.read_text("utf-8") != text]
    # What a transform left behind that there is no more.
    stale = {*REFERENCE.glob("*.md"), *SCHEMAS.rglob("*.json")} - wanted.keys()
    for file in sorted(drifted):
        if not check:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(wanted[file], encoding="utf-8")
            print(f"{file}: written")
    for file in sorted(stale):
        if not check:
            file.unlink()
            print(f"{file}: removed")
    if check and (drifted or stale):
        for file in sorted({*drifted, *stale}):
            print(f"{file}: differs from the models: run python docs/generate.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
