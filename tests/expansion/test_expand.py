"""What the service discovers, expands and refuses."""

from pathlib import Path
from typing import Any

import apache_beam as beam
import grpc
import psutil
import pytest
from apache_beam.portability.api import (
    beam_expansion_api_pb2_grpc,
    beam_runner_api_pb2,
    external_transforms_pb2,
    schema_pb2,
)
from apache_beam.transforms.environments import expand_anyof_environments
from apache_beam.transforms.external import (
    ExplicitSchemaTransformPayloadBuilder,
    SchemaAwareExternalTransform,
)
from apache_beam.transforms.trigger import AccumulationMode, AfterProcessingTime, AfterWatermark
from apache_beam.transforms.window import FixedWindows, Sessions, SlidingWindows
from serving import (
    CHAT,
    COMPLETIONS,
    MINIMAL,
    NAMED_TRANSFORM,
    TEXT_ROWS,
    Service,
    named_payload,
    request,
    serving,
)

from beam_llm.registry import TRANSFORMS, TransformSpec
from beam_llm.schemas import json_schema
from beam_llm.validation import ConfigError, check, load
from beam_llm_expansion.payloads import decode_row


def test_every_transform_is_discovered(service: Service) -> None:
    found = service.discover().schema_transform_configs
    assert set(found) == {spec.urn for spec in TRANSFORMS.values()}
    for spec in TRANSFORMS.values():
        described = found[spec.urn]
        assert described.description == spec.doc
        assert tuple(described.input_pcollection_names) == spec.inputs
        assert tuple(described.output_pcollection_names) == spec.outputs
        knobs = json_schema(spec.config)["$defs"][spec.config.__name__]
        fields = {field.name: field for field in described.config_schema.fields}
        assert set(fields) == set(knobs["properties"])
        required = set(knobs.get("required", ()))
        assert {name for name, field in fields.items() if not field.type.nullable} == required
        assert all(field.description for field in fields.values())


def test_discovery_is_the_same_in_every_process(service: Service) -> None:
    with serving() as other:
        assert other.discover() == service.discover()


def test_expansion_by_schema_transform_urn(service: Service) -> None:
    response = service.expand(request({**MINIMAL, "error_handling": {"output": "bad"}}))
    assert not response.error
    assert set(response.transform.outputs) == {"output", "bad"}
    assert response.transform.annotations["model_identifier"].startswith(b"beam-llm-")
    assert response.transform.unique_name == "Ask"


def test_expansion_by_class_name(service: Service) -> None:
    asked = request()
    asked.transform.spec.urn = NAMED_TRANSFORM
    asked.transform.spec.payload = named_payload("beam_llm.VLLMCompletions", MINIMAL)
    response = service.expand(asked)
    assert not response.error
    by_urn = service.expand(request())
    assert dict(response.transform.annotations) == dict(by_urn.transform.annotations)


@pytest.mark.parametrize(
    "name",
    [
        "__constructor__",
        "__callable__",
        "os.system",
        "beam_llm.RunInference",
        "beam_llm.transforms.VLLMChat",
        "beam_llm.VLLMChat.__init__",
        "VLLMChat",
        "beam_llm.*",
        "",
    ],
)
def test_no_other_class_is_expanded(name: str, service: Service) -> None:
    asked = request()
    asked.transform.spec.urn = NAMED_TRANSFORM
    asked.transform.spec.payload = named_payload(name, {"source": "lambda: None"})
    error = service.expand(asked).error
    assert error.startswith(f"the class '{name}' is not served here")
    assert "there are: beam_llm.BatchByPrefix, beam_llm.VLLMChat" in error


@pytest.mark.parametrize("urn", ["beam:schematransform:org.apache.beam:kafka_read:v1", CHAT + "x"])
def test_no_other_urn_is_expanded(urn: str, service: Service) -> None:
    as_schema_transform = request(urn=urn)
    directly = request()
    directly.transform.spec.urn = urn
    for asked in (as_schema_transform, directly):
        assert f"'{urn}' is not served here" in service.expand(asked).error


def test_a_misspelt_urn_is_met_with_the_right_one(service: Service) -> None:
    asked = request(urn="beam:schematransform:beam_llm:vllm_completion:v1")
    assert f"did you mean '{COMPLETIONS}'?" in service.expand(asked).error


