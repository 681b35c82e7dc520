"""Measures the memory our transform and client take: see README.md beside this file."""

import argparse
import statistics
from typing import Any

from benchmarks.common import (
    conditions,
    in_child,
    progress,
    rotated,
    serving,
    table,
    verdict,
)
from benchmarks.memory.measured import client, pipeline

STEPS = {
    "pass-through": "pass-through",
    "ours": "pass-through",
    "pass-through, keyed batches": "pass-through, keyed batches",
    "ours, keyed": "pass-through, keyed batches",
}
"""Each step of the pipeline, and what it is compared with."""


def of_pipelines(url: str, options: argparse.Namespace) -> None:
    """Peak growth of a process that runs the pipeline, with inference and without."""
    grown: dict[str, list[float]] = {step: [] for step in STEPS}
    for n in range(options.rounds):
        for step in rotated(list(STEPS), n):
            job = {"step": step, "url": url, "number": options.rows, "group": options.group}
            result = in_child(pipeline, job)
            assert result["rows"] == options.rows, (step, result)
            grown[step].append(result["peak_mb"] - result["before_mb"])
            progress(f"round {n + 1}/{options.rounds}, {step}: {result}")
    rows = []
    ratios = {}
    for step, values in grown.items():
        baseline = statistics.median(grown[STEPS[step]])
        ratios[step] = statistics.median(values) / baseline
        shown = f"{min(values):,.0f} to {max(values):,.0f}"
        rows.append([step, f"{statistics.median(values):,.0f}", shown, f"{ratios[step]:.3f}"])
    print(f"\nPipelines of {options.rows:,} rows, median of {options.rounds}")
    table(["step", "growth, MB", "range, MB", "x pass-through"], rows)
    verdict("ours / pass-through", ratios["ours"], 1.1, at_least=False)
    verdict("keyed / pass-through, keyed", ratios["ours, keyed"], 1.1, at_least=False)


def of_client(url: str, options: argparse.Namespace) -> None:
    """Memory of the client alone, over as many calls."""
    rows: list[list[str]] = []
    series: dict[str, list[float]] = {}
    for name, traced in (("RSS", False), ("allocated by Python", True)):
        progress(f"the client alone: {name}")
        job: dict[str, Any] = {"url": url, "number": options.rows, "traced": traced}
        series[name] = in_child(client, job)
        kb = series[name]
        rows.append([name, *(f"{value - kb[0]:,.0f}" for value in kb)])
    parts = len(next(iter(series.values()))) - 1
    heads = [f"{options.rows * (i + 1) // (parts + 1):,}" for i in range(parts + 1)]
    print("\nThe client alone: kB above the first column's, after so many calls")
    table(["", *heads], rows)
    kb = series["allocated by Python"]
    per_call = (kb[-1] - kb[0]) * 1024 / (options.rows * parts / (parts + 1))
    verdict("bytes that Python keeps for each further call", per_call, 1.0, at_least=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.memory",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parts = {"pipelines": of_pipelines, "client": of_client}
    parser.add_argument(
        "parts", nargs="*", metavar="pipelines|client", help="what to measure (default: both)"
    )
    parser.add_argument("--rows", type=int, default=100_000, help="rows, and calls")
    parser.add_argument("--group", type=int, default=64, help="rows of one key, where keyed")
    parser.add_argument("--rounds", type=int, default=3, help="times each pipeline runs")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(parts):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are pipelines and client")
    conditions()
    with serving("standin", standin=True) as url:
        for part in options.parts or parts:
            parts[part](url, options)


if __name__ == "__main__":
    main()
