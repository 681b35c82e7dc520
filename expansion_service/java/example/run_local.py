"""Runs the example on this machine: starts a job service, runs the Java main, stops the service.

    make java-example                                    # on Prism, with a real model
    make java-example JAVA_RUNNER=python                 # on Beam's own local job service
    python expansion_service/java/example/run_local.py prism=PATH --input=… --output=… --model=…

The first argument is the job service: `prism=PATH` or `python`. The others go to `LabelPackages`.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

EXAMPLE = Path(__file__).parent
STOP_SECS = 15.0
KEPT_LINES = 100


@contextlib.contextmanager
def job_service(kind: str) -> Iterator[str]:
    """Runs a local job service.

    It works in a temporary folder, which goes with it.

    Args:
      kind: `prism=PATH` with the path of Prism, or `python` for Beam's local job service.

    Yields:
      Its address.
    """
    name, _, path = kind.partition("=")
    with tempfile.TemporaryDirectory(prefix="beam-llm-jobs-") as folder:
        port_file = Path(folder) / "port"
        if name == "prism":
            command = [
                str(Path(path).resolve()),
                "--job_port=0",
                "--serve_http=false",
                "--log_kind=text",
            ]
        else:
            module = "apache_beam.runners.portability.local_job_service_main"
            command = [sys.executable, "-m", module, "--port=0", f"--port_file={port_file}"]
        said: list[str] = []
        with subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            threading.Thread(target=_listen, args=(process.stdout, said), daemon=True).start()
            try:
                yield f"localhost:{_port(process, port_file, said)}"
            finally:
                process.terminate()
                try:
                    process.wait(STOP_SECS)
                except subprocess.TimeoutExpired:
                    process.kill()


def _port(process: subprocess.Popen[str], port_file: Path, said: list[str]) -> str:
    while process.poll() is None:
        if port_file.exists():
            return port_file.read_text(encoding="utf-8").strip()
        if found := re.search(r"Serving JobManagement.*endpoint=\S+:(\d+)", "".join(said)):
            return found[1]
        time.sleep(0.05)
    raise RuntimeError(f"{process.args} did not serve:\n{''.join(said)}")


def _listen(output: IO[str], said: list[str]) -> None:
    with contextlib.suppress(ValueError):  # closed, at the end
        for line in output:
            if len(said) < KEPT_LINES:
                said.append(line)
            if re.search(r"level=(WARN|ERROR)|^(WARNING|ERROR):", line):
                sys.stderr.write(line)


def classpath() -> str:
    """Gives the class path of the example, which Maven has built."""
    libraries = (EXAMPLE / "target/classpath").read_text(encoding="utf-8")
    return f"{EXAMPLE / 'target/classes'}:{libraries}"


def main() -> int:
    """Runs the example."""
    kind, *arguments = sys.argv[1:]
    with job_service(kind) as endpoint:
        command = [
            "java",
            f"-Djava.util.logging.config.file={EXAMPLE / 'logging.properties'}",
            "-cp",
            classpath(),
            "io.beamllm.example.LabelPackages",
            "--runner=PortableRunner",
            f"--jobEndpoint={endpoint}",
            "--localWorkers=true",
            f"--python={sys.executable}",
            *arguments,
        ]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
