"""Beam YAML pipeline files: read, rendered and checked without Beam."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from beam_llm.config import LLMConfig
from beam_llm.documents import Document, DocumentError, read, scalars
from beam_llm.flows import Checker, Step
from beam_llm.lints import LINTS, Level, Lint, silenced
from beam_llm.providers import Providers
from beam_llm.rendering import Place, Rendered, RenderError, render
from beam_llm.validation import Path as KnobPath
from beam_llm.validation import dotted, nearest

_NOT_A_PIPELINE = "not a Beam YAML pipeline: it has no 'pipeline:' mapping"


@dataclass(frozen=True)
class Finding:
    """One problem of a file.

    Attributes:
      lint: The check that found it.
      message: What is there and what is allowed.
      file: The file.
      line: Its line, from 1, where known.
      column: Its column, from 1, where known.
      path: The value it is about: ``transforms[1].config.prompt``, or nothing.
      rendered: Whether line and column are those of the text that the template makes.
    """

    lint: Lint
    message: str
    file: str
    line: int | None = None
    column: int | None = None
    path: str = ""
    rendered: bool = False

    @property
    def level(self) -> Level:
        """How bad it is."""
        return self.lint.level

    @property
    def text(self) -> str:
        """The message, with the value's path and what there is to say of the place."""
        path = f"{self.path}: " if self.path else ""
        note = " (line of the rendered template)" if self.rendered else ""
        return f"{path}{self.message}{note}"

    def __str__(self) -> str:
        places = [str(place) for place in (self.line, self.column) if place is not None]
        place = ":".join([self.file, *places])
        return one_line(f"{place}: {self.level}: {self.text} [{self.lint.name}]")


# What moves a terminal's cursor, ends a line, turns the direction of text, or is half a character.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def one_line(text: str) -> str:
    """Escapes what would break a line or act on a terminal, as Python writes it."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class PipelineFileError(Exception):
    """A pipeline file that cannot be used; the message has a line for each problem.

    Attributes:
      exit_code: 2 when the file or the command line is unusable, 1 when its content is.
    """

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Pipeline:
    """One pipeline of a file.

    Attributes:
      spec: The parsed document.
      configs: Our language-model transforms that are right, each with its configuration.
    """

    spec: Mapping[str, Any]
    configs: list[tuple[Step, LLMConfig]]

    @property
    def options(self) -> dict[str, Any]:
        """Pipeline options that the file sets."""
        options = self.spec.get("options")
        return cast("dict[str, Any]", options) if isinstance(options, dict) else {}

    def steps(self) -> Iterator[Step]:
        """Every transform, nested ones included."""
        yield from _steps(self.spec["pipeline"], ("pipeline",))


@dataclass(frozen=True)
class Checked:
    """What was found in a file.

    Attributes:
      findings: Every problem, in the order of their lines.
      pipelines: Every pipeline in it.
      text: The YAML text, after Jinja.
      documents: How many YAML documents it holds.
      usable: Whether it could be read and rendered with the variables given.
    """

    findings: list[Finding]
    pipelines: list[Pipeline]
    text: str = ""
    documents: int = 0
    usable: bool = True


def read_source(path: Path) -> str:
    """Reads a file's text.

    Raises:
      PipelineFileError: It cannot be read.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineFileError(str(unreadable(str(path), error)), 2) from None


def unreadable(file: str, error: OSError | UnicodeDecodeError) -> Finding:
    """The problem of a file that cannot be read."""
    reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
    return Finding(LINTS["file"], f"cannot be read: {reason}", file)


def check_source(file: str, source: str, variables: Mapping[str, Any]) -> Checked:
    """Finds every problem of a pipeline file.

    Args:
      file: The file, as messages call it; includes start from its folder.
      source: Its text.
      variables: Values for its Jinja variables.

    Returns:
      The problems, and the pipelines.
    """
    try:
        rendered = render(file, source.replace("\r\n", "\n"), variables)
    except RenderError as error:
        findings = [
            Finding(LINTS["template"], message, where, line)
            for message, where, line in error.problems
        ]
        return Checked(findings, [], usable=not error.missing)
    checks = _Checks(rendered)
    pipelines: list[Pipeline] = []
    documents = 0
    start: tuple[int, int] | None = None
    try:
        for document in read(rendered.text):
            documents += 1
            start = start or document.start
            if isinstance(document.data, dict) and "pipeline" in document.data:
                pipelines.append(checks.pipeline(document))
    except DocumentError as error:
        checks.add("yaml", str(error), error.place)
    else:
        if not pipelines:
            checks.add("pipeline", _NOT_A_PIPELINE, start)
    checks.comments()
    return Checked(checks.sorted(), pipelines, rendered.text, documents)


