import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beam_llm.config import (
    BatchByPrefixConfig,
    ChatConfig,
    CompletionsConfig,
    LLMConfig,
    Sampling,
)
from beam_llm.registry import TRANSFORMS
from beam_llm.schemas import json_schema
from beam_llm.validation import ConfigError, check, integral, load, server_spec

MINIMAL: dict[type[LLMConfig], dict[str, Any]] = {
    ChatConfig: {"model": "m", "messages": [{"role": "user", "content": "{text}"}]},
    CompletionsConfig: {"model": "m", "prompt": "{text}"},
}


def problems(**knobs: Any) -> list[str]:
    found, config = check(CompletionsConfig, {**MINIMAL[CompletionsConfig], **knobs})
    assert (config is None) == bool(found)
    return [str(problem) for problem in found]


@pytest.mark.parametrize("model", MINIMAL)
def test_minimal_configurations_take_the_defaults(model: type[LLMConfig]) -> None:
    config = load(model, MINIMAL[model], "T")
    assert config.requests.max_in_flight == 64
    assert config.prefix_batching.mode == "fixed"
    assert config.error_handling is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "prompt: required, unless prefix_batching has a key_field or key_fn"),
        ({"prompt": ""}, 'prompt: "" is too short: at least 1 character'),
        ({"prompt": "{"}, "prompt: Single '{' encountered"),
        (
            {"prompt": "{a}", "prefix_batching": {"mode": "none"}},
            'prefix_batching.mode: "none" would leave nothing to batch by',
        ),
        (
            {"prefix_batching": {"key_field": "a"}, "batching": {"weight": "tokens"}},
            'batching.weight: "tokens" needs the prompt whose tokens they are',
        ),
        ({"prompt": "{a}", "model": "m"}, "model: unknown key"),
    ],
)
def test_batching_alone_needs_something_to_batch_by(config: Any, expected: str) -> None:
    (problem,), _ = check(BatchByPrefixConfig, config)
    assert str(problem).startswith(expected)


