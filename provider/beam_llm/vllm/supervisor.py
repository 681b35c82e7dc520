"""The process that owns one vLLM server, for as long as anybody holds it.

A holder is a process with an open connection to the supervisor's Unix socket. The
connection is the hold: the kernel closes it however the holder ends. When the last one
closes, the supervisor stops vLLM and exits; until then it restarts a vLLM that crashes.

Three processes, so that no single death leaves vLLM behind:

* the supervisor leads a session of its own, in which vLLM and all its children run;
* a sentinel, outside that session, waits for the supervisor's death and then kills the
  session;
* vLLM itself asks the kernel for a SIGKILL when the supervisor dies (`launch.py`).

Run by path with `python -P` and importing nothing of `beam_llm`, so that it is up in less
than 100 ms and stays small whatever the package imports. Messages are lines of JSON.
"""

import asyncio
import collections
import contextlib
import ctypes
import fcntl
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

PROTOCOL = 1
MARKER = "BEAM_LLM_SERVER"

_STOP_GRACE_SECS = 5.0
_PROBE_SECS = 0.1  # between health checks while starting
_WATCH_SECS = 2.0  # and once ready
_PROBE_TIMEOUT_SECS = 10.0
_MAX_PROBE_FAILURES = 3
_MAX_CRASHES = 5
_CRASH_WINDOW_SECS = 600.0
_MAX_LOG_BYTES = 10_000_000
_PR_SET_CHILD_SUBREAPER = 36


class Launch(msgspec.Struct, frozen=True):
    """What to run. Two holders of one identifier must agree on it."""

    identifier: str
    model: str
    args: tuple[str, ...]
    env: dict[str, str]

    def difference(self, other: "Launch") -> str:
        """Says where two launches differ; the values of variables may be secrets."""
        found: list[str] = []
        if self.model != other.model:
            found.append(f"model {self.model!r} against {other.model!r}")
        if self.args != other.args:
            found.append(f"args {list(self.args)} against {list(other.args)}")
        names = {name for name, _ in self.env.items() ^ other.env.items()}
        if names:
            found.append(f"the variables {', '.join(sorted(names))}")
        return "; ".join(found)


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A holder's first message."""

    launch: Launch
    startup_timeout_secs: float
    last_generation: int = 0
    protocol: int = PROTOCOL


class Check(msgspec.Struct, frozen=True, tag="check"):
    """A holder saw a request fail: tell it when the server has answered a new probe."""

    number: int


class State(msgspec.Struct, frozen=True):
    """What the supervisor tells its holders. Which fields count depends on `state`."""

    state: Literal["starting", "ready", "restarting", "failed"]
    phase: str = ""
    elapsed_secs: float = 0.0
    port: int = 0
    generation: int = 0
    startup_secs: float = 0.0
    attempt: int = 0
    delay_secs: float = 0.0
    message: str = ""
    checked: int = 0
    supervisor_pid: int = 0


# --- the processes of a server -----------------------------------------------------------


class _Process(msgspec.Struct, frozen=True):
    state: str
    parent: int
    session: int


def _processes() -> Iterator[tuple[int, _Process]]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            # Gone meanwhile, or hidden from us: not ours either way.
            with contextlib.suppress(OSError):
                fields = Path("/proc", name, "stat").read_text(errors="replace").rpartition(")")[2]
                state, parent, _, session, *_ = fields.split()
                yield int(name), _Process(state, int(parent), int(session))


def tree(session: int, marker: str, spare: int = 0) -> set[int]:
    """The running processes of a server.

    vLLM renames its processes, which overwrites the environment one could tell them by:
    hence the session first, the marker for what left it, and then their descendants.

    Args:
      session: The supervisor's process id; it leads the session and is no part of the tree.
      marker: The value of the variable `BEAM_LLM_SERVER` in the tree's environment.
      spare: The sentinel.
    """
    table = dict(_processes())
    mark = f"{MARKER}={marker}".encode()
    found: set[int] = set()
    for pid, process in table.items():
        with contextlib.suppress(OSError):
            if process.session == session or mark in Path(f"/proc/{pid}/environ").read_bytes():
                found.add(pid)
    grown = True
    while grown:
        children = {pid for pid, it in table.items() if it.parent in found | {session}}
        grown = bool(children - found)
        found |= children
    return {pid for pid in found if table[pid].state not in "ZX"} - {session, spare, os.getpid()}


