"""Servers, and the publishers of their capacity: one each, no longer than they live."""

import gc
import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import apache_beam as beam
import psutil
import pytest
from apache_beam.ml.inference.base import KeyedModelHandler
from apache_beam.ml.inference.base import RunInference as BeamRunInference
from pages import serving
from prometheus_client.parser import text_string_to_metric_families

import beam_llm
from beam_llm import VLLMChatModelHandler, VLLMCompletionsModelHandler
from beam_llm.autoscaling import AutoscalingMetricConfig
from beam_llm.autoscaling.publisher import published, publishers
from beam_llm.autoscaling.sampler import PrometheusCounterGaugeSampler
from beam_llm.config import Autoscaling, Requests
from beam_llm.vllm.client import Call, ServerSettings
from beam_llm.vllm.server import VLLMServer, VLLMServerSpec

# An estimator that learns from whatever runs: what is tested here is who publishes, and where.
FAST = AutoscalingMetricConfig(
    estimator="completion_rate", interval_secs=0.05, window_secs=1, min_completions=1
)
_names = count()


@pytest.fixture
def identifier() -> Iterator[str]:
    """An identifier of the test's own, of which no publisher is left."""
    name = f"wired-{next(_names)}"
    yield name
    wait_for(lambda: gc.collect() is not None and publishers_of(name) == [])
    assert [t for t in threading.enumerate() if t.name == f"beam-llm-capacity-{name}"] == []


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.005)


def publishers_of(tag: str) -> list[Any]:
    return [one for one in publishers() if one.tag == tag]


@pytest.fixture
def slow(standin_env: dict[str, str]) -> dict[str, str]:
    """A stand-in that takes long enough for requests to be seen under way."""
    return {**standin_env, "STANDIN_LATENCY_SECS": "0.02"}


def handler_of(env: dict[str, str], identifier: str, **more: Any) -> VLLMCompletionsModelHandler:
    handler = VLLMCompletionsModelHandler("m", env=env, autoscaling_config=FAST, **more)
    handler.set_model_identifier(identifier)
    return handler


def ask(handler: Any, model: Any, rows: int = 64) -> None:
    results = handler.run_inference(["a"] * rows, model)
    assert len(results) == rows


def test_a_handler_publishes_under_the_identifier_from_the_first_answer_to_the_end(
    slow: dict[str, str], identifier: str
) -> None:
    handler = handler_of(slow, identifier)
    model = handler.load_model()
    assert publishers_of(identifier) == []  # the server does not answer yet
    while published(identifier) is None:
        ask(handler, model)
    assert len(publishers_of(identifier)) == 1
    assert published(identifier) >= 1
    # The publisher holds nothing: who lets go of the handler lets go of the server.
    server = handler._client._target.server
    supervisor = psutil.Process(server.pid)
    del handler, model, server
    gc.collect()
    wait_for(lambda: publishers_of(identifier) == [])
    psutil.wait_procs([supervisor], timeout=60)
    assert not supervisor.is_running()
    assert published(identifier) >= 1


