"""The Java builders, held against the published JSON Schemas, knob by knob.

The builders are driven through reflection by `Conformance`, which knows nothing of the script
that writes them: what is compared is what a Java user can call, and the bytes that it sends.
"""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from apache_beam.coders import RowCoder
from apache_beam.portability.api import external_transforms_pb2
from driver import Builders, class_name
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from beam_llm.config import LLMConfig
from beam_llm.registry import TRANSFORMS, TransformSpec
from beam_llm.validation import ConfigError, check, load, plain

MINIMAL: dict[str, dict[str, Any]] = {
    "VLLMChat": {"model": "m", "messages": [{"role": "user", "content": "{text}"}]},
    "VLLMCompletions": {"model": "m", "prompt": "{text}"},
}
SCHEMAS = Path(__file__).parents[2] / "schemas"
SPECS = list(TRANSFORMS.values())

Rule = dict[str, Any]


def sent(answer: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The URN and the configuration that a service would read."""
    payload = external_transforms_pb2.SchemaTransformPayload.FromString(
        base64.b64decode(answer["payload"])
    )
    row = RowCoder(payload.configuration_schema).decode(payload.configuration_row)
    return payload.identifier, plain(row)


def schema(spec: TransformSpec) -> Rule:
    """The schema as it is published."""
    return json.loads((SCHEMAS / f"{spec.name}.v1.json").read_text(encoding="utf-8"))


def definitions(spec: TransformSpec) -> dict[str, Rule]:
    """The transform and all its sections by their names."""
    found: dict[str, Rule] = {}

    def collect(rule: Rule) -> None:
        if name := section(rule):
            found[name] = rule
        for inner in rule.get("properties", {}).values():
            collect(inner)
        if "items" in rule:
            collect(rule["items"])

    collect(schema(spec))
    return found


def section(rule: Rule) -> str | None:
    return rule["title"] if "properties" in rule else None


def camel(knob: str) -> str:
    first, *rest = knob.split("_")
    return first + "".join(word.capitalize() for word in rest)


def java_types(knob: str, rule: Rule) -> set[str]:
    """The types that a knob's setters take."""
    plain_types = {"string": "String", "integer": "long", "number": "double", "boolean": "boolean"}
    boxed = {"string": "String", "integer": "Long", "number": "Double", "boolean": "Boolean"}
    if name := section(rule):
        return {name, f"Consumer<{name}$Builder>"}
    if "enum" in rule:
        return {camel(f"_{knob}")}
    if rule["type"] == "array":
        item = section(rule["items"]) or boxed[rule["items"]["type"]]
        return {f"{item}[]", f"Collection<{item}>"}
    if rule["type"] == "object":
        return {f"Map<String, {boxed[rule['additionalProperties']['type']]}>"}
    return {plain_types[rule["type"]]}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_setters_are_the_knobs(builders: Builders, spec: TransformSpec) -> None:
    found = definitions(spec)
    names = {name: (class_name(spec) if name == spec.name else name) for name in found}
    setters = builders.setters(*names.values())
    for name, definition in found.items():
        offered = {
            method: {kind.rpartition("$")[2] if "Consumer" not in kind else kind for kind in kinds}
            for method, kinds in setters[names[name]].items()
        }
        wanted = {
            camel(knob): java_types(knob, rule) for knob, rule in definition["properties"].items()
        }
        assert offered == wanted, name


def value(rule: Rule) -> Any:
    """A value that the schema takes."""
    if section(rule):
        return {knob: value(inner) for knob, inner in rule["properties"].items()}
    if rule.get("examples"):
        return rule["examples"][0]
    if "enum" in rule:
        return rule["enum"][0]
    return {"string": "text", "integer": 7, "number": 0.5, "boolean": True}[rule["type"]]


def knobs(spec: TransformSpec) -> Iterator[tuple[tuple[str, ...], Rule]]:
    """Every knob of a transform by its path, those in sections included."""

    def inside(rule: Rule, at: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Rule]]:
        for knob, inner in rule.get("properties", {}).items():
            yield (*at, knob), inner
            yield from inside(inner, (*at, knob))

    yield from inside(schema(spec), ())


