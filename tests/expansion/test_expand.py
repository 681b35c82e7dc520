"""What the service discovers and expands."""

from typing import Any

from serving import (
    MINIMAL,
    NAMED_TRANSFORM,
    Service,
    named_payload,
    request,
    serving,
)

from beam_llm.registry import TRANSFORMS
from beam_llm.schemas import json_schema


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


def test_a_stopped_service_ends_with_0_and_leaves_nothing(tmp_path: Any) -> None:
    address_file = tmp_path / "address"
    with serving(f"--address-file={address_file}") as started:
        assert address_file.read_text().strip() == started.address
        assert started.terminate() == 0
    assert not list(tmp_path.iterdir())
