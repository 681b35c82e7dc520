"""What a runner is told: by a real SDK harness, over the Fn API, while a real pipeline runs."""

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.metrics import MetricsFilter
from apache_beam.metrics.monitoring_infos import extract_distribution
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability.api import beam_fn_api_pb2
from apache_beam.runners.portability.fn_api_runner import fn_runner, worker_handlers
from apache_beam.transforms.environments import SubprocessSDKEnvironment

import beam_llm

NAMESPACE = "BeamML_ModelManager"
ROWS = 600
FAST = {"interval_secs": 0.1, "window_secs": 5.0, "target_drain_secs": 60.0}


def pipeline_of(runner: Any, standin_env: dict[str, str], identifier: str, **chat: Any) -> Any:
    """Rows that take a stand-in vLLM about 5 seconds, 8 at a time."""
    pipeline = beam.Pipeline(runner=runner, options=chat.pop("options", PipelineOptions()))
    _ = (
        pipeline
        | beam.Create([beam.Row(text=f"row {i}") for i in range(ROWS)])
        | beam_llm.VLLMChat(
            model="m",
            model_identifier=identifier,
            messages=[{"role": "user", "content": "{text}"}],
            requests={"max_in_flight": 8},
            server={"env": {**standin_env, "STANDIN_LATENCY_SECS": "0.05"}},
            **{"autoscaling": FAST, **chat},
        )
    )
    return pipeline


class Control:
    """The runner's end of the Fn API's control stream to one harness."""

    def __init__(self, connection: worker_handlers.ControlConnection):
        self._connection = connection

    def ask(self, **request: Any) -> beam_fn_api_pb2.InstructionResponse:
        return self._connection.push(beam_fn_api_pb2.InstructionRequest(**request)).get()

    def metrics(self) -> dict[tuple[str, str], tuple[int, int, int, int]]:
        """Process-wide distributions: (count, sum, min, max) by namespace and name."""
        data = self.ask(
            harness_monitoring_infos=beam_fn_api_pb2.HarnessMonitoringInfosRequest()
        ).harness_monitoring_infos.monitoring_data
        ids = beam_fn_api_pb2.MonitoringInfosMetadataRequest(monitoring_info_id=list(data))
        known = self.ask(monitoring_infos=ids).monitoring_infos.monitoring_info
        found = {}
        for short_id, info in known.items():
            info.payload = data[short_id]
            if info.type == "beam:metrics:distribution_int64:v1":
                key = info.labels["NAMESPACE"], info.labels["NAME"]
                found[key] = extract_distribution(info)
        return found


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Finds the control stream of the next pipeline's harness, and its moments."""
    moments: dict[str, Any] = {"connected": threading.Event(), "at_end": lambda control: None}
    start_worker = worker_handlers.SubprocessSdkWorkerHandler.start_worker
    close_all = worker_handlers.WorkerHandlerManager.close_all

    def start(handler: Any) -> None:
        start_worker(handler)
        moments["control"] = Control(handler.control_conn)
        moments["connected"].set()

    def close(manager: Any) -> None:
        # All bundles are finished, and the harness is still there.
        if "control" in moments:
            try:
                moments["at_end"](moments["control"])
            except Exception as error:
                moments["error"] = error
        close_all(manager)

    monkeypatch.setattr(worker_handlers.SubprocessSdkWorkerHandler, "start_worker", start)
    monkeypatch.setattr(worker_handlers.WorkerHandlerManager, "close_all", close)
    yield moments
    assert "error" not in moments, moments["error"]


def harness() -> fn_runner.FnApiRunner:
    command = f"{sys.executable} -m apache_beam.runners.worker.sdk_worker_main"
    return fn_runner.FnApiRunner(default_environment=SubprocessSDKEnvironment(command))


def test_a_real_harness_tells_the_latest_value_also_while_no_bundle_runs(
    standin_env: dict[str, str], control: dict[str, Any]
) -> None:
    name = (NAMESPACE, "num_loaded_models_harness tickets/1")
    during: list[Any] = []
    after: list[Any] = []
    done = threading.Event()

    def watch() -> None:
        assert control["connected"].wait(120)
        while not done.is_set():
            during.append(control["control"].metrics().get(name))
            time.sleep(0.05)

    def at_end(asking: Control) -> None:
        done.set()
        watching.join()
        deadline = time.monotonic() + 60
        while len(after) < 20 and time.monotonic() < deadline:
            after.append(asking.metrics().get(name))
            time.sleep(0.05)

    control["at_end"] = at_end
    watching = threading.Thread(target=watch)
    watching.start()
    try:
        pipeline = pipeline_of(harness(), standin_env, "harness tickets/1")
        pipeline.run().wait_until_finish()
    finally:
        done.set()
        control["connected"].set()
        watching.join()
    seen = [value for value in during if value is not None]
    assert during[0] is None  # nothing is said before there is something to say
    assert len(set(seen)) > 1, "the value never changed, so a mean would look the same"
    for value in seen + after:
        count, total, least, most = value
        assert count == 1
        assert total == least == most > 0
    # 8 at a time, 50 ms each: 160 a second at best, for 60 s.
    assert 0.3 * 9_600 < seen[-1][1] < 1.3 * 9_600
    # Idle, it holds; and the harness answers with no bundle to answer for.
    assert len(after) == 20
    assert {value[1] for value in after[5:]} == {after[-1][1]}


def test_nothing_is_published_when_it_is_not_wanted(
    standin_env: dict[str, str], control: dict[str, Any]
) -> None:
    found: list[Any] = []
    control["at_end"] = lambda asking: found.append(asking.metrics())
    pipeline = pipeline_of(harness(), standin_env, "quiet", autoscaling={"enabled": False})
    pipeline.run().wait_until_finish()
    (metrics,) = found
    assert [key for key in metrics if key[0] == NAMESPACE] == []


def queried(result: Any, name: str) -> list[Any]:
    wanted = MetricsFilter().with_namespace(NAMESPACE).with_name(name)
    return result.metrics().query(wanted)["distributions"]


def answered(result: Any) -> int:
    found = result.metrics().query(MetricsFilter().with_name("rows_done"))["counters"]
    return sum(counter.result for counter in found)


def test_the_direct_runners_metrics_do_not_have_it(standin_env: dict[str, str]) -> None:
    """It asks its workers for the metrics of their bundles alone."""
    result = pipeline_of("FnApiRunner", standin_env, "direct").run()
    result.wait_until_finish()
    assert answered(result) == ROWS
    assert queried(result, "num_loaded_models_direct") == []


@pytest.mark.prism
def test_prisms_metrics_do_not_have_it(standin_env: dict[str, str], prism: str) -> None:
    """Nor does Prism."""
    options = PipelineOptions(["--environment_type=LOOPBACK", f"--prism_location={prism}"])
    result = pipeline_of("PrismRunner", standin_env, "on-prism", options=options).run()
    result.wait_until_finish()
    assert answered(result) == ROWS
    assert queried(result, "num_loaded_models_on-prism") == []