def configured(spec: TransformSpec, path: tuple[str, ...], given: Any) -> dict[str, Any]:
    config = dict(MINIMAL.get(spec.name, {}))
    at = config
    for step in path[:-1]:
        at[step] = dict(at.get(step, {}))
        at = at[step]
    at[path[-1]] = given
    return config


EVERY_KNOB = [
    pytest.param(spec, path, rule, id=f"{spec.name}-{'.'.join(path)}")
    for spec in SPECS
    for path, rule in knobs(spec)
]


@pytest.mark.parametrize(("spec", "path", "rule"), EVERY_KNOB)
def test_every_knob_arrives_as_it_was_given(
    builders: Builders, spec: TransformSpec, path: tuple[str, ...], rule: Rule
) -> None:
    config = configured(spec, path, value(rule))
    answer = builders(spec, config)
    assert sent(answer) == (spec.urn, config), answer


def beyond(rule: Rule) -> Iterator[Any]:
    """Values of a knob's type that its schema refuses."""
    if "enum" in rule or section(rule):
        return
    kind = rule["type"]
    if kind == "array":
        if rule.get("minItems"):
            yield []
        for item in beyond(rule["items"]):
            yield [item]
    elif kind == "object":
        for item in beyond(rule["additionalProperties"]):
            yield {"a": item}
    elif kind in ("integer", "number"):
        step = 1 if kind == "integer" else 0.25
        for bound, sign in (("minimum", -1), ("maximum", 1)):
            # Beyond 64 bits there is nothing to refuse: a Java caller cannot write it.
            if bound in rule and -(2**63) <= rule[bound] + sign * step < 2**63:
                yield rule[bound] + sign * step
        for bound in ("exclusiveMinimum", "exclusiveMaximum"):
            if bound in rule:
                yield rule[bound] if kind == "integer" else float(rule[bound])
    elif kind == "string":
        if rule.get("minLength"):
            yield ""
        if "pattern" in rule:
            yield from (
                text for text in ("a b\u00e9", "a\n", "1:2", "") if text or "minLength" not in rule
            )


