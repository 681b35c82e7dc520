"""Estimates of how many messages a worker can hold. No I/O, and no clock.

An estimator is fed what a server's metrics page says at one moment after another, and says
how many messages the worker should hold so that it has work for the wanted time.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

_CONCURRENCY_PERCENTILE = 0.9
_MIN_INTERVALS = 3
# Intervals shorter than this part of the window are put together, which bounds the memory.
_FINEST_INTERVAL = 1 / 1000
_ROUNDING = 1 - 1e-9  # sums that should be equal may differ in their last digits
#: A worker that runs this part of its most requests is taken for full.
FULL_SHARE = 0.8


class CapacityEstimator(Protocol):
    """What makes a capacity of a server's counter and gauge."""

    def observe(
        self, time: float, completed_total: float, running: float, waiting: float | None = None
    ) -> None:
        """Takes one sample.

        Args:
          time: When it was taken, on any clock [s].
          completed_total: Requests completed since the server started.
          running: Requests under way.
          waiting: Requests that wait at the server; None where it does not tell.
        """
        ...

    def estimate(self) -> float | None:
        """The capacity [messages], at least 1; None while there is too little evidence."""
        ...


class _Sample(NamedTuple):
    time: float
    completed_total: float
    running: float
    waiting: float | None


@dataclass(slots=True)
class _Interval:
    """What happened between two samples.

    Attributes:
      end: When it ended, counted in learned time alone [s].
      secs: How long it was [s].
      completed: Requests completed in it.
      slot_secs: Requests under way, over its time.
      level: The fewest requests under way at its ends.
      queued: Whether requests waited at both its ends.
    """

    end: float
    secs: float
    completed: float
    slot_secs: float
    level: float
    queued: bool

    @property
    def concurrency(self) -> float:
        return self.slot_secs / self.secs

    def add(self, other: _Interval) -> None:
        self.end = other.end
        self.secs += other.secs
        self.completed += other.completed
        self.slot_secs += other.slot_secs
        self.level = min(self.level, other.level)
        self.queued = self.queued and other.queued


class CompletionRateCapacityEstimator:
    """Capacity from how fast requests are completed, per request under way.

    capacity = completions per slot-second, times the 90th percentile of concurrency, times
    ``multiplier``. A slot-second is one request under way for one second. When a worker is
    starved for a while, completions and slot-seconds fall together and the percentile stays:
    the estimate holds, where a plain rate would fall and have the pool taken for too small.

    The window counts learned time alone, so that idleness changes nothing, however long.

    >>> estimator = CompletionRateCapacityEstimator(multiplier=60)
    >>> for second in range(5):  # 4 requests at a time, half a second each
    ...     estimator.observe(second, completed_total=8 * second, running=4)
    >>> estimator.estimate()
    480.0

    Args:
      multiplier: How many seconds of work a worker should hold [s].
      window_secs: How much learned time the estimate rests on [s].
      min_completions: Fewest completions in the window for an estimate; never fewer than the
        concurrency, since the first answers of many say little.
      max_gap_secs: An interval longer than this is dropped: nobody saw what ran in it [s].

    Raises:
      ValueError: An argument is not positive.
    """

    def __init__(
        self,
        multiplier: float,
        window_secs: float = 300.0,
        *,
        min_completions: float = 10,
        max_gap_secs: float = math.inf,
    ):
        for name, value in {
            "multiplier": multiplier,
            "window_secs": window_secs,
            "min_completions": min_completions,
            "max_gap_secs": max_gap_secs,
        }.items():
            if not value > 0:
                raise ValueError(f"{name}: {value!r} is not positive")
        self._multiplier = multiplier
        self._window_secs = window_secs
        self._min_completions = min_completions
        self._max_gap_secs = max_gap_secs
        self._last: _Sample | None = None
        self._learned_secs = 0.0
        self._window: deque[_Interval] = deque()

    def observe(
        self, time: float, completed_total: float, running: float, waiting: float | None = None
    ) -> None:
        """Takes one sample; see ``CapacityEstimator``."""
        if not all(map(math.isfinite, (time, completed_total, running, waiting or 0.0))):
            return
        last, self._last = self._last, _Sample(time, completed_total, running, waiting)
        if last is None:
            return
        secs = time - last.time
        completed = completed_total - last.completed_total
        if not 0 < secs <= self._max_gap_secs or completed < 0:
            return  # clock skew, a gap, or a server that was restarted
        slot_secs = secs * (last.running + running) / 2
        if completed == 0 and slot_secs == 0:
            return  # idle
        interval = _Interval(
            self._learned_secs + secs,
            secs,
            completed,
            slot_secs,
            min(last.running, running),
            bool(last.waiting) and bool(waiting),
        )
        if self._learnable(interval):
            self._learn(interval)

    def estimate(self) -> float | None:
        """The capacity [messages], at least 1; None while there is too little evidence."""
        if len(self._window) < _MIN_INTERVALS:
            return None
        completed = math.fsum(i.completed for i in self._window)
        slot_secs = math.fsum(i.slot_secs for i in self._window)
        if slot_secs == 0:
            return None
        concurrency = _percentile(
            ((i.concurrency, i.secs) for i in self._window), _CONCURRENCY_PERCENTILE
        )
        if completed < max(self._min_completions, concurrency) * _ROUNDING:
            return None
        return max(1.0, completed / slot_secs * concurrency * self._multiplier)

    def _learnable(self, interval: _Interval) -> bool:
        del interval
        return True

    def _learn(self, interval: _Interval) -> None:
        self._learned_secs = interval.end
        newest = self._window[-1] if self._window else None
        if newest is not None and newest.secs < self._window_secs * _FINEST_INTERVAL:
            newest.add(interval)
        else:
            self._window.append(interval)
        while self._window[0].end <= self._learned_secs - self._window_secs:
            self._window.popleft()


