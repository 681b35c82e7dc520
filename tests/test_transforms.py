"""The row transforms on Beam's in-process runner, against a stand-in vLLM."""

import json
import os
import typing
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple, Optional

import apache_beam as beam
import numpy
import psutil
import pytest
from apache_beam.metrics import MetricsFilter
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing import test_pipeline
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms import window
from apache_beam.typehints.row_type import RowTypeConstraint
from apache_beam.utils.timestamp import Timestamp

import beam_llm
from beam_llm import ConfigError

RUNNER = "apache_beam.runners.portability.fn_api_runner.FnApiRunner"
KEYED = [
    pytest.param({"mode": "fixed"}, id="keyed"),
    pytest.param({"mode": "none"}, id="unkeyed"),
]


class Ticket(NamedTuple):
    id: int
    team: str
    text: Optional[str]


beam.coders.registry.register_coder(Ticket, beam.coders.RowCoder)


@pytest.fixture
def server(standin_env: dict[str, str], tmp_path: Path) -> dict[str, Any]:
    """A `server:` section; the prompts that were answered are in `tmp_path / "log"`."""
    return {"env": {**standin_env, "STANDIN_LOG": str(tmp_path / "log")}}


def answered(tmp_path: Path) -> Counter[str]:
    lines = (tmp_path / "log").read_text().splitlines()
    return Counter(json.loads(line) for line in lines)


def pipeline(**options: Any) -> beam.Pipeline:
    return test_pipeline.TestPipeline(runner=RUNNER, options=PipelineOptions(**options))


def tickets(*texts: str | None) -> Any:
    return beam.Create(
        [Ticket(i, f"team {i % 3}", text) for i, text in enumerate(texts)]
    ).with_output_types(Ticket)


def completions(server: dict[str, Any], **more: Any) -> beam.PTransform:
    knobs = {"model": "m", "prompt": "{team}: {text}", "server": server, **more}
    return beam_llm.VLLMCompletions(**knobs)


def counters(result: Any) -> dict[str, int]:
    found = result.metrics().query(MetricsFilter().with_namespace("beam_llm"))["counters"]
    total: Counter[str] = Counter()
    for counter in found:
        total[counter.key.metric.name] += counter.result
    return dict(total)


# Rows


@pytest.mark.parametrize("prefix_batching", KEYED)
def test_rows_come_back_with_the_completion(server: Any, prefix_batching: Any) -> None:
    with pipeline() as p:
        out = (
            p
            | tickets("a", "b", "c")
            | completions(server, prefix_batching=prefix_batching)
            | beam.Map(lambda row: (row.id, row.team, row.text, row.completion, row.finish_reason))
        )
        assert_that(
            out,
            equal_to([(i, f"team {i}", t, f"team {i}: {t}", "stop") for i, t in enumerate("abc")]),
        )


def test_chat_rows_come_back_with_the_reply_usage_and_model(server: Any) -> None:
    with pipeline() as p:
        out = (
            p
            | tickets("hello")
            | beam_llm.VLLMChat(
                model="m",
                messages=[
                    {"role": "system", "content": "You label."},
                    {"role": "user", "content": "{text}"},
                ],
                server=server,
            )
        )
        fields = dict(out.element_type._fields)
        assert fields["text"] == Optional[str]
        assert fields["reply"] == Optional[str]
        assert fields["model"] is str
        assert [name for name, _ in fields["usage"]._fields] == [
            "prompt_tokens",
            "cached_tokens",
            "completion_tokens",
        ]

        def check(rows: list[Any]) -> None:
            (row,) = rows
            assert "hello" in row.reply
            assert row.model == "m"
            assert isinstance(row.usage.prompt_tokens, int)
            assert isinstance(row.usage.cached_tokens, int)

        assert_that(out, check)


def test_rows_cross_a_coder_on_the_way_out(server: Any) -> None:
    with pipeline() as p:
        out = (
            p
            | tickets("a", "b")
            | completions(server)
            | beam.Reshuffle()
            | beam.Map(lambda row: (row.id, row.completion, row.usage.completion_tokens > 0))
        )
        assert_that(out, equal_to([(0, "team 0: a", True), (1, "team 1: b", True)]))


