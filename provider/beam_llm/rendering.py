"""Jinja templates of pipeline files, filled as Beam fills them, with each line's origin."""

from __future__ import annotations

import datetime
import importlib.util
import os
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAX_CHARS = 10_000_000
_MAX_MISSING = 100
_MAX_EXPONENT = 1_000

# Marks go to where a line of the template begins, and come out again after it is filled.
_MARK = re.compile("\x00(\\d+):(\\d+)\x01")
# As `str.splitlines` has them.
_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_LINE = re.compile(f"[^{_BREAKS}]*(?:\r\n|[{_BREAKS}]|$)")
# These see the text they enclose, marks and all.
_CAPTURING = re.compile(r"\{%[-+]?\s*(?:filter|macro|call|set\s[^=%]*%\})")


class RenderError(Exception):
    """A template that cannot be filled.

    Attributes:
      problems: Messages, each with its file and its line from 1, where known.
      missing: Whether all that is wrong are variables without a value.
    """

    def __init__(self, problems: list[tuple[str, str, int | None]], missing: bool = False):
        super().__init__("\n".join(message for message, _, _ in problems))
        self.problems = problems
        self.missing = missing


@dataclass(frozen=True)
class Origin:
    """Where a piece of a rendered line comes from.

    Attributes:
      column: Where the piece starts in the rendered line, from 0.
      file: The template's file.
      line: Its line there, from 1.
      exact: Whether the piece begins there, and is not left from a line above.
    """

    column: int
    file: str
    line: int
    exact: bool


@dataclass(frozen=True)
class Place:
    """A place in a file, from 1; `rendered` when it is one of the rendered text instead."""

    file: str
    line: int
    column: int
    rendered: bool = False


class Rendered:
    """Text of a pipeline, and where it comes from.

    Attributes:
      text: What YAML reads.
    """

    def __init__(self, file: str, text: str, skipped: int = 0):
        """Takes text as it stands in a file.

        Args:
          file: The file.
          text: Its text, without what Beam skips at the top.
          skipped: How many lines that was.
        """
        self.file = file
        self.text = text
        self._skipped = skipped
        self._sources: dict[str, list[str]] | None = None
        self._origins: list[list[Origin]] | None = None
        self._lines: list[str] = []

    @classmethod
    def filled(cls, file: str, text: str, marked: str | None, loader: Any) -> Rendered:
        """Takes text that was filled, with and without marks."""
        rendered = cls(file, text)
        rendered._sources = loader.sources
        if marked is not None:
            rendered._lines = text.split("\n")
            rendered._origins = list(_origins(marked, loader.names))
        return rendered

    def place(self, line: int, column: int) -> Place:
        """Where a place of the text, from 0, stands in the file."""
        if self._sources is None:
            return Place(self.file, line + 1 + self._skipped, column + 1)
        if self._origins is None:
            return Place(self.file, line + 1, column + 1, rendered=True)
        pieces = self._origins[min(line, len(self._origins) - 1)]
        origin = next((p for p in reversed(pieces) if p.column <= column), pieces[0])
        if not origin.exact:
            return Place(self.file, line + 1, column + 1, rendered=True)
        source = self._sources[origin.file][origin.line - 1]
        here = self._lines[line] if line < len(self._lines) else ""
        return Place(origin.file, origin.line, _column(here, source, column) + 1)


def _column(rendered: str, source: str, column: int) -> int:
    """Where a column of a rendered line stands in its source: exact beside an expression."""
    if rendered == source:
        return column
    shorter = min(len(rendered), len(source))
    head = next((i for i in range(shorter) if rendered[i] != source[i]), shorter)
    if column < head:
        return column
    tail = next(
        (i for i in range(shorter - head) if rendered[-1 - i] != source[-1 - i]), shorter - head
    )
    from_end = len(rendered) - column
    return len(source) - from_end if from_end <= tail else head


def _origins(marked: str, names: list[str]) -> Iterator[list[Origin]]:
    last: tuple[str, int] = (names[0], 1)
    for line in marked.split("\n"):
        pieces: list[Origin] = []
        taken = 0
        first = _MARK.match(line)
        if first is None:
            pieces.append(Origin(0, *last, exact=False))
        for mark in _MARK.finditer(line):
            last = names[int(mark[1])], int(mark[2])
            pieces.append(Origin(mark.start() - taken, *last, exact=True))
            taken += mark.end() - mark.start()
        yield pieces


def without_leading_comments(source: str) -> tuple[str, int]:
    """Drops comments and blank lines at the top, as Beam does before it fills the template.

    Returns:
      The rest, and how many lines were dropped.
    """
    start = skipped = 0
    for line in _LINE.finditer(source):  # not all lines of what may be a large file
        if not line[0] or (line[0].strip() and not line[0].lstrip().startswith("#")):
            break
        start = line.end()
        skipped += 1
    return source[start:], skipped


def render(path: str, source: str, variables: Mapping[str, Any]) -> Rendered:
    """Fills the Jinja template that a pipeline file is.

    Expressions run in Jinja's sandbox: files to be checked may come from strangers.

    Args:
      path: The file, as messages call it.
      source: Its text.
      variables: Values of variables.

    Returns:
      The text, with its origins.

    Raises:
      RenderError: The template is wrong, or lacks variables; all of those are listed.
    """
    text, skipped = without_leading_comments(source)
    if "{{" not in text and "{%" not in text and "{#" not in text:
        return Rendered(path, text, skipped)
    return _fill(path, source, text, skipped, variables)