def test_null_and_empty_mean_the_default() -> None:
    config = load(
        CompletionsConfig,
        {**MINIMAL[CompletionsConfig], "sampling": {"seed": None}, "requests": {}, "server": None},
        "T",
    )
    assert config == load(CompletionsConfig, MINIMAL[CompletionsConfig], "T")


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        (
            {"prefix_batching": {"num_shards": -1}},
            "prefix_batching.num_shards: -1 is less than the minimum of 1",
        ),
        (
            {"sampling": {"temperature": "warm"}},
            'sampling.temperature: "warm" is a string, not a number',
        ),
        (
            {"sampling": {"max_tokens": True}},
            "sampling.max_tokens: true is a boolean, not an integer",
        ),
        (
            {"batching": {"min_batch_size": 9, "max_batch_size": 8}},
            "batching.min_batch_size: 9 is greater than max_batch_size, 8",
        ),
        ({"sampling": {"top_p": 0}}, "sampling.top_p: 0 is not greater than 0"),
        ({"sampling": {"min_p": 2}}, "sampling.min_p: 2 is greater than the maximum of 1"),
        ({"sampling": {"choices": []}}, "sampling.choices: [] is too short: at least 1 item"),
        ({"sampling": {"stop": "x"}}, 'sampling.stop: "x" is a string, not a list'),
        ({"output_field": "a\n"}, 'output_field: "a\\n" is not a field name'),
        (
            {"requests": {"timeout_secs": 10**400}},
            "requests.timeout_secs: 1000000000",
        ),
        (
            {"sampling": {"seed": 2**63}},
            "sampling.seed: 9223372036854775808 is greater than the maximum of 9223372036854775807",
        ),
        ({"output_field": "a-b"}, 'output_field: "a-b" is not a field name: letters, digits'),
        (
            {"prefix_batching": {"mode": "fixd"}},
            'prefix_batching.mode: "fixd" is not one of "fixed", "none"; did you mean \'fixed\'?',
        ),
        ({"samplng": {}}, "samplng: unknown key; did you mean 'sampling'? (allowed: model, "),
        (
            {"sampling": {"max_token": 3}},
            "sampling.max_token: unknown key; did you mean 'max_tokens'?",
        ),
        ({"prompt": "{"}, "prompt: "),
        ({"prompt": "{a!r}"}, "prompt: '{a!r}' is not a field"),
        (
            {"sampling": {"choices": ["a"], "regex": "b"}},
            "sampling.regex: given beside choices: only one of choices, regex, json_schema can be",
        ),
        ({"sampling": {"json_schema": "{"}}, 'sampling.json_schema: "{" is too short'),
        ({"sampling": {"json_schema": "{]"}}, 'sampling.json_schema: "{]" is not JSON: '),
        (
            {"sampling": {"extra_body": "[1]"}},
            'sampling.extra_body: "[1]" is JSON but not an object',
        ),
        (
            {"prefix_batching": {"key_field": "a", "key_fn": "m:f"}},
            "prefix_batching.key_fn: given beside key_field",
        ),
        (
            {"prefix_batching": {"mode": "none", "key_field": "a"}},
            "prefix_batching.key_field: has no effect with mode: none",
        ),
        (
            {"prefix_batching": {"prefix_char_len": 1, "prefix_delimiters": ["ab"]}},
            'prefix_batching.prefix_delimiters[0]: "ab" is longer than prefix_char_len, 1',
        ),
        ({"batching": {"max_batch_weight": 5}}, "batching.max_batch_weight: needs weight: tokens"),
        (
            {"batching": {"max_batch_duration_secs": 0}},
            "batching.max_batch_duration_secs: 0 is not gre",
        ),
        (
            {"server": {"endpoint": "http://127.0.0.1:1/v1", "args": ["--x=1"]}},
            "server.args: has no effect with server.endpoint",
        ),
        (
            {"server": {"endpoint": "localhost:1"}},
            'server.endpoint: "localhost:1" is not an address',
        ),
        ({"server": {"api_key_env": "KEY"}}, "server.api_key_env: needs server.endpoint"),
        (
            {"server": {"args": ["--max-model-len=1", "--port=1"]}},
            "server.args[1]: '--port=1' is not",
        ),
        (
            {"server": {"args": ["--api-key=k"]}},
            "server.args[0]: '--api-key=k' is not yours to set",
        ),
        (
            {"server": {"env": {"VLLM_API_KEY": "k"}}},
            "server.env: VLLM_API_KEY is not yours to set",
        ),
        (
            {"sampling": {"json_schema": '{"type": "objct"}'}},
            "sampling.json_schema: not a JSON Schema: type: 'objct' is not valid",
        ),
        (
            {"prefix_batching": {"mode": "none", "prefix_delimiters": [":"]}},
            "prefix_batching.prefix_delimiters: has no effect with mode: none",
        ),
        ({"server": {"args": ["--model", "x"]}}, "server.args[0]: '--model' is not yours to set"),
        ({"server": {"env": {"A": 1}}}, "server.env.A: 1 is an integer, not a string"),
        (
            {"error_handling": {"output": "output"}},
            'error_handling.output: "output" names the main',
        ),
        ({"error_handling": {"output": "a.b"}}, 'error_handling.output: "a.b" is not a field name'),
        ({"sampling": {"temperature": float("nan")}}, "sampling.temperature: nan is not a finite"),
        (
            {"requests": {"timeout_secs": float("inf")}},
            "requests.timeout_secs: inf is not a finite",
        ),
        ({"server": {"env": {"A=B": "1"}}}, "server.env: 'A=B' is no variable"),
        (
            {"prompt": {"text": None}},
            "prompt: {} is a mapping, not a string: quote text that begins",
        ),
        (
            {"error_handling": {}},
            "error_handling.output: required, and missing: Name of the output",
        ),
    ],
)
def test_says_where_what_and_what_is_allowed(knobs: dict[str, Any], expected: str) -> None:
    (problem,) = problems(**knobs)
    assert problem.startswith(expected)