def test_the_wording_is_that_of_every_check(service: Service) -> None:
    wrong: dict[str, Any] = {
        **MINIMAL,
        "sampling": {"temperature": 7.0, "max_tokens": 0},
        "prefix_batching": {"mode": "fixd"},
    }
    with pytest.raises(ConfigError) as raised:
        TRANSFORMS["VLLMCompletions"].load()(**wrong)
    error = service.expand(request(wrong)).error
    assert error.rpartition(" (request ")[0] == str(raised.value)
    assert error.count("\n") == 2


def test_knobs_that_are_not_there_are_named(service: Service) -> None:
    asked = request({**MINIMAL, "promt": "x"})
    assert "did you mean 'prompt'?" in service.expand(asked).error


def test_a_positional_argument_is_refused(service: Service) -> None:
    asked = request()
    asked.transform.spec.urn = NAMED_TRANSFORM
    asked.transform.spec.payload = named_payload(
        "beam_llm.VLLMCompletions", MINIMAL, args=beam.Row(arg0="m")
    )
    assert "positional arguments: name each knob" in service.expand(asked).error


# Through Beam's own client


class Applied:
    """What Beam's client makes of an expansion."""

    def __init__(self, transform: Any, element_type: Any = TEXT_ROWS):
        pipeline = beam.Pipeline(runner="FnApiRunner")
        rows: Any = pipeline | beam.Create([])
        rows.element_type = element_type
        self.outputs = rows | "Step" >> transform
        self.proto = pipeline.to_runner_api()

    def step(self) -> beam_runner_api_pb2.PTransform:
        """The expanded step, below the client's own wrapper."""
        return next(
            step
            for step in self.proto.components.transforms.values()
            if "model_identifier" in step.annotations
        )

    def hints(self, step: beam_runner_api_pb2.PTransform) -> list[dict[str, bytes]]:
        """Resource hints of the environments in which the step's parts run."""
        transforms = self.proto.components.transforms
        found: set[str] = set()
        below = [step]
        while below:
            part = below.pop()
            below += [transforms[name] for name in part.subtransforms]
            if part.spec.urn == "beam:transform:pardo:v1":
                found.add(part.environment_id)
        environments = [self.proto.components.environments[name] for name in found]
        return [
            dict(choice.resource_hints)
            for environment in environments
            for choice in expand_anyof_environments(environment)
        ]


def discovered(address: str, urn: str, **config: Any) -> Any:
    return SchemaAwareExternalTransform(urn, address, rearrange_based_on_discovery=True, **config)


@pytest.mark.parametrize("offer", [False, True])
def test_annotation_and_hints_survive(offer: bool, service: Service, with_workers: Service) -> None:
    address = (with_workers if offer else service).address
    hints = {"accelerator": "type:nvidia-l4;count:1", "min_ram": "30GB"}
    applied = Applied(
        discovered(address, COMPLETIONS, **MINIMAL, model_identifier="own", resource_hints=hints)
    )
    step = applied.step()
    assert step.annotations["model_identifier"] == b"own"
    found = applied.hints(step)
    assert len(found) == 1 + offer
    for of_environment in found:
        assert of_environment == {
            "beam:resources:accelerator:v1": b"type:nvidia-l4;count:1",
            "beam:resources:min_ram_bytes:v1": b"30000000000",
        }


def test_unset_sections_are_as_if_absent(service: Service) -> None:
    """Beam's client sends each knob that is not given, and each empty section, as nulls."""
    sections: dict[str, Any] = {
        field.name: dict.fromkeys(inner.name for inner in field.type.row_type.schema.fields)
        for field in service.discover().schema_transform_configs[COMPLETIONS].config_schema.fields
        if all(inner.type.nullable for inner in field.type.row_type.schema.fields)
        and field.type.HasField("row_type")
    }
    assert "server" in sections
    own = TRANSFORMS["VLLMCompletions"].load()(**MINIMAL).annotations()["model_identifier"]
    for config in ({}, sections):
        applied = Applied(discovered(service.address, COMPLETIONS, **MINIMAL, **config))
        assert isinstance(applied.outputs, beam.PCollection)  # and no error output
        assert applied.step().annotations["model_identifier"].decode() == own


# Knobs that exclude each other, or that other examples contradict.
EXCLUSIVE = (
    ("sampling", "regex"),
    ("sampling", "json_schema"),
    ("prefix_batching", "key_field"),
    ("prefix_batching", "key_fn"),
    ("server", "endpoint"),
    ("server", "api_key_env"),
    ("server", "metrics_endpoint"),
)