def test_any_value_has_a_text(server: Any) -> None:
    inner = beam.Row(x=1, y="é")
    row = beam.Row(
        s="text",
        i=3,
        f=1.5,
        b=True,
        d=Decimal("1.10"),
        items=["a", "b"],
        m={"k": 2},
        inner=inner,
        at=Timestamp(5),
    )
    with pipeline() as p:
        out = (
            p
            | beam.Create([row])
            | beam_llm.VLLMCompletions(
                model="m",
                prompt="{s}|{i}|{f}|{b}|{d}|{items}|{m}|{inner}|{inner.x}|{at}|{{literal}}|🙂",
                server=server,
            )
            | beam.Map(lambda row: row.completion)
        )
        expected = (
            'text|3|1.5|true|1.10|["a", "b"]|{"k": 2}|{"x": 1, "y": "é"}|1|1970-01-01T00:00:05Z'
            "|{literal}|🙂"
        )
        assert_that(out, equal_to([expected]))


# Failures


@pytest.mark.parametrize("prefix_batching", KEYED)
def test_a_failed_row_goes_alone_to_the_error_output(
    server: Any, prefix_batching: Any, tmp_path: Path
) -> None:
    texts = ["fine", "BAD", None, "also fine", "FLAKY500", "FLAKY429"]
    p = pipeline()
    out = (
        p
        | tickets(*texts)
        | completions(
            server, prefix_batching=prefix_batching, error_handling={"output": "failures"}
        )
    )
    assert set(out) == {"output", "failures"}
    assert [name for name, _ in out["failures"].element_type._fields] == ["element", "msg", "stack"]
    assert_that(
        out["output"] | beam.Map(lambda row: row.text),
        equal_to(["fine", "also fine", "FLAKY500", "FLAKY429"]),
    )
    assert_that(
        out["failures"] | "Msg" >> beam.Map(lambda row: (row.element.id, row.msg.split(" (")[-1])),
        equal_to([(1, "refused, HTTP 400)"), (2, "null_field)")]),
        label="failures",
    )
    result = p.run()
    found = counters(result)
    assert found["rows_read"] == 6
    assert found["rows_done"] == 4
    assert found["rows_failed"] == 2
    assert found["rows_failed_refused"] == 1
    assert found["rows_failed_null_field"] == 1
    assert found["requests"] == 7
    assert answered(tmp_path) == dict.fromkeys(
        ["team 0: fine", "team 0: also fine", "team 1: FLAKY500", "team 2: FLAKY429"], 1
    )


@pytest.mark.parametrize("prefix_batching", KEYED)
@pytest.mark.parametrize("text", ["BAD", None])
def test_without_an_error_output_a_failed_row_fails_the_pipeline_in_words(
    server: Any, prefix_batching: Any, text: str | None
) -> None:
    p = pipeline()
    _ = p | tickets("fine", text) | completions(server, prefix_batching=prefix_batching)
    with pytest.raises(Exception, match=r"VLLMCompletions: a row failed: .*error_handling"):
        p.run()


def test_an_empty_prompt_fails_its_row_and_an_empty_message_does_not(server: Any) -> None:
    with pipeline() as p:
        rows = p | tickets("")
        out = rows | "Prompt" >> completions(
            server, prompt="{text}", error_handling={"output": "failures"}
        )
        assert_that(
            out["failures"] | beam.Map(lambda row: row.msg),
            equal_to(["the prompt is empty (empty_prompt)"]),
        )
        chat = rows | beam_llm.VLLMChat(
            model="m", messages=[{"role": "user", "content": "{text}"}], server=server
        )
        assert_that(chat | beam.Map(lambda row: row.id), equal_to([0]), label="chat")


def test_a_lone_surrogate_fails_its_row_and_the_error_row_can_be_written() -> None:
    # Seen from below: Beam refuses to write such text, and mostly fails before our step.
    from beam_llm.rows import RowError, storable

    (body,) = bodies([beam.Row(text="fine 🙂")])
    assert body["prompt"] == "fine 🙂"
    row = Ticket(1, "a", "b\ud800")
    with pytest.raises(RowError) as error:
        bodies([row])
    assert error.value.kind == "invalid_text"
    assert error.value.message.endswith("a lone surrogate U+D800 at character 1")
    coder = beam.coders.RowCoder.from_type_hint(Ticket, beam.coders.registry)
    assert coder.decode(coder.encode(storable(row))) == Ticket(1, "a", "b\\ud800")


