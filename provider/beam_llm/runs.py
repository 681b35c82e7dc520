"""The machinery of keyed batching: keyed elements to batches.

    (key bytes, element) ── gather ──> (key bytes, run)
        bounded:    ── GroupByKey ── cut each group into consecutive batches
        unbounded:  ── state and timers per key: cut when full, flush when due

A *run* holds consecutive elements of one key and window. Elements travel in runs because
state and shuffle cost per item, not per element.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import apache_beam as beam
from apache_beam import coders, typehints
from apache_beam.coders.typecoders import registry
from apache_beam.metrics.metric import Metrics
from apache_beam.transforms import userstate, util, window
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.utils.shared import Shared
from apache_beam.utils.timestamp import MIN_TIMESTAMP, Timestamp
from apache_beam.utils.windowed_value import WindowedValue

from beam_llm.batch_sizes import BatchLatencies, BatchSize, BatchSizes

_LOGGER = logging.getLogger(__name__)

DEFAULT_MAX_BATCH_DURATION_SECS = 1.0

_MOST = 2**63 - 1  # of a metric
SHARD_BYTES = 8
"""A batch key begins with the shard, which sizes do not depend on."""

_METRICS = "beam_llm"
# Elements that a bundle holds back to put into runs. Large enough that hundreds of keys get
# runs of several elements, small enough for a bundle of megabyte prompts.
_MAX_GATHERED = 1024
_GLOBAL_WINDOW = window.GlobalWindow()
# Entries of a bag that is appended to until then, and rewritten with one.
_MAX_HELD_ENTRIES = 64

Run: TypeAlias = tuple[Any, list[Any], list[int] | None, list[float] | None]
"""Key as it came in, values, timestamps in microseconds, weights; None for what is not kept.

A plain tuple, since that is what Beam's tuple coder gives back."""


@dataclass(frozen=True)
class Rules:
    """What a batch may hold, and what it looks like.

    Attributes:
        estimator: The sizes, to be learned per key from a fresh copy of this one.
        weigh: Function from element to weight, or None: all weigh the same.
        max_weight: Bound of a batch's weight; None when the weights are the sizes.
        latencies: Where the sizes are learned from, instead of the time after the batching.
        rows: Whether to keep keys and timestamps, and yield `(key, [(value, timestamp)])`.
        clock: Wall clock, seconds since the epoch.
    """

    estimator: Any
    weigh: Callable[[Any], float] | None = None
    max_weight: float | None = None
    rows: bool = False
    latencies: BatchLatencies | None = None
    clock: Callable[[], float] = time.time

    def bounds(self, target: int) -> tuple[float, float]:
        """The number of elements and the weight at which a batch is complete."""
        if self.weigh is None:
            return target, math.inf
        return (math.inf, target) if self.max_weight is None else (target, self.max_weight)

    def output(self, run: Run, in_window: Any) -> WindowedValue:
        """The batch as it leaves, at its window's end or at its earliest row."""
        key, values, timestamps, _ = run
        if timestamps is None:
            return WindowedValue(values, in_window.max_timestamp(), (in_window,))
        batch = key, values, timestamps
        return WindowedValue(batch, Timestamp(micros=min(timestamps)), (in_window,))


class _Gather(beam.DoFn):
    """Puts the elements of a bundle into runs of one key and window.

    A run carries the earliest timestamp of its elements, which holds the watermark for them.
    """

    def __init__(self, rules: Rules, max_gathered: int):
        self._weighted = rules.weigh is not None
        self._rows = rules.rows
        self._max_gathered = max_gathered

    def start_bundle(self) -> None:
        self._windows: dict[Any, dict[bytes, _Gathered]] = {}
        self._gathered = 0
        self._window = None

    def process(
        self,
        element: tuple[bytes, Any],
        timestamp: Any = beam.DoFn.TimestampParam,
        in_window: Any = beam.DoFn.WindowParam,
    ) -> Iterable[WindowedValue] | None:
        batch_key, value = element
        # One window object mostly serves a whole bundle; hashing it costs more than the rest.
        if in_window is not self._window:
            self._window = in_window
            self._by_key = self._windows.setdefault(in_window, {})
        run = self._by_key.get(batch_key)
        micros = timestamp.micros
        if run is None:
            run = self._by_key[batch_key] = _Gathered(micros)
        elif micros < run.earliest:
            run.earliest = micros
        if self._weighted:
            value, weight = value
            run.weights.append(weight)
        if self._rows:
            key, value = value
            if not run.values:
                run.key = key
            run.timestamps.append(micros)
        run.values.append(value)
        self._gathered += 1
        return self._drain() if self._gathered >= self._max_gathered else None

    def finish_bundle(self) -> Any:  # Beam declares None, and takes values
        return self._drain()

    def _drain(self) -> Iterable[WindowedValue]:
        windows = self._windows
        self.start_bundle()
        for in_window, by_key in windows.items():
            for batch_key, gathered in by_key.items():
                run: Run = (
                    gathered.key,
                    gathered.values,
                    gathered.timestamps if self._rows else None,
                    gathered.weights if self._weighted else None,
                )
                earliest = Timestamp(micros=gathered.earliest)
                yield WindowedValue((batch_key, run), earliest, (in_window,))


