"""The life of the real vLLM, where a stand-in proves too little."""

import json
import os
import signal
import threading
import urllib.request

import psutil
import pytest
from server_helpers import HANG_SECS, family, shared_memory, vllm_process, wait_gone

from beam_llm import progress
from beam_llm.vllm.server import VLLMServerError, VLLMServerSpec
from tiny_model import make_tiny_model

pytestmark = pytest.mark.vllm

ENV = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
ARGS = ("--enforce-eager", "--max-model-len=2048")


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> VLLMServerSpec:
    model = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    return VLLMServerSpec(identifier="tiny", model=str(model), args=ARGS, env=ENV)


def complete(url: str, model: str) -> dict:
    body = json.dumps({"model": model, "prompt": "A batch of prompts", "max_tokens": 4})
    request = urllib.request.Request(
        f"{url}/v1/completions", body.encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def test_it_answers_on_loopback_alone_comes_back_and_ends_with_its_holder(hold, acquire, spec):
    server = acquire(spec)
    endpoint = server.wait_ready()
    usage = complete(endpoint.url, spec.model)["usage"]
    assert usage["completion_tokens"] == 4
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0  # not null: it was asked for

    processes = family(server.pid)
    assert len(processes) >= 5  # supervisor, sentinel, API server, engine, tracker
    listening = [
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert set(listening) == {"127.0.0.1"}

    holder = hold(spec)
    pid = holder.ready()
    assert pid == server.pid
    server.close()  # the holder goes on
    vllm = vllm_process(pid)
    old = [vllm, *vllm.children(recursive=True)]
    engine = next(p for p in old if "EngineCore" in " ".join(p.cmdline()))
    engine.kill()
    wait_gone(old)
    again = acquire(spec).wait_ready(after_failure_of=endpoint)
    assert again.generation == endpoint.generation + 1
    assert complete(again.url, spec.model)["usage"]["completion_tokens"] == 4

    processes = family(pid)
    acquire(spec).close()
    holder.do("exit")
    wait_gone(processes)


def test_nothing_is_left_when_the_holder_is_killed(hold, spec):
    holder = hold(spec)
    processes = family(holder.ready())
    memory = shared_memory(processes)
    assert memory
    holder.signal(signal.SIGKILL)
    wait_gone(processes)
    assert not {path for path in memory if path.exists()}


def test_nothing_is_left_when_the_holder_is_terminated_while_weights_load(hold, acquire, spec):
    loading = progress_reaches("loading weights")
    server = acquire(spec)
    holder = hold(spec)
    holder.wait("acquired")
    loading()
    processes = family(server.pid)
    server.close()
    holder.signal(signal.SIGTERM)
    wait_gone(processes)


def progress_reaches(phase: str):
    reached = threading.Event()

    def listen(_identifier, _state, now, _elapsed, _detail):
        if now == phase:
            reached.set()

    progress.set_server_listener(listen)

    def wait() -> None:
        try:
            assert reached.wait(HANG_SECS)
        finally:
            progress.set_server_listener(None)

    return wait


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"args": ("--no-such-flag",)}, ["exited with code 2", "bad flag", "--no-such-flag"]),
        ({"model": "/no/such/model"}, ["exited with code 1", "the model is missing"]),
    ],
)
def test_it_says_why_it_cannot_start(acquire, spec, change, words):
    server = acquire(
        VLLMServerSpec(**{"identifier": "bad", "model": spec.model, "env": ENV} | change)
    )
    with pytest.raises(VLLMServerError) as caught:
        server.wait_ready()
    for word in [*words, str(server.log_path)]:
        assert word in str(caught.value)
    assert os.path.getsize(server.log_path) > 0
