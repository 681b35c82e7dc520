"""Writes the tables of knobs into the pages, from the configuration models.

    python docs/generate.py           # rewrites what lies between the markers
    python docs/generate.py --check   # writes nothing; exits 1 where a page would change

A table stands between `<!-- generated NAME -->` and `<!-- /generated -->`. NAME is a section
of the configuration (`Sampling`), a transform (`VLLMChat`: the knobs that are not shared), or
`shared` (the knobs that all transforms have that ask a model).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from beam_llm.config import LLMConfig
from beam_llm.registry import TRANSFORMS
from beam_llm.schemas import json_schema

DOCS = Path(__file__).parent

_BLOCK = re.compile(r"(<!-- generated (\w+) -->\n).*?(<!-- /generated -->)", re.DOTALL)
_BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
}
_PLURALS = {"string": "strings", "integer": "integers", "object": "mappings"}


def _definitions() -> dict[str, dict[str, Any]]:
    """All tables by name: knobs and their schemas, required ones first."""
    found: dict[str, dict[str, Any]] = {}
    transforms: dict[str, dict[str, Any]] = {}
    for name, spec in TRANSFORMS.items():
        schema = json_schema(spec.config)
        for section, definition in schema["$defs"].items():
            found[section] = _in_order(definition)
        transforms[name] = found.pop(spec.config.__name__)
    asking = [n for n, spec in TRANSFORMS.items() if issubclass(spec.config, LLMConfig)]
    first, *others = (transforms[name] for name in asking)
    shared = {
        knob: rule
        for knob, rule in first.items()
        if all(other.get(knob) == rule for other in others)
    }
    for name, knobs in transforms.items():
        own = {k: rule for k, rule in knobs.items() if name not in asking or k not in shared}
        found[name] = own
    return {**found, "shared": shared}


def _in_order(definition: dict[str, Any]) -> dict[str, Any]:
    required = definition.get("required", ())
    knobs = {
        knob: {**rule, "required": knob in required}
        for knob, rule in definition["properties"].items()
    }
    return dict(sorted(knobs.items(), key=lambda item: not item[1]["required"]))


def table(knobs: dict[str, Any]) -> str:
    """Writes knobs as a Markdown table, or as a list where they all say the same."""
    if len(knobs) > 1 and all(knob in rule["description"] for knob, rule in knobs.items()):
        return ", ".join(f"`{knob}`" for knob in knobs) + "\n"
    lines = [
        "| knob | type | default | what it does | example |",
        "| --- | --- | --- | --- | --- |",
    ]
    for knob, rule in knobs.items():
        cells = (
            f"`{knob}`",
            _type(rule),
            "required" if rule["required"] else _value(rule.get("default")),
            rule["description"],
            _value(next(iter(rule.get("examples", ())), None)),
        )
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _type(rule: dict[str, Any]) -> str:
    if "$ref" in rule:
        section = rule["$ref"].rpartition("/")[2]
        anchor = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", section).lower()
        return f"[section](#{anchor})"
    if "enum" in rule:
        return " or ".join(_value(word) for word in sorted(rule["enum"]))
    words = rule["type"]
    if words == "array":
        words = f"list of {_plural(rule['items'])}"
    elif words == "object":
        words = f"mapping of names to {_plural(rule['additionalProperties'])}"
    elif words == "string" and rule.get("pattern", "").startswith("^[A-Za-z_][A-Za-z0-9_]*"):
        words = "field name"
    bounds = _bounds(rule)
    unit = f" ({rule['x-unit']})" if "x-unit" in rule else ""
    return " ".join([words, *([bounds] if bounds else [])]) + unit


def _plural(rule: dict[str, Any]) -> str:
    if "$ref" in rule:
        return rule["$ref"].rpartition("/")[2].lower() + "s"
    return " ".join(filter(None, (_PLURALS[rule["type"]], _bounds(rule))))


def _bounds(rule: dict[str, Any]) -> str:
    return ", ".join(words.format(rule[key]) for key, words in _BOUNDS.items() if key in rule)


def _value(value: Any) -> str:
    if value is None or value == "" or value in ([], (), {}):
        return ""
    return f"`{value}`" if isinstance(value, str) and "\n" not in value else f"`{_json(value)}`"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def generated(page: str) -> str:
    """Gives the text of a page with its tables written anew.

    Args:
      page: The text as it is.

    Returns:
      The text as it should be.
    """
    definitions = _definitions()

    def block(match: re.Match[str]) -> str:
        return match[1] + table(definitions[match[2]]) + match[3]

    return _BLOCK.sub(block, page)


def main() -> int:
    """Rewrites the pages, or checks them."""
    parser = argparse.ArgumentParser(description="Writes the tables of knobs into the pages.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on drift")
    check = parser.parse_args().check
    drifted = False
    for page in sorted(DOCS.glob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = generated(before)
        if after == before:
            continue
        drifted = True
        if check:
            print(f"{page}: tables differ from the models: run python docs/generate.py")
        else:
            page.write_text(after, encoding="utf-8")
            print(f"{page}: rewritten")
    return int(check and drifted)


if __name__ == "__main__":
    sys.exit(main())
