"""Finding the processes of servers, and processes that hold them."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil

from beam_llm.vllm.server import VLLMServerSpec

STANDIN = Path(__file__).parents[1] / "standin_vllm"
HANG_SECS = 120.0  # what takes longer has hung


def processes_with_marker(marker: object) -> list[psutil.Process]:
    """The running processes that have the marker in their arguments or environment.

    With a test's runtime directory: its supervisors, sentinels and servers.
    """
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with contextlib.suppress(psutil.Error):
            # Not the directory's own name in XDG_RUNTIME_DIR, which every child inherits.
            words = [*process.cmdline(), process.environ().get("BEAM_LLM_SERVER", "")]
            running = process.status() != psutil.STATUS_ZOMBIE
            if running and any(f"{marker}/beam-llm/" in word for word in words):
                found.append(process)
    return found


def wait_gone(processes: list[psutil.Process]) -> None:
    """Waits until all of these have ended; they need not be our children."""
    _, alive = psutil.wait_procs(processes, timeout=HANG_SECS)
    assert [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []


def wait_nothing_left(marker: object) -> None:
    """Waits until no process of this marker runs, also of those that appear meanwhile."""
    deadline = time.monotonic() + HANG_SECS
    while left := processes_with_marker(marker):
        psutil.wait_procs(left, timeout=5)
        assert time.monotonic() < deadline, left


def family(supervisor: int) -> list[psutil.Process]:
    """A supervisor, its sentinel, and vLLM's whole tree."""
    process = psutil.Process(supervisor)
    return [process, *process.children(recursive=True)]


def _runs(process: psutil.Process, program: str) -> bool:
    with contextlib.suppress(psutil.Error):  # one that has ended runs nothing
        return any(program in word for word in process.cmdline())
    return False


def vllm_process(supervisor: int) -> psutil.Process:
    """The process that answers requests."""
    (process,) = (p for p in psutil.Process(supervisor).children() if _runs(p, "launch.py"))
    return process


def sentinel_process(supervisor: int) -> psutil.Process | None:
    """The process that waits for the supervisor's death; None while there is none."""
    children = psutil.Process(supervisor).children()
    return next((p for p in children if _runs(p, "beam_llm.vllm.supervisor")), None)


def supervisor_processes(marker: object) -> list[psutil.Process]:
    """The supervisors of this marker, without their sentinels."""
    processes = [p for p in processes_with_marker(marker) if _runs(p, "beam_llm.vllm.supervisor")]
    return [p for p in processes if p.ppid() not in {other.pid for other in processes}]


def shared_memory(processes: list[psutil.Process]) -> set[Path]:
    """The files of shared memory that these processes have mapped."""
    maps = [m.path for p in processes for m in p.memory_maps(grouped=False)]
    return {Path(path) for path in maps if path.startswith("/dev/shm/") and Path(path).exists()}


class Holder:
    """A process that holds a server: `holder.py`."""

    def __init__(self, spec: VLLMServerSpec):
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("holder.py")), msgspec.json.encode(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )

    def wait(self, event: str) -> dict[str, object]:
        for line in self.process.stdout:
            message = json.loads(line)
            if message["event"] == event:
                return message
            assert message["event"] != "failed", message
        raise AssertionError(f"the holder ended before {event!r}")

    def ready(self) -> int:
        """Waits for the server. Returns its supervisor's process id."""
        return self.wait("ready")["supervisor"]

    def do(self, command: str) -> None:
        self.process.stdin.write(command + "\n")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def join(self) -> int:
        return self.process.wait(HANG_SECS)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
