"""The process that owns one vLLM server, for as long as anybody holds it.

A holder is a process with an open connection to the supervisor's Unix socket. The
connection is the hold: the kernel closes it however the holder ends. When the last one
closes, the supervisor stops vLLM and exits; until then it restarts a vLLM that crashes.

Three guards, so that no single death leaves vLLM behind:

* the supervisor leads a session of its own, in which vLLM and all its children run;
* a sentinel, outside that session, waits for the supervisor's death and then kills the
  session (`tree.py`);
* vLLM itself asks the kernel for a SIGKILL when the supervisor dies (`launch.py`).

It imports next to nothing, so that it is up in about 100 ms and stays small.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import msgspec

from beam_llm.vllm.messages import PROTOCOL, Check, Hello, Launch, State
from beam_llm.vllm.output import Output, ending
from beam_llm.vllm.tree import MARKER, TRACKER_GRACE_SECS, fork_sentinel, kill, kill_orphans, tree

_STOP_GRACE_SECS = 5.0
_PROBE_SECS = 0.1  # between health checks while starting
_WATCH_SECS = 2.0  # and once ready
_PROBE_TIMEOUT_SECS = 10.0
_MAX_PROBE_FAILURES = 3
_MAX_CRASHES = 5
_MAX_PORTS_LOST = 3
_CRASH_WINDOW_SECS = 600.0
_PR_SET_CHILD_SUBREAPER = 36


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
        self._inode = _inode(path)
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
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await life
            await self._leave(unless_held=False)
        finally:
            await self._stop()

    def _forget(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._leaving.set()  # a fault of ours must not leave vLLM behind

    async def _leave(self, *, unless_held: bool) -> bool:
        """Gives up the socket, under the lock under which newcomers connect.

        So a newcomer either is a holder of ours already or finds no supervisor.
        """
        with contextlib.ExitStack() as stack:
            # Without its directory (a logout removes /run/user/UID) nobody finds the socket.
            with contextlib.suppress(FileNotFoundError):
                lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
                stack.callback(os.close, lock)
                while not _try_lock(lock):
                    await asyncio.sleep(0.005)
            self._accept()
            if self._listener.fileno() >= 0 and not (unless_held and self._holders):
                asyncio.get_running_loop().remove_reader(self._listener)
                if _inode(self._path) == self._inode:  # else it is a successor's
                    self._path.unlink(missing_ok=True)
                self._listener.close()
            return self._listener.fileno() < 0

    def _post_sentinel(self) -> None:
        if self._sentinel_pipe >= 0:
            os.close(self._sentinel_pipe)
        self._sentinel, self._sentinel_pipe = fork_sentinel(self._tree_lock, self._marker)

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
            task.add_done_callback(self._forget)

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
            task.add_done_callback(self._forget)

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
        crashes: list[float] = []
        ports_lost = 0
        ever_ready = False
        while True:
            message = await self._run_once()
            was_ready = self._state.state == "ready"
            ever_ready |= was_ready
            if not was_ready and self._output.port_taken and ports_lost < _MAX_PORTS_LOST:
                ports_lost += 1
                await self._stop()
                self._port_keeper.close()
                self._port_keeper = _keep_port()
                continue
            if not ever_ready:
                break  # another try would take as long and end as this one
            now = time.monotonic()
            crashes = [at for at in crashes if now - at < _CRASH_WINDOW_SECS]
            if len(crashes) == _MAX_CRASHES:
                message = (
                    f"it crashed {_MAX_CRASHES + 1} times within "
                    f"{_CRASH_WINDOW_SECS / 60:.0f} minutes, the last time so: {message}"
                )
                break
            delay = 0.5 * 2 ** len(crashes) * random.uniform(0.75, 1.25)  # noqa: S311
            crashes.append(now)
            self._say(State("restarting", attempt=len(crashes), delay_secs=delay, message=message))
            await self._stop()
            await asyncio.sleep(delay)
        await self._stop()
        # The next to ask starts afresh; who waits now hears why.
        await self._leave(unless_held=False)
        self._say(State("failed", message=message))
        await self._flush()

    async def _run_once(self) -> str:
        """Runs vLLM until it ends. Returns words about its end."""
        try:
            await self._start()
            await self._watch()
        except _Ended as error:
            return str(error)

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
            # With a key that the worker has for something else it would refuse its holders.
            **{name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"},
            **self._launch.env,
            MARKER: self._marker,
        }
        launcher = Path(__file__).with_name("launch.py")
        command = [sys.executable, "-P", str(launcher), str(os.getpid())]
        command += [
            "serve",
            self._launch.model,
            *self._launch.args,
            "--host=127.0.0.1",
            f"--port={port}",
        ]
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
        except (OSError, ValueError) as error:  # no memory to fork; arguments too long
            os.close(read)
            raise _Ended(f"vLLM cannot be started: {error}") from None
        finally:
            os.close(write)
        stream = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read, "rb", 0)
        )
        reading = loop.create_task(self._output.read(stream))
        self._tasks.add(reading)
        reading.add_done_callback(self._forget)

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
        message = f"vLLM {ending(self._process.returncode)}"
        if reason := self._output.reason():
            message += f": {reason}"
        return _Ended(f"{message}\n{self._output.tail()}")

    async def _watch(self) -> NoReturn:
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
        begun = time.monotonic()
        while left := tree(os.getpid(), self._marker, self._sentinel):
            passed = time.monotonic() - begun
            if process.returncode is None or passed > 0.5:
                kill(left, trackers_too=passed > TRACKER_GRACE_SECS)
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


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


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


def main(listener_fd: int, path: str) -> None:
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
        await Supervisor(socket.socket(fileno=listener_fd), Path(path)).run()

    asyncio.run(run())
