"""Sizes settle, per key, by the time that batches really take."""

import pickle
import statistics

import apache_beam as beam
import pytest
from apache_beam.transforms import window
from running import Collect, Unbounded, batches_of

from beam_llm.batch_sizes import BatchLatencies, BatchSizes, Estimator
from beam_llm.batching import BatchByKey

# Seconds of a batch, of which the fixed ones are 5 % (the default target) at a size of 19.
FIXED, EACH = 0.05, 0.05


def seconds(size):
    return FIXED + EACH * size


def sizes_of(batches, latencies=None, in_flight=4):
    """Sizes of batches that a step starts at once, and whose latencies it learns later."""
    sizes = BatchSizes(Estimator(1, 10_000, record_metrics=False), latencies)
    flying, got = [], []
    for _ in range(batches):
        size = sizes.of(b"sk").target
        got.append(size)
        with sizes.of(b"sk").timed(size):
            flying.append(size)
        if len(flying) == in_flight:
            done = flying.pop(0)
            if latencies is not None:
                latencies.report("k", done, seconds(done))
    return got


def test_reported_latencies_let_sizes_settle():
    settled = sizes_of(200, BatchLatencies())[50:]
    assert 12 < statistics.mean(settled) < 26
    assert max(settled) < 40


def test_without_reports_sizes_of_deferred_batches_run_away():
    assert max(sizes_of(200)) > 1000


def test_each_key_has_its_own_size():
    latencies = BatchLatencies()
    sizes = BatchSizes(Estimator(1, 64, record_metrics=False), latencies)
    for _ in range(40):
        for key, encoded, cost in (("slow", b"sslow", 20.0), ("fast", b"sfast", 0.001)):
            size = sizes.of(encoded).target
            with sizes.of(encoded).timed(size):
                latencies.report(key, size, 0.5 + cost * size)
    assert sizes.of(b"sslow").target <= 2
    assert sizes.of(b"sfast").target >= 40


@pytest.mark.parametrize("outliers", [1, 2])
def test_two_sizes_are_enough_for_a_line(outliers):
    xs = [1.0] * 10 + [2.0] * outliers
    ys = [0.1, 0.11] * 5 + [5.0] * outliers
    fixed, marginal = Estimator.linear_regression(xs, ys)
    assert fixed + marginal == pytest.approx(0.105)
    assert fixed + 2 * marginal == pytest.approx(5.0)


def test_only_the_last_keys_are_remembered():
    sizes = BatchSizes(Estimator(1, 64, record_metrics=False))
    for i in range(3000):
        sizes.of(b"%d" % i)
    assert len(sizes._by_key) == 1024


def test_copies_of_a_handle_meet_in_their_process():
    latencies = BatchLatencies()
    one, two = (pickle.loads(pickle.dumps(latencies)) for _ in range(2))
    assert one.take(b"sk") == []
    two.report("k", 3, 0.5)
    assert one.take(b"sk") == [(3, 0.5)]
    assert two.take(b"sk") == []


class Deferring(beam.DoFn):
    """Takes no time, and reports what it would have taken."""

    def __init__(self, latencies):
        self.latencies = latencies

    def process(self, batch):
        key, rows = batch
        self.latencies.report(key, len(rows), seconds(len(rows)))
        yield len(rows)


class Then(beam.PTransform):
    def __init__(self, *transforms):
        super().__init__()
        self.transforms = transforms

    def expand(self, pcoll):
        for transform in self.transforms:
            pcoll |= transform
        return pcoll


@pytest.mark.parametrize("unbounded", [False, True])
def test_rows_are_batched_by_reported_latencies_in_streams(unbounded):
    latencies = BatchLatencies()
    outputs = batches_of(
        ((("k", i), 0) for i in range(1500)),
        Then(
            BatchByKey(max_batch_size=1000, min_batch_size=2, latencies=latencies, reshuffle=False),
            beam.ParDo(Deferring(latencies)),
        ),
        unbounded=unbounded,
    )
    sizes = [output.value for output in outputs]
    if unbounded:
        assert sizes[0] == 2
        assert max(sizes) < 40
    else:
        # Groups are split only above the largest batch.
        assert sizes == [1000, 500]


def test_windows_of_a_key_share_what_was_learned():
    collect = Collect()
    latencies = BatchLatencies()
    with beam.Pipeline(
        runner="apache_beam.runners.portability.fn_api_runner.FnApiRunner"
    ) as pipeline:
        _ = (
            pipeline
            | beam.Create(range(300))
            | beam.Map(lambda i: window.TimestampedValue(("k", i), i))
            | beam.WindowInto(window.FixedWindows(100))
            | Unbounded()
            | BatchByKey(max_batch_size=1000, min_batch_size=1, latencies=latencies)
            | beam.ParDo(Deferring(latencies))
            | "Collect" >> beam.ParDo(collect)
        )
    sizes = [output.value for output in collect.outputs]
    assert sum(sizes) == 300
    assert sizes.count(1) <= 3
