"""Prometheus metrics of the service."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import prometheus_client

from beam_llm.registry import TRANSFORMS

_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class Metrics:
    """Counts what is asked, by transform and outcome."""

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        prometheus_client.ProcessCollector(registry=self.registry)
        prometheus_client.PlatformCollector(registry=self.registry)
        self._requests = prometheus_client.Counter(
            "beam_llm_expansion_requests",
            "Requests: method, transform ('other' for those not served), and outcome: ok, invalid,"
            " forbidden, busy, timeout, error.",
            ["method", "transform", "outcome"],
            registry=self.registry,
        )
        self._seconds = prometheus_client.Histogram(
            "beam_llm_expansion_request_seconds",
            "Time to answer, waiting included.",
            ["method"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._in_flight = prometheus_client.Gauge(
            "beam_llm_expansion_in_flight", "Requests under way.", registry=self.registry
        )

    def answered(self, method: str, transform: str, outcome: str, seconds: float) -> None:
        """Counts a request.

        Args:
          method: ``expand`` or ``discover``.
          transform: The transform's name, if it is one of ours.
          outcome: What became of it.
          seconds: Time from its arrival to its answer.
        """
        name = transform if transform in TRANSFORMS else "other"
        self._requests.labels(method, name, outcome).inc()
        self._seconds.labels(method).observe(seconds)

    @contextlib.contextmanager
    def in_flight(self) -> Generator[None]:
        """Counts a request while it is under way."""
        with self._in_flight.track_inprogress():
            yield
