"""The schema of a whole pipeline file, composed with that of the installed Beam."""

import copy
import dataclasses
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import pytest
import yaml
from apache_beam.yaml import yaml_transform

from beam_llm.config import Deprecated, Section, _meta
from beam_llm.knobs import least
from beam_llm.pipeline_schema import pipeline_schema
from beam_llm.registry import TRANSFORMS
from beam_llm.schemas import DRAFTS

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = sorted((ROOT / "yaml_examples").glob("*.yaml"))
TEMPLATES = sorted((ROOT / "provider/beam_llm/cli/templates").glob("*.yaml"))
VARIABLES = dict.fromkeys(("model", "input", "output"), "x") | {"endpoint": "http://127.0.0.1:1/v1"}


@pytest.fixture(scope="module", params=DRAFTS)
def validator(request: pytest.FixtureRequest) -> Any:
    schema = pipeline_schema(request.param)
    kind = jsonschema.validators.validator_for(schema)
    kind.check_schema(schema)
    return kind(schema)


def read(file: Path) -> Any:
    """Reads a pipeline file as Beam does."""
    text = yaml_transform.expand_jinja(file.read_text("utf-8"), VARIABLES, [])
    return yaml.safe_load(text)


def places(validator: Any, pipeline: Any) -> list[str]:
    found = {"/".join(map(str, error.absolute_path)) for error in validator.iter_errors(pipeline)}
    return sorted(found)


@pytest.mark.parametrize("file", [*EXAMPLES, *TEMPLATES], ids=lambda file: file.name)
def test_pipelines_that_run_pass(validator: Any, file: Path) -> None:
    assert places(validator, read(file)) == []


@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_transform_is_checked(validator: Any, name: str) -> None:
    config = least(TRANSFORMS[name].config)
    step: dict[str, Any] = {"type": name, "config": config}
    pipeline: Any = {"pipeline": {"transforms": [{"type": "Create"}, step]}}
    assert places(validator, pipeline) == []
    step["config"] = {**config, "batching": {"max_batch_size": 0}}
    assert places(validator, pipeline) == ["pipeline/transforms/1/config/batching/max_batch_size"]


def chat(**knobs: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "{text}"}]
    return {"type": "VLLMChat", "config": {"model": "m", "messages": messages, **knobs}}


ROWS = {"type": "Create", "config": {"elements": [{"text": "x"}]}}
BAD = chat(sampling={"max_tokens": "8"})
AT = "config/sampling/max_tokens"


@pytest.mark.parametrize(
    ("pipeline", "expected"),
    [
        ({"transforms": [ROWS, BAD]}, f"transforms/1/{AT}"),
        ({"type": "chain", "transforms": [ROWS, BAD]}, f"transforms/1/{AT}"),
        (
            {"transforms": [ROWS, {"type": "composite", "transforms": [BAD]}]},
            f"transforms/1/transforms/0/{AT}",
        ),
        (
            {"transforms": [{"type": "chain", "transforms": [ROWS, BAD]}]},
            f"transforms/0/transforms/1/{AT}",
        ),
        ({"source": ROWS, "transforms": [BAD], "sink": {"type": "X"}}, f"transforms/0/{AT}"),
        ({"source": ROWS, "sink": BAD}, f"sink/{AT}"),
        ({"transforms": [ROWS], "extra_transforms": [BAD]}, f"extra_transforms/0/{AT}"),
        ({"transforms": [chat(promt="x")]}, "transforms/0/config"),
        ({"transforms": [chat(prefix_batching={"mode": "fixd"})]},
         "transforms/0/config/prefix_batching/mode"),
        ({"transforms": [chat(messages=[{"role": "user"}])]}, "transforms/0/config/messages/0"),
        ({"transforms": [chat(messages=[])]}, "transforms/0/config/messages"),
        ({"transforms": [{"type": "VLLMChat"}]}, "transforms/0"),
        ({"transforms": [{**chat(), "inputs": "x"}]}, "transforms/0"),
        ({"transforms": [{**chat(), "input": 1}]}, "transforms/0/input"),
    ],
)  # fmt: skip
def test_mistakes_are_found_in_their_place(validator: Any, pipeline: Any, expected: str) -> None:
    assert places(validator, {"pipeline": pipeline}) == [f"pipeline/{expected}"]
    # The place is that of the mistake: without it there is none.
    mended = copy.deepcopy(pipeline)
    if expected.endswith(AT):
        step = mended
        for key in expected.removesuffix(f"/{AT}").split("/"):
            step = step[int(key) if key.isdigit() else key]
        step["config"]["sampling"]["max_tokens"] = 8
        assert places(validator, {"pipeline": mended}) == []