@pytest.mark.parametrize("spec", TRANSFORMS.values(), ids=TRANSFORMS)
def test_every_knob_crosses(spec: TransformSpec, service: Service) -> None:
    """The examples of all knobs, which the models give, as one configuration."""
    definitions = json_schema(spec.config)["$defs"]

    def example(rule: dict[str, Any]) -> Any:
        if "$ref" in rule:
            section = definitions[rule["$ref"].rpartition("/")[2]]
            return {k: example(knob) for k, knob in section["properties"].items()}
        return rule["examples"][0] if "examples" in rule else rule.get("default")

    knobs = definitions[spec.config.__name__]["properties"]
    config = {name: example(knob) for name, knob in knobs.items()}
    for section, knob in EXCLUSIVE:
        config.get(section, {}).pop(knob, None)
    problems, checked = check(spec.config, config)
    assert problems == []
    schema = service.discover().schema_transform_configs[spec.urn].config_schema
    sent = ExplicitSchemaTransformPayloadBuilder(spec.urn, schema, **config).build()
    received = decode_row(sent.configuration_schema, sent.configuration_row)
    assert load(spec.config, received, spec.name) == checked


@pytest.mark.parametrize(
    "windowing",
    [
        {"windowfn": FixedWindows(60)},
        {"windowfn": SlidingWindows(60, 5)},
        {"windowfn": Sessions(60)},
        {
            "windowfn": FixedWindows(60),
            "trigger": AfterWatermark(early=AfterProcessingTime(1)),
            "accumulation_mode": AccumulationMode.DISCARDING,
        },
    ],
    ids=["fixed", "sliding", "sessions", "trigger"],
)
def test_windows_are_kept(windowing: dict[str, Any], service: Service) -> None:
    asked = request(**windowing)
    response = service.expand(asked)
    assert not response.error
    (name,) = response.transform.outputs.values()
    kept = response.components.windowing_strategies[
        response.components.pcollections[name].windowing_strategy_id
    ]
    (given,) = (
        strategy
        for strategy in asked.components.windowing_strategies.values()
        if strategy.window_fn.urn != "beam:window_fn:global_windows:v1"
    )
    assert kept.window_fn == given.window_fn
    assert kept.trigger == given.trigger


def test_an_input_without_a_schema_says_what_to_do(service: Service) -> None:
    error = service.expand(request(element_type=str)).error
    assert "its input has no schema" in error
    assert "beam.Row" in error
    error = service.expand(request(element_type=Any)).error
    assert "give it rows" in error


FIELDS = {
    "class": ("'class' is a word of the Python language", None),
    "_id": ("'_id' starts with '_'", None),
    "a-b": ("'a-b' is no Python name", None),
    "time": ("'time' is of the logical type", "beam:logical_type:time:v1"),
    "label": ("'label' is of the logical type", "beam:logical_type:enum:v1"),
    "joda": ("'joda' is of the logical type", "beam:logical_type:javasdk:v1"),
    "run": ("'run' is of the logical type", "beam:logical_type:python_callable:v1"),
}


def row_coder(asked: Any) -> Any:
    (coder,) = (c for c in asked.components.coders.values() if c.spec.urn == "beam:coder:row:v1")
    return coder


def test_all_fields_that_beam_cannot_read_are_named_at_once(service: Service) -> None:
    asked = request()
    coder = row_coder(asked)
    schema = schema_pb2.Schema.FromString(coder.spec.payload)
    for name, (_, urn) in FIELDS.items():
        field = schema.fields.add(name=name)
        if urn is None:
            field.type.atomic_type = schema_pb2.STRING
        else:
            field.type.logical_type.urn = urn
            field.type.logical_type.representation.atomic_type = schema_pb2.INT64
    coder.spec.payload = schema.SerializeToString()
    error = service.expand(asked).error
    assert error.startswith("input 'input': fields that Beam's Python SDK cannot read: ")
    for words, _ in FIELDS.values():
        assert words in error
    assert error.count("\n") == 0


def test_a_key_function_needs_leave(tmp_path: Path) -> None:
    (tmp_path / "own_keys.py").write_text("def key(row):\n    return row.text\n")
    asked = request({**MINIMAL, "prefix_batching": {"key_fn": "own_keys:key"}})
    with serving("--allow-callables", env={"PYTHONPATH": str(tmp_path)}) as started:
        assert not started.expand(asked).error
        asked = request({**MINIMAL, "prefix_batching": {"key_fn": "own_keys:other"}})
        assert "'own_keys:other' is not there" in started.expand(asked).error


# Limits


