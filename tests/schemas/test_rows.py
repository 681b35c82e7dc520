"""Every knob crosses a Beam Row, as Beam YAML's `remote` providers and Java send it."""

import uuid
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import apache_beam as beam
import grpc
import jsonschema
import msgspec
import pytest
import yaml
from apache_beam.coders import RowCoder
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability.api import (
    beam_expansion_api_pb2,
    beam_expansion_api_pb2_grpc,
    external_transforms_pb2,
    schema_pb2,
)
from apache_beam.yaml import json_utils, yaml_provider, yaml_transform, yaml_utils

from beam_llm.config import INT64
from beam_llm.knobs import least, walk
from beam_llm.registry import TRANSFORMS, TransformSpec
from beam_llm.schemas import self_contained
from beam_llm.validation import check, integral, plain

EACH = pytest.mark.parametrize("spec", TRANSFORMS.values(), ids=lambda spec: spec.name)

STRINGS = ["x", "é ✓ 𝒳", "a: b # c", " lead", "\n\n", "{", "true", "null", "1e-3", "010", "\x00"]


def beam_schema(spec: TransformSpec) -> schema_pb2.Schema:
    """A transform's configuration as Beam makes it of the published schema."""
    schema = json_utils.json_schema_to_beam_schema(self_contained(spec.config))
    _identify(schema)
    return schema


def _identify(schema: schema_pb2.Schema) -> None:
    """Gives ids to a schema and those in it: without one, Beam makes types anew for each row."""
    for field in schema.fields:
        kind = field.type
        if kind.HasField("array_type"):
            kind = kind.array_type.element_type
        if kind.HasField("row_type"):
            _identify(kind.row_type.schema)
    schema.id = str(
        uuid.uuid5(uuid.NAMESPACE_OID, schema.SerializeToString(deterministic=True).hex())
    )


