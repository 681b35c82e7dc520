"""The command: ``beam-llm serve`` and ``python -m beam_llm_expansion``."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from beam_llm_expansion.settings import SettingsError, read


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the service until it is told to stop.

    Args:
      argv: Arguments without the program's name; the process's own when absent.

    Returns:
      The exit code: 0 stopped, 2 the settings cannot be used.
    """
    try:
        settings = read(sys.argv[1:] if argv is None else argv)
        # Beam is imported only now: wrong settings and --help are answered at once.
        from beam_llm_expansion import logs
        from beam_llm_expansion.server import serve

        logs.set_up(settings.log_format, settings.log_level)
        if asyncio.run(serve(settings)):
            os._exit(0)  # else the process would wait for it after all
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
