"""The client against real sockets: a stand-in vLLM, and a server that misbehaves on demand."""

import asyncio
import json
import os
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from beam_llm.config import Requests
from beam_llm.vllm.client import (
    Call,
    Client,
    ExternalServer,
    Reply,
    RequestError,
    ServerSettings,
)
from beam_llm.vllm.protocol import COMPLETIONS_PATH
from beam_llm.vllm.server import VLLMServerError, VLLMServerSpec

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextmanager
def serving(handler: Handler) -> Iterator[str]:
    """Serves on loopback from a thread, and gives the address as OpenAI clients take it."""
    started = threading.Event()
    stop: list[Callable[[], None]] = []
    port: list[int] = []

    async def main() -> None:
        app = web.Application()
        app.router.add_route("*", "/v1/{tail:.*}", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port.append(site._server.sockets[0].getsockname()[1])  # type: ignore[union-attr]
        done = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(done.set))
        started.set()
        await done.wait()
        await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    started.wait()
    try:
        yield f"http://127.0.0.1:{port[0]}/v1"
    finally:
        stop[0]()
        thread.join()


def call(prompt: str = "p") -> Call:
    return Call(COMPLETIONS_PATH, json.dumps({"prompt": prompt, "model": "m"}).encode())


def completion(text: str = "t", **more: Any) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": "stop"}], "model": "m", **more}


@pytest.fixture
def client_of() -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def make(url: str, api_key: str | None = None, **requests: Any) -> Client:
        clients.append(Client(ExternalServer(url), Requests(**requests), api_key))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def ask(client: Client, *prompts: str) -> list[Reply | RequestError]:
    return client.run([call(prompt) for prompt in prompts or ("p",)])


@pytest.fixture(autouse=True)
def _no_long_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("beam_llm.vllm.client._FIRST_BACKOFF_SECS", 0.01)


def test_answers_come_in_order_whatever_the_servers_order(client_of: Any) -> None:
    async def handler(request: web.Request) -> web.Response:
        prompt = (await request.json())["prompt"]
        await asyncio.sleep(0.02 if int(prompt) % 2 else 0)
        return web.json_response(completion(prompt))

    with serving(handler) as url:
        outcomes = ask(client_of(url, max_in_flight=7), *map(str, range(50)))
    assert [o.answer.choices[0].text for o in outcomes] == [str(i) for i in range(50)]


def test_never_more_in_flight_than_asked_for(client_of: Any) -> None:
    now = most = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.005)
        now -= 1
        return web.json_response(completion())

    with serving(handler) as url:
        client = client_of(url, max_in_flight=5)
        threads = [threading.Thread(target=ask, args=(client, *"abcdefghij")) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == 5


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 302])
def test_a_refusal_is_not_retried_and_gives_the_servers_words(client_of: Any, status: int) -> None:
    asked = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        body = {"error": {"message": "You did it wrong.", "code": status}}
        return web.json_response(body, status=status, headers={"Location": "http://127.0.0.1:9/"})

    with serving(handler) as url:
        (outcome,) = ask(client_of(url))
    assert asked == 1
    assert isinstance(outcome, RequestError)
    assert (outcome.kind, outcome.status, outcome.attempts) == ("refused", status, 1)
    assert str(outcome) == f"You did it wrong. (refused, HTTP {status})"


@pytest.mark.parametrize(
    ("status", "kind"), [(429, "rate_limited"), (500, "server_error"), (503, "server_error")]
)
def test_transient_failures_are_retried(client_of: Any, status: int, kind: str) -> None:
    asked: Counter[str] = Counter()

    async def handler(request: web.Request) -> web.Response:
        prompt = (await request.json())["prompt"]
        asked[prompt] += 1
        if prompt == "never" or (prompt == "second" and asked[prompt] == 1):
            return web.Response(status=status, text="busy")
        return web.json_response(completion(prompt))

    with serving(handler) as url:
        outcomes = ask(client_of(url, max_retries=2), "first", "second", "never")
    assert asked == {"first": 1, "second": 2, "never": 3}
    assert [o.attempts for o in outcomes] == [1, 2, 3]
    assert isinstance(outcomes[1], Reply)
    assert isinstance(outcomes[2], RequestError)
    assert str(outcomes[2]) == f"busy ({kind}, HTTP {status}, after 3 attempts)"