class _GatherGlobally(_Gather):
    """The same where window and timestamps say nothing.

    Beam calls a process method that asks for neither without assembling arguments for it.
    """

    def process(self, element: tuple[bytes, Any]) -> Iterable[WindowedValue] | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().process(element, MIN_TIMESTAMP, _GLOBAL_WINDOW)


@dataclass(slots=True)
class _Gathered:
    earliest: int
    key: Any = None
    values: list[Any] = field(default_factory=list)
    timestamps: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)


class Batches(beam.PTransform):
    """Keyed elements to batches: grouped when bounded, else in state."""

    def __init__(
        self,
        rules: Rules,
        max_batch_duration_secs: float | None,
        value_type: Any,
        key_type: Any = typehints.Any,
        stateful: bool = False,
    ):
        super().__init__()
        self._rules = rules
        self._duration = max_batch_duration_secs
        self._run_type = _run_type(key_type, value_type)
        self._stateful = stateful

    def expand(self, input_or_inputs: Any) -> Any:
        """From `(key bytes, element)` to batches, in the windowing of the input."""
        keyed = input_or_inputs
        windowing = keyed.windowing
        if not isinstance(windowing.windowfn, window.NonMergingWindowFn):
            _LOGGER.warning(
                "%s: %s merges windows, and batches are made before that: elements meet in a "
                "batch only where their windows are equal, hardly ever. Re-window before.",
                self.label,
                windowing.windowfn,
            )
        stateful = self._stateful or not keyed.is_bounded
        globally = windowing.is_default() and not stateful and not self._rules.rows
        gather = (_GatherGlobally if globally else _Gather)(self._rules, _MAX_GATHERED)
        runs = keyed | "Gather" >> beam.ParDo(gather).with_output_types(
            typehints.Tuple[bytes, self._run_type]
        )
        if stateful:
            seconds = DEFAULT_MAX_BATCH_DURATION_SECS if self._duration is None else self._duration
            coder = registry.get_coder(self._run_type)
            return runs | "Buffer" >> beam.ParDo(buffering(self._rules, seconds, coder))
        runs._windowing = _grouping_windows(windowing, self._rules.rows)
        batches = runs | beam.GroupByKey() | "Cut" >> beam.ParDo(_Cut(self._rules))
        batches._windowing = windowing
        return batches


class BundleBatches(beam.PTransform):
    """Keyed elements to batches within their bundle."""

    def __init__(self, rules: Rules, value_type: Any):
        super().__init__()
        self._rules = rules
        self._run_type = _run_type(typehints.Any, value_type)

    def expand(self, input_or_inputs: Any) -> Any:
        """From `(key bytes, element)` to batches, in the windowing of the input."""
        keyed = input_or_inputs
        gather = beam.ParDo(_Gather(self._rules, _MAX_GATHERED))
        return (
            keyed
            | "Gather" >> gather.with_output_types(typehints.Tuple[bytes, self._run_type])
            | "Single" >> beam.Map(_group_of_one)
            | "Cut" >> beam.ParDo(_Cut(self._rules, last="bundle"))
        )


def _group_of_one(keyed: tuple[bytes, Run]) -> tuple[bytes, list[Run]]:
    return keyed[0], [keyed[1]]


def _run_type(key_type: Any, value_type: Any) -> Any:
    return typehints.Tuple[key_type, typehints.List[value_type], typehints.Any, typehints.Any]


def _grouping_windows(windowing: Windowing, rows: bool) -> Windowing:
    """The windows as they are, each grouped once.

    A trigger of the input would give panes, and accumulated ones twice; merging would give
    elements other windows than they have. For rows, which get their own timestamps back, a
    group holds the watermark at its earliest row: else Prism drops them all as late when they
    are windowed anew. Not otherwise, since Beam's direct runner groups ten times as fast in
    the default windowing as in any other.
    """
    if windowing.is_default() and not rows:
        return windowing
    window_fn = windowing.windowfn
    if not isinstance(window_fn, window.NonMergingWindowFn):
        window_fn = util._IdentityWindowFn(  # pyright: ignore[reportPrivateUsage]
            window_fn.get_window_coder()
        )
    combine = window.TimestampCombiner
    return Windowing(
        window_fn,
        timestamp_combiner=combine.OUTPUT_AT_EARLIEST if rows else combine.OUTPUT_AT_EOW,
        allowed_lateness=windowing.allowed_lateness.micros // 1_000_000,
        environment_id=windowing.environment_id,
    )


