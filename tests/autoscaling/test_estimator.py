"""The estimators, against a reference that is naive on purpose, and by their properties."""

import doctest
import itertools
import math
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beam_llm.autoscaling import (
    CapacityEstimator,
    CompletionRateCapacityEstimator,
    SaturatedCompletionRateCapacityEstimator,
    estimator,
)

TRACES = 2_000
MULTIPLIER = 60.0


class Sample(NamedTuple):
    time: float
    completed: float
    running: float
    waiting: float | None = None


def trace(seed: int) -> list[Sample]:
    """What a server might show: requests that come and go, and all that goes wrong."""
    rng = random.Random(seed)
    time, completed, limit = rng.uniform(0, 1e6), rng.randrange(10_000), rng.choice([1, 8, 64])
    tells_waiting = rng.random() < 0.5
    running, waiting, rate = 0, 0, rng.uniform(0.01, 3)
    samples = []
    mood, left = "busy", 0
    for _ in range(rng.randrange(2, 60)):
        if left == 0:
            mood = rng.choice(["busy", "busy", "full", "full", "idle", "starved", "burst"])
            left = rng.randrange(1, 10)
        left -= 1
        secs = rng.choice([5.0, rng.uniform(4.5, 5.5)])
        event = rng.random()
        if event < 0.04:
            secs = rng.uniform(13, 400)  # a gap
        elif event < 0.07:
            secs = 0.0  # the clock stands still
        elif event < 0.10:
            secs = -rng.uniform(0, 1000)  # … or goes backwards
        elif event < 0.13:
            completed = rng.randrange(20)  # a restarted server
        time += secs
        before = running
        running = {
            "busy": rng.randrange(limit + 1),
            "full": limit,
            "idle": 0,
            "starved": rng.randrange(1 + limit // 8),
            "burst": rng.randrange(3 * limit + 1),
        }[mood]
        waiting = rng.randrange(1, 100) if mood in ("full", "burst") and rng.random() < 0.8 else 0
        if mood != "idle":
            completed += rng.randrange(1 + round(max(0, secs) * rate * (before + running) / 2))
        samples.append(Sample(time, completed, running, waiting if tells_waiting else None))
    return samples


def intervals(samples: Sequence[Sample], max_gap: float) -> Iterator[tuple[Sample, Sample]]:
    """The pairs of samples between which something can be learned."""
    for one, two in itertools.pairwise(samples):
        secs = two.time - one.time
        idle = one.running == two.running == 0 and one.completed == two.completed
        if secs > 0 and secs <= max_gap and two.completed >= one.completed and not idle:
            yield one, two


def trailing(learned: Sequence[tuple[Sample, Sample]], window: float) -> list[Any]:
    """The latest of them that overlap the last `window` seconds of learned time."""
    now = sum(two.time - one.time for one, two in learned)
    kept, end = [], 0.0
    for one, two in learned:
        end += two.time - one.time
        if end > now - window:
            kept.append((one, two))
    return kept


def capacity(kept: Sequence[tuple[Sample, Sample]], least: float) -> float | None:
    """The formula, word by word."""
    if len(kept) < 3:
        return None
    completions = sum(two.completed - one.completed for one, two in kept)
    slot_seconds = sum((two.time - one.time) * (one.running + two.running) / 2 for one, two in kept)
    seconds = sum(two.time - one.time for one, two in kept)
    if slot_seconds == 0:
        return None

    def seconds_at_most(concurrency: float) -> float:
        return sum(b.time - a.time for a, b in kept if (a.running + b.running) / 2 <= concurrency)

    levels = sorted({(one.running + two.running) / 2 for one, two in kept})
    p90 = next(c for c in levels if seconds_at_most(c) >= 0.9 * seconds * (1 - 1e-9))
    if completions < least or completions < p90:
        return None
    return max(1, completions / slot_seconds * p90 * MULTIPLIER)


def naive(samples: Sequence[Sample], window: float, least: float, gap: float) -> float | None:
    return capacity(trailing(list(intervals(samples, gap)), window), least)


def naive_saturated(
    samples: Sequence[Sample], window: float, least: float, gap: float, full: float | None
) -> float | None:
    """Replays all that was seen, and forgets nothing but what it should."""

    def is_full(pair: tuple[Sample, Sample], most: float) -> bool:
        fewest = min(pair[0].running, pair[1].running)
        queued = bool(pair[0].waiting) and bool(pair[1].waiting)
        return queued or (fewest > 0 and fewest >= 0.8 * most)

    held, learned, seen = None, [], []
    for pair in intervals(samples, gap):
        seen.append(min(pair[0].running, pair[1].running))
        most = full if full is not None else sorted([0, 0, 0, *seen])[-3]
        if is_full(pair, most):
            learned.append(pair)
            kept = [p for p in trailing(learned, window) if is_full(p, most)]
            held = capacity(kept, least) or held
    return held


def close(found: float | None, wanted: float | None) -> bool:
    if found is None or wanted is None:
        return found is wanted
    return math.isclose(found, wanted, rel_tol=1e-9)


def feed(estimating: CapacityEstimator, samples: Sequence[Sample]) -> float | None:
    for sample in samples:
        estimating.observe(*sample)
    return estimating.estimate()


def test_completion_rate_equals_the_naive_reference() -> None:
    said_something = 0
    for seed in range(TRACES):
        rng = random.Random(-seed)
        window, least = rng.choice([20.0, 100.0, 300.0]), rng.choice([1, 10])
        samples = trace(seed)
        estimating = CompletionRateCapacityEstimator(
            MULTIPLIER, window, min_completions=least, max_gap_secs=12.5
        )
        for i, sample in enumerate(samples):
            estimating.observe(*sample)
            if i % 7 == 0 or i == len(samples) - 1:
                found = estimating.estimate()
                wanted = naive(samples[: i + 1], window, least, 12.5)
                assert close(found, wanted), (seed, i, found, wanted)
                said_something += found is not None
    assert said_something > TRACES


def test_saturated_completion_rate_equals_the_naive_reference() -> None:
    said_something = 0
    for seed in range(TRACES):
        rng = random.Random(-seed)
        window, least = rng.choice([20.0, 100.0, 300.0]), rng.choice([1, 10])
        full = rng.choice([None, None, 8.0, 64.0])
        samples = trace(seed)
        estimating = SaturatedCompletionRateCapacityEstimator(
            MULTIPLIER, window, full_concurrency=full, min_completions=least, max_gap_secs=12.5
        )
        for cut in (len(samples) // 2, len(samples)):
            done = len(samples) // 2 if cut == len(samples) else 0
            found = feed(estimating, samples[done:cut])
            wanted = naive_saturated(samples[:cut], window, least, 12.5, full)
            assert close(found, wanted), (seed, cut, found, wanted)
            said_something += found is not None
    assert said_something > TRACES


@pytest.mark.parametrize("seed", range(20))
def test_fine_samples_are_put_together_without_a_change_of_the_estimate(seed: int) -> None:
    """A window of many thousands of samples: as much memory, and nearly the same answer."""
    rng = random.Random(seed)
    estimating = CompletionRateCapacityEstimator(MULTIPLIER, 100.0)
    samples, done = [], 0
    for tick in range(20_000):
        done += rng.randrange(2)
        samples.append(Sample(tick * 0.01, done, 4 if (tick // 1000) % 2 else 6))
    found, wanted = feed(estimating, samples), naive(samples, 100.0, 10, math.inf)
    assert len(estimating._window) <= 1_001
    assert found is not None
    assert wanted is not None
    assert math.isclose(found, wanted, rel_tol=5e-3)


BEGINNING = Sample(0, 0, 8)


def steady(
    seconds: float, start: Sample = BEGINNING, rate: float = 2.0, **changes: float
) -> list[Sample]:
    """A server at work: `rate` completions a second, looked at every 5 seconds."""
    running = changes.get("running", start.running)
    return [
        Sample(start.time + t, start.completed + rate * t, running, changes.get("waiting"))
        for t in range(5, int(seconds) + 1, 5)
    ]


BOTH = pytest.mark.parametrize(
    "kind", [CompletionRateCapacityEstimator, SaturatedCompletionRateCapacityEstimator]
)


@BOTH
def test_warm_up_says_nothing(kind: Any) -> None:
    estimating = kind(MULTIPLIER, min_completions=50)
    assert estimating.estimate() is None
    said = [feed(estimating, [sample]) for sample in steady(40)]
    # 10 completions in each interval; the first sample begins one.
    assert said == [None, None, None, None, None, 120, 120, 120]


@BOTH
def test_idleness_changes_nothing_however_long(kind: Any) -> None:
    estimating = kind(MULTIPLIER, 60.0)
    busy = steady(100)
    before = feed(estimating, busy)
    last = busy[-1]._replace(running=0)
    idle = [last._replace(time=last.time + t) for t in range(5, 100_000, 5)]
    feed(estimating, [last._replace(time=last.time + 0.001)])
    after = feed(estimating, idle)
    assert before is not None
    assert after == pytest.approx(before, rel=1e-3)
    assert len(estimating._window) <= 14


@BOTH
def test_a_starved_worker_keeps_its_estimate(kind: Any) -> None:
    estimating = kind(MULTIPLIER)
    busy = steady(300)
    before = feed(estimating, busy)
    few = steady(25, busy[-1], rate=0.25, running=1)  # an eighth of the work for 25 s
    assert feed(estimating, few) == pytest.approx(before, rel=0.02)
    plain_rate = (few[-1].completed - few[-6 + 1].completed) / 20 * MULTIPLIER
    assert plain_rate < before / 7


@BOTH
def test_a_restarted_server_costs_one_interval(kind: Any) -> None:
    estimating = kind(MULTIPLIER)
    busy = steady(50)
    restarted = steady(50, Sample(busy[-1].time, -10, 8))  # begins at 0
    assert feed(estimating, busy + restarted) == pytest.approx(120)


@BOTH
def test_skew_and_nonsense_cost_an_interval_each(kind: Any) -> None:
    estimating = kind(MULTIPLIER)
    busy = steady(50)
    feed(estimating, busy)
    estimating.observe(math.nan, 7, 7)
    estimating.observe(busy[-1].time, math.inf, 7)
    back = steady(50, busy[-1]._replace(time=-1e9))
    assert feed(estimating, [busy[-1], *back]) == pytest.approx(120)


@BOTH
@settings(max_examples=200, deadline=None)
@given(
    samples=st.lists(
        st.builds(
            Sample,
            st.floats(-1e9, 1e9),
            st.floats(0, 1e12),
            st.floats(0, 1e6),
            st.none() | st.floats(0, 1e6),
        ),
        max_size=40,
    )
)
def test_whatever_comes_the_answer_is_at_least_one_and_the_same_again(
    kind: Any, samples: list[Sample]
) -> None:
    found = feed(kind(MULTIPLIER), samples)
    assert found is None or found >= 1
    assert found == feed(kind(MULTIPLIER), samples)


def test_a_slow_worker_says_one() -> None:
    estimating = CompletionRateCapacityEstimator(1.0, 3000, min_completions=1)
    assert feed(estimating, steady(1000, rate=0.01, running=1)) == 1


def test_a_million_samples_leave_no_trace() -> None:
    """Of memory; `benchmarks/autoscaling` has the figures."""
    estimating = SaturatedCompletionRateCapacityEstimator(MULTIPLIER)
    sizes = []
    for tick in range(100_000):
        estimating.observe(5.0 * tick, 3 * tick, 8, tick % 3)
        if tick in (1_000, 99_999):
            sizes.append((len(estimating._window), sys.getsizeof(estimating._highest)))
    assert sizes[0] == sizes[1]


def test_below_saturation_only_the_saturated_estimate_stands() -> None:
    full = steady(100, waiting=3)
    light = steady(2000, full[-1], rate=0.5, running=3, waiting=0)  # slower when less is asked
    saturated = SaturatedCompletionRateCapacityEstimator(MULTIPLIER)
    plain = CompletionRateCapacityEstimator(MULTIPLIER)
    assert feed(saturated, full + light) == pytest.approx(120)
    assert feed(plain, full + light) == pytest.approx(30)


def test_what_was_learned_at_less_is_forgotten_once_more_was_reached() -> None:
    estimating = SaturatedCompletionRateCapacityEstimator(MULTIPLIER)
    light = steady(200, Sample(0, 0, 2), rate=1)
    assert feed(estimating, light) == pytest.approx(60)
    full = steady(100, light[-1]._replace(running=8), rate=2)
    said = [feed(estimating, [sample]) for sample in full]
    assert said[0] == pytest.approx(60, rel=0.02)
    assert said[-1] == pytest.approx(120)  # of the time at 8 alone


def test_one_burst_does_not_set_what_full_is() -> None:
    estimating = SaturatedCompletionRateCapacityEstimator(MULTIPLIER)
    one = steady(50)
    burst = [Sample(one[-1].time + t, one[-1].completed + 2 * t, 100) for t in (5, 10)]
    after = steady(1000, burst[-1]._replace(running=8), rate=4)
    assert feed(estimating, one + burst + after) == pytest.approx(240)


@pytest.mark.parametrize(
    "wrong", [{"multiplier": 0}, {"window_secs": -1}, {"min_completions": 0}, {"max_gap_secs": 0}]
)
def test_arguments_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: "):
        CompletionRateCapacityEstimator(**{"multiplier": 1.0, **wrong})


def test_the_documented_example() -> None:
    assert doctest.testmod(estimator).failed == 0
