"""Asynchronous client of an OpenAI-compatible server: bounded, retried, one pool a process.

Requests run on one background event loop per process. Each prompt stands alone: what
the server refuses fails that prompt only. A managed server that dies is waited for,
and only what was not answered is asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import msgspec
from yarl import URL

from beam_llm import progress
from beam_llm.config import Requests
from beam_llm.vllm.capacity import Capacity, publish
from beam_llm.vllm.protocol import Answer, decode_answer, error_message
from beam_llm.vllm.server import Endpoint, VLLMServer, VLLMServerSpec

# uvicorn, vLLM's web server, closes idle connections after 5 s.
_KEEPALIVE_SECS = 4.0
_FIRST_BACKOFF_SECS = 0.5
_LONGEST_BACKOFF_SECS = 30.0
# A prompt that was under way in so many crashes is next asked with nothing beside it.
_CRASHES_UNTIL_ALONE = 3
_RETRIED_STATUSES = frozenset({408, 425, 429, *range(500, 600)})


class RequestError(Exception):
    """One prompt that got no answer.

    Attributes:
      kind: ``refused`` (the server will not answer it), ``rate_limited``, ``timeout``,
        ``connection``, ``server_error``, ``invalid_answer`` or ``server_crash`` (it brought
        our server down, alone).
      status: HTTP status, or None when there was none.
      attempts: How often it was sent.
    """

    def __init__(self, kind: str, message: str, status: int | None = None, attempts: int = 1):
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.status = status
        self.attempts = attempts

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.kind, self.message, self.status, self.attempts))

    def __str__(self) -> str:
        status = f", HTTP {self.status}" if self.status else ""
        tried = f", after {self.attempts} attempts" if self.attempts > 1 else ""
        return f"{self.message} ({self.kind}{status}{tried})"


@dataclass(frozen=True, slots=True)
class Call:
    """One request to send.

    Attributes:
      path: Below the server's ``/v1``, as in ``beam_llm.vllm.protocol``.
      body: JSON text in UTF-8.
    """

    path: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Reply:
    """One answered request.

    Attributes:
      answer: What the server said.
      latency_secs: How long the successful attempt took [s].
      attempts: How many attempts there were.
    """

    answer: Answer
    latency_secs: float
    attempts: int


Outcome = Reply | RequestError


class Target(Protocol):
    """Where requests go."""

    #: What follows the endpoint's address, before a request's path.
    prefix: str

    def publish(self, capacity: Capacity) -> None:
        """Publishes the server's capacity as soon as it answers."""
        ...

    def wait(self, failed: Endpoint | None) -> Endpoint:
        """Blocks until the server answers.

        Args:
          failed: The endpoint that just failed, if one did.

        Returns:
          The endpoint to use; the same again when nothing better is to be had.
        """
        ...


class ExternalServer:
    """A server that somebody else runs.

    Args:
      base_url: Its address, as OpenAI's clients take it: with ``/v1``.
    """

    prefix = ""

    def __init__(self, base_url: str):
        self._endpoint = Endpoint(url=base_url.rstrip("/"), generation=0)

    @classmethod
    def at(cls, base_url: str) -> ExternalServer:
        """The process's one for this address."""
        with _external_lock:
            server = _external.get(base_url)
            if server is None:
                server = _external[base_url] = cls(base_url)
            return server

    def publish(self, capacity: Capacity) -> None:
        """Publishes the server's capacity from now on: nobody tells when it answers."""
        publish(self, capacity)

    def wait(self, failed: Endpoint | None) -> Endpoint:
        """Gives the address: there is nothing to wait for."""
        del failed
        return self._endpoint


class ManagedServer:
    """A server that ``beam_llm`` started, and starts again when it dies."""

    prefix = "/v1"

    def __init__(self, server: VLLMServer):
        self.server = server
        self._capacities: list[Capacity] = []  # to be published when it answers

    def publish(self, capacity: Capacity) -> None:
        """Publishes the server's capacity as soon as it answers."""
        self._capacities.append(capacity)
        if self.server.endpoint is not None:
            self._publish()

    def wait(self, failed: Endpoint | None) -> Endpoint:
        """Waits until the server is ready, through start-up and restarts.

        Raises:
          VLLMServerError: It does not come (back).
        """
        endpoint = self.server.wait_ready(after_failure_of=failed)
        self._publish()
        return endpoint

    def _publish(self) -> None:
        while self._capacities:
            with contextlib.suppress(IndexError):  # another thread was faster
                publish(self.server, self._capacities.pop(0))


