"""Keyed batching on Prism, which has processing time and drops what is late."""

import collections
import pathlib
import time

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing import test_stream
from apache_beam.transforms import window
from apache_beam.transforms.periodicsequence import PeriodicImpulse
from apache_beam.utils.timestamp import Timestamp
from running import Collect

from beam_llm.batching import BatchByKey, BatchElements

PRISM = pathlib.Path(__file__).parents[2] / ".cache/bin/prism"

pytestmark = [
    pytest.mark.prism,
    pytest.mark.skipif(not PRISM.exists(), reason="no Prism: make setup needs Go for it"),
    # Beam leaves the sockets and processes of a finished job to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def prism(**kwargs):
    options = PipelineOptions(
        runner="PrismRunner",
        prism_location=str(PRISM),
        environment_type="LOOPBACK",  # workers in this process, so that `Collect` sees them
        **kwargs,
    )
    return beam.Pipeline(options=options)


def rows_of(batch):
    return [window.TimestampedValue(row, at) for row, at in batch[1]]


def count_in_windows(rows, seconds):
    """Counts rows per new window; what is late does not count."""
    return (
        rows
        | beam.WindowInto(window.FixedWindows(seconds))
        | beam.WithKeys(0)
        | beam.GroupByKey()
        | beam.MapTuple(lambda _, group: sorted(group))
    )


def test_bounded_rows_are_not_late_after_their_batch():
    collect = Collect()
    with prism() as pipeline:
        rows = (
            pipeline
            | beam.Create(range(40))
            | beam.Map(lambda x: window.TimestampedValue((x % 3, x), x))
            | BatchByKey(max_batch_size=4)
            | beam.FlatMap(rows_of)
        )
        _ = count_in_windows(rows, 10) | "Collect" >> beam.ParDo(collect)
    assert sorted(output.value for output in collect.outputs) == [
        list(range(start, start + 10)) for start in (0, 10, 20, 30)
    ]


def test_bounded_batches_of_a_key():
    collect = Collect()
    with prism() as pipeline:
        _ = (
            pipeline
            | beam.Create(range(100))
            | BatchElements(10, 10, key_fn=lambda x: x % 4)
            | "Collect" >> beam.ParDo(collect)
        )
    sizes = [len(output.value) for output in collect.outputs]
    assert sorted(sizes) == [5] * 4 + [10] * 8
    assert all(len({x % 4 for x in output.value}) == 1 for output in collect.outputs)


class Arrivals(beam.DoFn):
    """Notes when a batch came, since the youngest of its elements."""

    def process(self, batch):
        yield len(batch), time.time() - max(at for at in batch)


def test_unbounded_batches_leave_after_their_duration():
    collect = Collect()
    start = time.time() + 1
    with prism(streaming=True) as pipeline:
        _ = (
            pipeline
            | PeriodicImpulse(start, start + 4, 0.2)
            | beam.Map(lambda _: time.time())
            | BatchElements(1000, 1000, key_fn=lambda _: "k", max_batch_duration_secs=0.5)
            | beam.ParDo(Arrivals())
            | "Collect" >> beam.ParDo(collect)
        )
    sizes = [output.value[0] for output in collect.outputs]
    assert sum(sizes) == 20
    # Batches of the half second each; without a flush there would be one, at the end.
    assert len(sizes) >= 4
    assert max(delay for _, delay in (output.value for output in collect.outputs)) < 2


def test_waiting_rows_hold_the_watermark():
    collect = Collect()
    start = time.time() + 1
    with prism(streaming=True) as pipeline:
        rows = (
            pipeline
            | PeriodicImpulse(start, start + 4, 0.1)
            | beam.Map(lambda at: ("k", at))
            | BatchByKey(max_batch_size=1000, max_batch_duration_secs=1.5)
            | beam.FlatMap(rows_of)
        )
        # Windows far shorter than the rows wait.
        _ = count_in_windows(rows, 0.25) | "Collect" >> beam.ParDo(collect)
    assert sum(len(output.value) for output in collect.outputs) == 40
    assert len(collect.outputs) >= 15


def test_windows_late_and_out_of_order_elements():
    collect = Collect()

    def at(value, seconds):
        return window.TimestampedValue(value, seconds)

    events = (
        test_stream.TestStream()
        .add_elements([at("a7", 7), at("b2", 2), at("a1", 1), at("a12", 12)])
        .advance_watermark_to(8)
        .add_elements([at("a3", 3)])
        .advance_watermark_to(15)
        .add_elements([at("a4", 4)])
        .advance_watermark_to_infinity()
    )
    with prism(streaming=True) as pipeline:
        _ = (
            pipeline
            | events
            | beam.WindowInto(window.FixedWindows(10), allowed_lateness=100)
            | BatchElements(9, 9, key_fn=lambda x: x[0], max_batch_duration_secs=1000)
            | "Collect" >> beam.ParDo(collect)
        )
    counts = collections.Counter(x for output in collect.outputs for x in output.value)
    assert counts == dict.fromkeys(["a7", "b2", "a1", "a12", "a3", "a4"], 1)
    for batch, stamp, win in collect.outputs:
        assert len({x[0] for x in batch}) == 1
        assert all(win.start <= int(x[1:]) < win.end for x in batch)
        assert stamp == Timestamp(micros=win.end.micros - 1)


def test_an_older_row_that_comes_later_holds_the_watermark_too():
    collect = Collect()

    def at(seconds):
        return window.TimestampedValue(("k", seconds), seconds)

    events = (
        test_stream.TestStream()
        .add_elements([at(5)])
        .advance_watermark_to(1)
        .add_elements([at(2)])
        .advance_watermark_to(20)
        .add_elements([at(25)])
        .advance_watermark_to_infinity()
    )
    with prism(streaming=True) as pipeline:
        batch = BatchByKey(max_batch_size=3, max_batch_duration_secs=1000)
        rows = pipeline | events | batch | beam.FlatMap(rows_of)
        _ = count_in_windows(rows, 1) | "Collect" >> beam.ParDo(collect)
    assert sorted(output.value for output in collect.outputs) == [[2], [5], [25]]
