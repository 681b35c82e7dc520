"""What a user chooses of the capacity metric, and the parts that follow from it."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from beam_llm.autoscaling.estimator import (
    CapacityEstimator,
    CompletionRateCapacityEstimator,
    SaturatedCompletionRateCapacityEstimator,
)
from beam_llm.config import Autoscaling

if TYPE_CHECKING:
    from beam_llm.autoscaling.publisher import NumLoadedModelsPublisher
    from beam_llm.autoscaling.sampler import Sampler

_LOGGER = logging.getLogger("beam_llm")
_MIN_INTERVALS_IN_WINDOW = 4
# One missed look is bridged; what happened in a longer gap, nobody saw.
_LOOKS_IN_GAP = 2


def autoscaling_rules(knobs: Autoscaling) -> Iterator[tuple[str, str]]:
    """Checks the rules that span several knobs.

    Args:
      knobs: Knobs that are within their own bounds.

    Yields:
      The name of a knob, and what is wrong with it.
    """
    if knobs.window_secs < _MIN_INTERVALS_IN_WINDOW * knobs.interval_secs:
        yield (
            "window_secs",
            f"{knobs.window_secs:g} is less than {_MIN_INTERVALS_IN_WINDOW} times interval_secs,"
            f" {knobs.interval_secs:g}",
        )
    if knobs.full_concurrency is not None and knobs.estimator == "completion_rate":
        yield "full_concurrency", "has no effect with estimator: completion_rate"
    if knobs.page_host != Autoscaling().page_host and knobs.page_port is None:
        yield "page_host", "has no effect without page_port"


class AutoscalingMetricConfig(Autoscaling, frozen=True, kw_only=True):
    """How a model handler's workers tell the runner what they can hold.

    The knobs are those of the ``autoscaling`` section of the YAML transforms.

    >>> AutoscalingMetricConfig(target_drain_secs=60).resolve_tag("tickets", "org/model")
    'tickets'

    Attributes:
      estimator: A name, as in YAML, or a function without arguments that makes a
        ``CapacityEstimator``, and that a pipeline can be pickled with.

    Raises:
      ValueError: A knob is out of bounds, or excludes another.
    """

    estimator: str | Callable[[], CapacityEstimator] = Autoscaling().estimator  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]

    def __post_init__(self) -> None:
        knobs = msgspec.structs.asdict(self)
        if not isinstance(self.estimator, str):
            if not callable(self.estimator):
                raise ValueError(
                    f"estimator: {self.estimator!r} is neither a name nor a function that makes"
                    " an estimator"
                )
            del knobs["estimator"]
        for knob, value in knobs.items():
            try:
                msgspec.convert({knob: value}, Autoscaling)
            except msgspec.ValidationError as error:
                what = str(error).partition(" - at ")[0]
                raise ValueError(f"{knob}: {value!r}: {what}") from None
        for knob, message in autoscaling_rules(self):
            raise ValueError(f"{knob}: {message}")

    @classmethod
    def of(cls, section: Autoscaling) -> AutoscalingMetricConfig:
        """The same knobs, from a section of a transform's configuration."""
        return cls(**msgspec.structs.asdict(section))

    def resolve_tag(self, model_identifier: str | None, model_name: str) -> str:
        """Gives what stands behind ``num_loaded_models_`` in the metric's name.

        Args:
          model_identifier: The identifier that ``RunInference`` reports, if there is one.
          model_name: Path or hub name of the model.

        Returns:
          The explicit tag; else the identifier, verbatim; else the model's name, with an
          underscore for each character that is not an ASCII letter, a digit or an underscore.
          A warning is logged when two names become one tag.
        """
        return self.metric_tag or model_identifier or _sanitised(model_name)

    def make_estimator(self) -> CapacityEstimator:
        """Makes the estimator, with a memory of its own."""
        if not isinstance(self.estimator, str):
            return self.estimator()
        common: dict[str, Any] = {
            "multiplier": self.target_drain_secs,
            "window_secs": self.window_secs,
            "min_completions": self.min_completions,
            "max_gap_secs": _LOOKS_IN_GAP * (self.interval_secs + self.scrape_timeout_secs),
        }
        if self.estimator == "completion_rate":
            return CompletionRateCapacityEstimator(**common)
        return SaturatedCompletionRateCapacityEstimator(
            **common, full_concurrency=self.full_concurrency
        )

    @property
    def publisher_options(self) -> dict[str, Any]:
        """Arguments of ``NumLoadedModelsPublisher``."""
        return {
            "interval_secs": self.interval_secs,
            "aggregation": self.aggregation,
            "aggregation_count": self.aggregation_count,
        }

    def make_publisher(
        self, source: Sampler | Callable[[], float | None], tag: str, **options: Any
    ) -> NumLoadedModelsPublisher:
        """Makes a publisher; not started yet.

        Args:
          source: What samples a server, or any signal that gives a capacity [messages].
          tag: As ``resolve_tag`` gives it.
          **options: Further arguments of ``NumLoadedModelsPublisher``.
        """
        from beam_llm.autoscaling.publisher import CapacitySignal, NumLoadedModelsPublisher

        signal: Any = source
        if not callable(source):
            options.setdefault("interrupt", source.close)
            signal = CapacitySignal(source, self.make_estimator())
        return NumLoadedModelsPublisher(signal, tag, **self.publisher_options, **options)


_names: dict[str, str] = {}  # by sanitised name
_names_lock = threading.Lock()


def _sanitised(model_name: str) -> str:
    tag = re.sub(r"[^A-Za-z0-9_]", "_", model_name)
    with _names_lock:
        other = _names.setdefault(tag, model_name)
    if other != model_name:
        _LOGGER.warning(
            "capacity metric: models %r and %r both have the tag %r, and their workers' capacities"
            " will be mixed up: give one of them a metric_tag or a model_identifier",
            other,
            model_name,
            tag,
        )
    return tag
