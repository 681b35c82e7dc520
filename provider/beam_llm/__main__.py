"""Runs the command as ``python -m beam_llm``."""

import sys

from beam_llm.cli import main

sys.exit(main())
