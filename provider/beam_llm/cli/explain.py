"""``beam-llm explain``: what a transform, a section or a knob is, in the terminal."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from beam_llm.cli.names import nearest, unknown_transform
from beam_llm.knobs import Knob, knobs, least, value_words, walk
from beam_llm.registry import TRANSFORMS, TransformSpec


class UnknownNameError(Exception):
    """There is nothing of this name; the message says what there is."""


@dataclass
class Explanation:
    """What is said of one thing.

    Attributes:
      title: Its name.
      text: What it does.
      facts: Labels and values.
      children: The knobs in it.
      example: YAML, if an example is known.
    """

    title: str
    text: str
    facts: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    children: list[Knob] = field(default_factory=list[Knob])
    example: str = ""


def explain(name: str | None) -> int:
    """Prints what something is.

    Args:
      name: ``VLLMChat``, ``VLLMChat.sampling`` or ``VLLMChat.sampling.max_tokens``; when
        absent, the transforms are listed.

    Returns:
      The exit code.
    """
    try:
        found = _everything() if name is None else find(name)
    except UnknownNameError as error:
        print(f"beam-llm explain: {error}", file=sys.stderr)
        return 2
    if sys.stdout.isatty():
        _show(found)
    else:
        print(plain(found), end="")
    return 0


def paths() -> Iterator[str]:
    """Everything that can be explained, for completion."""
    for spec in TRANSFORMS.values():
        yield spec.name
        for knob in walk(spec.config):
            yield ".".join((spec.name, *knob.path))


def find(name: str) -> Explanation:
    """Finds what a name stands for.

    Args:
      name: A transform and the names that lead to the knob, joined by points. List
        indices, as error messages have them (``messages[0].role``), are passed over.

    Returns:
      What there is to say.

    Raises:
      UnknownNameError: There is no such thing.
    """
    first, *steps = re.sub(r"\[\d*\]", "", name).split(".")
    spec = TRANSFORMS.get(first)
    if spec is None:
        raise UnknownNameError(_unknown(first, name))
    if not steps:
        return _of_transform(spec)
    at, inner = spec.name, knobs(spec.config)
    knob: Knob | None = None
    for step in steps:
        if knob is not None and not knob.is_section:
            if knob.rule.get("type") == "object":  # the names in a mapping are the user's own
                break
            raise UnknownNameError(f"{at} is {knob.type_words()}: nothing is inside")
        by_name = {k.name: k for k in inner}
        if step not in by_name:
            raise UnknownNameError(
                f"{at} has no '{step}'{nearest(step, by_name)} (there are {', '.join(by_name)})"
            )
        knob = by_name[step]
        at, inner = f"{at}.{step}", knob.children()
    assert knob is not None  # noqa: S101 - there was at least one step
    return _of_knob(spec, knob)


def _unknown(first: str, name: str) -> str:
    """Says where a knob is that was named without its transform."""
    wanted = f".{name}"
    places = [path for path in paths() if path.endswith(wanted)]
    if places:
        return f"say where: {', '.join(places)}"
    return unknown_transform(first)


def _everything() -> Explanation:
    lines = [(spec.name, spec.doc) for spec in TRANSFORMS.values()]
    return Explanation("Transforms", "beam-llm explain NAME says more of each.", lines)


def _of_transform(spec: TransformSpec) -> Explanation:
    top = knobs(spec.config)
    return Explanation(
        spec.name,
        spec.doc,
        [("URN", spec.urn)],
        top,
        _yaml([{"type": spec.name, "config": least(spec.config)}]),
    )


def _of_knob(spec: TransformSpec, knob: Knob) -> Explanation:
    facts = [("type", "list of sections" if _is_list(knob) else knob.type_words())]
    if knob.unit:
        facts.append(("unit", knob.unit))
    if knob.required:
        facts.append(("default", "none: it is required"))
    elif not knob.is_section:
        facts.append(("default", _default(knob) or "none"))
    if knob.deprecated:
        facts.append(("deprecated", knob.deprecated))
    example = "" if knob.example is None else _yaml(_nested(spec, knob))
    children = knob.children()
    return Explanation(
        ".".join((spec.name, *knob.path)), knob.description, facts, children, example
    )


def _is_list(knob: Knob) -> bool:
    return knob.is_section and knob.rule.get("type") == "array"


def _default(knob: Knob) -> str:
    # An empty default that is a value (a name's prefix, no arguments) is worth showing.
    if knob.default in ("", [], {}):
        return "empty"
    return value_words(knob.default)


def _nested(spec: TransformSpec, knob: Knob) -> Any:
    """The example where it belongs: in its sections."""
    lists = {k.path for k in walk(spec.config) if _is_list(k)}
    value = knob.example
    for depth in range(len(knob.path), 0, -1):
        if knob.path[:depth] in lists and depth < len(knob.path):
            value = [value]
        value = {knob.path[depth - 1]: value}
    return value


def _yaml(value: Any) -> str:
    import yaml

    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=88)


def plain(found: Explanation) -> str:
    """Writes an explanation for pipes and files."""
    width = min(100, shutil.get_terminal_size((88, 24)).columns)
    lines = [found.title, "", *_wrapped(found.text, width, "  "), ""]
    labels = [label for label, _ in found.facts] + [knob.name for knob in found.children]
    column = max((len(label) for label in labels), default=0) + 2
    for label, text in found.facts:
        lines += _labelled(label, text, column, width)
    if found.facts:
        lines.append("")
    for knob in found.children:
        lines += _labelled(knob.name, _summary(knob), column, width)
        lines += _labelled("", knob.description, column, width)
    if found.children:
        lines.append("")
    if found.example:
        lines += ["  example", *textwrap.indent(found.example, "    ").splitlines(), ""]
    return "\n".join(lines[:-1]) + "\n"


def _summary(knob: Knob) -> str:
    """Type, unit and default in a line."""
    words = ["list of sections" if _is_list(knob) else knob.type_words()]
    if knob.unit:
        words.append(knob.unit)
    if knob.required:
        words.append("required")
    elif not knob.is_section and _default(knob):
        words.append(f"default {_default(knob)}")
    if knob.deprecated:
        words.append(f"deprecated {knob.deprecated}")
    return ", ".join(words)


def _labelled(label: str, text: str, column: int, width: int) -> Sequence[str]:
    lines = _wrapped(text, width, " " * (column + 2))
    lines[0] = f"  {label:<{column}}{lines[0].strip()}"
    return lines


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False
    ) or [indent]


def _show(found: Explanation) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.syntax import Syntax
    from rich.table import Table
    from rich.text import Text

    console = Console()
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    for label, text in found.facts:
        facts.add_row(Text(label), Text(text))
    inner = Table.grid(padding=(0, 2))
    inner.add_column(style="bold cyan")
    inner.add_column()
    for knob in found.children:
        words = Text.assemble((_summary(knob), "dim"), f"\n{knob.description}")
        inner.add_row(Text(knob.name), words)
    console.print(Text(found.title, style="bold"))
    console.print(Padding(Text(found.text), (1, 2)))
    if found.facts:
        console.print(Padding(facts, (0, 2, 1, 2)))
    if found.children:
        console.print(Padding(inner, (0, 2, 1, 2)))
    if found.example:
        console.print(Padding(Text("example", style="dim"), (0, 2)))
        console.print(
            Padding(Syntax(found.example, "yaml", background_color="default"), (0, 2, 0, 4))
        )