def test_a_megabyte_prompt_passes(server: Any) -> None:
    with pipeline() as p:
        out = (
            p
            | tickets("x" * 1_000_000)
            | completions(server)
            | beam.Map(lambda row: len(row.completion))
        )
        assert_that(out, equal_to([1_000_008]))


def test_a_server_that_cannot_start_fails_the_pipeline_with_its_words(server: Any) -> None:
    server["env"]["STANDIN_FAIL"] = "oom"
    p = pipeline()
    _ = p | tickets("a") | completions(server, error_handling={"output": "failures"})
    with pytest.raises(Exception, match=r"exited with code 1: out of memory"):
        p.run()


# Construction


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        (
            {"prompt": "{txt}"},
            "VLLMCompletions: prompt: the input has no field 'txt'; did you mean 'text'?"
            " (fields: id, team, text)",
        ),
        (
            {"per_row": {"seed": "sed"}},
            "VLLMCompletions: per_row.seed: the input has no field 'sed'",
        ),
        (
            {"prefix_batching": {"key_field": "owner"}},
            "VLLMCompletions: prefix_batching.key_field: the input has no field 'owner'",
        ),
        (
            {"prompt": "{text.k}"},
            "VLLMCompletions: prompt: 'text.k' is not there: 'text' is no nested row",
        ),
        ({"output_field": "text"}, "VLLMCompletions: output_field: the input already has a field"),
        ({"output_field": "usage"}, "VLLMCompletions: output_field: the step's own output already"),
        (
            {"prefix_batching": {"key_fn": "no_such_module:f"}},
            "VLLMCompletions: prefix_batching.key_fn: 'no_such_module:f' is not there",
        ),
        (
            {"prefix_batching": {"key_fn": "os:sep"}},
            "VLLMCompletions: prefix_batching.key_fn: 'os:sep' is a str, not a function",
        ),
    ],
)
def test_what_does_not_fit_the_input_is_an_error_at_construction(
    server: Any, knobs: Any, expected: str
) -> None:
    p = pipeline()
    with pytest.raises(ConfigError) as error:
        _ = p | tickets("a") | completions(server, **knobs)
    assert str(error.value).startswith(expected)


def test_an_input_without_a_schema_is_an_error_at_construction(server: Any) -> None:
    p = pipeline()
    with pytest.raises(ConfigError, match=r"its input has no schema .*MapToFields"):
        _ = p | beam.Create(["text"]) | completions(server)


def test_bytes_in_a_prompt_are_an_error_at_construction(server: Any) -> None:
    p = pipeline()
    with pytest.raises(ConfigError, match="prompt: field 'b' holds bytes: decode it"):
        _ = p | beam.Create([beam.Row(b=b"x")]) | completions(server, prompt="{b}")


def test_every_problem_of_the_configuration_is_listed() -> None:
    with pytest.raises(ConfigError) as error:
        beam_llm.VLLMChat(messages=[], requests={"max_retries": -1}, modle="m")
    lines = str(error.value).splitlines()
    assert sorted(line.split(": ")[1] for line in lines) == [
        "messages",
        "model",
        "modle",
        "requests.max_retries",
    ]


def test_resource_hints_reach_batching_and_inference_alike(server: Any) -> None:
    p = pipeline()
    _ = (
        p
        | tickets("a")
        | "LLM"
        >> completions(server, resource_hints={"accelerator": "type:t4;count:1", "min_ram": "3GB"})
    )
    proto = p.to_runner_api()
    transforms = proto.components.transforms.values()
    inside = [t for t in transforms if t.unique_name.startswith("LLM/") and t.environment_id]
    assert len(inside) > 3
    environments = {t.environment_id for t in inside}
    (environment,) = environments
    hints = proto.components.environments[environment].resource_hints
    assert hints["beam:resources:accelerator:v1"] == b"type:t4;count:1"
    assert hints["beam:resources:min_ram_bytes:v1"] == b"3000000000"
    outside = {t.environment_id for t in transforms if not t.unique_name.startswith("LLM")}
    assert environment not in outside