class _Batch(NamedTuple):
    run: Run
    weight: float
    reason: str


class _Filling:
    """A batch being filled from runs."""

    def __init__(self, rules: Rules, size: BatchSize):
        self._rules = rules
        self._size = size
        self._begin()

    def _begin(self) -> None:
        self.key: Any = None
        self.values: list[Any] = []
        self.timestamps: list[int] | None = [] if self._rules.rows else None
        self.weights: list[float] | None = [] if self._rules.weigh else None
        self.weight: float = 0

    @property
    def run(self) -> Run:
        return self.key, self.values, self.timestamps, self.weights

    def load(self, runs: Iterable[Run], weight: float) -> None:
        """Takes in what waited, which is less than a batch."""
        for run in runs:
            self._append(run, 0, len(run[1]))
        self.weight = weight

    def add(self, run: Run) -> Iterator[_Batch]:
        """Adds a run, and gives the batches that it completes."""
        _, values, _, weights = run
        start = 0
        while start < len(values):
            stop, reason = self._end(start, len(values), weights)
            self._append(run, start, stop)
            start = stop
            if reason is not None:
                yield self.close(reason)

    def close(self, reason: str) -> _Batch:
        """Ends the batch as it is, and begins another one."""
        batch = _Batch(self.run, self.weight, reason)
        self._begin()
        return batch

    def _append(self, run: Run, start: int, stop: int) -> None:
        key, values, timestamps, weights = run
        if not self.values:
            self.key = key
        self.values += values[start:stop]
        if self.timestamps is not None and timestamps is not None:
            self.timestamps += timestamps[start:stop]
        if self.weights is not None and weights is not None:
            self.weights += weights[start:stop]

    def _end(self, start: int, stop: int, weights: list[float] | None) -> tuple[int, str | None]:
        """Where among `start` to `stop` the batch ends, and why it does (None: it goes on)."""
        count = len(self.values)
        max_count, max_weight = self._rules.bounds(self._size.target)
        if weights is None:
            end = start + max(int(max_count) - count, 0)
            reason = "full" if end <= stop else None
            end = min(end, stop)
            self.weight += end - start
            return end, reason
        too_heavy = "full" if self._rules.max_weight is None else "weight"
        for index in range(start, stop):
            if count >= max_count:
                return index, "full"
            if count and self.weight + weights[index] > max_weight:
                return index, too_heavy
            self.weight += weights[index]
            count += 1
            if count >= max_count:
                return index + 1, "full"
            if self.weight >= max_weight:
                return index + 1, too_heavy
        return stop, None


class _Batching(beam.DoFn):
    """What the DoFns that give batches share: sizes, timing, metrics."""

    def __init__(self, rules: Rules):
        self._rules = rules
        self._shared = Shared()
        self._count = Metrics.counter(_METRICS, "batches")
        self._size_distribution = Metrics.distribution(_METRICS, "batch_size")
        self._weight_distribution = Metrics.distribution(_METRICS, "batch_weight")
        self._reasons = {
            reason: Metrics.counter(_METRICS, f"flush_{reason}")
            for reason in ("full", "weight", "timer", "window", "end_of_group", "bundle")
        }

    def setup(self) -> None:
        self._sizes = self._shared.acquire(
            lambda: BatchSizes(self._rules.estimator, self._rules.latencies)
        )

    def _emit(self, batch: _Batch, size: BatchSize, in_window: Any) -> Iterator[WindowedValue]:
        count = len(batch.run[1])
        self._count.inc()
        self._reasons[batch.reason].inc()
        self._size_distribution.update(count)
        if self._rules.weigh is not None:
            self._weight_distribution.update(round(min(batch.weight, _MOST)))
        by_count = self._rules.weigh is None or self._rules.max_weight is not None
        with size.timed(count if by_count else batch.weight):
            yield self._rules.output(batch.run, in_window)


class _Cut(_Batching):
    """Cuts groups into consecutive batches."""

    def __init__(self, rules: Rules, last: str = "end_of_group"):
        super().__init__(rules)
        self._last = last
        self._elements_per_key = Metrics.distribution(_METRICS, "elements_per_key")

    def process(
        self, group: tuple[bytes, Iterable[Run]], in_window: Any = beam.DoFn.WindowParam
    ) -> Iterator[WindowedValue]:
        batch_key, runs = group
        size = self._sizes.of(batch_key[SHARD_BYTES:])
        filling = _Filling(self._rules, size)
        elements = 0
        for run in runs:
            elements += len(run[1])
            for batch in filling.add(run):
                yield from self._emit(batch, size, in_window)
        if filling.values:
            yield from self._emit(filling.close(self._last), size, in_window)
        self._elements_per_key.update(elements)