def cyclic(asked: Any) -> str:
    (name,) = asked.transform.inputs.values()
    coder = asked.components.coders["list"]
    coder.spec.urn = "beam:coder:iterable:v1"
    coder.component_coder_ids.append("list")
    asked.components.pcollections[name].coder_id = "list"
    return "its coders nest more than 20 deep, or endlessly"


def doubling(asked: Any) -> str:
    """Nineteen coders that spell out as half a million."""
    (name,) = asked.transform.inputs.values()
    asked.components.coders["pair0"].spec.urn = "beam:coder:bytes:v1"
    for i in range(1, 19):
        pair = asked.components.coders[f"pair{i}"]
        pair.spec.urn = "beam:coder:kv:v1"
        pair.component_coder_ids.extend([f"pair{i - 1}"] * 2)
    asked.components.pcollections[name].coder_id = "pair18"
    return "its coder has more than 100 parts"


def deep_schema(asked: Any) -> str:
    schema = schema_pb2.Schema()
    schema.fields.add(name="x").type.atomic_type = schema_pb2.STRING
    for _ in range(22):
        outer = schema_pb2.Schema()
        outer.fields.add(name="x").type.row_type.schema.CopyFrom(schema)
        schema = outer
    row_coder(asked).spec.payload = schema.SerializeToString()
    return "nests more than 20 deep"


def deep_configuration(asked: Any) -> str:
    payload = external_transforms_pb2.SchemaTransformPayload.FromString(
        asked.transform.spec.payload
    )
    (model,) = (f for f in payload.configuration_schema.fields if f.name == "model")
    kind = schema_pb2.FieldType(atomic_type=schema_pb2.STRING)
    for _ in range(25):
        kind = schema_pb2.FieldType(array_type=schema_pb2.ArrayType(element_type=kind))
    model.type.CopyFrom(kind)
    asked.transform.spec.payload = payload.SerializeToString()
    return "nested more than 20 deep"


def wide_schema(asked: Any) -> str:
    schema = schema_pb2.Schema()
    for i in range(3_000):
        schema.fields.add(name=f"f{i}").type.atomic_type = schema_pb2.STRING
    row_coder(asked).spec.payload = schema.SerializeToString()
    return "has more than 2000 fields"


def many_components(asked: Any) -> str:
    for i in range(10_001):
        asked.components.coders[f"c{i}"].spec.urn = "x"
    return "components; at most 10000 are read"


def long_name(asked: Any) -> str:
    asked.transform.unique_name = "x" * 1_001
    return "the transform's name is not 1 to 1000 printable characters"


def no_namespace(asked: Any) -> str:
    asked.namespace = ""
    return "the namespace is not 1 to 1000 printable characters"


def colliding(asked: Any) -> str:
    asked.namespace = "ref"
    return "has the namespace of the expansion's own"


def two_inputs(asked: Any) -> str:
    asked.transform.inputs["more"] = asked.transform.inputs["input"]
    return "2 inputs, where it takes input"


def no_inputs(asked: Any) -> str:
    asked.transform.inputs.clear()
    return "0 inputs, where it takes input"


def parts(asked: Any) -> str:
    asked.transform.subtransforms.append("impulse_input")
    return "the transform has parts"


@pytest.mark.parametrize(
    "break_it",
    [
        cyclic,
        doubling,
        deep_schema,
        deep_configuration,
        wide_schema,
        many_components,
        long_name,
        no_namespace,
        colliding,
        two_inputs,
        no_inputs,
        parts,
    ],
)
def test_what_is_too_much_is_refused(break_it: Any, service: Service) -> None:
    asked = request()
    words = break_it(asked)
    assert words in service.expand(asked).error


def test_a_request_that_is_too_large_is_refused_unread(service: Service) -> None:
    asked = request({**MINIMAL, "prompt": "x" * 5_000_000 + "{text}"})
    with pytest.raises(grpc.RpcError) as refused:
        service.expand(asked)
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_request_that_unpacks_to_much_is_refused_packed(service: Service) -> None:
    """100 MB of nothing take 100 KB on the wire."""
    asked = request({**MINIMAL, "prompt": "x" * 100_000_000 + "{text}"})
    before = psutil.Process(service.process.pid).memory_info().rss
    with service.channel() as channel:
        stub = beam_expansion_api_pb2_grpc.ExpansionServiceStub(channel)
        with pytest.raises(grpc.RpcError):
            stub.Expand(asked, timeout=60, compression=grpc.Compression.Gzip)
    assert psutil.Process(service.process.pid).memory_info().rss - before < 50_000_000
    assert not service.expand(request()).error