def test_the_model_identifier_annotates_the_step(server: Any) -> None:
    p = pipeline()
    _ = p | tickets("a") | "LLM" >> completions(server, model_identifier="tickets")
    (step,) = [
        t for t in p.to_runner_api().components.transforms.values() if t.unique_name == "LLM"
    ]
    assert step.annotations["model_identifier"] == b"tickets"


def test_beam_yaml_reads_a_schema_and_documentation_from_the_constructor() -> None:
    from apache_beam.yaml.yaml_provider import InlineProvider

    schema = InlineProvider.config_schema_from_callable(beam_llm.VLLMChat)
    fields = {field.name: field for field in schema.fields}
    assert fields["model"].description == "Path or hub name of the model."
    assert fields["sampling"].type.HasField("row_type")
    assert fields["error_handling"].type.nullable
    assert InlineProvider.description_from_callable(beam_llm.VLLMChat).startswith("Asks a chat")


# Sampling


def bodies(rows: Any, **knobs: Any) -> list[dict[str, Any]]:
    """What the requests of some rows would hold."""
    from beam_llm.rows import Prompter
    from beam_llm.validation import load

    config = load(
        beam_llm.VLLMCompletions.config_model, {"model": "m", "prompt": "{text}", **knobs}, "T"
    )
    prompter = Prompter(config)
    return [json.loads(prompter.call(row).body) for row in rows]


def test_sampling_knobs_become_fields_of_the_request() -> None:
    (body,) = bodies(
        [beam.Row(text="t")],
        sampling={
            "max_tokens": 5,
            "temperature": 0,
            "stop": ["\n"],
            "json_schema": '{"type": "object"}',
            "extra_body": '{"logit_bias": {"5": 1}}',
        },
    )
    assert body == {
        "prompt": "t",
        "max_tokens": 5,
        "temperature": 0.0,
        "stop": ["\n"],
        "logit_bias": {"5": 1},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "reply", "schema": {"type": "object"}},
        },
    }


def test_per_row_values_replace_the_steps() -> None:
    rows = [
        beam.Row(text="t", n=7, c=["a", "b"], s=None),
        beam.Row(text="t", n=None, c=None, s=None),
        beam.Row(text="t", n=None, c=None, s='{"type": "string"}'),
    ]
    first, second, third = bodies(
        rows,
        sampling={"max_tokens": 5, "choices": ["x"]},
        per_row={"max_tokens": "n", "choices": "c", "json_schema": "s"},
    )
    assert (first["max_tokens"], first["structured_outputs"]) == (7, {"choice": ["a", "b"]})
    assert (second["max_tokens"], second["structured_outputs"]) == (5, {"choice": ["x"]})
    assert "structured_outputs" not in third
    assert third["response_format"]["json_schema"]["schema"] == {"type": "string"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1, "sampling.max_tokens from column 'n': Expected `int` >= 1"),
        ("7", "sampling.max_tokens from column 'n': Expected `int | null`, got `str`"),
    ],
)
def test_a_per_row_value_out_of_bounds_fails_its_row(value: Any, message: str) -> None:
    from beam_llm.rows import RowError

    with pytest.raises(RowError) as error:
        bodies([beam.Row(text="t", n=value)], per_row={"max_tokens": "n"})
    assert error.value.message.startswith(message)
    assert error.value.kind == "sampling"


@pytest.mark.parametrize(
    ("value", "sent"),
    [(7, 7), (7.0, 7), (float("nan"), 5), (None, 5), (numpy.int64(7), 7), (numpy.float64(7), 7)],
)
def test_a_column_of_integers_with_gaps_is_one_of_floats(value: Any, sent: int) -> None:
    (body,) = bodies(
        [beam.Row(text="t", n=value)], sampling={"max_tokens": 5}, per_row={"max_tokens": "n"}
    )
    assert body["max_tokens"] == sent


