"""Words for names that nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from beam_llm.registry import TRANSFORMS


def unknown_transform(name: str) -> str:
    """Says that there is no such transform, and which there are."""
    return f"no transform '{name}'{nearest(name, TRANSFORMS)} (there are {', '.join(TRANSFORMS)})"


def nearest(word: str, known: Iterable[str]) -> str:
    """Suggests a known name for a misspelt one, whatever its case; or says nothing."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), list(by_lower), n=1)
    return f"; did you mean '{by_lower[close[0]]}'?" if close else ""
