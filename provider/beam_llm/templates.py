"""Prompt templates: text with ``{field}`` placeholders, filled from a row.

The syntax is that of Python's format strings without conversions and format
specifications: literal braces are doubled, and a dotted path reads a nested row.
Nothing is evaluated, and no attribute outside the row's schema can be reached.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

_PATH = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*\Z")

#: Turns one row into the values of a template's fields, in the order of ``Template.fields``.
Getter = Callable[[Any], Sequence[str]]


class TemplateError(ValueError):
    """A template that cannot be read; the message says where and what is allowed."""


@dataclass(frozen=True)
class Template:
    """A parsed template.

    Attributes:
      text: The template as written.
      parts: Alternating literals and paths: ``[literal, path, literal, …, literal]``.
    """

    text: str
    parts: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Template:
        """Reads a template.

        Args:
          text: Text with ``{field}`` or ``{outer.inner}`` placeholders.

        Returns:
          The parsed template.

        Raises:
          TemplateError: A brace without its partner, an empty placeholder, or one
            that is not a path of field names.
        """
        parts: list[str] = [""]
        try:
            pieces = list(Formatter().parse(text))
        except ValueError as error:
            raise TemplateError(
                f"{error} (a literal brace is written twice: '{{{{' or '}}}}')"
            ) from None
        for literal, path, spec, conversion in pieces:
            parts[-1] += literal
            if path is None:
                continue
            if spec or conversion or not _PATH.match(path):
                shown = (
                    path + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
                )
                raise TemplateError(
                    f"'{{{shown}}}' is not a field: write '{{name}}' or '{{outer.inner}}' (rename"
                    " other columns first, with MapToFields), and a literal brace twice"
                )
            parts += [path, ""]
        return cls(text, tuple(parts))

    @property
    def fields(self) -> tuple[str, ...]:
        """The paths in it, in order, repeated where the template repeats them."""
        return self.parts[1::2]

    def render(self, values: Sequence[str]) -> str:
        """Fills the template.

        Args:
          values: One text for each of ``fields``.

        Returns:
          The text.
        """
        parts = list(self.parts)
        parts[1::2] = values
        return "".join(parts)

    def varies_within(self, char_len: int, delimiters: Sequence[str] = ()) -> bool:
        """Whether the start of the rendered text can differ between rows.

        Args:
          char_len: How many characters make the start.
          delimiters: Texts that end the start early.

        Returns:
          False when the first ``char_len`` characters, or those up to the first
          delimiter, are literal, so that every row shares them.
        """
        if len(self.parts) == 1:
            return False
        literal = self.parts[0]
        return len(literal) < char_len and not any(d in literal for d in delimiters)