def test_whole_numbers_may_come_as_floats() -> None:
    sampling = {"max_tokens": 16.0, "temperature": 1}
    config = load(CompletionsConfig, {**MINIMAL[CompletionsConfig], "sampling": sampling}, "T")
    assert config.sampling.max_tokens == 16
    assert isinstance(config.sampling.max_tokens, int)


def test_finds_every_problem_at_once() -> None:
    found, _ = check(
        ChatConfig,
        {
            "messages": [{"role": "usr", "content": "x"}, {"content": 1}],
            "sampling": {"seed": "a", "oops": 1},
            "requests": {"max_in_flight": 0},
        },
    )
    assert sorted(str(problem).partition(": ")[0] for problem in found) == [
        "messages[0].role",
        "messages[1].content",
        "messages[1].role",
        "model",
        "requests.max_in_flight",
        "sampling.oops",
        "sampling.seed",
    ]


def test_the_error_lists_the_problems_and_pickles() -> None:
    import pickle

    with pytest.raises(ConfigError) as caught:
        load(CompletionsConfig, {"prompt": "{", "requests": {"max_retries": -1}}, "VLLMCompletions")
    lines = str(caught.value).splitlines()
    assert all(line.startswith("VLLMCompletions: ") for line in lines)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_schemas_have_plain_types_and_a_description_for_every_knob(name: str) -> None:
    schema = json_schema(TRANSFORMS[name].config)
    for section, definition in schema["$defs"].items():
        assert definition["additionalProperties"] is False, section
        for knob, rule in definition["properties"].items():
            assert rule.get("description"), f"{section}.{knob}"
            assert isinstance(rule.get("type", "object"), str), f"{section}.{knob}"
            assert "anyOf" not in rule or "oneOf" not in rule


def test_the_identifier_is_stable_and_depends_on_model_and_server() -> None:
    def identifier(**knobs: Any) -> str:
        return load(CompletionsConfig, {**MINIMAL[CompletionsConfig], **knobs}, "T").identifier

    assert identifier() == identifier(sampling={"seed": 3}, prompt="{other}")
    assert identifier() != identifier(model="n")
    assert identifier() != identifier(server={"args": ["--seed=1"]})
    assert identifier() == identifier(server={"startup_timeout_secs": 5})
    assert identifier(server={"env": {"A": "1", "B": "2"}}) == identifier(
        server={"env": {"B": "2", "A": "1"}}
    )
    assert identifier(model_identifier="mine") == "mine"
    # Literal: it must not depend on the process, nor change from one to the next.
    assert identifier() == "beam-llm-3e518a7c45e308dc"


def test_the_server_gets_what_the_section_says() -> None:
    spec = server_spec(
        load(
            CompletionsConfig,
            {
                **MINIMAL[CompletionsConfig],
                "server": {"args": ["--seed=1"], "env": {"A": "1"}, "startup_timeout_secs": 5},
            },
            "T",
        )
    )
    assert (spec.args, dict(spec.env), spec.startup_timeout_secs) == (("--seed=1",), {"A": "1"}, 5)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=4),
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*Sampling.__struct_fields__, "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(st.sampled_from(Sampling.__struct_fields__), values, max_size=4))
def test_the_schema_and_the_model_agree(sampling: dict[str, Any]) -> None:
    knobs = {**MINIMAL[CompletionsConfig], "sampling": sampling}
    found, config = check(CompletionsConfig, knobs)
    try:
        given = {k: integral(v) for k, v in sampling.items() if v is not None}
        converted = msgspec.convert(given, Sampling)
    except msgspec.ValidationError:
        assert found
    else:
        # Only rules between knobs may find more.
        assert config is None or config.sampling == converted
        if config is None:
            assert all("JSON" in str(p) or "given beside" in str(p) for p in found)


def test_configurations_survive_json() -> None:
    config = load(ChatConfig, MINIMAL[ChatConfig], "T")
    again = load(ChatConfig, json.loads(msgspec.json.encode(config)), "T")
    assert again == config
