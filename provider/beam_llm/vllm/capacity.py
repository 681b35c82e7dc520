"""Publishes the capacity of vLLM servers: the metrics' names, and the servers' lives.

A server has one publisher in each process that holds it, from when it first answers until it
ends. How capacity is sampled, estimated and published is in `beam_llm.autoscaling`.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from beam_llm.autoscaling.config import AutoscalingMetricConfig
from beam_llm.vllm.server import VLLMServer

_LOGGER = logging.getLogger("beam_llm")

COMPLETED = "vllm:request_success_total"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
#: Finishes that say nothing of what the server can do.
NO_COMPLETIONS = {"finished_reason": ("abort", "error")}
_EXTRAS = {
    "prefix_cache_queries": "vllm:prefix_cache_queries_total",
    "prefix_cache_hits": "vllm:prefix_cache_hits_total",
}


@dataclass(frozen=True)
class Capacity:
    """How a server's capacity is to be published.

    Attributes:
      tag: The end of the metric's name.
      config: The knobs.
      metrics_endpoint: The page of a server that is not ours; None for one that is.
    """

    tag: str
    config: AutoscalingMetricConfig
    metrics_endpoint: str | None = None

    @classmethod
    def of(
        cls,
        config: AutoscalingMetricConfig,
        tag: str,
        metrics_endpoint: str | None,
        *bounds: int | None,
    ) -> Capacity:
        """Makes one for a step.

        Args:
          config: The knobs.
          tag: The end of the metric's name.
          metrics_endpoint: The page of a server that is not ours.
          *bounds: How many requests a worker process has under way at most. At the least of
            them it is full, unless the knobs say when it is.
        """
        known = [bound for bound in bounds if bound is not None]
        if config.estimator == "saturated_completion_rate" and known:
            full = config.full_concurrency or min(known)
            config = msgspec.structs.replace(config, full_concurrency=full)
        return cls(tag, config, metrics_endpoint)


_publishing: weakref.WeakKeyDictionary[Any, Capacity] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def publish(owner: object, capacity: Capacity) -> None:
    """Publishes a server's capacity, unless somebody in this process has seen to that.

    Args:
      owner: The server, held weakly: a ``VLLMServer`` that answers, or what stands for one
        that is not ours.
      capacity: What to publish.
    """
    with _lock:
        others = _publishing.setdefault(owner, capacity)
    if others is capacity:
        try:
            _start(owner, capacity)
        except Exception:  # whatever it is, requests are to be answered
            _LOGGER.exception(
                "capacity metric: num_loaded_models_%s is not published", capacity.tag
            )
    elif others != capacity:
        _LOGGER.warning(
            "capacity metric: steps that share a server want it published in different ways:"
            " num_loaded_models_%s is, as the first of them wants it",
            others.tag,
        )


def _start(owner: object, capacity: Capacity) -> None:
    # Beam, which the checks of a configuration do without.
    from beam_llm.autoscaling.page import open_page
    from beam_llm.autoscaling.publisher import PrometheusNumLoadedModelsPublisher

    url: str | Callable[[], str | None]
    if isinstance(owner, VLLMServer):
        url = _page_of(weakref.ref(owner))
    else:
        assert capacity.metrics_endpoint is not None  # noqa: S101 - checked by who made it
        url = capacity.metrics_endpoint
    publisher = PrometheusNumLoadedModelsPublisher(
        url,
        COMPLETED,
        RUNNING,
        capacity.tag,
        capacity.config,
        owner=owner,
        waiting_name=WAITING,
        exclude_labels=NO_COMPLETIONS,
        extra_names=_EXTRAS,
        on_stop=open_page(capacity.config),
    ).start()
    if isinstance(owner, VLLMServer):
        owner.call_at_end(publisher.end)


def _page_of(server: weakref.ref[VLLMServer]) -> Callable[[], str | None]:
    def url() -> str | None:
        held = server()
        endpoint = None if held is None else held.endpoint
        return None if endpoint is None else f"{endpoint.url}/metrics"

    return url
