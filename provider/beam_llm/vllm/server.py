"""A vLLM server that lives as long as somebody holds it.

One server per machine, user and model identifier, shared by processes, threads and
pipeline steps. This module is the holder's side; `supervisor.py` is the process that owns
vLLM. Neither imports vLLM here.
"""

import contextlib
import fcntl
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn, cast

import msgspec

import beam_llm
from beam_llm import progress
from beam_llm.vllm.messages import Check, Hello, Launch, State

_MAX_SUPERVISORS_LOST = 5
_WINDOW_SECS = 600.0
_CONNECT_TIMEOUT_SECS = 10.0
# This package may be importable thanks to a path that only this process knows.
_SUPERVISOR = (
    f"import sys; sys.path.insert(0, {str(Path(beam_llm.__path__[0]).parent)!r}); "
    "from beam_llm.vllm.supervisor import main; main(int(sys.argv[1]), sys.argv[2])"
)
_MAX_SOCKET_PATH = 107  # bytes: the kernel's limit for the address of a Unix socket

_OURS = {
    "port": "it listens on a free port of its own; ask the server object for its endpoint",
    "host": "it listens on loopback only; for a server elsewhere use endpoint",
    "uds": "it is reached by TCP on loopback",
    "model": "give the model as the spec's model",
    "model-tag": "give the model as the spec's model",
    "api-key": "it listens on loopback only, and is asked without a key",
    "headless": "a headless server answers no requests",
    "grpc": "the server is asked by HTTP",
    "ssl-keyfile": "the server is asked by plain HTTP, on loopback only",
    "ssl-certfile": "the server is asked by plain HTTP, on loopback only",
}
_API_KEY = "VLLM_API_KEY"
# vLLM's flags that have no `--no-` form.
_FLAGS_WITHOUT_NEGATIVE = {"headless", "grpc"}
# The defaults that differ from vLLM's: usage with the cached tokens, and no line per request.
_DEFAULT_FLAGS = ("enable-prompt-tokens-details", "disable-uvicorn-access-log")


class VLLMServerError(RuntimeError):
    """A server that cannot start or stay up, or that somebody else runs differently."""


class VLLMServerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What server to run.

    Attributes:
      identifier: Its name on this machine. Holders of one identifier share one server, and
        must agree on everything else but the time-out.
      model: A path or a name on the hub.
      args: vLLM's own command line, as for `vllm serve MODEL`.
      env: Variables for the server, beside this process's environment.
      env_from_worker: Names of variables that this process's environment must have: for
        secrets, which have no place in a pipeline's configuration.
      startup_timeout_secs: Longest time the server may take to answer [s].
    """

    identifier: str
    model: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    env_from_worker: tuple[str, ...] = ()
    startup_timeout_secs: float = 600.0

    def __post_init__(self) -> None:
        for name in ("identifier", "model"):
            value: Any = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ValueError(f"{name}: {value!r} is not a non-empty string")
        if self.model.startswith("-"):
            raise ValueError(f"model: {self.model!r} looks like a flag; use ./{self.model}")
        if isinstance(cast(Any, self.args), str):
            raise ValueError(f"args: {self.args!r} is one string; give a list, one per argument")
        for name, value in cast("Mapping[Any, Any]", self.env).items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise ValueError(f"env: {name!r}: {value!r} is not a string for a string")
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(f"env: {name!r} is no variable: no empty name, '=' or NUL")
            if name == _API_KEY:
                raise ValueError(f"env: {name} is not yours to set: {_OURS['api-key']}")
        if self.startup_timeout_secs <= 0:
            raise ValueError(f"startup_timeout_secs: {self.startup_timeout_secs!r} is not positive")
        _check_args(self.args)

    def launch(self) -> Launch:
        """The supervisor's part of the spec, with our defaults filled in.

        Raises:
          VLLMServerError: If the environment lacks a variable of `env_from_worker`.
        """
        missing = [name for name in self.env_from_worker if name not in os.environ]
        if missing:
            raise VLLMServerError(
                f"server {self.identifier!r}: the worker's environment lacks "
                f"{', '.join(missing)} (env_from_worker)"
            )
        given = {_flag(arg) for arg in self.args}
        defaults = [f"--{name}" for name in _DEFAULT_FLAGS if not {name, f"no-{name}"} & given]
        # Part of the comparison: a server has the secrets of the holder that started it.
        secrets = {name: os.environ[name] for name in self.env_from_worker}
        return Launch(self.identifier, self.model, (*self.args, *defaults), {**secrets, **self.env})


def _flag(arg: str) -> str:
    """The name of a flag in vLLM's canonical form, without its dashes; else ''."""
    if not arg.startswith("--"):
        return ""
    return arg[2:].partition("=")[0].replace("_", "-")


