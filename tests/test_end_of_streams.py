"""How a stream ends: drained, nothing is lost; cancelled, nothing is left running."""

import contextlib
import gc
import logging
import threading
import time
from pathlib import Path
from typing import Any

import apache_beam as beam
import psutil
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.runner import PipelineState
from apache_beam.testing import test_stream
from apache_beam.transforms.periodicsequence import PeriodicImpulse
from apache_beam.typehints.row_type import RowTypeConstraint
from apache_beam.utils.timestamp import Timestamp

import beam_llm

ROW = RowTypeConstraint.from_fields([("team", str), ("text", str)])

# Beam leaves the sockets and processes of a finished job to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where the stand-in writes what it answered."""
    path = tmp_path / "log"
    path.touch()
    return path


def completions(standin_env: dict[str, str], log: Path, **batching: Any) -> beam.PTransform:
    return beam_llm.VLLMCompletions(
        model="m",
        prompt="{team}: {text}",
        prefix_batching={"key_field": "team"},
        batching=batching,
        server={"env": {**standin_env, "STANDIN_LOG": str(log)}},
    )


_kept: list[str] = []


def keep(row: Any) -> None:
    _kept.append(row.completion)


def test_draining_answers_what_waits(standin_env: dict[str, str], log: Path) -> None:
    """A drain moves the watermark to its end, and fires no timer of processing time."""
    rows = [beam.Row(team=f"t{i % 3}", text=str(i)) for i in range(10)]
    events = test_stream.TestStream().advance_watermark_to(0).add_elements(rows)
    pipeline = beam.Pipeline(
        runner="BundleBasedDirectRunner", options=PipelineOptions(streaming=True)
    )
    _ = (
        pipeline
        | events.advance_watermark_to_infinity()
        | beam.Map(lambda row: row).with_output_types(ROW)
        | completions(
            standin_env,
            log,
            min_batch_size=100,
            max_batch_size=100,
            max_batch_duration_secs=86_400,
        )
        | beam.Map(keep)
    )
    _kept.clear()
    pipeline.run().wait_until_finish()
    assert sorted(_kept) == [f"t{i % 3}: {i}" for i in (0, 3, 6, 9, 1, 4, 7, 2, 5, 8)]


def held_by(log: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("STANDIN_LOG") == str(log):
                found.append(process)
    return found


@pytest.mark.prism
def test_cancelling_ends_the_server(
    standin_env: dict[str, str], log: Path, prism: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest keeps what is logged, and so the tracebacks of the cancelled bundle with its DoFns.
    for name in ("apache_beam.runners.worker.sdk_worker", "PrismRunner"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", False)
    pipeline = beam.Pipeline(
        options=PipelineOptions(
            runner="PrismRunner",
            prism_location=prism,
            environment_type="LOOPBACK",
            streaming=True,
        )
    )
    _ = (
        pipeline
        | PeriodicImpulse(start_timestamp=Timestamp.now(), fire_interval=0.05)
        | beam.Map(lambda at: beam.Row(team="t", text=f"{float(at)}")).with_output_types(ROW)
        | completions(standin_env, log)
    )
    result = pipeline.run()
    deadline = time.monotonic() + 300  # what takes longer has hung
    while log.read_text().count("\n") < 20:
        assert time.monotonic() < deadline
        threading.Event().wait(0.1)
    servers = held_by(log)
    assert servers
    result.cancel()
    assert result.state == PipelineState.CANCELLED
    alive = servers
    while alive:
        assert time.monotonic() < deadline
        gc.collect()  # Beam drops the DoFns of a cancelled bundle, without a teardown
        _, alive = psutil.wait_procs(alive, timeout=1)
    assert held_by(log) == []
