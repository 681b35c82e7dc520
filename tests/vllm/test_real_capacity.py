"""The published capacity of the real vLLM, against what it can be seen to do."""

import contextlib
import json
import socket
import threading
import time
import urllib.parse

import pytest
from server_helpers import HANG_SECS, vllm_process

from beam_llm.autoscaling import AutoscalingMetricConfig, PrometheusCounterGaugeSampler
from beam_llm.autoscaling.publisher import published, publishers
from beam_llm.config import Requests
from beam_llm.vllm import capacity
from beam_llm.vllm.client import Call, Reply, ServerSettings
from beam_llm.vllm.server import VLLMServerSpec
from tiny_model import make_tiny_model

pytestmark = pytest.mark.vllm

TAG = "real"
SLOTS, DRAIN_SECS = 4, 10.0
CONFIG = AutoscalingMetricConfig(
    interval_secs=0.25, window_secs=8, target_drain_secs=DRAIN_SECS, full_concurrency=SLOTS
)
ENV = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
ARGS = ("--enforce-eager", "--max-model-len=1024", f"--max-num-seqs={SLOTS}")
BODY = {"prompt": "A batch of prompts", "max_tokens": 40, "ignore_eos": True}
CALL = Call("completions", json.dumps(BODY).encode())


def wait_for(condition) -> None:
    deadline = time.monotonic() + HANG_SECS
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.05)


class Load:
    """Keeps so many requests under way, and counts the answers."""

    def __init__(self, client, at_once: int):
        self.client = client
        self.answered = 0
        self.ended = threading.Event()
        self.threads = [threading.Thread(target=self._ask) for _ in range(at_once)]
        for thread in self.threads:
            thread.start()

    def _ask(self) -> None:
        while not self.ended.is_set():
            (outcome,) = self.client.run([CALL])
            assert isinstance(outcome, Reply), outcome
            self.answered += 1

    def rate(self, secs: float) -> float:
        """Answers a second, over the time that this takes."""
        first, began = self.answered, time.monotonic()
        self.ended.wait(secs)
        return (self.answered - first) / (time.monotonic() - began)

    def __enter__(self) -> "Load":
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join(HANG_SECS)
            assert not thread.is_alive()


def give_up_a_request(url: str) -> None:
    """Asks for much, and hangs up while it is generated: vLLM calls that an abort."""
    address = urllib.parse.urlsplit(url)
    body = json.dumps({**BODY, "max_tokens": 900, "stream": True}).encode()
    with socket.create_connection((address.hostname, address.port)) as connection:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        assert connection.recv(4096)


def test_the_capacity_is_the_throughput_of_a_full_server_through_ups_downs_and_a_restart(
    runtime, tmp_path_factory
):
    model = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    spec = VLLMServerSpec(identifier=TAG, model=str(model), args=ARGS, env=ENV)
    settings = ServerSettings(
        spec, requests=Requests(max_in_flight=64), capacity=capacity.Capacity(TAG, CONFIG)
    )
    client = settings.open()
    seen: list[int] = []
    watching = threading.Event()

    def watch() -> None:
        while not watching.wait(0.02):
            value = published(TAG)
            if value is not None:
                seen.append(value)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        client._target.server.wait_ready()
        # It rises: three times as many requests as slots, so that some wait at the server.
        with Load(client, 3 * SLOTS) as load:
            wait_for(lambda: published(TAG))
            load.rate(4)
            full = load.rate(8)
            at_full = published(TAG)
        assert full > 0
        assert at_full == pytest.approx(full * DRAIN_SECS, rel=0.25)

        # It falls: what one request at a time does says nothing of what the server can.
        (publisher,) = publishers()
        with Load(client, 1) as load:
            load.rate(1)
            held, light = published(TAG), load.rate(5)
        assert light < 0.7 * full
        assert published(TAG) == held == pytest.approx(at_full, rel=0.25)

        # What the client gives up is no completion.
        url = client._target.server.endpoint.url
        looking = PrometheusCounterGaugeSampler(
            f"{url}/metrics",
            capacity.COMPLETED,
            capacity.RUNNING,
            exclude_labels=capacity.NO_COMPLETIONS,
            timeout_secs=60,
        )
        wait_for(lambda: looking.sample()[1] == 0)
        before = looking.sample()[0]
        for _ in range(3):
            give_up_a_request(url)
        wait_for(lambda: looking.sample()[1] == 0)
        client.run([CALL])
        wait_for(lambda: looking.sample()[0] > before)
        assert looking.sample()[0] == before + 1

        # Killed under load: requests come back, and so does the publisher's sight.
        generation = client._target.server.endpoint.generation
        with Load(client, 3 * SLOTS) as load:
            load.rate(1)
            vllm_process(client._target.server.pid).kill()
            wait_for(
                lambda: (
                    (now := client._target.server.endpoint) is not None
                    and now.generation > generation
                )
            )
            before_polls = publisher.polls["value"]
            wait_for(lambda: publisher.polls["value"] > before_polls + 4)
            load.rate(4)
            again = load.rate(8)
            assert published(TAG) == pytest.approx(again * DRAIN_SECS, rel=0.3)
        assert publishers() == [publisher]
    finally:
        watching.set()
        watcher.join()
        for one in publishers():
            one.stop()
        with contextlib.suppress(AttributeError):
            client._target.server.close()
    assert min(seen) >= 1