class Recorder(beam_expansion_api_pb2_grpc.ExpansionServiceServicer):
    """An expansion service that offers our transforms, and records how one is asked for."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def DiscoverSchemaTransform(self, request: Any, context: Any) -> Any:  # noqa: N802
        return beam_expansion_api_pb2.DiscoverSchemaTransformResponse(
            schema_transform_configs={
                spec.urn: beam_expansion_api_pb2.SchemaTransformConfig(
                    config_schema=beam_schema(spec),
                    input_pcollection_names=["input"],
                    output_pcollection_names=["output"],
                )
                for spec in TRANSFORMS.values()
            }
        )

    def Expand(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.asked.append(
            external_transforms_pb2.SchemaTransformPayload.FromString(
                request.transform.spec.payload
            )
        )
        return beam_expansion_api_pb2.ExpansionResponse(error="recorded")


@pytest.fixture(scope="module")
def service() -> Iterator[tuple[Recorder, str]]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    port = server.add_insecure_port("127.0.0.1:0")
    recorder = Recorder()
    beam_expansion_api_pb2_grpc.add_ExpansionServiceServicer_to_server(recorder, server)
    server.start()
    yield recorder, f"127.0.0.1:{port}"
    server.stop(None).wait()


def decoded(payload: Any) -> Any:
    return RowCoder(payload.configuration_schema).decode(payload.configuration_row)


def as_beam_reads_it(config: Any) -> Any:
    """Through YAML text, as Beam reads it and hands it to a provider."""
    text = yaml.safe_dump(config, allow_unicode=True, width=1_000_000)
    loaded = yaml.load(text, Loader=yaml_utils.SafeLineLoader)
    return yaml_utils.SafeLineLoader.strip_metadata(loaded)


def values(rule: Any) -> Iterator[Any]:
    """Values that are hard on an encoding; the caller keeps those that the knob allows."""
    yield from rule.get("examples", ())
    if "default" in rule:
        yield rule["default"]
    match rule["type"]:
        case "string":
            yield from rule.get("enum", STRINGS)
        case "integer":
            yield from (rule.get("minimum"), rule.get("maximum"), 0, -1, *INT64, 2.0)
        case "number":
            yield from (rule.get("minimum"), rule.get("maximum"), 0, 1, 0.1, 1e-300, 1e300, -0.5)
        case "array":
            inner = [v for v in values(rule["items"]) if _allowed(rule["items"], v)]
            yield from ([], inner, inner[:1])
        case "object" if "properties" in rule:
            yield {n: rule["properties"][n]["examples"][0] for n in rule.get("required", ())}
        case "object":
            rule = rule["additionalProperties"]
            inner = [v for v in values(rule) if _allowed(rule, v)]
            yield from ({}, dict(zip(["", "é ", *STRINGS], inner, strict=False)))
        case _:
            yield from (True, False)


def configurations(spec: TransformSpec) -> Iterator[dict[str, Any]]:
    """Configurations in which every knob takes every one of its values, beside all others, beside
    half of them, and alone in its section."""
    knobs = [k for k in walk(spec.config) if not k.is_section]
    tried = {k.path: [v for v in values(k.rule) if _allowed(k.rule, v)] for k in knobs}
    assert all(tried.values())
    for i in range(max(map(len, tried.values()))):
        taken = {path: found[i % len(found)] for path, found in tried.items()}
        yield _nested(spec, taken)
        yield _nested(
            spec, {path: v for n, (path, v) in enumerate(taken.items()) if n % 2 == i % 2}
        )
        yield _nested(
            spec, {path: v for n, (path, v) in enumerate(taken.items()) if n % 9 == i % 9}
        )
    yield _nested(spec, {})
    sections = [k.name for k in walk(spec.config) if len(k.path) == 1 and k.default == {}]
    yield _nested(spec, {}) | {name: {} for name in sections}


def _nested(spec: TransformSpec, taken: dict[tuple[str, ...], Any]) -> dict[str, Any]:
    """The configuration in which these knobs have these values, and others what they must."""

    def section(rule: Any, path: tuple[str, ...]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, inner in rule["properties"].items():
            below = (*path, name)
            if "properties" in inner:
                if value := section(inner, below):
                    made[name] = value
            elif "properties" in inner.get("items", {}):
                if value := section(inner["items"], below):
                    made[name] = [value]
            elif below in taken:
                made[name] = taken[below]
        for name in rule.get("required", ()) if made or not path else ():
            made.setdefault(name, rule["properties"][name]["examples"][0])
        return made

    return section(self_contained(spec.config), ())


@EACH
def test_every_knob_crosses_a_row(spec: TransformSpec, service: tuple[Recorder, str]) -> None:
    provider = yaml_provider.RemoteProvider({spec.name: spec.urn}, service[1])
    for config in configurations(spec):
        transform = provider.create_transform(spec.name, as_beam_reads_it(config), None)
        row = decoded(transform._payload_builder.build())
        # Not what rules between knobs say of it, which would hide the values.
        assert converted(spec, row) == converted(spec, config)


def converted(spec: TransformSpec, config: Any) -> Any:
    return msgspec.convert(integral(plain(config)), spec.config)


def _allowed(rule: Any, value: Any) -> bool:
    """Whether a value is one of the knob's own; other knobs may still exclude it."""
    return jsonschema.Draft202012Validator(rule).is_valid(value)


@EACH
def test_a_pipeline_sends_its_configuration_whole(
    spec: TransformSpec, service: tuple[Recorder, str]
) -> None:
    recorder, address = service
    config = least(spec.config)
    for knob in walk(spec.config):
        if "properties" in knob.rule or knob.required or len(knob.path) > 2:
            continue
        if len(knob.path) == 2:
            config.setdefault(knob.path[0], {})[knob.name] = knob.example
        else:
            config[knob.name] = knob.example
    pipeline = {
        "pipeline": {
            "type": "chain",
            "transforms": [
                {"type": "Create", "config": {"elements": [{"text": "x"}]}},
                {"type": spec.name, "config": config},
            ],
        },
        "providers": [
            {
                "type": "remote",
                "config": {"address": address},
                "transforms": {spec.name: spec.urn},
            }
        ],
    }
    recorder.asked.clear()
    # An error that the step has: the recorder answers with one once it was asked.
    with pytest.raises(Exception, match="recorded"):
        yaml_transform.expand_pipeline(
            beam.Pipeline(options=PipelineOptions(["--runner=FnApiRunner"])),
            yaml.safe_dump(pipeline),
        )
    (payload,) = recorder.asked
    assert payload.identifier == spec.urn
    assert check(spec.config, decoded(payload)) == check(spec.config, config)
