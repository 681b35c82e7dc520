"""A Prometheus page in each worker, with the published capacity and what it is made of."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from beam_llm import progress
from beam_llm.autoscaling.publisher import CapacitySignal, published, publishers

if TYPE_CHECKING:
    from beam_llm.autoscaling.config import AutoscalingMetricConfig

_LOGGER = logging.getLogger("beam_llm")

#: Totals of this process, by the name that `beam_llm.progress` counts them under.
_TOTALS = {
    "read": ("rows_read", "Rows or examples that came in."),
    "answered": ("rows_answered", "Rows or examples that were answered."),
    "failed": ("rows_failed", "Rows or examples that failed."),
    "batches": ("batches", "Batches of rows or examples that came in."),
    "prompt_tokens": ("prompt_tokens", "Tokens of the prompts of answered rows."),
    "cached_tokens": ("cached_tokens", "Those of them from the server's prefix cache."),
    "completion_tokens": ("completion_tokens", "Tokens that were generated."),
}


class CapacityCollector(Collector):
    """What this process publishes, and from what, as Prometheus metrics."""

    def collect(self) -> Iterator[Any]:
        """Yields each metric with its series."""
        tags = ["tag"]
        capacity = GaugeMetricFamily(
            "beam_llm_num_loaded_models",
            "Messages that the worker can hold, as published.",
            labels=tags,
        )
        estimate = GaugeMetricFamily(
            "beam_llm_capacity_estimate",
            "The latest estimate of that, not aggregated.",
            labels=tags,
        )
        polls = CounterMetricFamily(
            "beam_llm_capacity_polls",
            "Polls that gave a value, nothing, or an error.",
            labels=[*tags, "outcome"],
        )
        completed = CounterMetricFamily(
            "beam_llm_server_completed", "Requests that the server has completed.", labels=tags
        )
        running = GaugeMetricFamily(
            "beam_llm_server_running", "Requests under way at the server.", labels=tags
        )
        waiting = GaugeMetricFamily(
            "beam_llm_server_waiting", "Requests that wait at the server.", labels=tags
        )
        queries = CounterMetricFamily(
            "beam_llm_server_prefix_cache_queries",
            "Tokens looked up in the prefix cache.",
            labels=tags,
        )
        hits = CounterMetricFamily(
            "beam_llm_server_prefix_cache_hits", "Those of them that were there.", labels=tags
        )
        for publisher in publishers():
            tag = [publisher.tag]
            value = published(publisher.tag)
            if value is not None:
                capacity.add_metric(tag, value)
            if publisher.latest is not None:
                estimate.add_metric(tag, publisher.latest)
            for outcome in ("value", "nothing", "error"):
                polls.add_metric([*tag, outcome], publisher.polls[outcome])
            signal = publisher.signal
            reading = signal.latest if isinstance(signal, CapacitySignal) else None
            if reading is None:
                continue
            completed.add_metric(tag, reading.completed_total)
            running.add_metric(tag, reading.running)
            if reading.waiting is not None:
                waiting.add_metric(tag, reading.waiting)
            for name, family in (("prefix_cache_queries", queries), ("prefix_cache_hits", hits)):
                if name in reading.extras:
                    family.add_metric(tag, reading.extras[name])
        yield from (capacity, estimate, polls, completed, running, waiting, queries, hits)
        totals = progress.totals()
        for ours, (name, words) in _TOTALS.items():
            yield CounterMetricFamily(f"beam_llm_{name}", words, value=totals[ours])


class _Page:
    def __init__(self, server: WSGIServer, thread: threading.Thread):
        self.users = 0
        self._server = server
        self._thread = thread

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


_pages: dict[tuple[str, int], _Page] = {}
_lock = threading.Lock()


def open_page(config: AutoscalingMetricConfig) -> Callable[[], None] | None:
    """Opens the page that a configuration asks for, shared by all of this process that do.

    Returns:
      A function that lets go of the page, which ends with the last who does; None if there is
      no page: none is wanted, or its address is taken, mostly by another process of the same
      worker, whose page then has the same capacity. That is logged.
    """
    if config.page_port is None:
        return None
    address = (config.page_host, config.page_port)
    with _lock:
        page = _pages.get(address)
        if page is None:
            registry = CollectorRegistry(auto_describe=False)
            registry.register(CapacityCollector())
            try:
                page = _Page(*start_http_server(address[1], address[0], registry))
            except OSError as error:
                _LOGGER.warning(
                    "capacity metric: no Prometheus page on %s port %d: %s", *address, error
                )
                return None
            _pages[address] = page
            _LOGGER.info("capacity metric: Prometheus page on %s port %d", *address)
        page.users += 1
    return lambda: _let_go(address, page)


def _let_go(address: tuple[str, int], page: _Page) -> None:
    with _lock:
        page.users -= 1
        if page.users:
            return
        del _pages[address]
        page.close()
