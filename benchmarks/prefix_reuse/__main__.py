"""Measures what keyed batches save of prefill: see README.md beside this file."""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.asking import ask_bare, ask_ours, ask_stock
from benchmarks.common import (
    conditions,
    forget_prefixes,
    in_child,
    progress,
    rotated,
    server_counters,
    serving,
    table,
    verdict,
)
from benchmarks.prefix_reuse.material import PROMPT, make_model, make_rows, model_path

GROUPED = "bare, grouped"


def variants(options: argparse.Namespace, model: str, at: dict[str, str]) -> dict[str, Any]:
    """The ways to ask, by name: the function and its job."""
    # Nothing but these: what is not given has its default, as in YAML.
    config = {
        "model": model,
        "prompt": PROMPT,
        "sampling": {
            "max_tokens": options.max_tokens,
            "temperature": 0.0,
            "extra_body": '{"ignore_eos": true}',
        },
    }
    bare = {"config": config, "in_flight": options.concurrency}
    size = options.concurrency
    fixed = {"min_batch_size": size, "max_batch_size": size}
    shuffled = {"config": config, "rows": at["shuffled"]}
    runners = {"direct": {}}
    if options.prism:
        runners["Prism"] = {"runner": "prism", "prism": str(options.prism.resolve())}
    ways: dict[str, Any] = {
        GROUPED: (ask_bare, {**bare, "rows": at["grouped"]}),
        "bare, shuffled": (ask_bare, {**bare, "rows": at["shuffled"]}),
    }
    for name, on in runners.items():
        ways[f"ours, shuffled, {name}"] = (ask_ours, {**shuffled, **on})
        ways[f"stock, shuffled, {name}"] = (ask_stock, {**shuffled, **on})
        ways[f"stock, batches of {size}, shuffled, {name}"] = (
            ask_stock,
            {**shuffled, **on, "batching": fixed},
        )
    chosen = options.variants.split(",") if options.variants else [""]
    return {name: way for name, way in ways.items() if any(name.startswith(c) for c in chosen)}


def measure(url: str, ways: dict[str, Any], number: int, rounds: int) -> dict[str, Any]:
    """Runs each variant once a round on an emptied cache."""
    results: dict[str, Any] = {name: {"secs": [], "rate": []} for name in ways}
    for n in range(rounds):
        for name in rotated(list(ways), n):
            ask, job = ways[name]
            forget_prefixes(url)
            before = server_counters(url)
            result = in_child(ask, {"url": url, **job})
            after = server_counters(url)
            assert result["rows"] == number, (name, result)
            gone = {key: value - before.get(key, 0.0) for key, value in after.items()}
            hits = gone["vllm:prefix_cache_hits_total"]
            rate = hits / gone["vllm:prefix_cache_queries_total"]
            results[name]["secs"].append(result["seconds"])
            results[name]["rate"].append(rate)
            progress(f"round {n + 1}/{rounds}, {name}: {result['seconds']:.1f} s, {rate:.1%} hits")
    return results


def show(results: dict[str, Any], number: int) -> None:
    """Prints the table and what is to be reached."""
    secs = {name: statistics.median(result["secs"]) for name, result in results.items()}
    rate = {name: statistics.median(result["rate"]) for name, result in results.items()}
    table(
        ["", "seconds", "rows/s", "token hit rate"],
        [[n, f"{secs[n]:.1f}", f"{number / secs[n]:.2f}", f"{rate[n]:.1%}"] for n in results],
    )
    for name in results:
        kind, _, runner = name.rpartition(", ")
        if kind != "ours, shuffled":
            continue
        if GROUPED in results:
            share = rate[name] / (rate[GROUPED] or 1.0)
            verdict(f"{runner}: hit rate / grouped order's", share, 0.9, at_least=True)
        for stock in results:
            if stock.startswith("stock") and stock.endswith(runner):
                verdict(f"{name} / {stock}", secs[stock] / secs[name], 3.0, at_least=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.prefix_reuse",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--prism", type=Path, help="Prism's binary: measure on Prism too")
    parser.add_argument("--variants", help="only those that begin so: 'bare,ours,stock, shuffled'")
    parser.add_argument("--prefixes", type=int, default=24, help="distinct guides")
    parser.add_argument("--each", type=int, default=6, help="prompts of each guide")
    parser.add_argument("--tokens", type=int, default=1410, help="of a guide")
    parser.add_argument("--max-tokens", type=int, default=8, help="generated of each prompt")
    parser.add_argument("--concurrency", type=int, default=16, help="of server and bare client")
    parser.add_argument("--blocks", type=int, default=64, help="of 128 tokens in the KV cache")
    parser.add_argument("--hidden", type=int, default=512, help="the model's width")
    parser.add_argument("--layers", type=int, default=6, help="the model's depth")
    parser.add_argument("--rounds", type=int, default=1, help="times each variant runs")
    parser.add_argument(
        "--dry", action="store_true", help="use a stand-in server: to try the script"
    )
    options = parser.parse_args()
    conditions()
    path = model_path(options.hidden, options.layers)
    if not (path / "config.json").exists():
        made = in_child(make_model, {"hidden": options.hidden, "layers": options.layers})
        progress(f"made {path.name}, {made['millions']:.1f} million parameters")
    args = (
        "--enforce-eager",
        "--dtype=float32",
        "--max-model-len=2048",
        f"--max-num-seqs={options.concurrency}",
        f"--num-gpu-blocks-override={options.blocks}",
    )
    number = options.prefixes * options.each
    with tempfile.TemporaryDirectory(prefix="beam-llm-bench-") as directory:
        at = {}
        for order in ("grouped", "shuffled"):
            at[order] = str(Path(directory, f"{order}.jsonl"))
            shape = (options.prefixes, options.each, options.tokens)
            mean = make_rows(Path(at[order]), path, *shape, shuffled=order == "shuffled")
        ways = variants(options, str(path), at)
        if not ways:
            parser.error(f"--variants: none begins with {options.variants}")
        with serving(str(path), args, standin=options.dry) as url:
            results = measure(url, ways, number, options.rounds)
    ceiling = (options.each - 1) / options.each * (options.tokens // 128 * 128) / mean
    print(
        f"\n{options.prefixes} prefixes x {options.each} prompts of {mean:,.0f} tokens,"
        f" {options.blocks} KV blocks, {options.concurrency} at once, median of {options.rounds};"
        f" the most that whole blocks allow: {ceiling:.1%}"
    )
    show(results, number)


if __name__ == "__main__":
    main()
