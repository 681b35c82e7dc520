"""Describes our transforms to clients that know none of them."""

from __future__ import annotations

import inspect
import uuid
from typing import Any

from apache_beam.portability.api import beam_expansion_api_pb2, schema_pb2
from apache_beam.typehints.schemas import named_fields_to_schema

from beam_llm.registry import TRANSFORMS, TransformSpec
from beam_llm.schemas import json_schema


def discover() -> beam_expansion_api_pb2.DiscoverSchemaTransformResponse:
    """Describes every transform: its URN, configuration, inputs and outputs.

    The error output, which the configuration names, is not among the outputs.
    """
    return beam_expansion_api_pb2.DiscoverSchemaTransformResponse(
        schema_transform_configs={
            spec.urn: beam_expansion_api_pb2.SchemaTransformConfig(
                config_schema=config_schema(spec),
                input_pcollection_names=spec.inputs,
                output_pcollection_names=spec.outputs,
                description=spec.doc,
            )
            for spec in TRANSFORMS.values()
        }
    )


def config_schema(spec: TransformSpec) -> schema_pb2.Schema:
    """Gives a transform's configuration as a Beam schema, described at every level.

    Its ids are made from its content: every process, and every restart, gives the same.
    """
    parameters = inspect.signature(spec.load()).parameters.values()
    schema = named_fields_to_schema([(p.name, p.annotation) for p in parameters])
    definitions = json_schema(spec.config)["$defs"]
    _complete(schema, definitions[spec.config.__name__], definitions)
    return schema


def _complete(schema: schema_pb2.Schema, rule: dict[str, Any], definitions: dict[str, Any]) -> None:
    for field in schema.fields:
        knob = rule["properties"][field.name]
        field.description = knob["description"]
        kind = field.type
        if kind.HasField("array_type"):
            kind, knob = kind.array_type.element_type, knob["items"]
        if kind.HasField("row_type"):
            section = definitions[knob["$ref"].rpartition("/")[2]]
            _complete(kind.row_type.schema, section, definitions)
    schema.ClearField("id")
    content = schema.SerializeToString(deterministic=True).hex()
    schema.id = str(uuid.uuid5(uuid.NAMESPACE_OID, content))
