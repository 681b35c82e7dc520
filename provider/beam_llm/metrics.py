"""Beam metrics of the row transforms.

They are in the namespace ``beam_llm``; ``docs/metrics.md`` lists them.
"""

from __future__ import annotations

import time
from typing import Any

from apache_beam.metrics.metric import Metrics

from beam_llm import progress
from beam_llm.vllm.client import Reply

NAMESPACE = "beam_llm"


class StepMetrics:
    """Counters and distributions of one step."""

    def __init__(self) -> None:
        self._counters: dict[str, Any] = {}
        self._latency = Metrics.distribution(NAMESPACE, "request_latency_ms")
        # Clock times: the least start and the greatest end, over all workers, tell how
        # long inference took, whatever the runner did before and after.
        self._started = Metrics.distribution(NAMESPACE, "request_started_unix_ms")
        self._ended = Metrics.distribution(NAMESPACE, "request_ended_unix_ms")

    def count(self, name: str, by: int = 1) -> None:
        """Adds to a counter.

        Args:
          name: The counter.
          by: How much to add.
        """
        counter = self._counters.get(name)
        if counter is None:
            counter = self._counters[name] = Metrics.counter(NAMESPACE, name)
        counter.inc(by)

    def read(self, rows: int) -> None:
        """Counts rows that came in."""
        self.count("rows_read", rows)
        progress.count(read=rows)

    def batch(self, rows: int) -> None:
        """Counts the rows of a batch that came in."""
        self.read(rows)
        progress.count(batches=1)

    def failed(self, error: Any) -> None:
        """Counts one failed row, in all and by kind.

        Args:
          error: What failed it: a ``RowError``, or a ``RequestError`` with its attempts.
        """
        kind = error.kind
        self.count("requests", getattr(error, "attempts", 0))
        progress.count(failed=1)
        self.count("rows_failed")
        self.count(f"rows_failed_{kind}")

    def answered(self, reply: Reply) -> None:
        """Counts one answered row with its tokens and latency."""
        self.count("rows_done")
        self.count("requests", reply.attempts)
        usage = reply.answer.usage
        if usage is not None:
            tokens = {
                "prompt_tokens": usage.prompt_tokens or 0,
                "cached_tokens": usage.cached_tokens or 0,
                "completion_tokens": usage.completion_tokens or 0,
            }
            for name, number in tokens.items():
                self.count(name, number)
            progress.count(**tokens)
        latency_ms = round(reply.latency_secs * 1_000)
        now_ms = round(time.time() * 1_000)
        self._latency.update(latency_ms)
        self._started.update(now_ms - latency_ms)
        self._ended.update(now_ms)