class _EventLoopThread:
    """The process's event loop for requests, on a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.pid = os.getpid()
        self.thread = threading.Thread(
            target=self.loop.run_forever, name="beam-llm-requests", daemon=True
        )
        self.thread.start()


_loop_lock = threading.Lock()
_loop_thread: _EventLoopThread | None = None


def _event_loop() -> _EventLoopThread:
    global _loop_thread
    with _loop_lock:
        # A forked child inherits the object but not the thread.
        if _loop_thread is None or _loop_thread.pid != os.getpid():
            _loop_thread = _EventLoopThread()
        return _loop_thread


class Submission:
    """A batch of calls under way."""

    def __init__(self, client: Client, calls: Sequence[Call], done: Callable[[Submission], None]):
        self._client = client
        self._calls = calls
        self._done = done
        self._task: asyncio.Task[None] | None = None
        self._cancelled = False
        self._outcomes: list[Outcome] | None = None
        self._error: BaseException | None = None

    def result(self) -> list[Outcome]:
        """The outcomes, one for each call, in order, once ``done`` was called.

        Raises:
          VLLMServerError: The server cannot be started or does not come back.
        """
        if self._error is not None:
            raise self._error
        if self._outcomes is None:
            raise RuntimeError("the submission is not done")
        return self._outcomes

    def cancel(self) -> None:
        """Gives up what has not been answered; ``done`` is not called any more."""
        self._cancelled = True
        if self._task is not None:
            self._client.loop.call_soon_threadsafe(self._task.cancel)

    def start(self) -> None:
        """Begins, on the loop's thread."""
        if not self._cancelled:
            self._task = self._client.loop.create_task(self._run())

    async def _run(self) -> None:
        try:
            if len(self._calls) == 1:  # spares a task
                self._outcomes = [await self._client.call(self._calls[0])]
            else:
                self._outcomes = list(
                    await asyncio.gather(*(self._client.call(call) for call in self._calls))
                )
        except asyncio.CancelledError:
            return
        except BaseException as error:
            self._error = error
        if not self._cancelled:
            self._done(self)