def _check_args(args: tuple[Any, ...]) -> None:
    previous: str = "--flag=value"
    for position, arg in enumerate(args):
        where = f"args[{position}]: {arg!r}"
        if not isinstance(arg, str):
            raise ValueError(f"{where} is {type(arg).__name__}, not a string: write {str(arg)!r}")
        if "\0" in arg:
            raise ValueError(f"{where} holds a NUL character")
        if reason := _OURS.get(_flag(arg)):
            raise ValueError(f"{where} is not yours to set: {reason}")
        if match := re.match(r"(--[\w.-]+)\s+(.*)", arg, re.DOTALL):
            raise ValueError(f"{where} holds two arguments: write {match[1]}={match[2]}")
        if not arg.startswith("-") and previous.startswith("--") and "=" in previous:
            raise ValueError(
                f"{where} would name the model: give it as the spec's model, "
                f"and the values of flags as --flag=value"
            )
        previous = arg


def args_from_vllm_server_kwargs(kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Writes Beam's `vllm_server_kwargs` as vLLM's command line.

    Args:
      kwargs: Flags without their dashes. A value of None or True gives the bare flag, False
        its `--no-` form; mappings and sequences are written as JSON, anything else by `str`.

    >>> args_from_vllm_server_kwargs({"max_model_len": 2048, "enforce_eager": True})
    ('--max-model-len=2048', '--enforce-eager')
    """
    args: list[str] = []
    for key, value in kwargs.items():
        name = key.lstrip("-").replace("_", "-")
        if value is None or value is True:
            args.append(f"--{name}")
        elif value is False:
            if name not in _FLAGS_WITHOUT_NEGATIVE:
                args.append(f"--no-{name}")
        elif isinstance(value, (Mapping, list, tuple)):
            args.append(f"--{name}={json.dumps(value)}")
        else:
            args.append(f"--{name}={value}")
    return tuple(args)


class Endpoint(msgspec.Struct, frozen=True):
    """Where a server answers.

    Attributes:
      url: Its base address, without a path.
      generation: Grows with each restart, whoever's supervisor made it.
    """

    url: str
    generation: int


class VLLMServer:
    """This process's hold on a server. Safe to use from any thread.

    `acquire` returns at once and the server starts in the background. It stops when no
    process holds it any more: when the object is garbage or closed, or the process ends.

        server = VLLMServer.acquire(VLLMServerSpec(identifier="tickets", model=path))
        endpoint = server.wait_ready()
        …                       # a request to endpoint.url failed?
        endpoint = server.wait_ready(after_failure_of=endpoint)
    """

    def __init__(self, spec: VLLMServerSpec):
        """Use `acquire`, which shares servers."""
        self.spec = spec
        self._link = _Link(spec)
        # The thread below owns the link alone: nothing it does keeps this object alive.
        self._finalizer = weakref.finalize(self, self._link.close)
        self._finalizer.atexit = False
        self._link.start()

    @classmethod
    def acquire(cls, spec: VLLMServerSpec) -> "VLLMServer":
        """The process's server of this identifier, started if nobody runs it yet.

        Raises:
          VLLMServerError: If this process holds a server of the same identifier and other
            settings, or `env_from_worker` names a variable there is not.
        """
        with _servers_lock:
            server = _servers.get(spec.identifier)
            if server is not None and server._link.usable:
                if difference := server._link.launch.difference(spec.launch()):
                    raise VLLMServerError(
                        f"server {spec.identifier!r} is held already with other settings: "
                        f"{difference}. Give servers that differ different identifiers"
                    )
                return server
            server = _servers[spec.identifier] = cls(spec)
            return server

    def wait_ready(
        self, timeout: float | None = None, *, after_failure_of: Endpoint | None = None
    ) -> Endpoint:
        """Waits until the server answers.

        Args:
          timeout: Longest time to wait [s]; None waits as long as the server may take.
          after_failure_of: The endpoint at which a request has just failed to connect. The
            server is probed at once, and the answer is an endpoint of a later generation, or
            the same if it proved healthy after this call.

        Raises:
          VLLMServerError: If the server cannot start or stay up, or the hold is closed.
          TimeoutError: After `timeout`.
        """
        return self._link.wait_ready(timeout, after_failure_of)

    @property
    def endpoint(self) -> Endpoint | None:
        """Where the server answers; None unless it is ready."""
        return self._link.endpoint

    @property
    def startup_secs(self) -> float | None:
        """How long the last start took [s]; None before the first has succeeded."""
        return self._link.startup_secs

    @property
    def pid(self) -> int | None:
        """Process id of the supervisor, once connected."""
        return self._link.supervisor_pid

    @property
    def log_path(self) -> Path:
        """The file with vLLM's output."""
        return self._link.path.with_suffix(".log")

    def call_at_end(self, function: Callable[[], object]) -> None:
        """Has a function called once when this hold ends: closed, failed, or garbage.

        It may be called anywhere, by a finalizer too, and must take no lock. At once, if the
        hold has ended.
        """
        self._link.call_at_end(function)

    def close(self) -> None:
        """Ends this process's hold, for everybody who got it from `acquire`."""
        self._finalizer()

    def __enter__(self) -> "VLLMServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a VLLMServer belongs to its process and cannot be pickled: send its spec, and "
            "acquire it there"
        )

    def __repr__(self) -> str:
        endpoint = self.endpoint
        where = endpoint.url if endpoint else self._link.status
        return f"<VLLMServer {self.spec.identifier!r} of {self.spec.model!r}: {where}>"


