"""Publishes a capacity where the runner looks for it, from a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import re
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from apache_beam.metrics import execution
from apache_beam.metrics.cells import DistributionCell
from apache_beam.metrics.metricbase import MetricName

from beam_llm.autoscaling.config import AutoscalingMetricConfig
from beam_llm.autoscaling.estimator import CapacityEstimator
from beam_llm.autoscaling.sampler import PrometheusCounterGaugeSampler, Reading, Sampler
from beam_llm.config import AGGREGATION

_LOGGER = logging.getLogger("beam_llm")
#: Namespace of the metric; that of Beam's own ``ModelManager``.
NAMESPACE = "BeamML_ModelManager"
_WARN_EVERY_SECS = 600.0
_JOIN_SECS = 5.0
_MOST = 1 << 53

_lock = threading.Lock()
_current: dict[str, NumLoadedModelsPublisher] = {}  # by tag: who may publish


def metric_name(tag: str) -> MetricName:
    """The metric's name for a tag."""
    return MetricName(NAMESPACE, f"num_loaded_models_{tag}")


def published(tag: str) -> int | None:
    """What this process tells the runner under a tag; None if nothing."""
    cell = _cells().get(_cell_key(tag))
    return None if cell is None else cell.get_cumulative().max


def publishers() -> list[NumLoadedModelsPublisher]:
    """The publishers of this process, one a tag."""
    with _lock:
        return list(_current.values())


def _cell_key(tag: str) -> Any:
    name = metric_name(tag)
    return execution._TypedMetricName(DistributionCell, name)  # pyright: ignore[reportPrivateUsage]


def _cells() -> dict[Any, Any]:
    return execution.MetricsEnvironment.process_wide_container().metrics


class NumLoadedModelsPublisher:
    """Polls a capacity signal and publishes it as ``num_loaded_models_TAG``, process-wide.

    One publisher has a tag: the last one started. A value that has been published stays
    until another takes its place, also after ``stop``: it says what the worker can hold, and
    a zero would tell the runner that it can hold nothing.

    Example::

      publisher = NumLoadedModelsPublisher(lambda: 4 * free_slots(), "tickets").start()
      …
      publisher.stop()

    Args:
      signal: Gives the capacity [messages], or None when there is nothing to say. What it
        raises is logged. It must not refer to ``owner``.
      tag: The end of the metric's name.
      interval_secs: Time between polls [s].
      aggregation: Of the latest values: ``last``, ``max``, ``mean`` or a percentile such as
        ``p90``; ``lifetime_max`` of all.
      aggregation_count: How many values that looks at.
      owner: Held weakly; the publisher stops when it is garbage.
      interrupt: Ends a signal that is under way, when ``stop`` is called. Takes no lock.
      on_stop: Called by the thread as the last thing it does.

    Attributes:
      tag: As given.
      polls: How many polls gave a ``value``, ``nothing``, or an ``error``.
      signal: As given.
      latest: The latest value of the signal [messages]; None before the first.

    Raises:
      ValueError: An argument cannot be used.
    """

    def __init__(
        self,
        signal: Callable[[], float | None],
        tag: str,
        *,
        interval_secs: float = 5.0,
        aggregation: str = "last",
        aggregation_count: int = 30,
        owner: object | None = None,
        interrupt: Callable[[], object] | None = None,
        on_stop: Callable[[], object] | None = None,
    ):
        if not tag:
            raise ValueError("tag: it is empty")
        if not interval_secs > 0:
            raise ValueError(f"interval_secs: {interval_secs!r} is not positive")
        if not re.fullmatch(AGGREGATION, aggregation):
            raise ValueError(
                f"aggregation: {aggregation!r} is not last, lifetime_max, max, mean or a"
                " percentile such as p90"
            )
        if aggregation_count < 1:
            raise ValueError(f"aggregation_count: {aggregation_count!r} is less than 1")
        self.tag = tag
        self.polls: Counter[str] = Counter()
        self.latest: float | None = None
        self.signal = signal
        self._interval_secs = interval_secs
        self._aggregation = aggregation
        self._recent: deque[float] = deque(maxlen=aggregation_count)
        self._highest = 0.0
        self._interrupt = interrupt
        self._on_stop = on_stop
        self._key = _cell_key(tag)
        self._ending = False
        # Reentrant, unlike an Event: garbage collection may end us anywhere.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._logged_error = -math.inf
        self._logged_value: int | None = None
        self._owner = None if owner is None else weakref.ref(owner, lambda _: self.end())

    def start(self) -> NumLoadedModelsPublisher:
        """Begins to poll, in the place of the tag's publisher so far. Returns itself.

        Raises:
          RuntimeError: It was started or stopped before.
        """
        thread = threading.Thread(
            target=self._run, name=f"beam-llm-capacity-{self.tag}", daemon=True
        )
        with _lock:
            if self._thread is not None or self._ending:
                raise RuntimeError(f"the publisher of {self.tag!r} was started or stopped before")
            previous = _current.get(self.tag)
            _current[self.tag] = self
            self._thread = thread
            thread.start()
        if previous is not None:
            previous.end()
        return self

    def end(self) -> None:
        """Has the thread stop soon, and publish no more. Takes no lock: safe in a finalizer."""
        self._ending = True
        self._wake.put(None)
        if self._interrupt is not None:
            self._interrupt()

    def stop(self) -> None:
        """Publishes no more, and waits for the thread. Safe to call again, from any thread."""
        self.end()
        with _lock:  # a value on its way is out, or will not be
            if _current.get(self.tag) is self:
                del _current[self.tag]
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(_JOIN_SECS)

    @property
    def running(self) -> bool:
        """Whether its thread still polls."""
        return self._thread is not None and self._thread.is_alive()

    def poll(self) -> int | None:
        """Polls the signal once. Returns what was published, or None if nothing was."""
        try:
            value = self.signal()
            number = None
            if value is not None and 0 < value < math.inf:
                self.latest = value
                number = min(max(1, round(self._aggregated(value))), _MOST)
        except Exception:
            self.polls["error"] += 1
            self._log_error()
            return None
        self.polls["nothing" if number is None else "value"] += 1
        return None if number is None else self._publish(number)

    def _aggregated(self, value: float) -> float:
        self._recent.append(value)
        self._highest = max(self._highest, value)
        if self._aggregation == "last":
            return value
        if self._aggregation == "lifetime_max":
            return self._highest
        if self._aggregation == "max":
            return max(self._recent)
        if self._aggregation == "mean":
            return math.fsum(self._recent) / len(self._recent)
        rank = math.ceil(int(self._aggregation[1:]) * len(self._recent) / 100)
        return sorted(self._recent)[rank - 1]

    def _publish(self, number: int) -> int | None:
        # The runner is to see the latest value, not the mean of all; a cell that is reset
        # and then updated would be seen empty in between: a whole one takes its place.
        cell = DistributionCell()
        cell.update(number)
        with _lock:
            if self._ending or _current.get(self.tag) is not self:
                return None
            _cells()[self._key] = cell
        self._log_value(number)
        return number

    def _run(self) -> None:
        try:
            while not self._ending:
                self.poll()
                with contextlib.suppress(queue.Empty):
                    self._wake.get(timeout=self._interval_secs)
        finally:
            with _lock:
                if _current.get(self.tag) is self:
                    del _current[self.tag]
            if self._on_stop is not None:
                self._on_stop()

    def _log_value(self, number: int) -> None:
        before, self._logged_value = self._logged_value, number
        if before is None:
            _LOGGER.info("capacity metric: num_loaded_models_%s is %d", self.tag, number)
        elif before != number:
            _LOGGER.debug(
                "capacity metric: num_loaded_models_%s is %d, was %d", self.tag, number, before
            )

    def _log_error(self) -> None:
        now = time.monotonic()
        if now - self._logged_error >= _WARN_EVERY_SECS:
            self._logged_error = now
            _LOGGER.warning(
                "capacity metric: the signal of num_loaded_models_%s failed; it is polled again",
                self.tag,
                exc_info=True,
            )


