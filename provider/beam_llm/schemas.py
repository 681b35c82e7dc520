"""JSON Schemas of the configuration models, and the files in which they are published."""

from __future__ import annotations

import copy
import functools
from typing import Any, cast

import msgspec

from beam_llm.config import Section
from beam_llm.registry import TransformSpec

#: The drafts of JSON Schema in which schemas are published. Editors still read draft-07.
#: Only keywords that both share are used, so that the documents differ in their header alone.
DRAFTS = {
    "2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft-07": "http://json-schema.org/draft-07/schema#",
}


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
            if "pattern" in knob:  # from Python's to that of JSON Schema: see `config.exact`
                knob["pattern"] = knob["pattern"].replace(r"\Z", "$")
            if "enum" in knob:
                knob["type"] = "string"  # Beam makes no field without it
            if name not in required and knob.get("default") is None:
                knob.pop("default", None)
    return schema


@functools.cache
def self_contained(model: type[Section]) -> dict[str, Any]:
    """Gives the JSON Schema of a configuration model without references.

    Each section stands where it is used. That is what Beam makes a Row's schema of
    (``apache_beam.yaml.json_utils.json_schema_to_beam_schema`` follows no ``$ref``), and
    draft-07 ignores what stands beside a ``$ref``.

    Args:
      model: A model of ``beam_llm.config``.

    Returns:
      The schema of an object. Do not change it: it is shared.
    """
    schema = json_schema(model)
    definitions = schema["$defs"]

    def inline(value: Any) -> Any:
        if isinstance(value, list):
            return [inline(item) for item in cast("list[Any]", value)]
        if not isinstance(value, dict):
            return value
        rule = {key: inline(inner) for key, inner in cast("dict[str, Any]", value).items()}
        reference = rule.pop("$ref", None)
        if reference is None:
            return rule
        return {**inline(definitions[reference.rpartition("/")[2]]), **rule}

    return inline({"$ref": schema["$ref"]})


def version(spec: TransformSpec) -> str:
    """The version of a transform's configuration, such as ``v1``: that of its URN."""
    return spec.urn.rpartition(":")[2]


def published(spec: TransformSpec, draft: str = "2020-12") -> dict[str, Any]:
    """Gives a transform's schema as it is published.

    Args:
      spec: The transform.
      draft: A key of ``DRAFTS``.

    Returns:
      The document, self-contained. Its ``$id`` ends in the version of the configuration.
    """
    body = copy.deepcopy(self_contained(spec.config))
    kind, _, revision = spec.urn.partition(":schematransform:")[2].rpartition(":")
    kind = kind.rpartition(":")[2]
    suffix = "" if draft == "2020-12" else f":{draft}"
    return {
        "$schema": DRAFTS[draft],
        "$id": f"urn:beam-llm:schema:{kind}{suffix}:{revision}",
        **body,
        "title": spec.name,
        "description": spec.doc,
        "x-urn": spec.urn,
    }


def file_name(spec: TransformSpec, draft: str = "2020-12") -> str:
    """The name of the file that a published schema has in ``schemas/``."""
    folder = "" if draft == "2020-12" else f"{draft}/"
    return f"{folder}{spec.name}.{version(spec)}.json"
