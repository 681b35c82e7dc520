"""Runs one measurement in a process of its own: see `common.in_child`.

python -m benchmarks.child MODULE:FUNCTION < arguments.json
"""

import importlib
import json
import logging
import sys


def main() -> None:
    """Calls the function with the JSON object on stdin; its result is the last line of stdout."""
    module, _, name = sys.argv[1].partition(":")
    logging.basicConfig(level=logging.WARNING)
    result = getattr(importlib.import_module(module), name)(**json.load(sys.stdin))
    print(f"\n{json.dumps(result)}", flush=True)


if __name__ == "__main__":
    main()