class CapacitySignal:
    """The capacity signal of a sampled server: samples and estimates when it is called.

    Args:
      sampler: What reads the server.
      estimator: What makes a capacity of its samples.
      clock: Gives the time [s].

    Attributes:
      latest: The latest sample; None after a look that gave none.
    """

    def __init__(
        self,
        sampler: Sampler,
        estimator: CapacityEstimator,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.sampler = sampler
        self.latest: Reading | None = None
        self._estimator = estimator
        self._clock = clock

    def __call__(self) -> float | None:
        """Looks once. Returns the capacity [messages], or None when there is nothing new."""
        reading = self.latest = self.sampler.read()
        if reading is None:
            return None
        self._estimator.observe(
            self._clock(), reading.completed_total, reading.running, reading.waiting
        )
        return self._estimator.estimate()


class PrometheusNumLoadedModelsPublisher(NumLoadedModelsPublisher):
    """Scrapes a server's metrics page, estimates its capacity and publishes that.

    Example::

      publisher = PrometheusNumLoadedModelsPublisher(
          "http://127.0.0.1:30000/metrics",
          "sglang:num_requests_total",
          "sglang:num_running_reqs",
          tag="tickets",
          owner=server,
      ).start()

    Args:
      metrics_url: Address of the page, or a function that gives it; it must not refer to
        ``owner``.
      counter_name: Counter of completed requests.
      gauge_name: Gauge of requests under way.
      tag: The end of the metric's name, as ``AutoscalingMetricConfig.resolve_tag`` gives it.
      config: The knobs; the defaults if None.
      owner: Held weakly; the publisher stops when it is garbage.
      on_stop: Called by the thread as the last thing it does.
      **sampler_options: As for ``PrometheusCounterGaugeSampler``.
    """

    def __init__(
        self,
        metrics_url: str | Callable[[], str | None],
        counter_name: str,
        gauge_name: str,
        tag: str,
        config: AutoscalingMetricConfig | None = None,
        *,
        owner: object | None = None,
        on_stop: Callable[[], object] | None = None,
        **sampler_options: Any,
    ):
        config = config or AutoscalingMetricConfig()
        sampler_options.setdefault("timeout_secs", config.scrape_timeout_secs)
        sampler = PrometheusCounterGaugeSampler(
            metrics_url, counter_name, gauge_name, **sampler_options
        )
        super().__init__(
            CapacitySignal(sampler, config.make_estimator()),
            tag,
            owner=owner,
            interrupt=sampler.close,
            on_stop=on_stop,
            **config.publisher_options,
        )


def _after_fork_in_child() -> None:
    """The threads are the parent's, and so are the values."""
    global _lock
    _lock = threading.Lock()
    for publisher in _current.values():
        _cells().pop(publisher._key, None)  # pyright: ignore[reportPrivateUsage]
    _current.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
