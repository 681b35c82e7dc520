"""Words for names that nobody knows."""

from __future__ import annotations

from beam_llm.registry import TRANSFORMS
from beam_llm.validation import nearest as nearest


def unknown_transform(name: str) -> str:
    """Says that there is no such transform, and which there are."""
    return f"no transform '{name}'{nearest(name, TRANSFORMS)} (there are {', '.join(TRANSFORMS)})"
