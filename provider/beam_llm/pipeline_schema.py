"""The schema of a whole pipeline file: Beam's own, with our transforms in it.

Beam's part is read from the installed package, on the user's machine. Nothing here imports
Beam.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, cast

import yaml

from beam_llm.providers import beam_transforms
from beam_llm.registry import TRANSFORMS
from beam_llm.schemas import DRAFTS, self_contained

#: The file that ``beam-llm schema --pipeline --out DIR`` writes.
FILE_NAME = "beam-llm-pipeline.schema.json"

_TEMPLATE = r"\{[{%]"


def pipeline_schema(draft: str = "draft-07") -> dict[str, Any]:
    """Composes the schema of a Beam YAML pipeline file.

    Args:
      draft: A key of ``beam_llm.schemas.DRAFTS``. Beam's part is written in draft-07 and
        uses nothing that changed since.

    Returns:
      The schema: Beam's, in which a step whose type is one of our transforms must have a
      configuration of that transform.

    Raises:
      FileNotFoundError: The installed Beam has no schema of its own.
    """
    schema = _beams()
    definitions = schema["$defs"]
    schema = {
        **schema,
        "$schema": DRAFTS[draft],
        "$id": f"urn:beam-llm:schema:pipeline{'' if draft == '2020-12' else ':' + draft}:v1",
        "title": "Beam YAML pipeline with the transforms of beam-llm",
    }
    # Not such as `Filter-java`, which is written `Filter` with a `language`.
    names = {
        "chain",
        "composite",
        *TRANSFORMS,
        *(name for name in beam_transforms() if "-" not in name),
    }
    kind = definitions["transformBase"]["properties"]["type"]
    # The enumeration offers names to an editor; the second alternative allows all others.
    definitions["transformBase"]["properties"]["type"] = {
        **kind,
        "description": "What the step does: the name of a transform.",
        "anyOf": [{"enum": sorted(names)}, {"type": "string"}],
    }
    definitions["transform"]["allOf"] += [
        {
            "if": {"properties": {"type": {"const": spec.name}}, "required": ["type"]},
            "then": _step(_for_editors(self_contained(spec.config))),
        }
        for spec in TRANSFORMS.values()
    ]
    _accept_listings(definitions["provider"])
    return schema


def _step(config: dict[str, Any]) -> dict[str, Any]:
    step: dict[str, Any] = {"properties": {"config": config}}
    if config.get("required"):
        step["required"] = ["config"]
    return step


def _for_editors(rule: Any) -> Any:
    """Fits a schema to editors.

    They see Jinja templates unfilled, so that text of a form may be one; and YAML language
    servers say what is deprecated in a keyword of their own.
    """
    if isinstance(rule, list):
        return [_for_editors(inner) for inner in cast("list[Any]", rule)]
    if not isinstance(rule, dict):
        return rule
    made = {key: _for_editors(inner) for key, inner in cast("dict[str, Any]", rule).items()}
    if isinstance(made.get("pattern"), str):
        made["pattern"] = f"{made['pattern']}|{_TEMPLATE}"
    if isinstance(made.get("enum"), list):
        made["anyOf"] = [{"enum": made.pop("enum")}, {"pattern": _TEMPLATE}]
    if "x-deprecated" in made:
        made["deprecationMessage"] = f"deprecated {made['x-deprecated']}"
    return made


def _accept_listings(provider: dict[str, Any]) -> None:
    """Accepts the provider listings that Beam takes and its schema does not describe.

    A listing needs no ``config`` (``ExternalProvider.provider_from_spec``), and the
    transforms of a ``yaml`` listing are mappings with the steps they stand for.
    """
    provider["required"] = [key for key in provider["required"] if key != "config"]
    transforms = provider["properties"]["transforms"]
    transforms["additionalProperties"] = {
        "if": {"type": "object"},
        "then": {
            "properties": {
                "body": {
                    "if": {"type": "object"},
                    "then": {"$ref": "#/$defs/transform"},
                    "else": {"type": "string"},  # a Jinja template
                }
            }
        },
        "else": transforms["additionalProperties"],
    }


def _beams() -> dict[str, Any]:
    beam = importlib.util.find_spec("apache_beam")
    if beam is None or beam.origin is None:
        raise FileNotFoundError("apache-beam is not installed")
    file = Path(beam.origin).parent / "yaml/pipeline.schema.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8"))