def test_retry_after_is_honoured(client_of: Any) -> None:
    times: list[float] = []

    async def handler(request: web.Request) -> web.Response:
        times.append(asyncio.get_running_loop().time())
        if len(times) == 1:
            return web.Response(status=429, headers={"Retry-After": "0.3"})
        return web.json_response(completion())

    with serving(handler) as url:
        (outcome,) = ask(client_of(url))
    assert isinstance(outcome, Reply)
    assert times[1] - times[0] >= 0.3


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"choices": []}',
        b'{"choices": [{"text": 1}]}',
        b"\xff\xfe",
        b"<html>",
    ],
)
def test_an_answer_that_cannot_be_read_is_retried_then_fails_its_prompt(
    client_of: Any, body: bytes
) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    with serving(handler) as url:
        (outcome,) = ask(client_of(url, max_retries=1))
    assert isinstance(outcome, RequestError)
    assert (outcome.kind, outcome.attempts) == ("invalid_answer", 2)


@pytest.mark.parametrize(
    "body", [b"", b"{", b'"words"', b'{"error": "words"}', b'{"detail": [{"msg": "x"}]}', b"\xff"]
)
def test_any_error_body_is_survived(client_of: Any, body: bytes) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body, status=400)

    with serving(handler) as url:
        (outcome,) = ask(client_of(url))
    assert isinstance(outcome, RequestError)
    assert outcome.kind == "refused"


def test_a_connection_cut_in_the_answer_is_retried(client_of: Any) -> None:
    asked = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        if asked < 3:
            response = web.StreamResponse(headers={"Content-Length": "1000"})
            await response.prepare(request)
            await response.write(b'{"choices"')
            request.transport.close()  # type: ignore[union-attr]
            return response
        return web.json_response(completion())

    with serving(handler) as url:
        (outcome,) = ask(client_of(url))
    assert isinstance(outcome, Reply)
    assert outcome.attempts == 3


def test_a_slow_answer_times_out(client_of: Any) -> None:
    async def handler(request: web.Request) -> web.Response:
        if (await request.json())["prompt"] == "slow":
            await asyncio.sleep(30)
        return web.json_response(completion())

    with serving(handler) as url:
        slow, quick = ask(client_of(url, timeout_secs=0.2, max_retries=1), "slow", "quick")
    assert isinstance(quick, Reply)
    assert isinstance(slow, RequestError)
    assert str(slow) == "no answer within 0.2 s (timeout, after 2 attempts)"


def test_nobody_listening_fails_each_prompt_after_its_retries(client_of: Any) -> None:
    outcomes = ask(client_of("http://127.0.0.1:9/v1", max_retries=1), "a", "b")
    assert [(o.kind, o.attempts) for o in outcomes] == [("connection", 2)] * 2


def test_the_api_key_is_sent(client_of: Any) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response(completion(request.headers["Authorization"]))

    with serving(handler) as url:
        (outcome,) = ask(client_of(url, api_key="secret"))
    assert outcome.answer.choices[0].text == "Bearer secret"


def test_a_missing_api_key_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ValueError, match=r"server\.api_key_env: .* has no NO_SUCH_KEY"):
        ServerSettings(None, "http://127.0.0.1:9/v1", "NO_SUCH_KEY").open()


def test_a_cancelled_submission_says_nothing_any_more(client_of: Any) -> None:
    arrived = threading.Event()
    left = threading.Event()

    async def handler(request: web.Request) -> web.Response:
        arrived.set()
        try:
            await asyncio.sleep(30)
        finally:
            left.set()
        return web.json_response(completion())

    with serving(handler) as url:
        said: list[Any] = []
        submission = client_of(url).submit([call()], said.append)
        assert arrived.wait(20)
        submission.cancel()
        assert left.wait(20)
        assert said == []


