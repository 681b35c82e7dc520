"""Each worker's capacity, as a metric from which a runner can size its pool.

A sampler reads a model server's counter and gauge, an estimator makes a capacity of them, and
a publisher puts that where the runner looks. Nothing here knows which server it is.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from beam_llm.autoscaling import presets as presets
    from beam_llm.autoscaling.config import AutoscalingMetricConfig as AutoscalingMetricConfig
    from beam_llm.autoscaling.estimator import CapacityEstimator as CapacityEstimator
    from beam_llm.autoscaling.estimator import (
        CompletionRateCapacityEstimator as CompletionRateCapacityEstimator,
    )
    from beam_llm.autoscaling.estimator import (
        SaturatedCompletionRateCapacityEstimator as SaturatedCompletionRateCapacityEstimator,
    )
    from beam_llm.autoscaling.publisher import NumLoadedModelsPublisher as NumLoadedModelsPublisher
    from beam_llm.autoscaling.publisher import (
        PrometheusNumLoadedModelsPublisher as PrometheusNumLoadedModelsPublisher,
    )
    from beam_llm.autoscaling.sampler import (
        PrometheusCounterGaugeSampler as PrometheusCounterGaugeSampler,
    )
    from beam_llm.autoscaling.sampler import Reading as Reading

_HOMES = {
    "AutoscalingMetricConfig": "config",
    "CapacityEstimator": "estimator",
    "CompletionRateCapacityEstimator": "estimator",
    "NumLoadedModelsPublisher": "publisher",
    "PrometheusCounterGaugeSampler": "sampler",
    "PrometheusNumLoadedModelsPublisher": "publisher",
    "Reading": "sampler",
    "SaturatedCompletionRateCapacityEstimator": "estimator",
}

__all__ = ["presets", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    # The publisher imports Beam, which the checks of a configuration do without.
    if name == "presets":
        return importlib.import_module("beam_llm.autoscaling.presets")
    if name not in _HOMES:
        raise AttributeError(f"module 'beam_llm.autoscaling' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"beam_llm.autoscaling.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
