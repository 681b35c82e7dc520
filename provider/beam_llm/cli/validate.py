"""``beam-llm validate``: every problem of pipeline files, for people and for machines."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import stat
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from beam_llm.cli.variables import parse_variables
from beam_llm.lints import LINTS
from beam_llm.pipelines import Finding, PipelineFileError, check_source, one_line, unreadable

_SUFFIXES = (".yaml", ".yml")
# What a directory holds besides pipelines is none of our business.
_PIPELINE = re.compile(r"""^["']?pipeline["']?\s*:|^\s*\{\s*["']?pipeline["']?\s*:""", re.MULTILINE)
_MAX_BYTES = 40_000_000
_MAX_MEMORY = 4 << 30  # bytes
_STDIN = "<stdin>"
_HALF = re.compile("[\ud800-\udfff]")


@contextlib.contextmanager
def _bounded_memory() -> Generator[None]:
    """Lets templates that fill the memory end in an error: files may come from strangers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = _MAX_MEMORY if hard == resource.RLIM_INFINITY else min(hard, _MAX_MEMORY)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@_bounded_memory()
def validate(
    targets: Sequence[str],
    variables: Sequence[str],
    *,
    style: str | None = None,
    strict: bool = False,
    quiet: bool = False,
    color: str = "auto",
) -> int:
    """Checks pipeline files, and writes what is wrong to standard output.

    Args:
      targets: Files, directories, and ``-`` for standard input.
      variables: Jinja variables as ``NAME=VALUE``.
      style: ``text``, ``json``, ``sarif`` or ``github``; when absent, ``github`` in a
        GitHub action, else ``text``.
      strict: Whether warnings fail as well.
      quiet: Whether to leave out the summary, and warnings that do not fail.
      color: ``auto``, ``always`` or ``never``.

    Returns:
      The exit code: 0 when all is well, 1 when anything is wrong, 2 when a file cannot be
      read or a variable is missing.
    """
    try:
        given = parse_variables(variables)
    except PipelineFileError as error:
        _note(str(error))
        return 2
    if style is None:
        style = "github" if os.environ.get("GITHUB_ACTIONS") == "true" else "text"
    findings: list[Finding] = []
    files, code = 0, 0
    for name, source in _sources(targets):
        if isinstance(source, Finding):
            findings.append(source)
            code = 2
            continue
        files += 1
        checked = check_source(name, source, given)
        findings += checked.findings
        if not checked.usable:
            code = 2
    failing = [f for f in findings if strict or f.level == "error"]
    code = code or int(bool(failing))
    shown = failing if quiet else findings
    if not _put(_WRITERS[style](shown, _use_color(color))):
        return 2
    if not quiet and style in ("text", "github"):
        _note(_summary(files, findings))
    if not files and not findings:
        _note("beam-llm: no pipeline files there")
        return 2
    return code


def _put(text: str) -> bool:
    """Writes the report; where nobody takes it, says so and gives False."""
    stream: Any = sys.stdout
    if stream is None:  # closed before the start
        _note("beam-llm: standard output is closed")
        return False
    try:
        _print(text, stream)
    except BrokenPipeError:  # `| head` has seen enough
        return False
    except OSError as error:
        _note(f"beam-llm: standard output cannot be written: {error.strerror}")
        return False
    return True


def _note(text: str) -> None:
    stream: Any = sys.stderr
    if stream is not None:
        with contextlib.suppress(OSError):
            _print(text + "\n", stream)


def _print(text: str, stream: Any) -> None:
    if isinstance(stream, io.TextIOWrapper):  # whatever the terminal's encoding lacks
        stream.reconfigure(errors="backslashreplace")
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        # What is left in the buffer would fail again, with a traceback, when Python ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        raise


def _sources(targets: Sequence[str]) -> Iterator[tuple[str, str | Finding]]:
    """The texts to check, or what keeps them from being read."""
    seen: set[str] = set()
    for target in targets:
        if target == "-":
            if target not in seen:
                seen.add(target)
                yield _STDIN, _stdin()
        elif os.path.isdir(target):
            for file in _files(target):
                if file not in seen:
                    seen.add(file)
                    source = _read(file)
                    if isinstance(source, Finding) or _PIPELINE.search(source):
                        yield file, source
        elif target not in seen:
            seen.add(target)
            yield target, _read(target)


def _files(directory: str) -> Iterator[str]:
    """The YAML files below a directory, without hidden ones, pipes and the like."""
    for folder, folders, names in os.walk(directory):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if name.endswith(_SUFFIXES) and not name.startswith("."):
                file = Path(folder, name)
                if file.is_file() or not file.exists():  # a link to nothing is worth a word
                    yield str(file)


def _stdin() -> str | Finding:
    stream: Any = sys.stdin
    if stream is None:
        return Finding(LINTS["file"], "cannot be read: it is closed", _STDIN)
    try:
        return _text(_STDIN, stream.buffer.read(_MAX_BYTES))
    except OSError as error:
        return unreadable(_STDIN, error)


def _read(file: str) -> str | Finding:
    try:
        with open(file, "rb", opener=_open_at_once) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                words = "cannot be read: it is not a regular file (what a pipe holds goes to '-')"
                return Finding(LINTS["file"], words, file)
            return _text(file, stream.read(_MAX_BYTES))
    except OSError as error:
        return unreadable(file, error)


def _open_at_once(file: str, flags: int) -> int:
    """Opens a file, without waiting for somebody who writes to a pipe."""
    return os.open(file, flags | os.O_NONBLOCK)


def _text(file: str, read: bytes) -> str | Finding:
    if len(read) == _MAX_BYTES:
        return Finding(LINTS["file"], f"cannot be read: it has {_MAX_BYTES:,} bytes or more", file)
    try:
        return read.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return unreadable(file, error)


def _use_color(color: str) -> bool:
    if color == "auto":
        stream: Any = sys.stdout
        return stream is not None and stream.isatty() and not os.environ.get("NO_COLOR")
    return color == "always"


def _summary(files: int, findings: Sequence[Finding]) -> str:
    counts = {level: sum(f.level == level for f in findings) for level in ("error", "warning")}
    words = [_counted(n, level) for level, n in counts.items() if n]
    return f"{_counted(files, 'file')} checked: {', '.join(words) or 'no problems'}"


def _counted(n: int, word: str) -> str:
    return f"{n:,} {word}{'' if n == 1 else 's'}"


# Formats


def _write_text(findings: Sequence[Finding], colored: bool) -> str:
    lines: list[str] = []
    for finding in findings:
        line = str(finding)
        if colored:
            paint = "31" if finding.level == "error" else "33"
            place, _, rest = line.partition(f": {finding.level}: ")
            line = f"\x1b[1m{place}:\x1b[0m \x1b[{paint}m{finding.level}:\x1b[0m {rest}"
        lines.append(line + "\n")
    return "".join(lines)


def _write_json(findings: Sequence[Finding], colored: bool) -> str:
    del colored
    problems = [
        {
            "file": f.file,
            "line": f.line,
            "column": f.column,
            "level": f.level,
            "lint": f.lint.name,
            "path": f.path,
            "message": f.message,
            "rendered": f.rendered,
        }
        for f in findings
    ]
    return _json({"version": 1, "problems": problems})


def _write_github(findings: Sequence[Finding], colored: bool) -> str:
    """Writes GitHub's workflow commands, which it shows beside the lines."""
    del colored

    def escaped(text: str, *more: str) -> str:
        for character in ("%", "\r", "\n", *more):
            text = text.replace(character, f"%{ord(character):02X}")
        return text

    lines: list[str] = []
    for f in findings:
        values = {"file": f.file, "line": f.line, "col": f.column, "title": f.lint.name}
        known = {k: str(v) for k, v in values.items() if v is not None}
        if f.rendered:
            del known["line"], known["col"]
        properties = ",".join(f"{k}={escaped(v, ':', ',')}" for k, v in known.items())
        lines.append(one_line(f"::{f.level} {properties}::{escaped(f.text)}") + "\n")
    return "".join(lines)


