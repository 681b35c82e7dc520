"""Three ways to ask one running server about the same rows, timed alike.

`ask_bare` is a client of 20 lines on asyncio and aiohttp, `ask_ours` the `VLLMCompletions`
transform, `ask_stock` Beam's own `VLLMCompletionsModelHandler` in `RunInference`. Each is
meant to be called in a process of its own (`common.in_child`), with a job of plain JSON.

A Beam pipeline is timed by two steps in it, from the first row that enters what is measured
to the last that leaves it: the making of the pipeline, the start of the runner, the rows'
own making and shuffling, and the set-up of clients and models (Beam calls it before a
bundle's first element) are outside for both Beam variants. Grouping and batching are inside.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.typehints.row_type import RowTypeConstraint

DIRECT = "apache_beam.runners.portability.fn_api_runner.FnApiRunner"


class _Clock:
    """Of this process, where the workers of a local runner are threads."""

    started: float | None = None
    ended = 0.0
    rows = 0


class _Rows(beam.DoFn):
    """Reads the rows in the worker, so that the source costs the same for everyone."""

    def __init__(self, path: str):
        self._path = path

    def process(self, _: Any) -> Iterator[Any]:
        for row in read_rows(self._path):
            yield beam.Row(**row)


class _Started(beam.DoFn):
    def process(self, element: Any) -> Iterator[Any]:
        if _Clock.started is None:
            _Clock.started = time.perf_counter()
        yield element


class _Ended(beam.DoFn):
    def process(self, element: Any) -> None:
        _Clock.rows += 1
        _Clock.ended = time.perf_counter()


def read_rows(path: str) -> list[dict[str, Any]]:
    """Reads rows from lines of JSON."""
    with open(path) as file:
        return [json.loads(line) for line in file]


def _pipeline(runner: str, prism: str | None) -> beam.Pipeline:
    if runner == "direct":
        return beam.Pipeline(runner=DIRECT, options=PipelineOptions([]))
    return beam.Pipeline(
        options=PipelineOptions(
            ["--runner=PrismRunner", f"--prism_location={prism}", "--environment_type=LOOPBACK"]
        )
    )


def _timed(rows: str, steps: beam.PTransform, runner: str, prism: str | None) -> dict[str, Any]:
    whole = time.perf_counter()
    fields = [(name, type(value)) for name, value in read_rows(rows)[0].items()]
    pipeline = _pipeline(runner, prism)
    _ = (
        pipeline
        | beam.Impulse()
        | "Rows" >> beam.ParDo(_Rows(rows)).with_output_types(RowTypeConstraint.from_fields(fields))
        | beam.Reshuffle()
        | "Started" >> _SameType(beam.ParDo(_Started()))
        | "Measured" >> steps
        | "Ended" >> beam.ParDo(_Ended())
    )
    pipeline.run().wait_until_finish()
    now = time.perf_counter()
    assert _Clock.started is not None
    return {
        "rows": _Clock.rows,
        "seconds": _Clock.ended - _Clock.started,
        "pipeline_secs": now - whole,
    }


class _SameType(beam.PTransform):
    def __init__(self, inner: beam.PTransform):
        super().__init__()
        self._inner = inner

    def expand(self, input_or_inputs: Any) -> Any:
        return input_or_inputs | self._inner.with_output_types(input_or_inputs.element_type)


def ask_ours(
    url: str,
    rows: str,
    config: dict[str, Any],
    runner: str = "direct",
    prism: str | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Asks with `VLLMCompletions`.

    Args:
      url: The server's address, without a path.
      rows: A file of rows, as lines of JSON.
      config: The transform's, without its server.
      runner: `direct` or `prism`.
      prism: Path of the Prism binary.

    Returns:
      How many `rows` came out, the `seconds` measured, and the whole pipeline's time.
    """
    from beam_llm.transforms import VLLMCompletions

    steps = VLLMCompletions(**config, server={"endpoint": f"{url}/v1"})
    return _timed(rows, steps, runner, prism)


def ask_stock(
    url: str,
    rows: str,
    config: dict[str, Any],
    batching: dict[str, int] | None = None,
    runner: str = "direct",
    prism: str | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Asks with Beam's handler: as `ask_ours`, with Beam's batching parameters."""
    from apache_beam.ml.inference.base import RunInference

    from benchmarks.stock import StockHandler

    template = config["prompt"]
    handler = StockHandler(config["model"], int(url.rpartition(":")[2]), **(batching or {}))
    sampling = dict(config["sampling"])
    extra = json.loads(sampling.pop("extra_body", "{}"))
    arguments = {**sampling, **({"extra_body": extra} if extra else {})}

    class Steps(beam.PTransform):
        def expand(self, input_or_inputs: Any) -> Any:
            return (
                input_or_inputs
                | beam.Map(lambda row: template.format(**row._asdict())).with_output_types(str)
                | RunInference(handler, inference_args=arguments)
            )

    return _timed(rows, Steps(), runner, prism)


def ask_bare(
    url: str, rows: str, config: dict[str, Any], in_flight: int, **_: Any
) -> dict[str, Any]:
    """Asks without Beam: as `ask_ours`, with `in_flight` requests under way at once."""
    template = config["prompt"]
    sampling = dict(config["sampling"])
    sampling.update(json.loads(sampling.pop("extra_body", "{}")))
    prompts = [template.format(**row) for row in read_rows(rows)]

    async def main() -> tuple[int, float]:
        waiting = iter(prompts)
        answers: list[str] = []
        connector = aiohttp.TCPConnector(limit=in_flight)
        timeout = aiohttp.ClientTimeout(total=3600)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

            async def worker() -> None:
                for prompt in waiting:
                    body = {"model": config["model"], "prompt": prompt, **sampling}
                    async with session.post(f"{url}/v1/completions", json=body) as response:
                        response.raise_for_status()
                        answer = json.loads(await response.read())
                        answers.append(answer["choices"][0]["text"])

            began = time.perf_counter()
            await asyncio.gather(*(worker() for _ in range(in_flight)))
            return len(answers), time.perf_counter() - began

    answered, seconds = asyncio.run(main())
    return {"rows": answered, "seconds": seconds, "pipeline_secs": seconds}