class Client:
    """Sends requests to one server.

    Thread-safe. Closed when it is garbage-collected, which also lets go of a managed
    server.
    """

    def __init__(self, target: Target, requests: Requests, api_key: str | None = None):
        """Makes a client; nothing is sent yet.

        Args:
          target: Where requests go.
          requests: Bounds and retries.
          api_key: Sent as a bearer token.
        """
        self._target = target
        self._published: list[Capacity] = []
        self._requests = requests
        thread = _event_loop()
        self.loop = thread.loop
        self._session: aiohttp.ClientSession = asyncio.run_coroutine_threadsafe(
            _open_session(requests, api_key), thread.loop
        ).result()
        self._slots = asyncio.Semaphore(requests.max_in_flight)
        self._alone = asyncio.Lock()
        self._incoming: deque[Submission] = deque()
        self._woken = False
        self._endpoint: Endpoint | None = None
        self._urls: dict[str, URL] = {}
        self._waiting: asyncio.Task[Endpoint] | None = None
        self._finalizer = weakref.finalize(self, _close_session, self._session, thread)

    def publish(self, capacity: Capacity) -> None:
        """Publishes the server's capacity as long as it is there, once for all who ask."""
        if capacity not in self._published:
            self._published.append(capacity)
            self._target.publish(capacity)

    @property
    def max_in_flight(self) -> int:
        """Most requests under way at once."""
        return self._requests.max_in_flight

    def submit(self, calls: Sequence[Call], done: Callable[[Submission], None]) -> Submission:
        """Starts a batch of calls and returns at once.

        Args:
          calls: The requests; at most ``max_in_flight`` of all submissions run at once.
          done: Called on the loop's thread with the submission when all are answered.

        Returns:
          The submission.
        """
        submission = Submission(self, calls, done)
        self._incoming.append(submission)
        if not self._woken:  # waking the loop costs a system call
            self._woken = True
            self.loop.call_soon_threadsafe(self._start_incoming)
        return submission

    def _start_incoming(self) -> None:
        self._woken = False  # before the look: what comes now wakes the loop again
        while self._incoming:
            self._incoming.popleft().start()

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """Sends a batch of calls and waits for it.

        Args:
          calls: The requests.

        Returns:
          One outcome for each call, in order.

        Raises:
          VLLMServerError: The server cannot be started or does not come back.
        """
        future: Future[None] = Future()
        submission = self.submit(calls, lambda _: future.set_result(None))
        try:
            future.result()
        except BaseException:
            submission.cancel()
            raise
        return submission.result()

    def close(self) -> None:
        """Closes the connections; for tests and short programs."""
        self._finalizer()

    async def call(self, call: Call) -> Outcome:
        """Sends one request, with retries, and gives its outcome. Runs on ``loop``."""
        attempts = 0
        for _ in range(_CRASHES_UNTIL_ALONE):
            async with self._slots:
                outcome = await self._until_crash(call, attempts)
            if not isinstance(outcome, _Crash):
                return outcome
            attempts = outcome.attempts
        async with self._alone, _all_slots(self._slots, self._requests.max_in_flight):
            outcome = await self._until_crash(call, attempts)
        if not isinstance(outcome, _Crash):
            return outcome
        return RequestError(
            "server_crash",
            f"the server crashed {_CRASHES_UNTIL_ALONE + 1} times with this prompt under way, the"
            " last time with no other of this step beside it",
            None,
            outcome.attempts,
        )

    async def _until_crash(self, call: Call, attempts: int) -> Outcome | _Crash:
        """Sends a request until it has an outcome, or a server of ours has crashed under it."""
        retries = 0
        while True:
            endpoint = self._endpoint or await self._wait(None)
            attempts += 1
            outcome, retry_after = await self._attempt(call, attempts)
            if isinstance(outcome, Reply) or retry_after is None:
                return outcome
            # A vLLM whose engine has died says so with a 500 before it goes down.
            if outcome.kind in ("connection", "server_error"):
                now = await self._wait(endpoint)
                if now.generation != endpoint.generation:
                    return _Crash(attempts)
            if retries == self._requests.max_retries:
                return outcome
            retries += 1
            await asyncio.sleep(max(retry_after, _backoff_secs(retries)))

    async def _attempt(self, call: Call, attempts: int) -> tuple[Outcome, float | None]:
        """Gives the outcome, and how long to wait at least before another try [s], if one helps."""
        started = time.monotonic()

        def failure(kind: str, words: str, status: int | None = None) -> RequestError:
            return RequestError(kind, words, status, attempts)

        try:
            async with self._session.post(
                self._urls[call.path], data=call.body, allow_redirects=False
            ) as response:
                body = await response.read()
        except aiohttp.ConnectionTimeoutError as error:
            return failure("connection", str(error)), 0.0
        except TimeoutError:
            return failure("timeout", f"no answer within {self._requests.timeout_secs:g} s"), 0.0
        except (aiohttp.ClientError, OSError) as error:
            return failure("connection", str(error) or type(error).__name__), 0.0
        status = response.status
        if status == 200:
            try:
                answer = decode_answer(call.path, body)
            except ValueError as error:
                words = f"the server's answer cannot be read: {error}"
                return failure("invalid_answer", words, status), 0.0
            usage = answer.usage
            tokens = ((usage.prompt_tokens or 0) + (usage.completion_tokens or 0)) if usage else 0
            progress.count(answered=1, tokens=tokens)
            return Reply(answer, time.monotonic() - started, attempts), None
        if status not in _RETRIED_STATUSES:
            return failure("refused", error_message(body), status), None
        kind = "rate_limited" if status == 429 else "server_error"
        return failure(kind, error_message(body), status), _retry_after(response)

    async def _wait(self, failed: Endpoint | None) -> Endpoint:
        if failed is not None and self._endpoint not in (None, failed):
            return self._endpoint  # somebody else waited already
        if self._waiting is None:
            self._waiting = self.loop.create_task(self._wait_once(failed))
            self._waiting.add_done_callback(self._waited)
        return await asyncio.shield(self._waiting)

    async def _wait_once(self, failed: Endpoint | None) -> Endpoint:
        endpoint = await asyncio.wrap_future(_in_daemon_thread(self._target.wait, failed))
        self._endpoint = endpoint
        self._urls = _Urls(endpoint.url + self._target.prefix)
        return endpoint

    def _waited(self, task: asyncio.Task[Endpoint]) -> None:
        self._waiting = None
        if not task.cancelled():
            task.exception()  # seen here, raised to each waiter


@dataclass(frozen=True, slots=True)
class _Crash:
    """A server of ours went down while a request was under way."""

    attempts: int