def _write_sarif(findings: Sequence[Finding], colored: bool) -> str:
    """Writes SARIF 2.1.0, which code-scanning services read."""
    del colored
    from importlib.metadata import version

    used = sorted({f.lint.name for f in findings})
    rules = [
        {
            "id": name,
            "shortDescription": {"text": LINTS[name].summary},
            "defaultConfiguration": {"level": LINTS[name].level},
        }
        for name in used
    ]
    run = {
        "tool": {"driver": {"name": "beam-llm", "version": version("beam-llm"), "rules": rules}},
        "columnKind": "unicodeCodePoints",
        "results": [
            {
                "ruleId": f.lint.name,
                "ruleIndex": used.index(f.lint.name),
                "level": f.level,
                "message": {"text": f.text},
                "locations": [{"physicalLocation": _sarif_place(f)}],
            }
            for f in findings
        ],
    }
    log = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [run],
    }
    return _json(log)


def _json(data: Any) -> str:
    """Writes JSON that every encoding has, and every reader: without halves of characters."""
    written = json.dumps(data, ensure_ascii=False, indent=2)
    return json.dumps(json.loads(_HALF.sub("\ufffd", written)), indent=2) + "\n"


def _sarif_place(finding: Finding) -> dict[str, Any]:
    from urllib.parse import quote

    path = Path(finding.file)
    uri = path.as_uri() if path.is_absolute() else quote(path.as_posix(), errors="surrogateescape")
    place: dict[str, Any] = {"artifactLocation": {"uri": uri}}
    if finding.line is not None and not finding.rendered:
        place["region"] = {"startLine": finding.line}
        if finding.column is not None:
            place["region"]["startColumn"] = finding.column
    return place


_WRITERS: dict[str, Callable[[Sequence[Finding], bool], str]] = {
    "text": _write_text,
    "json": _write_json,
    "sarif": _write_sarif,
    "github": _write_github,
}
