"""Samplers of servers other than vLLM, by the names that their metrics pages use.

Each takes the address of the page and further options of ``PrometheusCounterGaugeSampler``,
and goes to ``AutoscalingMetricConfig.make_publisher``::

  config = AutoscalingMetricConfig(target_drain_secs=60)
  sampler = presets.sglang("http://127.0.0.1:30000/metrics")
  publisher = config.make_publisher(sampler, "tickets", owner=server).start()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beam_llm.autoscaling.sampler import (
    PrometheusCounterGaugeSampler,
    PrometheusLittlesLawSampler,
)

Url = str | Callable[[], str | None]


def sglang(metrics_url: Url, **options: Any) -> PrometheusCounterGaugeSampler:
    """Samples SGLang, which has the page when started with ``--enable-metrics``.

    Its counter comes with the first finished request: until then there is no sample.
    """
    return PrometheusCounterGaugeSampler(
        metrics_url,
        "sglang:num_requests_total",
        "sglang:num_running_reqs",
        waiting_name="sglang:num_queue_reqs",
        extra_names={
            "prefix_cache_queries": "sglang:prompt_tokens_total",
            "prefix_cache_hits": "sglang:cached_tokens_total",
        },
        **options,
    )


def llama_cpp(
    metrics_url: Url, tokens_per_message: float, **options: Any
) -> PrometheusCounterGaugeSampler:
    """Samples llama.cpp's server, which has the page when started with ``--metrics``.

    It counts generated tokens, not requests.

    Args:
      metrics_url: Address of the page.
      tokens_per_message: How many tokens one message generates in the mean, by which the
        count of tokens becomes one of messages.
      **options: As for ``PrometheusCounterGaugeSampler``.
    """
    return PrometheusCounterGaugeSampler(
        metrics_url,
        "llamacpp:tokens_predicted_total",
        "llamacpp:requests_processing",
        waiting_name="llamacpp:requests_deferred",
        counter_unit=tokens_per_message,
        **options,
    )


def triton(metrics_url: Url, model: str, **options: Any) -> PrometheusLittlesLawSampler:
    """Samples one model of a Triton Inference Server.

    Triton has no gauge of running requests (``nv_inference_pending_request_count`` counts
    those that wait): the mean under way, waiting ones included, is by Little's law the rate
    of ``nv_inference_request_duration_us``.

    Args:
      metrics_url: Address of the page, mostly ``http://127.0.0.1:8002/metrics``.
      model: The model's name in Triton.
      **options: As for ``PrometheusCounterGaugeSampler``.
    """
    return PrometheusLittlesLawSampler(
        metrics_url,
        "nv_inference_request_success",
        "nv_inference_request_duration_us",
        durations_per_sec=1e6,
        waiting_name="nv_inference_pending_request_count",
        match_labels={"model": model, **options.pop("match_labels", {})},
        **options,
    )
