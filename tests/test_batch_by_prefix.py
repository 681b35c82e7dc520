"""`BatchByPrefix` on Beam's in-process runner and on Prism."""

import typing
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms import window
from apache_beam.utils.timestamp import Timestamp

from beam_llm import BatchByPrefix, ConfigError

DIRECT = {"runner": "apache_beam.runners.portability.fn_api_runner.FnApiRunner"}


class Ticket(NamedTuple):
    id: int
    team: Optional[str]
    text: str


beam.coders.registry.register_coder(Ticket, beam.coders.RowCoder)

TICKETS = [Ticket(i, f"team {i % 3}", f"ticket {i}") for i in range(10)]


@pytest.fixture(params=["direct", pytest.param("prism", marks=pytest.mark.prism)])
def runner(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "direct":
        return DIRECT
    return {
        "runner": "PrismRunner",
        "options": PipelineOptions(
            prism_location=request.getfixturevalue("prism"), environment_type="LOOPBACK"
        ),
    }


class Unbounded(beam.PTransform):
    """Says that its input were unbounded, which is what decides how batches are made."""

    def expand(self, pcoll: Any) -> Any:
        result = pcoll | beam.Map(lambda row: row).with_output_types(pcoll.element_type)
        result.is_bounded = False
        return result


def tickets(rows: Any = TICKETS) -> beam.PTransform:
    return beam.Create(list(rows)).with_output_types(Ticket)


def shape(batch: Any) -> tuple[Any, list[int]]:
    return batch.key, sorted(row.id for row in batch.rows)


# Beam leaves the sockets and processes of a finished job to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("streaming", [False, True], ids=["grouped", "in state"])
def test_rows_of_a_prefix_meet_whole(runner: dict[str, Any], streaming: bool) -> None:
    with beam.Pipeline(**runner) as pipeline:
        rows = pipeline | tickets()
        if streaming:
            rows |= Unbounded()
        batches = rows | BatchByPrefix(
            prompt="{team}: {text}",
            prefix_batching={"prefix_char_len": 6, "num_shards": 1},
            batching={"min_batch_size": 100, "max_batch_size": 100},
        )
        assert_that(
            batches | beam.Map(shape),
            equal_to([("team 0", [0, 3, 6, 9]), ("team 1", [1, 4, 7]), ("team 2", [2, 5, 8])]),
        )
        whole = batches | beam.FlatMap(lambda batch: [tuple(row) for row in batch.rows])
        assert_that(whole, equal_to([tuple(ticket) for ticket in TICKETS]), label="whole")


def test_the_output_is_typed() -> None:
    pipeline = beam.Pipeline(**DIRECT)
    rows = pipeline | tickets()
    by_prompt = rows | "Prompt" >> BatchByPrefix(prompt="{text}")
    by_field = rows | "Field" >> BatchByPrefix(prefix_batching={"key_field": "id"})
    by_function = rows | "Function" >> BatchByPrefix(
        prefix_batching={"key_fn": "test_batch_by_prefix:of_id"}
    )
    keys = [
        dict(batches.element_type._fields)["key"] for batches in (by_prompt, by_field, by_function)
    ]
    assert keys == [Optional[str], int, Optional[str]]
    rows_type = dict(by_prompt.element_type._fields)["rows"]
    assert typing.get_args(rows_type) == (Ticket,)


def of_id(row: Any) -> Any:
    if row.id == 7:
        raise ValueError("no sevens")
    return None if row.id == 8 else row.id % 2


def test_keys_of_a_function_are_text_and_its_failures_alone() -> None:
    with beam.Pipeline(**DIRECT) as pipeline:
        outputs = (
            pipeline
            | tickets()
            | BatchByPrefix(
                prefix_batching={"key_fn": "test_batch_by_prefix:of_id"},
                error_handling={"output": "failures"},
            )
        )
        assert_that(
            outputs["output"] | beam.Map(shape),
            equal_to([("0", [0, 2, 4, 6]), ("1", [1, 3, 5, 9]), (None, [8])]),
        )
        assert_that(
            outputs["failures"] | beam.Map(lambda f: (f.element.id, "no sevens" in f.msg)),
            equal_to([(7, True)]),
            label="failures",
        )


class Place(NamedTuple):
    city: str
    zone: int


def of_place(row: Any) -> Any:
    return Place("Bern", row.id % 2)


def test_a_row_as_key_is_written_as_json() -> None:
    with beam.Pipeline(**DIRECT) as pipeline:
        batches = (
            pipeline
            | tickets()
            | BatchByPrefix(prefix_batching={"key_fn": "test_batch_by_prefix:of_place"})
        )
        assert_that(
            batches | beam.Map(lambda batch: batch.key),
            equal_to(['{"city": "Bern", "zone": 0}', '{"city": "Bern", "zone": 1}']),
        )


def test_a_column_that_cannot_be_a_key_is_named() -> None:
    pipeline = beam.Pipeline(**DIRECT)
    rows = pipeline | beam.Create([beam.Row(at=Timestamp(1))])
    with pytest.raises(ConfigError, match="key_field: field 'at' is a Timestamp, which cannot"):
        _ = rows | BatchByPrefix(prefix_batching={"key_field": "at"})


def test_a_null_field_fails_its_row_alone() -> None:
    with beam.Pipeline(**DIRECT) as pipeline:
        outputs = (
            pipeline
            | tickets([*TICKETS[:3], Ticket(3, None, "")])
            | BatchByPrefix(prompt="{team}", error_handling={"output": "failures"})
        )
        assert_that(
            outputs["failures"] | beam.Map(lambda f: (f.element.id, f.msg)),
            equal_to([(3, "field 'team' is null (null_field)")]),
        )


def test_a_literal_prefix_is_one_key() -> None:
    with beam.Pipeline(**DIRECT) as pipeline:
        batches = (
            pipeline
            | tickets()
            | BatchByPrefix(
                prompt="Label this: {text}",
                prefix_batching={"prefix_char_len": 10},
                batching={"max_batch_size": 4},
            )
        )
        sizes = batches | beam.Map(lambda batch: (batch.key, len(batch.rows)))
        assert_that(sizes, equal_to([("Label this", 4), ("Label this", 4), ("Label this", 2)]))


def test_tokens_bound_a_batch() -> None:
    with beam.Pipeline(**DIRECT) as pipeline:
        batches = (
            pipeline
            | tickets(Ticket(i, "a", "x" * 39) for i in range(4))
            | BatchByPrefix(
                prompt="{team}{text}",  # 40 bytes: 10 tokens
                prefix_batching={"key_field": "team"},
                batching={"weight": "tokens", "max_batch_weight": 25},
            )
        )
        assert_that(batches | beam.Map(lambda batch: len(batch.rows)), equal_to([2, 2]))


class TimeAndWindow(beam.DoFn):
    def process(
        self, batch: Any, at: Any = beam.DoFn.TimestampParam, win: Any = beam.DoFn.WindowParam
    ) -> Iterator[Any]:
        yield sorted(row.id for row in batch.rows), at, win


@pytest.mark.parametrize("streaming", [False, True], ids=["grouped", "in state"])
def test_a_batch_stays_in_its_window_with_its_earliest_timestamp(streaming: bool) -> None:
    with beam.Pipeline(**DIRECT) as pipeline:
        rows = (
            pipeline
            | tickets()
            | beam.Map(lambda row: window.TimestampedValue(row, row.id)).with_output_types(Ticket)
            | beam.WindowInto(window.FixedWindows(5))
        )
        if streaming:
            rows |= Unbounded()
        batches = rows | BatchByPrefix(
            prefix_batching={"key_field": "team", "num_shards": 1},
            batching={"min_batch_size": 9, "max_batch_size": 9},
        )
        first, second = window.IntervalWindow(0, 5), window.IntervalWindow(5, 10)
        expected = [
            ([0, 3], Timestamp(0), first),
            ([1, 4], Timestamp(1), first),
            ([2], Timestamp(2), first),
            ([6, 9], Timestamp(6), second),
            ([7], Timestamp(7), second),
            ([5, 8], Timestamp(5), second),
        ]
        assert_that(batches | beam.ParDo(TimeAndWindow()), equal_to(expected))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"prompt": "{txt}"}, "prompt: the input has no field 'txt'; did you mean 'text'?"),
        (
            {"prefix_batching": {"key_field": "tam"}},
            "prefix_batching.key_field: the input has no field 'tam'; did you mean 'team'?",
        ),
        (
            {"prefix_batching": {"key_fn": "no_such_module:f"}},
            "prefix_batching.key_fn: 'no_such_module:f' is not there",
        ),
    ],
)
def test_what_the_input_lacks_is_named(config: dict[str, Any], said: str) -> None:
    rows = beam.Pipeline(**DIRECT) | tickets()
    with pytest.raises(ConfigError) as caught:
        _ = rows | BatchByPrefix(**config)
    assert said in str(caught.value)


def test_without_an_error_output_a_failing_row_fails_the_pipeline() -> None:
    pipeline = beam.Pipeline(**DIRECT)
    _ = pipeline | tickets([Ticket(3, None, "")]) | BatchByPrefix(prompt="{team}")
    with pytest.raises(Exception, match="BatchByPrefix: a row failed: field 'team' is null"):
        pipeline.run()
