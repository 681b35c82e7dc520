"""What a person sees of work under way: servers that start, and rows that are answered."""

import logging
import sys
import threading
import time
from collections import Counter
from typing import Literal, NamedTuple, Protocol

logger = logging.getLogger("beam_llm")

ServerStateName = Literal["starting", "ready", "restarting", "failed"]

_LOG_EVERY_SECS = 10.0


class ServerListener(Protocol):
    """Receives each state of each server that this process holds, on a thread of ours."""

    def __call__(
        self, identifier: str, state: ServerStateName, phase: str, elapsed_secs: float, detail: str
    ) -> None:
        """See `report_server`."""


class _Logged(NamedTuple):
    state: str
    phase: str
    at: float


_lock = threading.Lock()
_listener: ServerListener | None = None
_logged: dict[str, _Logged] = {}


_totals: Counter[str] = Counter()
_totals_lock = threading.Lock()


def count(**amounts: int) -> None:
    """Adds to this process's totals, for a display in the process itself.

    A runner's metrics tell more, but most local runners tell them only at the end.

    Args:
      **amounts: What to add, by name: ``read``, ``answered``, ``failed`` [rows], ``batches``,
        ``tokens``, ``prompt_tokens``, ``cached_tokens``, ``completion_tokens``.
    """
    with _totals_lock:
        _totals.update(amounts)


def totals() -> Counter[str]:
    """A copy of what was counted since the process began."""
    with _totals_lock:
        return Counter(_totals)


def set_server_listener(listener: ServerListener | None) -> None:
    """Hands the display to somebody else, or back to the default with None.

    Args:
      listener: Called instead of the default display. Failures and restarts are logged
        nevertheless.
    """
    global _listener
    _listener = listener


def report_server(
    identifier: str,
    state: ServerStateName,
    phase: str = "",
    elapsed_secs: float = 0.0,
    detail: str = "",
) -> None:
    """Shows a state of a server.

    By default one line on a terminal, rewritten in place; elsewhere log lines, when the
    phase changes and every 10 s.

    Args:
      identifier: Of the server.
      state: Its state.
      phase: What a starting server is doing.
      elapsed_secs: Since the start began; of a ready server, how long it took [s].
      detail: The address of a ready server, the reason of a restart or failure.
    """
    listener = _listener
    on_terminal = listener is None and _is_terminal()
    if on_terminal:
        _show(identifier, state, phase, elapsed_secs, detail)
    if state == "failed":
        logger.error("vLLM server %s failed: %s", identifier, detail)
    elif state == "restarting":
        logger.warning("vLLM server %s: %s", identifier, detail)
    if listener is not None:
        try:
            listener(identifier, state, phase, elapsed_secs, detail)
        except Exception:
            logger.exception("the listener for server states failed")
    elif not on_terminal and state in ("starting", "ready"):
        _log(identifier, state, phase, elapsed_secs, detail)


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # no stderr, or a closed one
        return False


def _show(identifier: str, state: str, phase: str, elapsed_secs: float, detail: str) -> None:
    line = f"\r\x1b[K· vLLM {identifier}: "
    if state == "starting":
        line += f"{phase} ({elapsed_secs:.0f} s)"
    elif state == "ready":
        line += f"ready after {elapsed_secs:.1f} s on {detail}\n"
    else:  # the log has the words
        line = "\r\x1b[K"
    with _lock:
        sys.stderr.write(line)
        sys.stderr.flush()


def _log(identifier: str, state: str, phase: str, elapsed_secs: float, detail: str) -> None:
    now = time.monotonic()
    with _lock:
        last = _logged.get(identifier)
        unchanged = last is not None and (last.state, last.phase) == (state, phase)
        if last and unchanged and (state == "ready" or now - last.at < _LOG_EVERY_SECS):
            return
        _logged[identifier] = _Logged(state, phase, now)
    if state == "ready":
        logger.info("vLLM server %s: ready after %.1f s on %s", identifier, elapsed_secs, detail)
    else:
        logger.info("vLLM server %s: %s (%.0f s)", identifier, phase, elapsed_secs)
