"""The processes of a server: how they are found, and killed when nobody else would.

They are one session, led by the supervisor. The sentinel, outside that session, waits for
the supervisor's death.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

MARKER = "BEAM_LLM_SERVER"
TRACKER_GRACE_SECS = 3.0


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


def kill(pids: set[int], *, trackers_too: bool) -> None:
    """Sends SIGKILL to those that still run.

    Args:
      pids: Of the processes.
      trackers_too: Whether Python's resource trackers are killed as well. One that is left
        alone unlinks its processes' shared memory when they are dead, and then ends.
    """
    for pid in pids:
        with contextlib.suppress(OSError):
            if trackers_too or b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


def kill_orphans(session: int, marker: str) -> None:
    """Kills what is left of a dead supervisor's tree."""
    deadline = time.monotonic() + TRACKER_GRACE_SECS
    while True:
        # A session's id is not given to a new process while the session has members: if
        # there is a living process of that id, it is a stranger and nothing is left.
        leader = dict(_processes()).get(session)
        if leader is not None and leader.state not in "ZX":
            return
        left = tree(session, marker)
        if not left:
            return
        kill(left, trackers_too=time.monotonic() > deadline)
        time.sleep(0.02)


def fork_sentinel(keep: int, marker: str) -> tuple[int, int]:
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