def test_templates_may_stand_for_text_of_a_form(validator: Any) -> None:
    templates = {
        "output_field": "{{ field }}",
        "server": {"endpoint": "{{ endpoint }}"},
        "prefix_batching": {"mode": "{% if x %}none{% else %}fixed{% endif %}"},
    }
    assert places(validator, {"pipeline": {"transforms": [ROWS, chat(**templates)]}}) == []


LISTING = {"type": "python", "transforms": {"VLLMChat": "beam_llm.transforms.VLLMChat"}}


@pytest.mark.parametrize(
    "provider",
    [
        {**LISTING, "config": {}},
        LISTING,
        {"include": "providers.yaml"},
        {
            "type": "remote",
            "config": {"address": "127.0.0.1:1"},
            "transforms": {"VLLMChat": TRANSFORMS["VLLMChat"].urn},
        },
        {
            "type": "yaml",
            "transforms": {
                "Label": {
                    "config_schema": {"properties": {"model": {"type": "string"}}},
                    "body": {"type": "chain", "transforms": [chat(model="{{ model }}")]},
                },
                "Ask": {"body": "type: VLLMChat\nconfig: {model: '{{ model }}'}"},
            },
        },
    ],
    ids=("inline", "without config", "include", "remote", "yaml"),
)
def test_providers_pass_and_their_pipelines_are_checked(validator: Any, provider: Any) -> None:
    document = {"pipeline": {"transforms": [ROWS, chat()]}, "providers": [provider]}
    assert places(validator, document) == []
    document["pipeline"]["transforms"][1] = BAD
    assert places(validator, document) == [f"pipeline/transforms/1/{AT}"]


def test_steps_in_a_provider_are_checked(validator: Any) -> None:
    provider = {"type": "yaml", "transforms": {"Ask": {"body": BAD}}}
    document = {"pipeline": {"transforms": [ROWS]}, "providers": [provider]}
    assert places(validator, document) == [f"providers/0/transforms/Ask/body/{AT}"]


def test_a_listing_without_transforms_is_a_mistake(validator: Any) -> None:
    document = {"pipeline": {"transforms": [ROWS]}, "providers": [{"type": "python"}]}
    assert places(validator, document) == ["providers/0"]


def test_an_editor_is_offered_our_names_and_those_of_beam() -> None:
    kind = pipeline_schema()["$defs"]["transformBase"]["properties"]["type"]
    assert {*TRANSFORMS, "chain", "Create", "MapToFields", "ReadFromCsv", "Sql"} <= set(
        kind["anyOf"][0]["enum"]
    )


def test_an_editor_says_what_is_deprecated(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = dataclasses.replace(TRANSFORMS["VLLMChat"], config=_WithOld)
    monkeypatch.setitem(TRANSFORMS, spec.name, spec)
    (step,) = [
        rule["then"]["properties"]["config"]["properties"]
        for rule in pipeline_schema()["$defs"]["transform"]["allOf"][1:]
        if rule["if"].get("properties", {}).get("type") == {"const": spec.name}
    ]
    assert step["old"]["deprecationMessage"] == "deprecated since 0.3: use new"
    assert "deprecationMessage" not in step["new"]


class _WithOld(Section, frozen=True):
    """A configuration with a knob that is on its way out."""

    new: Annotated[int, _meta("New.", example=1)] = 1
    old: Annotated[int, _meta("Old.", example=1, deprecated=Deprecated("0.3", "new"))] = 1


def test_what_beam_accepts_passes_and_what_it_refuses_does_not(validator: Any) -> None:
    """Beam's own check and ours agree where no transform of ours is."""
    good = {"pipeline": {"type": "chain", "transforms": [ROWS, {"type": "Anything"}]}}
    bad = {"pipeline": {"type": "chain", "transforms": [{**ROWS, "input": "x"}]}}
    yaml_transform.validate_against_schema(good, "generic")
    assert places(validator, good) == []
    with pytest.raises(jsonschema.ValidationError):
        yaml_transform.validate_against_schema(bad, "generic")
    assert places(validator, bad) != []


def test_no_text_of_beam_is_committed() -> None:
    committed = [*(ROOT / "schemas").rglob("*.json"), *(ROOT / "provider").rglob("*.py")]
    text = "".join(file.read_text("utf-8") for file in committed)
    assert "implicitInputOutputs" not in text
