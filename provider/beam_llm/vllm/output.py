"""What vLLM says: kept, and read for what it is doing and why it ended."""

import collections
import contextlib
import os
import re
import signal
from asyncio import StreamReader
from collections.abc import Callable
from pathlib import Path

_MAX_LOG_BYTES = 10_000_000
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
    (re.compile(r"\berror: ((?:unrecognized arguments|argument |ambiguous option).*)"), "bad flag"),
    (
        re.compile(
            r"out of memory|OutOfMemory|Cannot allocate memory|[Nn]o available memory"
            r"|(Free|Available) memory on .* is less than"
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
    (re.compile(r"^Value error, .+"), ""),  # pydantic's, on the line after its name
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

    async def read(self, stream: StreamReader) -> None:
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
        with contextlib.suppress(OSError):  # a full disk, or no directory, must not stop vLLM
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
                    said = match[1] if kind == "bad flag" else line
                    return f"{kind}: {said}" if kind else said
        return ""

    def tail(self) -> str:
        """The last lines, for an error message."""
        last = list(self._lines)[-30:]
        shown = "\n".join(f"  {line}" for line in last) or "  (nothing)"
        return f"The last lines of its output ({self._log}):\n{shown}"


def ending(code: int) -> str:
    """Words for an exit status, negative for a signal's number."""
    if code >= 0:
        return f"exited with code {code}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(-code).name
        hint = " (the kernel does so when memory runs out)" if code == -signal.SIGKILL else ""
        return f"was killed by {name}{hint}"
    return f"was killed by signal {-code}"