class _Link:
    """The connection to the supervisor, and the thread that reads from it."""

    def __init__(self, spec: VLLMServerSpec):
        self.identifier = spec.identifier
        self.launch = spec.launch()
        self.path = runtime_dir() / f"{_digest(spec.identifier)}.sock"
        self.endpoint: Endpoint | None = None
        self.startup_secs: float | None = None
        self.supervisor_pid: int | None = None
        self.status = "starting"
        self.socket: socket.socket | None = None
        self._startup_timeout_secs = spec.startup_timeout_secs
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._failure = ""
        self._at_end: list[Callable[[], object]] = []
        self._generation = 0
        self._checks = 0
        self._checked = 0
        _links.add(self)

    def start(self) -> None:
        name = f"beam-llm-server-{self.identifier}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def usable(self) -> bool:
        return self._pid == os.getpid() and not self._failure

    def close(self) -> None:
        if self._pid != os.getpid():
            return  # a forked child: the hold is its parent's
        with self._changed:
            self._fail("closed")
            if self.socket is not None:
                # The reading thread wakes up and closes it.
                with contextlib.suppress(OSError):
                    self.socket.shutdown(socket.SHUT_RDWR)

    def wait_ready(self, timeout: float | None, failed: Endpoint | None) -> Endpoint:
        if self._pid != os.getpid():
            raise VLLMServerError(
                f"server {self.identifier!r} is held by the process this one was forked from: "
                "acquire it here"
            )
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            number = 0
            if failed is not None:
                number = self._checks = self._checks + 1
                self._send(Check(number))
            while True:
                if self._failure:
                    raise VLLMServerError(f"server {self.identifier!r}: {self._failure}")
                if self.endpoint is not None and (
                    failed is None
                    or number <= self._checked
                    or self.endpoint.generation > failed.generation
                ):
                    return self.endpoint
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(
                        f"server {self.identifier!r} is not ready after {timeout:g} s: "
                        f"{self.status}"
                    )
                self._changed.wait(left)

    def call_at_end(self, function: Callable[[], object]) -> None:
        with self._changed:
            if not self._failure:
                self._at_end.append(function)
                return
        function()

    def _fail(self, message: str) -> None:
        self._failure = self._failure or message
        while self._at_end:
            self._at_end.pop()()
        self.status = self._failure.partition("\n")[0]
        self.endpoint = None
        self._changed.notify_all()

    def _send(self, message: Hello | Check) -> None:
        # A broken connection shows itself to the reading thread, which mends it.
        if self.socket is not None:
            with contextlib.suppress(OSError):
                self.socket.sendall(msgspec.json.encode(message) + b"\n")

    def _run(self) -> None:
        lost: deque[float] = deque(maxlen=_MAX_SUPERVISORS_LOST)
        while not self._failure:
            try:
                with _fork_lock:
                    self.socket = _connect(self.path)
            except (OSError, VLLMServerError) as error:
                self._report_failure(f"cannot reach its supervisor: {error}")
                return
            self._converse()
            if self._failure:
                return
            now = time.monotonic()
            if len(lost) == _MAX_SUPERVISORS_LOST and now - lost[0] < _WINDOW_SECS:
                self._report_failure(
                    f"its supervisor died {_MAX_SUPERVISORS_LOST + 1} times within "
                    f"{_WINDOW_SECS / 60:.0f} minutes; see {self.path.with_suffix('.log')}"
                )
                return
            delay = 0.0 if not lost else 0.5 * 2 ** len(lost)
            lost.append(now)
            message = f"its supervisor died; starting another in {delay:g} s"
            progress.report_server(self.identifier, "restarting", detail=message)
            with self._changed:
                self.endpoint = None
                self.status = "restarting"
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._failure), delay)

    def _converse(self) -> None:
        """Reads states until the connection ends."""
        assert self.socket is not None  # noqa: S101
        connection = self.socket
        try:
            with self._changed:
                if self._failure:
                    return
                self._send(
                    Hello(self.launch, self._startup_timeout_secs, last_generation=self._generation)
                )
                if self._checks > self._checked:  # asked of a supervisor that has died since
                    self._send(Check(self._checks))
            decode = msgspec.json.Decoder(State).decode
            rest = b""
            while data := connection.recv(65536):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._take(decode(line))
        except OSError:
            pass
        finally:
            # In this order: a finalizer may want a link's lock where the other one is held.
            with _fork_lock, self._changed:
                self.socket = None
                connection.close()

    def _take(self, state: State) -> None:
        if state.state == "failed":
            self._report_failure(state.message)
            return
        detail = ""
        with self._changed:
            if self._failure:
                return
            self.supervisor_pid = state.supervisor_pid
            self._checked = max(self._checked, state.checked)
            if state.state == "ready":
                detail = f"http://127.0.0.1:{state.port}"
                self.endpoint = Endpoint(detail, state.generation)
                self._generation = state.generation
                self.startup_secs = state.startup_secs
                self.status = "ready"
            else:
                self.endpoint = None
                self.status = state.phase or state.state
                if state.state == "restarting":
                    detail = f"restart {state.attempt} in {state.delay_secs:.1f} s: {state.message}"
            self._changed.notify_all()
        if not state.checked:
            progress.report_server(
                self.identifier, state.state, state.phase, state.elapsed_secs, detail
            )

    def _report_failure(self, message: str) -> None:
        if not self._failure:  # said before anybody is woken up by it
            progress.report_server(self.identifier, "failed", detail=message)
        with self._changed:
            self._fail(message)


