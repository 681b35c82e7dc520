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
from collections.abc import Iterator
from pathlib import Path
from typing import IO

EXAMPLE = Path(__file__).parent
STOP_SECS = 15.0


@contextlib.contextmanager
def job_service(kind: str) -> Iterator[str]:
    """Runs a local job service.

    Args:
      kind: `prism=PATH` with the path of Prism, or `python` for Beam's local job service.

    Yields:
      Its address.
    """
    name, _, path = kind.partition("=")
    with tempfile.TemporaryDirectory(prefix="beam-llm-jobs-") as staging:
        if name == "prism":
            command = [path, "--job_port=0", "--serve_http=false", "--log_kind=text"]
            address = re.compile(r"Serving JobManagement.*endpoint=\"?(\S+:\d+)")
        else:
            module = "apache_beam.runners.portability.local_job_service_main"
            command = [sys.executable, "-m", module, "--port=0", f"--staging_dir={staging}"]
            address = re.compile(r"Listening for jobs at (\d+)")
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                yield _address(process, address)
            finally:
                process.terminate()
                try:
                    process.wait(STOP_SECS)
                except subprocess.TimeoutExpired:
                    process.kill()


def _address(process: subprocess.Popen[str], pattern: re.Pattern[str]) -> str:
    output = process.stdout
    assert output is not None  # noqa: S101 - it was asked for
    said = []
    for line in output:
        said.append(line)
        if found := pattern.search(line):
            threading.Thread(target=_show, args=(output,), daemon=True).start()
            return found[1] if ":" in found[1] else f"localhost:{found[1]}"
    raise RuntimeError(f"{process.args} did not serve:\n{''.join(said)}")


def _show(output: IO[str]) -> None:
    with contextlib.suppress(ValueError):  # closed, at the end
        for line in output:
            if re.search(r"WARN|ERROR", line):
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
