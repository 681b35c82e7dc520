"""Measures what our transform costs beside a bare client: see README.md beside this file."""

import argparse
import json
import statistics
import tempfile
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from benchmarks.asking import ask_bare, ask_ours, ask_stock
from benchmarks.common import (
    REAL_MODEL,
    conditions,
    forget_prefixes,
    in_child,
    median_ratio,
    progress,
    rotated,
    serving,
    table,
    verdict,
)

PROMPT = """Label the summary of a Python package with one word: data, web, test or other.

Summary: Fast arrays and matrices
Label: data

Summary: A framework for HTTP servers
Label: web

Summary: Fixtures and assertions
Label: test

Summary: {text}
Label:"""


def write_rows(path: Path, number: int, group: int) -> None:
    """Writes rows of short, real text, in groups that a key column tells."""
    found = {d.metadata["Summary"] for d in distributions() if d.metadata["Summary"]}
    summaries = sorted(found)
    with path.open("w") as file:
        for i in range(number):
            # Numbered, so that no prompt is the repetition of another.
            text = f"({i}) {summaries[i % len(summaries)][:100]}"
            file.write(json.dumps({"group": f"g{i // group}", "text": text}) + "\n")


def config(model: str, in_flight: int, max_tokens: int, keyed: bool) -> dict[str, Any]:
    """The configuration of `VLLMCompletions`; the other ways read prompt and sampling of it."""
    return {
        "model": model,
        "prompt": PROMPT,
        "sampling": {
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "extra_body": '{"ignore_eos": true}',
        },
        "requests": {"max_in_flight": in_flight},
        "prefix_batching": {"key_field": "group"} if keyed else {"mode": "none"},
    }


def compare(
    url: str,
    rows: dict[str, tuple[str, int]],
    ways: dict[str, tuple[Any, dict[str, Any]]],
    rounds: int,
) -> dict[str, list[float]]:
    """Runs each way once a round, and gives its rows per second."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for n in range(rounds):
        for name in rotated(list(ways), n):
            ask, job = ways[name]
            path, number = rows[name]
            forget_prefixes(url)
            result = in_child(ask, {"url": url, "rows": path, **job})
            assert result["rows"] == number, (name, result)
            rates[name].append(number / result["seconds"])
            progress(f"round {n + 1}/{rounds}, {name}: {rates[name][-1]:,.1f} rows/s")
    return rates


def show(rates: dict[str, list[float]]) -> None:
    """Prints the table of a comparison."""
    rows = []
    for name, values in rates.items():
        rows.append(
            [
                name,
                f"{statistics.median(values):,.1f}",
                f"{min(values):,.1f} to {max(values):,.1f}",
                f"{median_ratio(values, rates['bare aiohttp']):.3f}",
                f"{median_ratio(values, rates['stock']):.2f}",
            ]
        )
    table(["", "rows/s", "range", "x bare", "x stock"], rows)


def real(options: argparse.Namespace, directory: Path) -> None:
    """On a vLLM: nearly as fast as bare, and no slower than Beam's handler."""
    path = directory / "real.jsonl"
    write_rows(path, options.rows, options.group)
    concurrency = options.concurrency
    model = str(options.model)
    unkeyed = config(model, concurrency, options.max_tokens, keyed=False)
    keyed = config(model, concurrency, options.max_tokens, keyed=True)
    fixed = {"min_batch_size": concurrency, "max_batch_size": concurrency}
    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        "bare aiohttp": (ask_bare, {"config": unkeyed, "in_flight": concurrency}),
        "ours": (ask_ours, {"config": unkeyed}),
        f"ours, keyed, {options.group} rows a key": (ask_ours, {"config": keyed}),
        "stock": (ask_stock, {"config": unkeyed}),
        f"stock, batches of {concurrency}": (ask_stock, {"config": unkeyed, "batching": fixed}),
    }
    args = (
        "--enforce-eager",
        "--max-model-len=2048",
        "--dtype=float32",
        f"--max-num-seqs={concurrency}",
    )
    with serving(model, args, standin=options.dry) as url:
        progress("warming up")
        for _ in range(1 if options.dry else 2):
            in_child(ask_bare, {"url": url, "rows": str(path), **ways["bare aiohttp"][1]})
        rates = compare(url, dict.fromkeys(ways, (str(path), options.rows)), ways, options.rounds)
    print(
        f"\nvLLM, {options.rows} prompts, {options.max_tokens} tokens each, {concurrency} at once,"
        f" median of {options.rounds}"
    )
    show(rates)
    bare, ours, _, stock, batched = rates.values()
    verdict("ours / bare", median_ratio(ours, bare), 0.95, at_least=True)
    verdict("ours / stock", median_ratio(ours, stock), 1.0, at_least=True)
    verdict("ours / stock in batches", median_ratio(ours, batched), 1.0, at_least=True)
    verdict("keyed / unkeyed", median_ratio(rates[list(ways)[2]], ours), 0.95, at_least=True)


def standin(options: argparse.Namespace, directory: Path) -> None:
    """On a server that answers at once: only our own overhead counts."""
    many, few = directory / "many.jsonl", directory / "few.jsonl"
    write_rows(many, options.standin_rows, options.group)
    write_rows(few, options.stock_rows, options.group)
    unkeyed = config("standin", 64, 1, keyed=False)
    keyed = config("standin", 64, 1, keyed=True)
    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        "bare aiohttp": (ask_bare, {"config": unkeyed, "in_flight": 64}),
        "ours": (ask_ours, {"config": unkeyed}),
        f"ours, keyed, {options.group} rows a key": (ask_ours, {"config": keyed}),
        "stock": (ask_stock, {"config": unkeyed}),
    }
    rows = dict.fromkeys(ways, (str(many), options.standin_rows))
    rows["stock"] = (str(few), options.stock_rows)
    with serving("standin", standin=True) as url:
        rates = compare(url, rows, ways, options.rounds)
    print(
        f"\nStand-in, {options.standin_rows:,} prompts (stock: {options.stock_rows:,}), 64 at once,"
        f" median of {options.rounds}"
    )
    show(rates)
    _, ours, ours_keyed, stock = rates.values()
    verdict("ours / stock", median_ratio(ours, stock), 5.0, at_least=True)
    verdict("keyed / stock", median_ratio(ours_keyed, stock), 5.0, at_least=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.overhead",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "parts", nargs="*", metavar="real|standin", help="what to measure (default: both)"
    )
    parser.add_argument("--model", type=Path, default=REAL_MODEL, help="of the real server")
    parser.add_argument("--rows", type=int, default=320, help="prompts for the real server")
    parser.add_argument("--max-tokens", type=int, default=8, help="generated of each prompt")
    parser.add_argument("--concurrency", type=int, default=16, help="requests at once, real server")
    parser.add_argument("--group", type=int, default=6, help="rows of one key, where keyed")
    parser.add_argument("--rounds", type=int, default=5, help="times each variant runs")
    parser.add_argument("--standin-rows", type=int, default=20_000, help="prompts, stand-in")
    parser.add_argument("--stock-rows", type=int, default=2_000, help="of them for Beam's handler")
    parser.add_argument(
        "--dry", action="store_true", help="use the stand-in for `real` too: to try the script"
    )
    options = parser.parse_args()
    parts = {"real": real, "standin": standin}
    if unknown := set(options.parts) - set(parts):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are real and standin")
    conditions()
    with tempfile.TemporaryDirectory(prefix="beam-llm-bench-") as directory:
        for part in options.parts or parts:
            parts[part](options, Path(directory))


if __name__ == "__main__":
    main()