class SaturatedCompletionRateCapacityEstimator(CompletionRateCapacityEstimator):
    """Capacity from how fast requests are completed while the worker is full.

    A rate below saturation says what was asked of a worker, not what it can do: a larger pool
    lowers each worker's rate, which asks for a larger pool. This one learns from an interval
    only if the worker was full: requests waited at the server at both its ends, or no fewer
    than ``FULL_SHARE`` of ``full_concurrency`` were under way. Otherwise it holds what it
    knows, for as long as it takes.

    Without ``full_concurrency`` the worker is full near the most that was under way so far:
    the most that was reached in three intervals, so that one burst does not set it. What was
    learned at less is forgotten when more is reached, once there is enough new evidence.

    Args:
      multiplier: How many seconds of work a worker should hold [s].
      window_secs: How much learned time the estimate rests on [s].
      full_concurrency: How many requests run on a full worker; None to learn it.
      min_completions: As for ``CompletionRateCapacityEstimator``.
      max_gap_secs: As for ``CompletionRateCapacityEstimator`` [s].
    """

    def __init__(
        self,
        multiplier: float,
        window_secs: float = 300.0,
        *,
        full_concurrency: float | None = None,
        min_completions: float = 10,
        max_gap_secs: float = math.inf,
    ):
        super().__init__(
            multiplier, window_secs, min_completions=min_completions, max_gap_secs=max_gap_secs
        )
        if full_concurrency is not None and not full_concurrency > 0:
            raise ValueError(f"full_concurrency: {full_concurrency!r} is not positive")
        self._full_concurrency = full_concurrency
        self._highest = [0.0] * _MIN_INTERVALS  # a heap of the highest levels
        self._held: float | None = None

    def estimate(self) -> float | None:
        """The capacity [messages], at least 1, as of the latest full intervals."""
        return self._held

    def _learnable(self, interval: _Interval) -> bool:
        if self._full_concurrency is None and interval.level > self._highest[0]:
            heapq.heapreplace(self._highest, interval.level)
            self._window = deque(i for i in self._window if self._full(i))
        return self._full(interval)

    def _full(self, interval: _Interval) -> bool:
        most = self._full_concurrency or self._highest[0]
        return interval.queued or (interval.level > 0 and interval.level >= FULL_SHARE * most)

    def _learn(self, interval: _Interval) -> None:
        super()._learn(interval)
        estimate = super().estimate()
        if estimate is not None:
            self._held = estimate


def _percentile(weighted: Iterable[tuple[float, float]], share: float) -> float:
    """The least value such that values up to it have this share of the weight."""
    ordered = sorted(weighted)
    wanted = share * math.fsum(weight for _, weight in ordered) * _ROUNDING
    reached = 0.0
    for value, weight in ordered:
        reached += weight
        if reached >= wanted:
            return value
    return ordered[-1][0]
