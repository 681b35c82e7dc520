"""A worker process of the local pool: ``python -m beam_llm_expansion.worker CONTROL ID``.

It ends when its standard input does: with the service that started it.
"""

import logging
import os
import sys
import threading

from apache_beam.runners.worker.sdk_worker import SHORT_ID_CACHE, SdkHarness


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    """Runs one worker."""
    control, name = sys.argv[1:]
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    # Prism keeps the short names that workers give their metrics in one table for the job, and
    # panics when two workers, of two languages say, give one name to two metrics.
    SHORT_ID_CACHE._last_short_id = os.getpid() << 32  # pyright: ignore[reportPrivateUsage]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    SdkHarness(control, worker_id=name, data_buffer_time_limit_ms=0).run()


if __name__ == "__main__":
    main()
