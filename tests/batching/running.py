"""Running a batching transform and getting back what it gave, with windows and timestamps."""

import uuid
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.transforms import window
from apache_beam.utils.timestamp import Timestamp

# Runners by name: plain DirectRunner may or may not become Prism.
FN_API_RUNNER = "apache_beam.runners.portability.fn_api_runner.FnApiRunner"
BUNDLE_RUNNER = "BundleBasedDirectRunner"

_outputs: dict[str, list["Output"]] = {}


class Output(NamedTuple):
    value: Any
    timestamp: Timestamp
    window: Any


class Collect(beam.DoFn):
    """Keeps what it sees; for runners in this process."""

    def __init__(self):
        self.name = uuid.uuid4().hex
        _outputs[self.name] = []

    def process(self, element, at=beam.DoFn.TimestampParam, win=beam.DoFn.WindowParam):
        _outputs[self.name].append(Output(element, at, win))

    @property
    def outputs(self) -> list[Output]:
        return _outputs[self.name]


class Unbounded(beam.PTransform):
    """Says that its input were unbounded, which is what decides how batches are made."""

    def expand(self, pcoll):
        result = pcoll | beam.Map(lambda element: element)
        result.is_bounded = False
        return result


def batches_of(
    elements, transform, *, windows=None, unbounded=False, runner=FN_API_RUNNER, options=()
) -> list[Output]:
    """Applies a transform to `(value, timestamp in seconds)` pairs."""
    collect = Collect()
    flags = beam.options.pipeline_options.PipelineOptions(list(options))
    with beam.Pipeline(runner=runner, options=flags) as pipeline:
        values = (
            pipeline
            | beam.Create(list(elements), reshuffle=False)
            | beam.MapTuple(lambda value, at: window.TimestampedValue(value, at))
        )
        if windows is not None:
            values |= beam.WindowInto(windows)
        if unbounded:
            values |= Unbounded()
        _ = values | transform | "Collect" >> beam.ParDo(collect)
    return collect.outputs


def counter_values(result) -> dict[str, int]:
    """The counters of `beam_llm` after a run, by name."""
    counters: dict[str, int] = {}
    for metric in result.metrics().query()["counters"]:
        if metric.key.metric.namespace == "beam_llm":
            name = metric.key.metric.name
            counters[name] = counters.get(name, 0) + metric.committed
    return counters