def test_a_cell_may_hold_an_array_of_numpy() -> None:
    array = numpy.array(["a", "b"])
    (body,) = bodies([beam.Row(text="t", c=array)], per_row={"choices": "c"})
    assert body["structured_outputs"] == {"choice": ["a", "b"]}


def test_a_list_may_come_as_json(server: Any) -> None:
    rows = beam.Create([beam.Row(text="a", c='["x", "y"]'), beam.Row(text="b", c="x")])
    with pipeline() as p:
        out = (
            p
            | rows
            | completions(
                server,
                prompt="{text}",
                per_row={"choices": "c"},
                error_handling={"output": "failures"},
            )
        )
        assert_that(out["output"] | beam.Map(lambda row: row.text), equal_to(["a"]))
        assert_that(
            out["failures"] | "Msg" >> beam.Map(lambda row: row.msg.split(":")[0]),
            equal_to(["sampling.choices from column 'c'"]),
            label="failures",
        )


def test_what_is_not_a_number_is_null_in_a_prompt() -> None:
    from beam_llm.rows import RowError

    with pytest.raises(RowError, match="field 'text' is null"):
        bodies([beam.Row(text=float("nan"))])
    with pytest.raises(RowError, match="field 'text' is null"):
        bodies([beam.Row(text=numpy.float32("nan"))])


def test_bytes_of_an_unknown_type_fail_their_row() -> None:
    from beam_llm.rows import RowError

    with pytest.raises(RowError, match="field 'text' holds bytes: decode it first"):
        bodies([beam.Row(text=b"x")])


# Time


