"""``python -m beam_llm_expansion``: the same as ``beam-llm serve``."""

import sys

from beam_llm_expansion.command import main

if __name__ == "__main__":
    sys.exit(main())
