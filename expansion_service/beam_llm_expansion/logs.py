"""Log lines with fields, as text or JSON, on standard error."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from google.protobuf.message import DecodeError

_FORM = "%(asctime)s %(levelname)s %(message)s"


def set_up(form: str, level: str) -> None:
    """Writes the process's log to standard error.

    Args:
      form: ``text`` or ``json``.
      level: Least level of ours; other libraries' begins at ``WARNING``.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if form == "json" else _Text(_FORM))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    handler.addFilter(_shorten)
    logging.getLogger("beam_llm_expansion").setLevel(level)


def _shorten(record: logging.LogRecord) -> bool:
    """Leaves out what gRPC adds where a stranger sends noise: a traceback for each message."""
    theirs = record.name.startswith("grpc")
    if theirs and record.exc_info and isinstance(record.exc_info[1], DecodeError):
        record.msg, record.args, record.exc_info = "a message that cannot be read", (), None
    return True


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


class _Text(logging.Formatter):
    converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        first, *rest = super().format(record).split("\n")
        # What a client sends cannot make a line of its own.
        pairs = (f"{k}={json.dumps(v, ensure_ascii=True)}" for k, v in _fields(record).items())
        return "\n".join([" ".join([first, *pairs]), *rest])


class _Json(logging.Formatter):
    converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%SZ"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)