def test_equal_settings_share_a_client_and_others_do_not() -> None:
    def settings(**more: Any) -> ServerSettings:
        return ServerSettings(None, "http://127.0.0.1:9/v1", **more)

    first = settings().open()
    assert settings().open() is first
    assert settings(requests=Requests(max_in_flight=3)).open() is not first


# With a server of ours


def spec(standin: dict[str, str], identifier: str, env: Any = None) -> VLLMServerSpec:
    return VLLMServerSpec(identifier=identifier, model="m", env={**standin, **(env or {})})


def answers(log: Path) -> Counter[str]:
    return Counter(json.loads(line) for line in log.read_text().splitlines())


def test_a_killed_server_is_waited_for_and_only_the_unanswered_are_asked_again(
    standin_env: dict[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    env = {"STANDIN_LOG": str(log), "STANDIN_LATENCY_SECS": "0.005"}
    settings = ServerSettings(
        spec(standin_env, "killed", env=env), requests=Requests(max_in_flight=8, max_retries=0)
    )
    client = settings.open()
    prompts = [f"prompt {i}" for i in range(1000)]
    prompts[300] += " CRASH"
    prompts[700] += " CRASH"
    outcomes = client.run([call(prompt) for prompt in prompts])
    assert [o.answer.choices[0].text for o in outcomes if isinstance(o, Reply)] == prompts
    again = {prompt: n for prompt, n in answers(log).items() if n > 1}
    # An answer written while the process died may be lost on its way: no more than were
    # in flight at the two crashes.
    assert len(again) <= 16
    assert answers(log).keys() == set(prompts)


def test_a_prompt_that_always_brings_the_server_down_fails_alone(
    standin_env: dict[str, str],
) -> None:
    # Without a log the stand-in remembers no crash: this prompt brings every server down.
    client = ServerSettings(
        spec(standin_env, "poisoned"), requests=Requests(max_in_flight=4)
    ).open()
    prompts = [f"prompt {i}" for i in range(20)]
    *good, bad = client.run([call(prompt) for prompt in [*prompts, "CRASH"]])
    assert [o.answer.choices[0].text for o in good if isinstance(o, Reply)] == prompts
    assert isinstance(bad, RequestError)
    assert bad.kind == "server_crash"
    assert str(bad).startswith("the server crashed 4 times with this prompt under way")


def test_the_workers_own_api_key_does_not_lock_us_out(
    standin_env: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from beam_llm.vllm.server import VLLMServer

    monkeypatch.setenv("VLLM_API_KEY", "for something else")
    server = VLLMServer.acquire(spec(standin_env, "keyless"))
    server.wait_ready()
    environments = [
        process.environ()
        for process in psutil.process_iter()
        if process.pid != os.getpid() and "keyless" in _marker(process, server.log_path)
    ]
    assert environments
    assert all("VLLM_API_KEY" not in environment for environment in environments)


def _marker(process: psutil.Process, log: Path) -> str:
    try:
        marked = str(log.with_suffix("")) in process.environ().get("BEAM_LLM_SERVER", "")
    except psutil.Error:
        return ""
    return "keyless" if marked else ""


def test_a_server_that_cannot_start_fails_the_batch_with_its_own_words(
    standin_env: dict[str, str],
) -> None:
    settings = ServerSettings(spec(standin_env, "bad", env={"STANDIN_FAIL": "badflag"}))
    client = settings.open()
    with pytest.raises(VLLMServerError, match="exited with code 2: bad flag"):
        client.run([call()])


def test_two_identifiers_never_share_a_server(standin_env: dict[str, str]) -> None:
    one, two = (ServerSettings(spec(standin_env, name)).open() for name in ("one", "two"))
    assert one is not two
    ask(one), ask(two)
    endpoints = {client._endpoint.url for client in (one, two)}  # type: ignore[union-attr]
    assert len(endpoints) == 2
