"""Times a pipeline in Java beside the same one in Python: see README.md beside this file."""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import distributions
from pathlib import Path

from benchmarks.common import (
    ROOT,
    conditions,
    forget_prefixes,
    median_ratio,
    progress,
    rotated,
    serving,
    table,
    verdict,
)

JAVA = ROOT / "expansion_service/java"
PRISM = ROOT / ".cache/bin/prism"
sys.path.append(str(JAVA / "example"))

from run_local import job_service  # noqa: E402


def write_rows(path: Path, number: int, group: int) -> None:
    """Writes rows of short, real text, in groups that a key column tells."""
    summaries = sorted({d.metadata["Summary"] for d in distributions() if d.metadata["Summary"]})
    with path.open("w") as file:
        for i in range(number):
            text = f"({i}) {summaries[i % len(summaries)][:100]}"
            file.write(json.dumps({"group": f"g{i // group}", "text": text}) + "\n")


def java(jobs: str, url: str, rows: Path, output: Path) -> list[str]:
    """The command of the pipeline in Java."""
    module = JAVA / "integration/target"
    return [
        "java",
        "-cp",
        f"{module / 'classes'}:{(module / 'classpath').read_text()}",
        "io.beamllm.integration.Throughput",
        "--runner=PortableRunner",
        f"--jobEndpoint={jobs}",
        f"--service={sys.executable}",
        f"--endpoint={url}/v1",
        f"--input={rows}",
        f"--output={output}",
    ]


def python(jobs: str, url: str, rows: Path, output: Path) -> list[str]:
    """The command of the same pipeline in Python."""
    return [
        sys.executable,
        "-m",
        "benchmarks.java.pipeline",
        f"--endpoint={url}/v1",
        f"--input={rows}",
        f"--output={output}",
        "--runner=PortableRunner",
        f"--job_endpoint={jobs}",
        "--environment_type=LOOPBACK",
    ]


def main() -> None:
    """Runs both pipelines in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--group", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    subprocess.run(["mvn", "-B", "-q", "-ntp", "package", "-DskipTests"], cwd=JAVA, check=True)
    conditions()
    ways = {"Java": java, "Python": python}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder, serving("m", standin=True) as url:
        rows = Path(folder) / "rows.jsonl"
        write_rows(rows, options.rows, options.group)
        for n in range(options.rounds):
            for name in rotated(list(ways), n):
                output = Path(folder) / f"{name}-{n}.jsonl"
                forget_prefixes(url)
                # A runner of its own each: they keep what they have seen.
                with job_service(f"prism={PRISM}") as jobs:
                    began = time.monotonic()
                    subprocess.run(
                        ways[name](jobs, url, rows, output),
                        cwd=ROOT,
                        check=True,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                    )
                    seconds[name].append(time.monotonic() - began)
                with output.open() as file:
                    assert sum(1 for _ in file) == options.rows
                progress(f"round {n + 1}/{options.rounds}, {name}: {seconds[name][-1]:.1f} s")
    table(
        ["", "seconds", "range", "rows/s", "x Python"],
        [
            [
                name,
                f"{statistics.median(found):.1f}",
                f"{min(found):.1f} to {max(found):.1f}",
                f"{options.rows / statistics.median(found):,.0f}",
                f"{median_ratio(found, seconds['Python']):.2f}",
            ]
            for name, found in seconds.items()
        ],
    )
    ratio = median_ratio(seconds["Java"], seconds["Python"])
    verdict("time of Java, in times of Python", ratio, 2, at_least=False)


if __name__ == "__main__":
    main()