@contextlib.asynccontextmanager
async def _all_slots(slots: asyncio.Semaphore, count: int) -> AsyncGenerator[None]:
    taken = 0
    try:
        while taken < count:
            await slots.acquire()
            taken += 1
        yield
    finally:
        for _ in range(taken):
            slots.release()


def _in_daemon_thread(
    wait: Callable[[Endpoint | None], Endpoint], failed: Endpoint | None
) -> Future[Endpoint]:
    # Not an executor: its threads would hold up the interpreter's exit during a start-up.
    future: Future[Endpoint] = Future()

    def run() -> None:
        try:
            future.set_result(wait(failed))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="beam-llm-wait", daemon=True).start()
    return future


class _Urls(dict[str, URL]):
    """Parsed addresses by path: parsing is a fifth of a small request's cost."""

    def __init__(self, base_url: str):
        super().__init__()
        self._base_url = base_url

    def __missing__(self, path: str) -> URL:
        url = self[path] = URL(f"{self._base_url}/{path}")
        return url


async def _open_session(requests: Requests, api_key: str | None) -> aiohttp.ClientSession:
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=requests.max_in_flight, keepalive_timeout=_KEEPALIVE_SECS
        ),
        timeout=aiohttp.ClientTimeout(total=requests.timeout_secs, sock_connect=10),
        headers=headers,
    )


def _close_session(session: aiohttp.ClientSession, thread: _EventLoopThread) -> None:
    if thread.pid != os.getpid() or not thread.thread.is_alive():
        return
    future = asyncio.run_coroutine_threadsafe(session.close(), thread.loop)
    if threading.current_thread() is not thread.thread:
        future.result(timeout=10)


def _backoff_secs(attempts: int) -> float:
    # Exponential, with jitter, so that a crowd does not come back at once.
    longest = min(_LONGEST_BACKOFF_SECS, _FIRST_BACKOFF_SECS * 2 ** (attempts - 1))
    return random.uniform(longest / 2, longest)  # noqa: S311


def _retry_after(response: aiohttp.ClientResponse) -> float:
    try:
        secs = float(response.headers.get("Retry-After", 0))
    except ValueError:
        return 0.0  # a date: our own backoff will do
    return min(max(secs, 0.0), _LONGEST_BACKOFF_SECS)


_clients: weakref.WeakValueDictionary[Any, Client] = weakref.WeakValueDictionary()
_clients_lock = threading.Lock()
_external: weakref.WeakValueDictionary[str, ExternalServer] = weakref.WeakValueDictionary()
_external_lock = threading.Lock()


def _after_fork_in_child() -> None:
    """Renews what another thread of the parent may have held."""
    global _clients_lock, _external_lock, _loop_lock
    _clients_lock, _external_lock = threading.Lock(), threading.Lock()
    _loop_lock = threading.Lock()
    _clients.clear()
    _external.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


@dataclass(frozen=True)
class ServerSettings:
    """Where requests go: a server to start on each worker, or one that runs already.

    Attributes:
      spec: The server to start; None with ``endpoint``.
      endpoint: Base address of a running server, with its ``/v1``.
      api_key_env: Variable of the worker's environment that holds the API key.
      requests: How requests are sent.
      capacity: How the server's capacity is published; None if it is not.
    """

    spec: VLLMServerSpec | None
    endpoint: str | None = None
    api_key_env: str | None = None
    requests: Requests = field(default_factory=Requests)
    capacity: Capacity | None = None

    def open(self) -> Client:
        """Opens the process's client for this server, and begins to start the server.

        Returns:
          A client shared by all who ask with equal settings; hold it as long as the
          server is needed.

        Raises:
          ValueError: A variable that the settings name is missing here.
        """
        api_key = None
        if self.api_key_env is not None:
            api_key = os.environ.get(self.api_key_env)
            if not api_key:
                raise ValueError(
                    f"server.api_key_env: the worker's environment has no {self.api_key_env}"
                )
        where = self.endpoint or msgspec.json.encode(self.spec, order="sorted")
        key = (os.getpid(), where, api_key, self.requests)
        with _clients_lock:
            client = _clients.get(key)
            if client is None:
                client = _clients[key] = Client(self._target(), self.requests, api_key)
        if self.capacity is not None:
            client.publish(self.capacity)
        return client

    def _target(self) -> Target:
        if self.endpoint is not None:
            return ExternalServer.at(self.endpoint)
        assert self.spec is not None  # noqa: S101 - one of the two is always there
        return ManagedServer(VLLMServer.acquire(self.spec))
