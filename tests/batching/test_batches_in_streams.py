"""Keyed batching of unbounded input: waiting, flushing, event time."""

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing import test_stream
from apache_beam.transforms import window
from apache_beam.utils.timestamp import Timestamp
from running import BUNDLE_RUNNER, Collect

from beam_llm.batching import BatchByKey, BatchElements

STREAMING = PipelineOptions(["--streaming"])


def at(value, seconds):
    return window.TimestampedValue(value, seconds)


def stream_through(events, transform, windows=None):
    """Runs a test stream on the direct runner that has a clock of its own."""
    collect = Collect()
    with beam.Pipeline(runner=BUNDLE_RUNNER, options=STREAMING) as pipeline:
        elements = pipeline | events
        if windows is not None:
            elements |= beam.WindowInto(windows, allowed_lateness=60)
        _ = elements | transform | "Collect" >> beam.ParDo(collect)
    return collect.outputs


def by_letter(size=100, seconds=None):
    # The test stream's clock begins at 0, at which this runner fires no timer.
    return BatchElements(
        size,
        size,
        key_fn=lambda text: text[0],
        max_batch_duration_secs=seconds,
        clock=lambda: 0.5,
    )


def test_incomplete_batches_leave_when_due():
    events = (
        test_stream.TestStream()
        .add_elements(["a1", "b1"])
        .add_elements(["a2"])
        .advance_processing_time(1.5)
        .add_elements(["a3"])
        .advance_watermark_to_infinity()
    )
    batches = [output.value for output in stream_through(events, by_letter())]
    assert sorted(batches) == [["a1", "a2"], ["a3"], ["b1"]]


def test_incomplete_batches_leave_at_the_end_of_their_window():
    events = (
        test_stream.TestStream()
        .add_elements([at("a1", 1), at("a2", 12), at("a3", 3)])
        .advance_watermark_to(10)
        .add_elements([at("a4", 13)])
        .advance_watermark_to_infinity()
    )
    outputs = stream_through(events, by_letter(seconds=1000), window.FixedWindows(10))
    assert [(output.value, output.timestamp) for output in outputs] == [
        (["a1", "a3"], Timestamp(9.999999)),
        (["a2", "a4"], Timestamp(19.999999)),
    ]


def test_full_batches_leave_at_once_and_the_rest_waits():
    events = test_stream.TestStream().add_elements([f"a{i}" for i in range(5)])
    events = events.advance_watermark_to_infinity()
    outputs = stream_through(events, by_letter(size=2, seconds=1000))
    assert [output.value for output in outputs] == [["a0", "a1"], ["a2", "a3"], ["a4"]]


def test_late_elements_are_batched_too():
    events = (
        test_stream.TestStream()
        .add_elements([at("a1", 1)])
        .advance_watermark_to(15)
        .add_elements([at("a2", 2), at("a3", 16)])
        .advance_watermark_to_infinity()
    )
    outputs = stream_through(events, by_letter(seconds=1000), window.FixedWindows(10))
    assert sorted(output.value for output in outputs) == [["a1"], ["a2"], ["a3"]]


def test_out_of_order_elements_of_overlapping_windows():
    events = (
        test_stream.TestStream()
        .add_elements([at("a7", 7), at("a2", 2)])
        .add_elements([at("a4", 4)])
        .advance_watermark_to_infinity()
    )
    outputs = stream_through(events, by_letter(seconds=1000), window.SlidingWindows(10, 5))
    got = sorted((int(output.window.start), sorted(output.value)) for output in outputs)
    assert got == [(-5, ["a2", "a4"]), (0, ["a2", "a4", "a7"]), (5, ["a7"])]


def test_zero_seconds_is_not_never():
    events = (
        test_stream.TestStream()
        .add_elements(["a1", "a2"])
        .advance_processing_time(1)
        .add_elements(["a3"])
        .advance_watermark_to_infinity()
    )
    batches = [output.value for output in stream_through(events, by_letter(seconds=0))]
    assert batches == [["a1", "a2"], ["a3"]]


@pytest.mark.parametrize("seconds", [None, 1000])
def test_rows_keep_their_timestamps(seconds):
    events = (
        test_stream.TestStream()
        .add_elements([at(("k", "r3"), 3), at(("k", "r1"), 1)])
        .add_elements([at(("k", "r2"), 2)])
        .advance_watermark_to_infinity()
    )
    outputs = stream_through(events, BatchByKey(max_batch_size=9, max_batch_duration_secs=seconds))
    rows = [row for output in outputs for row in output.value[1]]
    assert sorted(rows) == [("r1", Timestamp(1)), ("r2", Timestamp(2)), ("r3", Timestamp(3))]
    assert all(output.timestamp == min(t for _, t in output.value[1]) for output in outputs)