@pytest.mark.parametrize("kind", [VLLMCompletionsModelHandler, VLLMChatModelHandler])
def test_both_handlers_publish_by_default_and_can_be_told_not_to(kind: Any) -> None:
    assert kind("m").publishes_capacity
    assert not kind("m", enable_autoscaling_metric=False).publishes_capacity
    assert not kind(
        "m", autoscaling_config=AutoscalingMetricConfig(enabled=False)
    ).publishes_capacity
    here = "http://127.0.0.1:9/v1"
    assert not kind("m", endpoint=here).publishes_capacity
    assert kind("m", endpoint=here, metrics_endpoint="http://127.0.0.1:9/m").publishes_capacity
    copy = pickle.loads(pickle.dumps(kind("m", autoscaling_config=FAST)))
    assert copy._autoscaling == FAST


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metrics_endpoint": "http://h/m"}, "metrics_endpoint: needs endpoint"),
        (
            {"autoscaling_config": FAST, "enable_autoscaling_metric": False},
            "autoscaling_config: has no effect with enable_autoscaling_metric=False",
        ),
        (
            {"autoscaling_config": FAST, "endpoint": "http://h/v1"},
            "autoscaling_config: has no effect with endpoint without metrics_endpoint",
        ),
        (
            {"endpoint": "http://h/v1", "metrics_endpoint": "h/m"},
            "metrics_endpoint: 'h/m' is not an address",
        ),
    ],
)
def test_arguments_that_contradict_each_other(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VLLMCompletionsModelHandler("m", **arguments)


def test_beams_model_manager_publishes_the_same_metric_and_is_refused() -> None:
    handler = VLLMCompletionsModelHandler("m")
    for one in (handler, KeyedModelHandler(handler)):
        with pytest.raises(ValueError, match="use_model_manager: True, and the handler publishes"):
            beam_llm.RunInference(one, use_model_manager=True)
    quiet = VLLMCompletionsModelHandler("m", enable_autoscaling_metric=False)
    beam_llm.RunInference(quiet, use_model_manager=True)
    with pytest.raises(ValueError, match="with use_model_manager, models are in another process"):
        quiet.run_inference(["a"], "a tag of the manager's")


@pytest.mark.parametrize("run_inference", [BeamRunInference, beam_llm.RunInference])
def test_run_inference_and_the_metric_agree_on_the_tag(
    slow: dict[str, str], run_inference: Any, identifier: str
) -> None:
    model = f"org/{identifier}"
    handler = VLLMCompletionsModelHandler(model, env=slow, autoscaling_config=FAST)
    step = run_inference(handler, model_identifier=identifier)
    assert step.annotations()["model_identifier"] == identifier
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        _ = pipeline | beam.Create(["a"] * 2_000) | step
    # Beam's own transform does not tell its handlers: there it is the model's name.
    other = model.replace("/", "_").replace("-", "_")
    assert published(identifier if run_inference is beam_llm.RunInference else other)


def settings(env: dict[str, str], identifier: str, **more: Any) -> ServerSettings:
    from beam_llm.vllm.capacity import Capacity

    spec = VLLMServerSpec(identifier=identifier, model="m", env=env)
    more.setdefault("capacity", Capacity(identifier, FAST))
    return ServerSettings(spec, **more)


CALL = Call("completions", b'{"prompt": "a"}')


def test_steps_and_threads_that_share_a_server_share_its_publisher(
    slow: dict[str, str], identifier: str, caplog: pytest.LogCaptureFixture
) -> None:
    clients: list[Any] = []

    def open_and_ask(bound: int) -> None:
        client = settings(slow, identifier, requests=Requests(max_in_flight=bound)).open()
        clients.append(client)
        client.run([CALL] * 8)

    opening = [threading.Thread(target=open_and_ask, args=(1 + i % 3,)) for i in range(9)]
    for thread in opening:
        thread.start()
    for thread in opening:
        thread.join()
    assert len({id(client) for client in clients}) == 3
    assert len(publishers_of(identifier)) == 1
    name = f"beam-llm-capacity-{identifier}"
    assert [t.name for t in threading.enumerate()].count(name) == 1
    assert caplog.records == []


def test_the_first_of_two_wishes_counts_and_the_other_is_told(
    slow: dict[str, str], identifier: str, caplog: pytest.LogCaptureFixture
) -> None:
    from beam_llm.vllm.capacity import Capacity

    one = settings(slow, identifier).open()
    one.run([CALL])
    two = settings(slow, identifier, capacity=Capacity("another-tag", FAST)).open()
    assert two is one
    (first,) = publishers_of(identifier)
    assert publishers_of("another-tag") == []
    (record,) = (r for r in caplog.records if r.levelno == logging.WARNING)
    assert f"num_loaded_models_{identifier} is, as the first of them" in record.message
    assert first.running


def test_a_second_step_may_be_the_first_that_publishes(
    slow: dict[str, str], identifier: str
) -> None:
    one = settings(slow, identifier, capacity=None).open()
    one.run([CALL])
    assert publishers_of(identifier) == []
    settings(slow, identifier).open()
    assert len(publishers_of(identifier)) == 1
    assert one.run([CALL])


def test_a_reloaded_servers_publisher_supersedes_the_old(
    slow: dict[str, str], identifier: str
) -> None:
    client = settings(slow, identifier).open()
    client.run([CALL])
    (old,) = publishers_of(identifier)
    spec = client._target.server.spec
    client._target.server.close()
    wait_for(lambda: not old.running)
    assert publishers_of(identifier) == []
    renewed = settings(slow, identifier, requests=Requests(max_in_flight=5)).open()
    renewed.run([CALL] * 200)
    (new,) = publishers_of(identifier)
    assert new is not old
    wait_for(lambda: published(identifier))
    assert VLLMServer.acquire(spec) is renewed._target.server


def test_a_server_that_fails_takes_its_publisher_along(
    slow: dict[str, str], identifier: str
) -> None:
    client = settings(slow, identifier).open()
    client.run([CALL])
    (publisher,) = publishers_of(identifier)
    client._target.server._link._report_failure("for a test")
    wait_for(lambda: not publisher.running)
    called: list[int] = []
    client._target.server.call_at_end(lambda: called.append(1))
    assert called == [1]  # it has ended already


def test_a_crash_is_bridged_by_the_same_publisher(
    slow: dict[str, str], identifier: str, tmp_path: Path
) -> None:
    env = {**slow, "STANDIN_LOG": str(tmp_path / "log")}
    client = settings(env, identifier).open()
    while published(identifier) is None:
        client.run([CALL] * 64)
    (publisher,) = publishers_of(identifier)
    before = publisher.polls["value"]
    client.run([Call("completions", b'{"prompt": "CRASH"}')] + [CALL] * 64)
    client.run([CALL] * 200)
    wait_for(lambda: publisher.polls["value"] > before + 3)
    assert publishers_of(identifier) == [publisher]
    assert published(identifier) >= 1


def test_an_endpoint_with_a_metrics_page(identifier: str, slow: dict[str, str]) -> None:
    with VLLMServer.acquire(VLLMServerSpec(identifier=identifier, model="m", env=slow)) as server:
        url = server.wait_ready().url
        handler = VLLMCompletionsModelHandler(
            "m",
            endpoint=f"{url}/v1",
            metrics_endpoint=f"{url}/metrics",
            autoscaling_config=FAST,
        )
        handler.set_model_identifier(identifier)
        model = handler.load_model()
        while published(identifier) is None:
            ask(handler, model)
        assert len(publishers_of(identifier)) == 1


def test_a_worker_is_full_at_the_least_of_what_bounds_it() -> None:
    from beam_llm.vllm.capacity import Capacity

    def full(config: AutoscalingMetricConfig, *bounds: int | None) -> int | None:
        return Capacity.of(config, "t", None, *bounds).config.full_concurrency

    assert full(AutoscalingMetricConfig(), 64, 16) == 16
    assert full(AutoscalingMetricConfig(), 64, None) == 64
    assert full(AutoscalingMetricConfig(full_concurrency=5), 64, 16) == 5
    assert full(FAST, 64, 16) is None  # the other estimator has no use for it


def test_the_row_transforms_publish_under_their_identifier(
    slow: dict[str, str], identifier: str
) -> None:
    rows = [beam.Row(text=f"row {i}") for i in range(2_000)]
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        _ = (
            pipeline
            | beam.Create(rows)
            | beam_llm.VLLMChat(
                model="m",
                model_identifier=identifier,
                messages=[{"role": "user", "content": "{text}"}],
                server={"env": slow},
                autoscaling=Autoscaling(
                    estimator="completion_rate", interval_secs=0.05, window_secs=1
                ),
            )
        )
    assert published(identifier) >= 1


def test_a_publisher_that_cannot_start_is_logged_and_requests_are_answered(
    slow: dict[str, str], identifier: str, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Any:
        raise RuntimeError("no estimator today")

    config = AutoscalingMetricConfig(estimator=broken)
    handler = VLLMCompletionsModelHandler("m", env=slow, autoscaling_config=config)
    handler.set_model_identifier(identifier)
    ask(handler, handler.load_model())
    assert "no estimator today" in caplog.text
    assert publishers_of(identifier) == []


def test_the_real_page_of_vllm_is_read_by_its_names() -> None:
    from beam_llm.vllm import capacity

    text = (Path(__file__).with_name("pages") / "vllm.txt").read_text()
    series = [s for f in text_string_to_metric_families(text) for s in f.samples]
    wanted = {
        name: sum(s.value for s in series if s.name == name)
        for name in (capacity.COMPLETED, capacity.RUNNING, capacity.WAITING)
    }
    with serving(text) as server:
        sampler = PrometheusCounterGaugeSampler(
            server.url,
            capacity.COMPLETED,
            capacity.RUNNING,
            waiting_name=capacity.WAITING,
            exclude_labels=capacity.NO_COMPLETIONS,
        )
        reading = sampler.read()
    assert (reading.completed_total, reading.running, reading.waiting) == tuple(wanted.values())
    assert wanted == {capacity.COMPLETED: 5, capacity.RUNNING: 4, capacity.WAITING: 8}
