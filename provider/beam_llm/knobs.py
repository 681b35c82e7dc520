"""Knobs as people read them: paths, types, bounds and defaults in words.

The reference pages and ``beam-llm explain`` are written with this, from the schemas.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from beam_llm.config import FIELD_NAME, FIELD_NAME_START, INT64, Section
from beam_llm.schemas import self_contained

Rule = Mapping[str, Any]

_BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
}
_PLURALS = {
    "string": "strings",
    "integer": "integers",
    "number": "numbers",
    "boolean": "booleans",
    "object": "mappings",
}


@dataclass(frozen=True)
class Knob:
    """One knob, or a section of them.

    Attributes:
      path: Names that lead to it from the transform's configuration.
      rule: Its JSON Schema, self-contained.
      required: Whether it must be given.
    """

    path: tuple[str, ...]
    rule: Rule
    required: bool = False

    @property
    def name(self) -> str:
        """Its own name."""
        return self.path[-1]

    @property
    def description(self) -> str:
        """What it does."""
        return str(self.rule.get("description", ""))

    @property
    def example(self) -> Any:
        """A valid value, if one is known."""
        return next(iter(self.rule.get("examples", ())), None)

    @property
    def default(self) -> Any:
        """Its value when it is absent, if that can be said by a value."""
        return self.rule.get("default")

    @property
    def unit(self) -> str | None:
        """Unit of its value."""
        return self.rule.get("x-unit")

    @property
    def deprecated(self) -> str | None:
        """Since when and for what it is to be replaced, if it is deprecated."""
        return self.rule.get("x-deprecated")

    @property
    def is_section(self) -> bool:
        """Whether it holds knobs of its own."""
        return "properties" in self.rule or "properties" in self.rule.get("items", {})

    def children(self) -> list[Knob]:
        """The knobs in it, or in each of its items; required ones first."""
        rule = self.rule if "properties" in self.rule else self.rule.get("items", {})
        required = rule.get("required", ())
        knobs = [
            Knob((*self.path, name), inner, name in required)
            for name, inner in rule.get("properties", {}).items()
        ]
        return sorted(knobs, key=lambda knob: not knob.required)

    def type_words(self) -> str:
        """Its type, with bounds: ``integer ≥ 1``."""
        return _type_words(self.rule)

    def bounds_words(self) -> str:
        """The bounds of its value, or nothing."""
        return _bounds_words(self.rule)


def knobs(model: type[Section]) -> list[Knob]:
    """The knobs at the top of a configuration; required ones first."""
    return Knob((), self_contained(model)).children()


def walk(model: type[Section]) -> Iterator[Knob]:
    """Every knob and section of a configuration, outer ones first."""

    def descend(found: list[Knob]) -> Iterator[Knob]:
        for knob in found:
            yield knob
            yield from descend(knob.children())

    return descend(knobs(model))


def least(model: type[Section]) -> dict[str, Any]:
    """A configuration with as little as it takes, made of examples."""
    from beam_llm.validation import check

    by_name = {knob.name: knob for knob in knobs(model)}
    config = {name: knob.example for name, knob in by_name.items() if knob.required}
    # What only a rule between knobs asks for.
    for problem in check(model, config)[0]:
        knob = by_name.get(str(problem.path[0]))
        if knob is not None and knob.name not in config:
            config[knob.name] = knob.example
    return config


def deprecated_in(config: Section) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Finds the deprecated knobs that a configuration sets to something of its own.

    Args:
      config: A configuration.

    Yields:
      The path of each, with list indices, and since when and for what it is to be replaced.
    """
    if any(knob.deprecated for knob in _every(type(config))):
        # Defaults are left out of this.
        yield from _deprecated(self_contained(type(config)), msgspec.to_builtins(config), ())


@functools.cache
def _every(model: type[Section]) -> tuple[Knob, ...]:
    return tuple(walk(model))


def _deprecated(
    rule: Rule, value: Any, path: tuple[str | int, ...]
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    if "x-deprecated" in rule:
        yield path, rule["x-deprecated"]
    elif "properties" in rule:
        for name, inner in value.items():
            yield from _deprecated(rule["properties"][name], inner, (*path, name))
    elif "properties" in rule.get("items", {}):
        for i, inner in enumerate(value):
            yield from _deprecated(rule["items"], inner, (*path, i))


def value_words(value: Any) -> str:
    """Writes a value as YAML takes it on one line; nothing for what is empty."""
    if value is None or value == "" or value in ([], (), {}):
        return ""
    if isinstance(value, str) and "\n" not in value:
        return value
    return json.dumps(value, ensure_ascii=False)


def _type_words(rule: Rule) -> str:
    if "properties" in rule:
        return "section"
    if "enum" in rule:
        return " or ".join(f"`{value_words(word)}`" for word in sorted(rule["enum"]))
    words = rule["type"]
    if words == "array":
        words = f"list of {_plural(rule['items'])}"
    elif words == "object":
        words = f"mapping of names to {_plural(rule['additionalProperties'])}"
    elif rule.get("pattern") in (FIELD_NAME, FIELD_NAME_START):
        words = "field name"
    return " ".join(filter(None, (words, _bounds_words(rule))))


def _plural(rule: Rule) -> str:
    if "properties" in rule:
        return str(rule.get("title", "section")).lower() + "s"
    return " ".join(filter(None, (_PLURALS[rule["type"]], _bounds_words(rule))))


def _bounds_words(rule: Rule) -> str:
    return ", ".join(
        words.format(rule[key])
        for key, words in _BOUNDS.items()
        # What the type itself can hold says nothing.
        if key in rule and rule[key] not in INT64
    )
