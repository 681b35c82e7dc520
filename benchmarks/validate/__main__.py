"""Measures how soon `beam-llm validate` answers: see README.md beside this file."""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import (
    clean_env,
    conditions,
    in_child,
    median_ratio,
    progress,
    rotated,
    table,
    verdict,
)
from benchmarks.validate.measure import BOMBS, PIPELINE, timed_bomb, timed_lines, warm_rate


def command(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def wall(arguments: list[str]) -> float:
    began = time.perf_counter()
    done = subprocess.run(arguments, capture_output=True, text=True, env=clean_env())
    took = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"{arguments} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return took


def cold(rounds: int) -> None:
    """One file, a new process each: ours, check-jsonschema and our help in turn."""
    with tempfile.TemporaryDirectory(prefix="beam-llm-bench-") as directory:
        schema = Path(directory) / "pipeline.schema.json"
        with schema.open("w") as out:
            subprocess.run([command("beam-llm"), "schema", "--pipeline"], stdout=out, check=True)
        commands = {
            "beam-llm validate": [command("beam-llm"), "validate", str(PIPELINE)],
            "check-jsonschema": [
                command("check-jsonschema"), "--schemafile", str(schema), str(PIPELINE)
            ],
            "beam-llm --help": [command("beam-llm"), "--help"],
        }  # fmt: skip
        times: dict[str, list[float]] = {name: [] for name in commands}
        for n in range(rounds + 1):
            for name in rotated(list(commands), n):
                took = wall(commands[name])
                if n:  # the first round warms up disk and bytecode
                    times[name].append(took)
        progress(f"cold: {rounds} rounds done")
    print(f"\nCold, {PIPELINE.name}, {rounds} rounds, milliseconds")
    rows = [
        [name, *(f"{f(values) * 1e3:.0f}" for f in (statistics.median, min, max))]
        for name, values in times.items()
    ]
    table(["command", "median", "least", "most"], rows)
    ours, theirs, help_ = times.values()
    verdict("validate / check-jsonschema", median_ratio(ours, theirs), 1.0, at_least=False)
    verdict("--help / validate", median_ratio(help_, ours), 1 / 3, at_least=False)
    verdict("--help / check-jsonschema", median_ratio(help_, theirs), 1 / 3, at_least=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.validate",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=15, help="of cold starts, after a first")
    parser.add_argument("--repeats", type=int, default=10, help="of the corpus, warm")
    options = parser.parse_args()
    conditions()

    cold(options.rounds)

    rate = in_child(warm_rate, {"repeats": options.repeats})
    print(f"\nWarm, {rate['files']:.0f} files, one process, reading included")
    print(f"{rate['wall']:.0f} files/s by the clock, {rate['cpu']:.0f} by processor time")
    verdict("files a second of one core", rate["cpu"], 500, at_least=True)

    print("\nLong pipelines")
    sizes = [12_500, 25_000, 50_000, 100_000]
    runs = [in_child(timed_lines, {"lines": n}) for n in sizes]
    table(
        ["lines", "processor seconds", "per line [µs]", "memory [MB]"],
        [
            [f"{n:,}", f"{r['secs']:.2f}", f"{r['secs'] / n * 1e6:.1f}", f"{r['mb']:.0f}"]
            for n, r in zip(sizes, runs, strict=True)
        ],
    )
    growth = (runs[-1]["secs"] / sizes[-1]) / (runs[0]["secs"] / sizes[0])
    verdict("time per line, 100,000 / 12,500 lines", growth, 1.5, at_least=False)

    print("\nText without end")
    ends = {name: in_child(timed_bomb, {"name": name}) for name in BOMBS}
    table(
        ["text", "processor seconds", "problems", "memory [MB]"],
        [
            [name, f"{r['secs']:.2f}", f"{r['problems']:.0f}", f"{r['mb']:.0f}"]
            for name, r in ends.items()
        ],
    )
    verdict("slowest [s]", max(r["secs"] for r in ends.values()), 1.0, at_least=False)
    verdict("most memory [MB]", max(r["mb"] for r in ends.values()), 512, at_least=False)


if __name__ == "__main__":
    main()