@pytest.mark.parametrize("prefix_batching", KEYED)
def test_rows_keep_their_timestamp_and_window(server: Any, prefix_batching: Any) -> None:
    def with_time(
        row: Any, ts: Any = beam.DoFn.TimestampParam, w: Any = beam.DoFn.WindowParam
    ) -> Any:
        return (row.id, int(ts), int(w.start), int(w.end))

    with pipeline() as p:
        out = (
            p
            | tickets(*"abcdefgh", "BAD")
            | beam.Map(lambda t: window.TimestampedValue(t, t.id * 7)).with_output_types(Ticket)
            | beam.WindowInto(window.FixedWindows(10))
            | completions(
                server, prefix_batching=prefix_batching, error_handling={"output": "failures"}
            )
        )
        expected = [(i, i * 7, i * 7 // 10 * 10, i * 7 // 10 * 10 + 10) for i in range(9)]
        assert_that(out["output"] | beam.Map(with_time), equal_to(expected[:8]))
        failures = (
            out["failures"]
            | beam.Map(lambda row: row.element)
            | "FailedTime" >> beam.Map(with_time)
        )
        assert_that(failures, equal_to(expected[8:]), label="failures")


@pytest.mark.parametrize("prefix_batching", KEYED)
def test_sliding_windows_and_sessions(server: Any, prefix_batching: Any) -> None:
    with pipeline() as p:
        rows = (
            p
            | tickets("a", "b")
            | beam.Map(lambda t: window.TimestampedValue(t, t.id)).with_output_types(Ticket)
        )
        sliding = (
            rows
            | beam.WindowInto(window.SlidingWindows(10, 5))
            | "InSliding" >> completions(server, prefix_batching=prefix_batching)
            | beam.Map(lambda row, w=beam.DoFn.WindowParam: (row.id, int(w.start)))
        )
        assert_that(sliding, equal_to([(0, 0), (0, -5), (1, 0), (1, -5)]), label="sliding")
        sessions = (
            rows
            | "Sessions" >> beam.WindowInto(window.Sessions(10))
            | "InSessions" >> completions(server, prefix_batching=prefix_batching)
            | "One" >> beam.Map(lambda row: ("all", row.id))
            | beam.GroupByKey()
            | "Sorted" >> beam.MapTuple(lambda _, ids: sorted(ids))
        )
        assert_that(sessions, equal_to([[0, 1]]), label="sessions")


# Servers


class Unbounded(beam.PTransform):
    """Says that its input were unbounded, which is what decides how batches are made."""

    def expand(self, pcoll: Any) -> Any:
        result = pcoll | beam.Map(lambda row: row).with_output_types(pcoll.element_type)
        result.is_bounded = False
        return result


@pytest.mark.parametrize(
    ("least", "smallest"), [(1, 1), (16, 4)], ids=["from one row", "of a fixed size"]
)
def test_batches_of_a_stream_grow_by_what_requests_take(
    server: Any, least: int, smallest: int
) -> None:
    server["env"]["STANDIN_LATENCY_SECS"] = "0.01"  # whatever the size: large batches pay
    p = pipeline()
    rows = p | beam.Create([Ticket(i, "a", f"{i}") for i in range(500)]).with_output_types(Ticket)
    answered = (
        rows
        | Unbounded()
        | completions(
            server,
            prefix_batching={"key_field": "team", "num_shards": 1},
            batching={"min_batch_size": least, "max_batch_size": 16},
            requests={"max_in_flight": 8},
        )
    )
    assert_that(answered | beam.Map(lambda row: row.id), equal_to(range(500)))
    result = p.run()
    (sizes,) = [
        metric.result
        for metric in result.metrics().query(MetricsFilter().with_name("batch_size"))[
            "distributions"
        ]
    ]
    assert (sizes.sum, sizes.min, sizes.max) == (500, smallest, 16)


def test_two_steps_share_one_server_and_details_need_a_prefix(server: Any, tmp_path: Path) -> None:
    p = pipeline()
    first = p | tickets("a", "b") | "First" >> completions(server)
    with pytest.raises(ConfigError, match="details_prefix: the input already has a field 'usage'"):
        _ = first | "Clash" >> completions(server, prompt="{completion}", output_field="again")
    second = first | "Second" >> completions(
        server, prompt="{completion}!", output_field="again", details_prefix="second_"
    )
    assert_that(
        second | beam.Map(lambda row: (row.again, row.second_model, row.model)),
        equal_to([(f"team {i}: {t}!", "m", "m") for i, t in enumerate("ab")]),
    )
    p.run()


def test_nothing_is_left_running_after_the_pipeline(server: Any) -> None:
    with pipeline() as p:
        _ = p | tickets("a") | completions(server, model_identifier="left-nothing")
    left = [
        process
        for process in psutil.process_iter()
        if process.is_running()
        and _environment(process).get("STANDIN_LOG") == server["env"]["STANDIN_LOG"]
    ]
    psutil.wait_procs(left, timeout=20)
    assert [process for process in left if process.is_running()] == []


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        environment = process.environ()
    except psutil.Error:
        return {}
    return environment if process.pid != os.getpid() else {}


def test_ten_thousand_rows_with_bad_ones_and_three_kills(server: Any, tmp_path: Path) -> None:
    total = 10_000

    def word(i: int) -> str:
        return "BAD" if i % 100 == 50 else "CRASH" if i in (2_000, 5_000, 8_000) else "ok"

    p = pipeline()
    out = (
        p
        | beam.Create(range(total))
        | beam.Map(lambda i: beam.Row(id=int(i), text=f"{i} {word(i)}"))
        | completions(
            server,
            prompt="{text}",
            requests={"max_retries": 0},
            error_handling={"output": "failures"},
        )
    )
    ids = {
        name: rows
        | f"Ids{name}" >> beam.Map(lambda row: getattr(row, "element", row).id)
        | f"Gather{name}" >> beam.combiners.ToList()
        for name, rows in out.items()
    }
    bad = [i for i in range(total) if i % 100 == 50]

    def exactly(expected: list[int]) -> Any:
        def check(lists: list[list[int]]) -> None:
            assert sorted(lists[0]) == expected

        return check

    assert_that(ids["output"], exactly([i for i in range(total) if i not in set(bad)]), "good")
    assert_that(ids["failures"], exactly(bad), "bad")
    found = counters(p.run())
    assert (found["rows_done"], found["rows_failed"]) == (9_900, 100)
    assert typing.cast("int", found["rows_read"]) == total


def test_output_rows_of_a_schema_have_named_types(server: Any) -> None:
    p = pipeline()
    out = p | tickets("a") | completions(server)
    assert isinstance(out.element_type, RowTypeConstraint)