def _fill(
    path: str, source: str, text: str, skipped: int, variables: Mapping[str, Any]
) -> Rendered:
    import jinja2
    import jinja2.ext
    import jinja2.lexer
    import jinja2.sandbox

    class Loader(jinja2.BaseLoader):
        """Finds included files where Beam does, inside of its folders, and keeps their text."""

        def __init__(self) -> None:
            self.sources = {path: source.splitlines()}
            self.skipped = {path: skipped}
            self.names = [path]

        def get_source(self, environment: Any, template: str) -> tuple[str, str, Any]:
            folders = [(folder, folder.resolve()) for folder in _folders(path)]
            outside = absolute = os.path.isabs(template)
            for folder, _ in folders:
                file = folder / template
                real = file.resolve()  # where links lead
                if absolute or not any(real.is_relative_to(root) for _, root in folders):
                    outside = True
                elif file.is_file():
                    name = os.path.normpath(file)
                    read = file.read_text(encoding="utf-8")
                    kept, dropped = without_leading_comments(read)
                    if name not in self.sources:
                        self.names.append(name)
                    self.sources[name] = read.splitlines()
                    self.skipped[name] = dropped
                    return kept, name, lambda: True
            if outside:
                words = f"'{template}' leads out of the pipeline's folder and the working directory"
                raise jinja2.TemplateRuntimeError(words)
            raise jinja2.TemplateNotFound(template)

    class Sandbox(jinja2.sandbox.SandboxedEnvironment):
        """Refuses what would take for ever, besides what reaches out."""

        intercepted_binops = frozenset(["*", "**"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            sized = [len(x) for x in (left, right) if isinstance(x, str | list | tuple)]
            numbers = [abs(x) for x in (left, right) if isinstance(x, int)]
            if (operator == "**" and numbers[1:] > [_MAX_EXPONENT]) or (
                sized and numbers and sized[0] * numbers[0] > _MAX_CHARS
            ):
                raise OverflowError("an expression's value is too large")
            return super().call_binop(context, operator, left, right)

    loader = Loader()

    class LineMarks(jinja2.ext.Extension):
        """Puts marks into what the lexer has left of the text, so that trimming is done."""

        def filter_stream(self, stream: Any) -> Iterator[Any]:
            file = stream.filename or path
            number, offset = loader.names.index(file), loader.skipped[file]
            for token in stream:
                if token.type != "data":
                    yield token
                    continue
                line = token.lineno + offset
                pieces = token.value.split("\n")
                value = "\n".join(f"\x00{number}:{line + i}\x01{p}" for i, p in enumerate(pieces))
                yield jinja2.lexer.Token(token.lineno, "data", value)

    def environment(**options: Any) -> Any:
        return Sandbox(undefined=jinja2.StrictUndefined, loader=loader, **options)

    def filled(env: Any) -> str:
        code = env.compile(text, filename=path)
        template = jinja2.Template.from_code(env, code, env.make_globals(None))
        size, chunks = 0, []
        for chunk in template.generate({"datetime": _DATETIME, **given}):
            size += len(chunk)
            if size > _MAX_CHARS:
                raise RenderError([(f"it makes more than {_MAX_CHARS:,} characters", path, None)])
            chunks.append(chunk)
        return "".join(chunks)

    given = dict(variables)
    missing: list[tuple[str, str, int | None]] = []
    while True:
        env = environment(extensions=[LineMarks])
        try:
            marked = f"\x000:{skipped + 1}\x01" + filled(env)
            break
        except jinja2.UndefinedError as error:
            name = re.fullmatch(r"'([^']*)' is undefined", str(error))
            file, line = _where(error, loader)
            if name is None or name[1] in given or len(missing) >= _MAX_MISSING:
                raise RenderError([*missing, (str(error), file, line)], missing=True) from None
            hint = f"give it with --var {name[1]}=VALUE, or write '{{{name[1]}}}' for a row's field"
            missing.append((f"{error}: {hint}", file, line))
            given[name[1]] = name[1]  # to find what else is missing
        except jinja2.TemplateSyntaxError as error:
            file = error.filename or path
            line = error.lineno + loader.skipped.get(file, 0)
            raise RenderError([*missing, (f"Jinja: {error.message}", file, line)]) from None
        except jinja2.TemplateNotFound as error:
            file, line = _where(error, loader)
            words = f"Jinja: there is no file '{error.name}' to include"
            raise RenderError([*missing, (words, file, line)]) from None
        except RenderError as error:
            raise RenderError([*missing, *error.problems]) from None
        except Exception as error:  # an expression of the template may raise anything
            file, line = _where(error, loader)
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            raise RenderError([*missing, (f"Jinja: {kind}{error}", file, line)]) from None
    if missing:
        raise RenderError(missing, missing=True)
    plain = _MARK.sub("", marked)
    if any(_CAPTURING.search("\n".join(lines)) for lines in loader.sources.values()):
        truth = filled(environment())
        if truth != plain:
            return Rendered.filled(path, truth, None, loader)
    return Rendered.filled(path, plain, marked, loader)


# The names of the module, without those through which its own imports can be reached.
_DATETIME = types.SimpleNamespace(
    **{name: getattr(datetime, name) for name in datetime.__all__ if hasattr(datetime, name)}
)


def _where(error: BaseException, loader: Any) -> tuple[str, int | None]:
    """The innermost line of a template that an exception passed."""
    file, line = loader.names[0], None
    traceback = error.__traceback__
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if name in loader.skipped:
            file, line = name, traceback.tb_lineno + loader.skipped[name]
        traceback = traceback.tb_next
    return file, line


def _folders(path: str) -> Iterator[Path]:
    yield Path()
    yield Path(path).parent
    beam = importlib.util.find_spec("apache_beam")
    if beam is not None and beam.origin:
        yield Path(beam.origin).parent.parent
