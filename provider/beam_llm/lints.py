"""Every check by name: how bad what it finds is, and whether a comment can silence it.

docs/lints.md has a section for each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning"]


@dataclass(frozen=True)
class Lint:
    """One check.

    Attributes:
      name: What messages and comments call it.
      level: ``error`` where the pipeline would not do what is written, ``warning`` where it
        mostly would not.
      summary: What it finds, in a sentence.
      certain: Whether Beam or a transform would refuse the same, so that a comment cannot
        silence it.
    """

    name: str
    level: Level
    summary: str
    certain: bool = False


LINTS = {
    lint.name: lint
    for lint in (
        Lint("file", "error", "A file that cannot be read.", certain=True),
        Lint("yaml", "error", "Text that is not YAML, or too much of it.", certain=True),
        Lint(
            "template",
            "error",
            "A Jinja template that cannot be filled, for instance for want of a variable.",
            certain=True,
        ),
        Lint(
            "pipeline",
            "error",
            "A document that is not a Beam YAML pipeline, or a part of one that has a wrong shape.",
            certain=True,
        ),
        Lint("config", "error", "A wrong knob of one of our transforms.", certain=True),
        Lint(
            "unknown-transform",
            "error",
            "A transform that neither Beam, nor this package, nor the file's providers have.",
        ),
        Lint(
            "unknown-urn",
            "error",
            "A provider that names a transform or a version that this package does not have.",
        ),
        Lint(
            "bad-input",
            "error",
            "An input that names no transform or output, several, or the transform itself.",
        ),
        Lint("unconsumed-errors", "error", "An error output that no transform reads."),
        Lint("unknown-field", "error", "A field that the input is known not to have."),
        Lint("field-clash", "error", "A new column whose name the input is known to have."),
        Lint(
            "identifier-conflict",
            "error",
            "Steps of one `model_identifier` that want different servers.",
        ),
        Lint("duplicate-key", "error", "A key twice in one mapping: YAML takes the last."),
        Lint("float-as-text", "warning", "`1e-3`, which YAML 1.1 reads as text."),
        Lint("octal-number", "warning", "`010`, which YAML 1.1 reads as 8."),
        Lint("word-as-boolean", "warning", "`on` or `no`, which YAML 1.1 reads as a boolean."),
        Lint("base-60-number", "warning", "`1:30`, which YAML 1.1 reads as 90."),
        Lint("deprecated-knob", "warning", "A knob that is to be replaced."),
        Lint("secret-in-config", "warning", "What looks like a secret, in the server's settings."),
        Lint("session-windows", "warning", "Session windows before rows are keyed."),
        Lint(
            "unkeyed-prompt",
            "warning",
            "`prefix_batching` set for a prompt whose start is the same in every row.",
        ),
        Lint(
            "impossible-key",
            "warning",
            "`num_shards_by_key` for a key that no prompt can have.",
        ),
        Lint(
            "unread-provider", "warning", "An included provider listing that cannot be read here."
        ),
        Lint("unknown-lint", "warning", "A comment that silences a check that is not there."),
    )
}

_COMMENT = re.compile(r"#[^#\n]*\bbeam-llm:\s*ignore\[([^\]\n]*)\]")


def silenced(line: str) -> Iterator[tuple[str, int]]:
    """Reads the checks that a line's comment silences: ``# beam-llm: ignore[NAME, NAME]``.

    Yields:
      Each name, with its column from 0.
    """
    for comment in _COMMENT.finditer(line):
        for name in re.finditer(r"[^\s,]+", comment[1]):
            yield name[0], comment.start(1) + name.start()