def python_words(spec: TransformSpec, config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        load(spec.config, config, spec.name)
    return str(error.value)


BOUNDED = [knob for knob in EVERY_KNOB if list(beyond(knob.values[2]))]


@pytest.mark.parametrize(("spec", "path", "rule"), BOUNDED)
def test_every_bound_is_kept_in_the_same_words(
    builders: Builders, spec: TransformSpec, path: tuple[str, ...], rule: Rule
) -> None:
    for given_value in beyond(rule):
        config = configured(spec, path, given_value)
        if not check(spec.config, config)[0]:
            continue  # such as a text that the pattern takes after all
        assert builders(spec, config).get("error") == python_words(spec, config)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_required_knobs_are_missed_in_the_same_words(
    builders: Builders, spec: TransformSpec
) -> None:
    required = schema(spec).get("required", [])
    assert sent(builders(spec, dict(MINIMAL.get(spec.name, {}))))[0] == spec.urn
    for config in ({}, {"error_handling": {}}):
        if required or config:
            assert builders(spec, config).get("error") == python_words(spec, config)


def test_all_problems_are_named_at_once(builders: Builders) -> None:
    config = {
        "sampling": {"top_p": 0.0, "stop": ["", "a", ""], "max_tokens": 0},
        "messages": [{"role": "user"}, {"content": "x"}],
        "server": {"endpoint": "nowhere", "startup_timeout_secs": {"double": "NaN"}},
        "requests": {"timeout_secs": {"double": "Infinity"}, "max_retries": 101},
    }
    plain_config = json.loads(json.dumps(config))
    plain_config["server"]["startup_timeout_secs"] = float("nan")
    plain_config["requests"]["timeout_secs"] = float("inf")
    spec = TRANSFORMS["VLLMChat"]
    assert builders(spec, config)["error"] == python_words(spec, plain_config)


def test_wrong_types_cannot_be_written_in_java(builders: Builders) -> None:
    spec = TRANSFORMS["VLLMCompletions"]
    for path, wrong in (
        (("sampling", "max_tokens"), "many"),
        (("sampling", "temperature"), True),
        (("sampling", "stop"), "x"),
        (("prefix_batching", "mode"), "fixd"),
        (("no_such_knob",), 1),
    ):
        assert "inexpressible" in builders(spec, configured(spec, path, wrong))


texts = st.text(st.sampled_from("{}{}[]:!.ab_1 \n"), max_size=12) | st.sampled_from(
    [
        "{a!r}",
        "{a!rx}",
        "{a!",
        "{a:{b}}",
        "{a:",
        "{a[}]}",
        "é{é}",
        "{{{a}}}",
        "{a.b}{a.b}",
        "\U0001f600{",
    ]
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(texts)
def test_templates_are_read_as_python_reads_them(builders: Builders, text: str) -> None:
    spec = TRANSFORMS["VLLMCompletions"]
    answer = builders(spec, {"model": "m", "prompt": text})
    problems, _ = check(spec.config, {"model": "m", "prompt": text})
    assert answer.get("error", "") == "\n".join(f"{spec.name}: {p}" for p in problems)


numbers = st.floats(allow_nan=False, allow_infinity=False) | st.floats(-3, 3).map(
    lambda number: round(number, 3)
)


@settings(max_examples=120, deadline=None)
@given(numbers)
def test_numbers_are_written_as_python_writes_them(builders: Builders, number: float) -> None:
    spec = TRANSFORMS["VLLMCompletions"]
    config = {"model": "m", "prompt": "p", "sampling": {"temperature": number, "top_p": number}}
    problems, _ = check(spec.config, config)
    answer = builders(spec, config)
    assert answer.get("error", "") == "\n".join(f"{spec.name}: {p}" for p in problems)


names = st.text(min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(
    model=st.sampled_from(["m", "org/model", 'quo"te\\', "ünïcode \U0001f600", "tab\t\x01\x7f"]),
    args=st.lists(names, max_size=2),
    env=st.dictionaries(names, names, max_size=3),
    endpoint=st.none() | st.just("http://127.0.0.1:1/v1"),
)
def test_the_model_identifier_is_the_same(
    builders: Builders, model: str, args: list[str], env: dict[str, str], endpoint: str | None
) -> None:
    server = {"args": args, "env": env, "endpoint": endpoint, "env_from_worker": ["A"]}
    server = {knob: given_value for knob, given_value in server.items() if given_value is not None}
    spec = TRANSFORMS["VLLMCompletions"]
    raw = {"model": model, "prompt": "p", "server": server}
    config = LLMConfig(model=model, server=_server(server))
    assert builders(spec, raw)["identifier"] == config.identifier
    named = builders(spec, {**raw, "model_identifier": "tickets"})
    assert named["identifier"] == "tickets"


def _server(knobs: dict[str, Any]) -> Any:
    from beam_llm.config import Server

    return Server(**{k: tuple(v) if isinstance(v, list) else v for k, v in knobs.items()})


def test_text_shows_the_knobs_that_were_given(builders: Builders) -> None:
    answer = builders(TRANSFORMS["VLLMChat"], {**MINIMAL["VLLMChat"], "sampling": {"seed": 3}})
    assert answer["text"] == (
        'VLLMChat(model="m", messages=[{"role": "user", "content": "{text}"}],'
        ' sampling={"seed": 3})'
    )
    assert "identifier" not in builders(TRANSFORMS["BatchByPrefix"], {"prompt": "{a}"})
