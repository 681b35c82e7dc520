"""The schemas and the models allow the same, and every default is what it says."""

import random
from typing import Any

import jsonschema
import jsonschema_rs
import msgspec
import pytest
from generating import mutated, valid

from beam_llm.config import Section
from beam_llm.knobs import least, walk
from beam_llm.registry import TRANSFORMS, TransformSpec
from beam_llm.schemas import DRAFTS, published, self_contained
from beam_llm.validation import check, integral, load, plain, schema_validator

CONFIGURATIONS = 100_000
EACH = pytest.mark.parametrize("spec", TRANSFORMS.values(), ids=lambda spec: spec.name)


def accepts(model: type[Section], data: Any) -> bool:
    try:
        msgspec.convert(integral(data), model)
    except (msgspec.ValidationError, OverflowError):
        return False
    return True


@EACH
def test_schema_and_model_agree_on_random_configurations(spec: TransformSpec) -> None:
    rng = random.Random(f"agreement {spec.name}")
    schema = self_contained(spec.config)
    # A compiled validator for each published draft; and, now and then, the slow one that
    # words the runtime's messages.
    compiled = {draft: jsonschema_rs.validator_for(published(spec, draft)) for draft in DRAFTS}
    python = schema_validator(spec.config)
    counted = {True: 0, False: 0}
    disagreements: list[Any] = []
    for i in range(CONFIGURATIONS // len(TRANSFORMS)):
        config = valid(schema, rng)
        if rng.random() < 0.7:
            config = mutated(config, rng)
        data = plain(config)
        expected = accepts(spec.config, data)
        said = {draft: validator.is_valid(data) for draft, validator in compiled.items()}
        if i % 10 == 0:
            said["python"] = python.is_valid(data)
        counted[expected] += 1
        if set(said.values()) != {expected}:
            disagreements.append((expected, said, data))
    assert disagreements[:5] == []
    assert min(counted.values()) > 0.2 * sum(counted.values())


@EACH
def test_every_default_is_what_absence_means(spec: TransformSpec) -> None:
    base = least(spec.config)
    config = load(spec.config, base, spec.name)
    for knob in walk(spec.config):
        if knob.required or any(p in ("messages", "error_handling") for p in knob.path[:-1]):
            continue
        if "default" in knob.rule:
            value = knob.rule["default"]
            for name in reversed(knob.path):
                value = {name: value}
            # Rules between knobs may say that a knob has no effect: not at its default.
            assert load(spec.config, {**base, **value}, spec.name) == config, knob.path


@EACH
def test_configurations_survive_plain_data(spec: TransformSpec) -> None:
    config = load(spec.config, least(spec.config), spec.name)
    assert load(spec.config, msgspec.to_builtins(config), spec.name) == config
    assert load(spec.config, in_full(config), spec.name) == config
    assert load(spec.config, config, spec.name) == config


def in_full(section: Section) -> dict[str, Any]:
    """All knobs of a configuration, defaults as well."""
    return {
        name: in_full(value) if isinstance(value, Section) else msgspec.to_builtins(value)
        for name, value in msgspec.structs.asdict(section).items()
    }


@EACH
def test_an_empty_section_is_an_absent_one(spec: TransformSpec) -> None:
    base = least(spec.config)
    config = load(spec.config, base, spec.name)
    sections = [k.name for k in walk(spec.config) if "properties" in k.rule and not k.required]
    assert sections
    for name in sections:
        found, given = check(spec.config, {**base, name: {}})
        if self_contained(spec.config)["properties"][name].get("required"):
            assert found
        else:
            assert given == config


@EACH
def test_every_example_is_valid(spec: TransformSpec) -> None:
    for knob in walk(spec.config):
        if knob.is_section and "properties" in knob.rule:
            continue
        assert knob.example is not None, knob.path
        jsonschema.Draft202012Validator(knob.rule).validate(knob.example)


@EACH
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 10**400, -(10**400)])
def test_no_number_beyond_a_double_comes_through(spec: TransformSpec, number: float) -> None:
    numbers = [k for k in walk(spec.config) if k.rule.get("type") in ("number", "integer")]
    for knob in numbers:
        value: Any = number
        for name in reversed(knob.path):
            value = {name: value}
        found, config = check(spec.config, {**least(spec.config), **value})
        assert config is None
        assert {p.path for p in found} == {knob.path}