class _Checks:
    """Collects the problems of one file, less those that comments silence."""

    def __init__(self, rendered: Rendered):
        self._rendered = rendered
        self._silenced = dict(_silenced(rendered.text)) if "beam-llm:" in rendered.text else {}
        self._found: dict[Finding, None] = {}

    def pipeline(self, document: Document) -> Pipeline:
        """Checks one document."""
        spec = cast("dict[str, Any]", document.data)
        wrong: dict[KnobPath, list[tuple[str, str]]] = {}

        def report(path: KnobPath, lint: str, message: str) -> None:
            wrong.setdefault(path, []).append((lint, message))

        checker = Checker(Providers(spec.get("providers"), self._rendered.file, report), report)
        checker.check(spec)
        for path, problems in wrong.items():
            # One mistake, one message.
            wrong[path] = [p for p in problems if p[0] == "config"] or problems
        for trap in document.traps:
            known = wrong.get(trap.path, ())
            if any(lint == "config" for lint, _ in known) and trap.lint != "duplicate-key":
                wrong[trap.path] = [(lint, f"{words} ({trap.message})") for lint, words in known]
            else:
                self.add(trap.lint, trap.message, trap.place, trap.path)
        for path, problems in wrong.items():
            place = document.place(path)
            for lint, message in problems:
                self.add(lint, message, place, path)
        return Pipeline(spec, checker.configs)

    def comments(self) -> None:
        """Checks the comments that silence."""
        for number, names in self._silenced.items():
            for name, column in names:
                if name not in LINTS:
                    words = f"there is no check '{name}'{nearest(name, LINTS)}"
                    self.add("unknown-lint", words, (number, column))
                elif LINTS[name].certain:
                    words = f"'{name}' cannot be silenced: the pipeline would not start"
                    self.add("unknown-lint", words, (number, column))

    def add(
        self,
        name: str,
        message: str,
        place: tuple[int, int] | None,
        path: KnobPath = (),
    ) -> None:
        """Adds a problem."""
        lint = LINTS[name]
        shown = dotted(path[1:] if path[:1] == ("pipeline",) and len(path) > 1 else path)
        if place is None:
            finding = Finding(lint, message, self._rendered.file, path=shown)
        else:
            names = self._silenced.get(place[0], ())
            if not lint.certain and any(name == lint.name for name, _ in names):
                return
            at: Place = self._rendered.place(*place)
            finding = Finding(lint, message, at.file, at.line, at.column, shown, at.rendered)
        self._found[finding] = None

    def sorted(self) -> list[Finding]:
        """The problems in the order of their lines."""
        return sorted(self._found, key=lambda f: (f.file, f.line or 0, f.column or 0))


def _silenced(text: str) -> Iterator[tuple[int, list[tuple[str, int]]]]:
    """The lines whose comments silence checks: the checks' names, each with its column."""
    spans = list(scalars(text))
    starts = [start for start, _ in spans]
    offset = 0
    for number, line in enumerate(text.split("\n")):
        names: list[tuple[str, int]] = []
        for name, column in silenced(line):
            before = bisect.bisect_right(starts, offset + column) - 1
            if before < 0 or offset + column >= spans[before][1]:
                names.append((name, column))
        if names:
            yield number, names
        offset += len(line) + 1


class PipelineFile:
    """A file with one pipeline, to be run.

    Attributes:
      path: The file.
      text: The YAML text, after Jinja.
      spec: The parsed document.
      options: Pipeline options that the file sets.
      warnings: What is odd about it.
    """

    def __init__(self, path: Path, variables: Mapping[str, Any]):
        """Reads a file.

        Args:
          path: The file.
          variables: Values for its Jinja variables.

        Raises:
          PipelineFileError: It cannot be read, rendered or parsed, or anything in it is wrong.
        """
        self.path = path
        checked = check_source(str(path), read_source(path), variables)
        raise_errors(checked.findings, exit_code=1 if checked.usable else 2)
        self.warnings = checked.findings
        self.text = checked.text
        if checked.documents > 1:
            words = f"it has {checked.documents} YAML documents, and Beam runs files of one"
            raise PipelineFileError(str(Finding(LINTS["pipeline"], words, str(path))))
        self._pipeline = checked.pipelines[0]
        self.spec = self._pipeline.spec
        self.options = self._pipeline.options

    def steps(self) -> Iterator[Step]:
        """Every transform, nested ones included."""
        return self._pipeline.steps()

    def llm_configs(self) -> list[tuple[Step, LLMConfig]]:
        """Our language-model transforms, each with its configuration."""
        return self._pipeline.configs


def raise_errors(findings: Iterable[Finding], exit_code: int = 1) -> None:
    """Raises if any of the findings is an error.

    Raises:
      PipelineFileError: With a line for each finding, of which one at least is an error.
    """
    listed = list(findings)
    if any(finding.level == "error" for finding in listed):
        raise PipelineFileError("\n".join(map(str, listed)), exit_code)


def _steps(block: Any, path: KnobPath) -> Iterator[Step]:
    if not isinstance(block, dict):
        return
    block = cast("dict[str, Any]", block)
    for name in ("source", "sink"):
        if isinstance(block.get(name), dict):
            yield Step((*path, name), block[name])
    for name in ("transforms", "extra_transforms"):
        items = block.get(name)
        for i, spec in enumerate(cast("list[Any]", items) if isinstance(items, list) else ()):
            if isinstance(spec, dict):
                at = (*path, name, i)
                yield Step(at, cast("dict[str, Any]", spec))
                yield from _steps(spec, at)
