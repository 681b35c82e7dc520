"""JSON Schemas of the configuration models."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from beam_llm.config import Section


@functools.cache
def json_schema(model: type[Section]) -> dict[str, Any]:
    """Gives the JSON Schema (draft 2020-12) of a configuration model.

    Absent means the default, so no knob admits null: each property has one plain type.
    Required knobs come first.

    Args:
      model: A model of ``beam_llm.config``.

    Returns:
      The schema, with a ``$defs`` entry for each section.
    """
    schema = msgspec.json.schema(model)
    for definition in schema["$defs"].values():
        required = set(definition.get("required", ()))
        knobs = definition["properties"]
        definition["properties"] = dict(sorted(knobs.items(), key=lambda k: k[0] not in required))
        for name, knob in definition["properties"].items():
            options = knob.pop("anyOf", None)
            if options is not None:
                (typed,) = [option for option in options if option != {"type": "null"}]
                knob.update(typed)
            if name not in required and knob.get("default") is None:
                knob.pop("default", None)
    return schema