def buffering(rules: Rules, max_duration_secs: float, run_coder: coders.Coder) -> beam.DoFn:
    """Makes the stateful DoFn; the coder of its state must be known when its class is made."""
    runs_spec = userstate.BagStateSpec("runs", run_coder)
    held_spec = userstate.BagStateSpec("held", coders.FastPrimitivesCoder())
    window_timer_spec = userstate.TimerSpec("window_end", TimeDomain.WATERMARK)
    duration_timer_spec = userstate.TimerSpec("duration", TimeDomain.REAL_TIME)
    runs_state: Any = beam.DoFn.StateParam(runs_spec)
    held_state: Any = beam.DoFn.StateParam(held_spec)
    window_end: Any = beam.DoFn.TimerParam(window_timer_spec)
    duration_end: Any = beam.DoFn.TimerParam(duration_timer_spec)

    class Buffer(_Batching):
        """Keeps incomplete batches in state.

        The highest entry of `held` is (number of values, weight, earliest timestamp in
        microseconds, due time in seconds since the epoch) of all that is in `runs`. Both, and
        the timers, are there only while something waits. `held` is a bag because the SDK
        spends about 1 ms to size each state that it replaces.
        """

        def process(
            self,
            element: tuple[bytes, Run],
            timestamp: Any = beam.DoFn.TimestampParam,
            in_window: Any = beam.DoFn.WindowParam,
            runs: Any = runs_state,
            held: Any = held_state,
            window_timer: Any = window_end,
            duration_timer: Any = duration_end,
        ) -> Iterator[WindowedValue]:
            batch_key, run = element
            size = self._sizes.of(batch_key[SHARD_BYTES:])
            waiting = list(held.read())
            count, weight, hold, due = max(waiting, default=(0, 0, 0, 0.0))
            new_count, new_weight = count + len(run[1]), _add(weight, run)
            max_count, max_weight = self._rules.bounds(size.target)
            if new_count >= max_count or new_weight >= max_weight:
                filling = _Filling(self._rules, size)
                if waiting:
                    filling.load(list(runs.read()), weight)
                    runs.clear()
                    held.clear()
                for batch in filling.add(run):
                    yield from self._emit(batch, size, in_window)
                if not filling.values:
                    if waiting:
                        window_timer.clear()
                        duration_timer.clear()
                    return
                # What is left came with this run, as whatever waited went with the first batch.
                run, waiting = filling.run, []
                new_count, new_weight = len(run[1]), filling.weight
            runs.add(run)
            if not waiting:
                hold, due = timestamp.micros, self._rules.clock() + max_duration_secs
                window_timer.set(in_window.max_timestamp())
                duration_timer.set(due)
            elif timestamp.micros < hold:
                # A timer holds the watermark at the element that sets it: the earliest must.
                hold = timestamp.micros
                duration_timer.set(due)
            if len(waiting) >= _MAX_HELD_ENTRIES:
                held.clear()
            held.add((new_count, new_weight, hold, due))

        @userstate.on_timer(window_timer_spec)
        def at_window_end(
            self,
            batch_key: Any = beam.DoFn.KeyParam,
            in_window: Any = beam.DoFn.WindowParam,
            runs: Any = runs_state,
            held: Any = held_state,
            duration_timer: Any = duration_end,
        ) -> Iterator[WindowedValue]:
            yield from self._flush("window", batch_key, in_window, runs, held, duration_timer)

        @userstate.on_timer(duration_timer_spec)
        def when_due(
            self,
            batch_key: Any = beam.DoFn.KeyParam,
            in_window: Any = beam.DoFn.WindowParam,
            runs: Any = runs_state,
            held: Any = held_state,
            window_timer: Any = window_end,
        ) -> Iterator[WindowedValue]:
            yield from self._flush("timer", batch_key, in_window, runs, held, window_timer)

        def _flush(
            self, reason: str, batch_key: bytes, in_window: Any, runs: Any, held: Any, timer: Any
        ) -> Iterator[WindowedValue]:
            waiting = list(held.read())
            if not waiting:
                return
            size = self._sizes.of(batch_key[SHARD_BYTES:])
            filling = _Filling(self._rules, size)
            filling.load(list(runs.read()), max(waiting)[1])
            runs.clear()
            held.clear()
            timer.clear()
            yield from self._emit(filling.close(reason), size, in_window)

    return Buffer(rules)


def _add(weight: float, run: Run) -> float:
    """The weight with the run's, added up in the order in which `_Filling` does."""
    _, values, _, weights = run
    if weights is None:
        return weight + len(values)
    for more in weights:
        weight += more
    return weight