def _kill(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def kill_orphans(session: int, marker: str) -> None:
    """Kills what is left of a dead supervisor's tree."""
    while True:
        # A session's id is not given to a new process while the session has members: if
        # there is a living process of that id, it is a stranger and nothing is left.
        leader = dict(_processes()).get(session)
        if leader is not None and leader.state not in "ZX":
            return
        left = tree(session, marker)
        if not left:
            return
        _kill(left)
        time.sleep(0.02)


def _fork_sentinel(keep: int, marker: str) -> tuple[int, int]:
    """Forks the process that kills the tree when the supervisor dies.

    Args:
      keep: The descriptor of the lock on the tree, which the sentinel shares: the lock is
        free when both are gone.
      marker: See `tree`.

    Returns:
      Its process id, and the pipe whose end of file it waits for.
    """
    supervisor = os.getpid()
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(read)
        return pid, write
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        # Holders wait for the end of file on their connections: hold none of them open.
        kept = sorted({read, keep})
        for low, high in zip([-1, *kept], [*kept, os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(low + 1, high)
        os.read(read, 1)
        while os.getppid() == supervisor:
            time.sleep(0.005)
        kill_orphans(supervisor, marker)
    finally:
        os._exit(0)


# --- what vLLM says ----------------------------------------------------------------------

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PREFIX = re.compile(r"^(\(\S+( pid=\d+)?\) )?((DEBUG|INFO|WARNING|ERROR) \S+ \S+ \[\S+\] ?)?")
_PHASES = (
    ("importing", r"$^"),
    ("reading the model's configuration", r"non-default args|Resolved architecture"),
    ("starting the engine", r"Initializing a V1 LLM engine"),
    ("loading weights", r"Starting to load model|Loading \S+ checkpoint shards"),
    ("compiling", r"torch\.compile takes|Dynamo bytecode transform|Compiling a graph"),
    ("warming up", r"KV cache size|Capturing CUDA graph|Warming up"),
    ("opening the API", r"Starting vLLM (API )?server"),
)
_PORT_TAKEN = re.compile(r"address already in use", re.IGNORECASE)
_REASONS = (
    (_PORT_TAKEN, "the port is in use"),
    (re.compile(r"\berror: (unrecognized arguments|argument |ambiguous option).*"), "bad flag"),
    (
        re.compile(
            r"out of memory|OutOfMemory|Cannot allocate memory|[Nn]o available memory"
            r"|Free memory on device .* is less than"
        ),
        "out of memory",
    ),
    (
        re.compile(
            r"Repo id must|is not a local folder|[Ii]nvalid repository ID|RepositoryNotFound"
            r"|does not appear to have a file|couldn't connect to|outgoing traffic has been"
            r"|[Nn]o such file or directory: .*config\.json|LocalEntryNotFound"
        ),
        "the model is missing",
    ),
    (re.compile(r"^\S*(Error|Exception): (?!Engine core init)\S.*"), ""),
)


class Output:
    """The last lines of vLLM's output; all of it goes to this process's own, the log file."""

    def __init__(self, log: Path, on_phase: Callable[[], None]):
        self.phase = _PHASES[0][0]
        self._log = log
        self._on_phase = on_phase
        self._lines: collections.deque[str] = collections.deque(maxlen=400)
        self._next = 1

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Reads to the end of the stream, which comes when the whole tree has closed it."""
        rest = b""
        while data := await stream.read(65536):
            self._keep(data)
            *lines, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
            rest = rest[-65536:]
            for line in lines:
                self._add(line.decode(errors="replace"))
        self._add(rest.decode(errors="replace"))

    def _keep(self, data: bytes) -> None:
        os.write(1, data)
        if os.fstat(1).st_size > _MAX_LOG_BYTES:
            self._log.replace(self._log.with_suffix(".log.1"))
            descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.close(descriptor)

    def _add(self, line: str) -> None:
        line = _ANSI.sub("", line).rstrip()
        if not line:
            return
        self._lines.append(line)
        for number in range(self._next, len(_PHASES)):
            phase, pattern = _PHASES[number]
            if re.search(pattern, line):
                self.phase, self._next = phase, number + 1
                self._on_phase()
                break

    @property
    def port_taken(self) -> bool:
        """Whether vLLM said that somebody else listens on its port."""
        return any(_PORT_TAKEN.search(line) for line in self._lines)

    def reason(self) -> str:
        """One line out of many: why vLLM ended, as far as it said so."""
        lines = [_PREFIX.sub("", line).strip() for line in self._lines]
        for pattern, kind in _REASONS:
            for line in reversed(lines):
                if match := pattern.search(line):
                    said = match[0] if pattern.pattern.startswith(r"\b") else line
                    return f"{kind}: {said}" if kind else said
        return ""

    def tail(self) -> str:
        """The last lines, for an error message."""
        last = list(self._lines)[-30:]
        shown = "\n".join(f"  {line}" for line in last) or "  (nothing)"
        return f"The last lines of its output ({self._log}):\n{shown}"


def _ending(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(-code).name
        hint = " (the kernel does so when memory runs out)" if code == -signal.SIGKILL else ""
        return f"was killed by {name}{hint}"
    return f"was killed by signal {-code}"


# --- the server --------------------------------------------------------------------------


class _Ended(Exception):  # noqa: N818 - an outcome, expected of any server
    """vLLM ended, or must be: the message says why."""


class _Holder:
    """One connection."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.check = 0
        self.greeted = False
        self.writer: asyncio.StreamWriter | None = None

    def tell(self, state: State) -> None:
        if self.writer is not None and self.greeted:
            self.writer.write(msgspec.json.encode(state) + b"\n")


class Supervisor:
    """One server and its holders. Everything happens in one thread, on one event loop."""

    def __init__(self, listener: socket.socket, path: Path):
        self._listener = listener
        self._path = path  # of the socket; the lock and the log are beside it
        self._marker = f"{path}:{os.getpid()}"
        self._holders: set[_Holder] = set()
        self._launch: Launch | None = None
        self._startup_timeout_secs = 0.0
        self._generation = 0
        self._state = State("starting")
        self._begun = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        self._output = Output(path.with_suffix(".log"), self._say_phase)
        self._exited = asyncio.Event()
        self._wake = asyncio.Event()  # a holder asked for a check, or vLLM has exited
        self._greeted = asyncio.Event()
        self._leaving = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._tree_lock = os.open(path.with_suffix(".tree"), os.O_RDWR | os.O_CREAT, 0o600)
        self._sentinel = 0
        self._sentinel_pipe = -1
        # Held, never listened on: with SO_REUSEADDR on both sides vLLM can bind the same
        # port, and nobody else is given it.
        self._port_keeper = _keep_port()

    # The supervisor's own life.

    async def run(self) -> None:
        """Serves holders until the last has gone."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        loop.add_signal_handler(signal.SIGTERM, self._leaving.set)
        self._post_sentinel()
        self._listener.setblocking(False)
        loop.add_reader(self._listener, self._accept)
        # The holder that started us connected first. Without it nobody would end us.
        loop.call_later(10, self._holder_left)
        life = asyncio.create_task(self._live())
        leaving = asyncio.create_task(self._leaving.wait())
        await asyncio.wait({life, leaving}, return_when=asyncio.FIRST_COMPLETED)
        self._leaving.set()
        life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await life
        await self._leave(unless_held=False)
        await self._stop()

    async def _leave(self, *, unless_held: bool) -> bool:
        """Gives up the socket, under the lock under which newcomers connect.

        So a newcomer either is a holder of ours already or finds no supervisor.
        """
        lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            while not _try_lock(lock):
                await asyncio.sleep(0.005)
            self._accept()
            if self._listener.fileno() >= 0 and not (unless_held and self._holders):
                asyncio.get_running_loop().remove_reader(self._listener)
                self._path.unlink(missing_ok=True)
                self._listener.close()
            return self._listener.fileno() < 0
        finally:
            os.close(lock)

    def _post_sentinel(self) -> None:
        if self._sentinel_pipe >= 0:
            os.close(self._sentinel_pipe)
        self._sentinel, self._sentinel_pipe = _fork_sentinel(self._tree_lock, self._marker)

    def _reap(self) -> None:
        """Collects every dead child: vLLM, the sentinel, and orphans given to a subreaper."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._sentinel:
                self._post_sentinel()
            elif self._process is not None and pid == self._process.pid:
                self._process.returncode = os.waitstatus_to_exitcode(status)
                self._exited.set()
                self._wake.set()

    # Holders.

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # none waiting, or the listener is closed
                return
            if _peer_uid(connection) != os.getuid():
                connection.close()
                continue
            holder = _Holder(connection)
            self._holders.add(holder)
            task = asyncio.get_running_loop().create_task(self._attend(holder))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _attend(self, holder: _Holder) -> None:
        try:
            reader, holder.writer = await asyncio.open_unix_connection(
                sock=holder.connection, limit=1 << 24
            )
            decode = msgspec.json.Decoder(Hello | Check).decode
            while line := await reader.readline():
                message = decode(line)
                if isinstance(message, Hello):
                    self._greet(holder, message)
                else:
                    holder.check = message.number
                    self._wake.set()
        except (OSError, ValueError):
            pass  # a broken connection ends the hold as well as a closed one
        finally:
            self._holders.discard(holder)
            if holder.writer is not None:
                holder.writer.close()
            self._holder_left()

    def _holder_left(self) -> None:
        if not self._holders and not self._leaving.is_set():
            task = asyncio.get_running_loop().create_task(self._leave_unless_held())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _leave_unless_held(self) -> None:
        if await self._leave(unless_held=True):
            self._leaving.set()

    def _greet(self, holder: _Holder, hello: Hello) -> None:
        holder.greeted = True
        refusal = ""
        if hello.protocol != PROTOCOL:
            refusal = (
                f"the running supervisor speaks version {PROTOCOL} of the protocol, this "
                f"process {hello.protocol}: end the processes that hold the server first"
            )
        elif self._launch is None:
            self._launch = hello.launch
            self._startup_timeout_secs = hello.startup_timeout_secs
            self._greeted.set()
        elif difference := self._launch.difference(hello.launch):
            refusal = (
                f"a server with the identifier {hello.launch.identifier!r} runs already with "
                f"other settings: {difference}. Give servers that differ different identifiers"
            )
        if refusal:
            holder.tell(State("failed", message=refusal))
            self._holders.discard(holder)
            return
        self._generation = max(self._generation, hello.last_generation)
        if self._state.phase or self._state.state != "starting":
            holder.tell(self._stamped(self._state))

    def _stamped(self, state: State) -> State:
        now = time.monotonic() - self._begun
        elapsed = state.startup_secs if state.state == "ready" else now
        return msgspec.structs.replace(state, elapsed_secs=elapsed, supervisor_pid=os.getpid())

    def _say(self, state: State) -> None:
        self._state = state
        for holder in self._holders:
            holder.tell(self._stamped(state))

    def _say_phase(self) -> None:
        if self._state.state == "starting":
            self._say(State("starting", phase=self._output.phase))

    # The server's life.

    async def _live(self) -> None:
        """Starts vLLM, watches it, and restarts it, until that is hopeless."""
        await self._greeted.wait()
        while not _try_lock(self._tree_lock):
            if not self._state.phase:
                self._say(State("starting", phase="waiting for the previous server to stop"))
            await asyncio.sleep(0.02)
        self._clear_predecessor()
        crashes: collections.deque[float] = collections.deque(maxlen=_MAX_CRASHES)
        ports_lost = 0
        message = ""
        while True:
            try:
                await self._start()
                await self._watch()
            except _Ended as error:
                message = str(error)
            was_ready = self._state.state == "ready"
            port_taken = not was_ready and self._output.port_taken
            await self._stop()
            if port_taken and ports_lost < 3:
                ports_lost += 1
                self._port_keeper.close()
                self._port_keeper = _keep_port()
                continue
            now = time.monotonic()
            if not was_ready and not crashes:
                break  # it never worked: another try would take as long and end as this one
            if len(crashes) == _MAX_CRASHES and now - crashes[0] < _CRASH_WINDOW_SECS:
                message = (
                    f"it crashed {_MAX_CRASHES + 1} times within "
                    f"{_CRASH_WINDOW_SECS / 60:.0f} minutes, the last time so: {message}"
                )
                break
            recent = [at for at in crashes if now - at < _CRASH_WINDOW_SECS]
            crashes.append(now)
            delay = 0.5 * 2 ** len(recent) * random.uniform(0.75, 1.25)  # noqa: S311
            self._say(
                State("restarting", attempt=len(recent) + 1, delay_secs=delay, message=message)
            )
            await asyncio.sleep(delay)
        # The next to ask starts afresh; who waits now hears why.
        await self._leave(unless_held=False)
        self._say(State("failed", message=message))
        await self._flush()

    async def _flush(self) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(2):
                for holder in list(self._holders):
                    if holder.writer is not None:
                        await holder.writer.drain()
                        holder.writer.close()
                        await holder.writer.wait_closed()

    def _clear_predecessor(self) -> None:
        """Kills what a supervisor and its sentinel, killed together, have left."""
        previous = os.pread(self._tree_lock, 4096, 0).decode()
        if previous:
            pid, _, marker = previous.partition(" ")
            kill_orphans(int(pid), marker)
        os.ftruncate(self._tree_lock, 0)
        os.pwrite(self._tree_lock, f"{os.getpid()} {self._marker}".encode(), 0)

    async def _start(self) -> None:
        """Starts vLLM and waits until it answers."""
        assert self._launch is not None  # noqa: S101 - set before _live passes its first line
        self._begun = time.monotonic()
        self._output = Output(self._path.with_suffix(".log"), self._say_phase)
        self._exited.clear()
        port: int = self._port_keeper.getsockname()[1]
        env = {
            "VLLM_HOST_IP": "127.0.0.1",  # else vLLM's processes listen on the machine's address
            "VLLM_NO_USAGE_STATS": "1",
            **os.environ,
            **self._launch.env,
            MARKER: self._marker,
            "BEAM_LLM_SUPERVISOR_PID": str(os.getpid()),
        }
        launcher = Path(__file__).with_name("launch.py")
        command = [sys.executable, "-P", str(launcher), "serve", self._launch.model]
        command += [*self._launch.args, "--host=127.0.0.1", f"--port={port}"]
        read, write = os.pipe()
        self._say(State("starting", phase=self._output.phase))
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=write,
                stderr=write,
                env=env,
                process_group=0,
            )
        finally:
            os.close(write)
        stream = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read, "rb", 0)
        )
        reading = loop.create_task(self._output.read(stream))
        self._tasks.add(reading)
        reading.add_done_callback(self._tasks.discard)

        told = self._begun
        while not await _healthy(port):
            now = time.monotonic()
            if self._exited.is_set():
                raise await self._ended(reading)
            if now - self._begun > self._startup_timeout_secs:
                raise _Ended(
                    f"vLLM did not answer within {self._startup_timeout_secs:g} s "
                    f"(startup_timeout_secs); it was {self._output.phase}. {self._output.tail()}"
                )
            if now - told >= 1:
                told = now
                self._say_phase()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exited.wait(), _PROBE_SECS)
        self._generation += 1
        self._say(
            State(
                "ready",
                port=port,
                generation=self._generation,
                startup_secs=time.monotonic() - self._begun,
            )
        )

    async def _ended(self, reading: "asyncio.Task[None] | None" = None) -> _Ended:
        """Words for a vLLM that has exited."""
        assert self._process is not None and self._process.returncode is not None  # noqa: S101, PT018
        if reading is not None:  # the last lines are on their way; children may hold the pipe
            await asyncio.wait({reading}, timeout=0.5)
        message = f"vLLM {_ending(self._process.returncode)}"
        if reason := self._output.reason():
            message += f": {reason}"
        return _Ended(f"{message}\n{self._output.tail()}")

    async def _watch(self) -> None:
        """Probes a ready server, at once when a holder saw a request fail."""
        failures = 0
        while True:
            self._wake.clear()
            checks = {holder: holder.check for holder in self._holders if holder.check}
            healthy = await _healthy(self._state.port, _PROBE_TIMEOUT_SECS)
            if self._exited.is_set():
                raise await self._ended()
            failures = 0 if healthy else failures + 1
            if failures == _MAX_PROBE_FAILURES:
                raise _Ended(
                    f"vLLM failed {failures} health checks in a row\n{self._output.tail()}"
                )
            if healthy:
                for holder, number in checks.items():
                    holder.tell(self._stamped(msgspec.structs.replace(self._state, checked=number)))
                    if holder.check == number:
                        holder.check = 0
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _WATCH_SECS if healthy else 0.2)

    async def _stop(self) -> None:
        """Ends vLLM and every process it started: asked first, then killed."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            os.kill(process.pid, signal.SIGTERM)  # Popen's own would reap it behind our back
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exited.wait(), _STOP_GRACE_SECS)
        # Its helpers end by themselves when it has ended well; not all, and not always.
        deadline = time.monotonic() + 0.5
        while left := tree(os.getpid(), self._marker, self._sentinel):
            if process.returncode is None or time.monotonic() > deadline:
                _kill(left)
            await asyncio.sleep(0.02)
        self._process = None


def _keep_port() -> socket.socket:
    keeper = socket.socket()
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.bind(("127.0.0.1", 0))
    return keeper


def _peer_uid(connection: socket.socket) -> int:
    if sys.platform != "linux":
        return os.getuid()
    size = struct.calcsize("3i")
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[
        1
    ]


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def _healthy(port: int, timeout: float = 2.0) -> bool:
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(
                    b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
                )
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):
        return False


def main(listener_fd: int, path: Path) -> None:
    """Becomes the supervisor.

    Args:
      listener_fd: The listening Unix socket, inherited from the holder that bound it: so a
        connection can be made before this process runs.
      path: Of that socket.
    """
    if os.fork():  # so that no holder has a child it would have to wait for
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    async def run() -> None:
        await Supervisor(socket.socket(fileno=listener_fd), path).run()

    asyncio.run(run())


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
