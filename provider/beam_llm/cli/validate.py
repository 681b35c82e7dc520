"""``beam-llm validate``: every problem of pipeline files, for people and for machines."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from beam_llm.cli.variables import parse_variables
from beam_llm.lints import LINTS
from beam_llm.pipelines import Finding, PipelineFileError, check_source, unreadable

_SUFFIXES = (".yaml", ".yml")
# What a directory holds besides pipelines is none of our business.
_PIPELINE = re.compile(r"""^["']?pipeline["']?\s*:|^\s*\{\s*["']?pipeline["']?\s*:""", re.MULTILINE)
_MAX_BYTES = 40_000_000
_MAX_MEMORY = 4 << 30  # bytes
_STDIN = "<stdin>"


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
        print(error, file=sys.stderr)
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
    _WRITERS[style](shown, _use_color(color))
    if not quiet and style in ("text", "github"):
        print(_summary(files, findings), file=sys.stderr)
    if not files and not findings:
        print("beam-llm: no pipeline files there", file=sys.stderr)
        return 2
    return code


def _sources(targets: Sequence[str]) -> Iterator[tuple[str, str | Finding]]:
    """The texts to check, or what keeps them from being read."""
    seen: set[str] = set()
    for target in targets:
        if target == "-":
            yield _STDIN, _text(_STDIN, sys.stdin.buffer.read(_MAX_BYTES))
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
    """The YAML files below a directory, without hidden ones."""
    for folder, folders, names in os.walk(directory):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if name.endswith(_SUFFIXES) and not name.startswith("."):
                yield str(Path(folder, name))


def _read(file: str) -> str | Finding:
    try:
        with open(file, "rb") as stream:
            return _text(file, stream.read(_MAX_BYTES))
    except OSError as error:
        return unreadable(file, error)


def _text(file: str, read: bytes) -> str | Finding:
    if len(read) == _MAX_BYTES:
        return Finding(LINTS["file"], f"cannot be read: it has {_MAX_BYTES:,} bytes or more", file)
    try:
        return read.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return unreadable(file, error)


def _use_color(color: str) -> bool:
    if color == "auto":
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return color == "always"


def _summary(files: int, findings: Sequence[Finding]) -> str:
    counts = {level: sum(f.level == level for f in findings) for level in ("error", "warning")}
    words = [_counted(n, level) for level, n in counts.items() if n]
    return f"{_counted(files, 'file')} checked: {', '.join(words) or 'no problems'}"


def _counted(n: int, word: str) -> str:
    return f"{n:,} {word}{'' if n == 1 else 's'}"


# Formats


def _write_text(findings: Sequence[Finding], colored: bool) -> None:
    for finding in findings:
        line = str(finding)
        if colored:
            paint = "31" if finding.level == "error" else "33"
            place, _, rest = line.partition(f": {finding.level}: ")
            line = f"\x1b[1m{place}:\x1b[0m \x1b[{paint}m{finding.level}:\x1b[0m {rest}"
        print(line)


def _write_json(findings: Sequence[Finding], colored: bool) -> None:
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
    print(json.dumps({"version": 1, "problems": problems}, ensure_ascii=False, indent=2))


def _write_github(findings: Sequence[Finding], colored: bool) -> None:
    """Writes GitHub's workflow commands, which it shows beside the lines."""
    del colored

    def escaped(text: str, *more: str) -> str:
        for character in ("%", "\r", "\n", *more):
            text = text.replace(character, f"%{ord(character):02X}")
        return text

    for f in findings:
        values = {"file": f.file, "line": f.line, "col": f.column, "title": f.lint.name}
        known = {k: str(v) for k, v in values.items() if v is not None}
        if f.rendered:
            del known["line"], known["col"]
        properties = ",".join(f"{k}={escaped(v, ':', ',')}" for k, v in known.items())
        print(f"::{f.level} {properties}::{escaped(f.text)}")


def _write_sarif(findings: Sequence[Finding], colored: bool) -> None:
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
    print(json.dumps(log, ensure_ascii=False, indent=2))


def _sarif_place(finding: Finding) -> dict[str, Any]:
    from urllib.parse import quote

    path = Path(finding.file)
    uri = path.as_uri() if path.is_absolute() else quote(path.as_posix())
    place: dict[str, Any] = {"artifactLocation": {"uri": uri}}
    if finding.line is not None and not finding.rendered:
        place["region"] = {"startLine": finding.line}
        if finding.column is not None:
            place["region"]["startColumn"] = finding.column
    return place


_WRITERS: dict[str, Callable[[Sequence[Finding], bool], None]] = {
    "text": _write_text,
    "json": _write_json,
    "sarif": _write_sarif,
    "github": _write_github,
}
