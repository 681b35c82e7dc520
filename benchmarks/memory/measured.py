"""What is measured, each in a process of its own."""

import gc
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import msgspec
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.typehints.row_type import RowTypeConstraint

from beam_llm.batching import BatchByKey
from beam_llm.config import Requests
from beam_llm.transforms import VLLMCompletions
from beam_llm.vllm.client import Call, Client, ExternalServer, Reply
from beam_llm.vllm.protocol import COMPLETIONS_PATH
from benchmarks.asking import DIRECT

_FIELDS = [("id", int), ("group", str), ("text", str)]
_PARTS = 10


def _memory_mb() -> dict[str, float]:
    """Resident memory of this process, now and at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return {name: int(found[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM")}


class _Rows(beam.DoFn):
    def __init__(self, number: int, group: int):
        self._arguments = number, group

    def process(self, _: Any) -> Iterator[Any]:
        number, group = self._arguments
        for i in range(number):
            yield beam.Row(id=i, group=f"g{i // group}", text=f"{i} {'some text ' * 10}")


class _Seen:
    rows = 0


class _Count(beam.DoFn):
    """Takes the rows and keeps nothing of them."""

    def process(self, element: Any) -> None:
        _Seen.rows += 1


def _rows_of_batch(batch: Any) -> list[Any]:
    return [row for row, _ in batch[1]]


def _group(row: Any) -> tuple[str, Any]:
    return row.group, row


class _KeyedBatches(beam.PTransform):
    """The same keyed batches as ours, and nothing done with them."""

    def expand(self, input_or_inputs: Any) -> Any:
        return (
            input_or_inputs
            | beam.Map(_group).with_output_types(tuple[str, input_or_inputs.element_type])
            | BatchByKey(max_batch_size=64)
            | beam.FlatMap(_rows_of_batch)
        )


def _same(row: Any) -> Any:
    return row


def pipeline(step: str, url: str, number: int, group: int) -> dict[str, float]:
    """Runs the pipeline with one of the steps.

    Args:
      step: What stands between the shuffled rows and the count.
      url: The server's address, without a path.
      number: How many rows.
      group: How many of them have one key.

    Returns:
      The rows counted, and the resident memory before and at the peak [MB].
    """
    ours = {
        "model": "standin",
        "prompt": "{text}",
        "sampling": {"max_tokens": 1},
        "server": {"endpoint": f"{url}/v1"},
    }
    steps = {
        "pass-through": lambda: beam.Map(_same),
        "ours": lambda: VLLMCompletions(**ours, prefix_batching={"mode": "none"}),
        "pass-through, keyed batches": _KeyedBatches,
        "ours, keyed": lambda: VLLMCompletions(**ours, prefix_batching={"key_field": "group"}),
    }
    run = beam.Pipeline(runner=DIRECT, options=PipelineOptions([]))
    _ = (
        run
        | beam.Impulse()
        | "Rows"
        >> beam.ParDo(_Rows(number, group)).with_output_types(
            RowTypeConstraint.from_fields(_FIELDS)
        )
        | beam.Reshuffle()
        | "Measured" >> steps[step]()
        | "Count" >> beam.ParDo(_Count())
    )
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = _memory_mb()["VmRSS"]
    run.run().wait_until_finish()
    return {"rows": _Seen.rows, "before_mb": before, "peak_mb": _memory_mb()["VmHWM"]}


def client(url: str, number: int, traced: bool) -> list[float]:
    """Sends calls with the client alone, and weighs it after each tenth of them.

    Args:
      url: The server's address, without a path.
      number: How many calls.
      traced: Whether to weigh what Python has allocated, or else the resident memory.

    Returns:
      Kilobytes, ten times.
    """
    if traced:
        tracemalloc.start()
    own = Client(ExternalServer(f"{url}/v1"), Requests(max_in_flight=64))
    series: list[float] = []
    chunk = 1_000
    for part in range(_PARTS):
        for start in range(0, number // _PARTS, chunk):
            size = min(chunk, number // _PARTS - start)
            outcomes = own.run([_call(f"{part} {start + i}") for i in range(size)])
            assert all(isinstance(outcome, Reply) for outcome in outcomes)
            del outcomes
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] if traced else _memory_mb()["VmRSS"] * 1024**2
        series.append(taken / 1024)
    own.close()
    return series


def _call(text: str) -> Call:
    body = {"model": "standin", "prompt": f"{text} {'some text ' * 10}", "max_tokens": 1}
    return Call(COMPLETIONS_PATH, msgspec.json.encode(body))