# --- finding, or starting, the supervisor ------------------------------------------------


def runtime_dir() -> Path:
    """The directory of this user's sockets, locks and logs; made if there is none.

    Raises:
      VLLMServerError: If it belongs to somebody else or others may write to it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if base and os.access(base, os.W_OK | os.X_OK):
        path = Path(base, "beam-llm")
    else:
        path = Path(tempfile.gettempdir(), f"beam-llm-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if status.st_uid != os.getuid() or (status.st_mode & 0o170777) != 0o040700:
        raise VLLMServerError(
            f"{path} must be a directory of user {os.getuid()} with mode 0700; it belongs to "
            f"user {status.st_uid} with mode {status.st_mode & 0o7777:04o}: remove it"
        )
    return path


def _digest(identifier: str) -> str:
    return sha256(identifier.encode(errors="surrogatepass")).hexdigest()[:16]


def _connect(path: Path) -> socket.socket:
    """Connects to the supervisor of this socket, started if there is none."""
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise VLLMServerError(f"{path} is too long for a socket: set XDG_RUNTIME_DIR or TMPDIR")
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_CONNECT_TIMEOUT_SECS)
    try:
        with _locked(path.with_suffix(".lock")):
            try:
                connection.connect(os.fspath(path))
            except (FileNotFoundError, ConnectionRefusedError):
                path.unlink(missing_ok=True)
                _start_supervisor(path, connection)
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    return connection


@contextlib.contextmanager
def _locked(path: Path) -> Generator[None, None, None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _start_supervisor(path: Path, connection: socket.socket) -> None:
    """Binds the socket, connects to it, and only then starts who answers it.

    So no other holder can find the socket before it works, and the supervisor, which ends
    without a holder, has one from its first moment.
    """
    log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.fspath(path))
            try:
                listener.listen(128)
                connection.connect(os.fspath(path))
                command = [sys.executable, "-P", "-c", _SUPERVISOR, str(listener.fileno()), path]
                # It forks once more and its first process ends at once.
                subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(listener.fileno(),),
                    start_new_session=True,
                    check=True,
                )
            except BaseException as error:
                path.unlink(missing_ok=True)
                if isinstance(error, subprocess.SubprocessError):
                    raise VLLMServerError(f"{error}; see {path.with_suffix('.log')}") from error
                raise
    finally:
        os.close(log)


# --- threads and forks -------------------------------------------------------------------

_servers: "weakref.WeakValueDictionary[str, VLLMServer]" = weakref.WeakValueDictionary()
_servers_lock = threading.Lock()
_links: "weakref.WeakSet[_Link]" = weakref.WeakSet()
_fork_lock = threading.Lock()  # held while a descriptor exists that a fork must not copy


def _after_fork_in_child() -> None:
    """Lets go of what the parent holds: an inherited connection would keep its hold alive."""
    global _servers_lock
    for link in list(_links):
        if link.socket is not None:
            os.close(link.socket.detach())
            link.socket = None
    _links.clear()
    _servers.clear()
    _servers_lock = threading.Lock()  # another thread of the parent may have held it
    _fork_lock.release()


os.register_at_fork(
    before=_fork_lock.acquire,
    after_in_parent=_fork_lock.release,
    after_in_child=_after_fork_in_child,
)
