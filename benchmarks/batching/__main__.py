"""Measures keyed batching: see README.md beside this file.

python -m benchmarks.batching [throughput] [extraction] [scaling] [--keys N …]
"""

import argparse
import json
import logging
import random
import resource
import statistics
import subprocess
import sys
import time
import timeit

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from beam_llm.batching import BatchByKey, BatchElements
from beam_llm.prefixes import ChatPrefixKeyFn, PromptPrefixKeyFn

RUNNER = "apache_beam.runners.portability.fn_api_runner.FnApiRunner"
SIZE = 32


def key_of(text):
    return text[:8]


def prompts(number, keys, seed=1):
    """Shuffled texts of 48 characters whose first 8 are one of so many keys."""
    draw = random.Random(seed)
    return [f"{draw.randrange(keys):08d}{'x' * 40}" for _ in range(number)]


class Prompts(beam.DoFn):
    """Makes them in the worker, so that the source costs the same for everyone."""

    def __init__(self, number, keys):
        self.arguments = number, keys

    def process(self, _):
        return prompts(*self.arguments)


class Unbounded(beam.PTransform):
    """Says that its input were unbounded, which makes keyed batching use state."""

    def expand(self, pcoll):
        result = pcoll | beam.Map(lambda element: element)
        result.is_bounded = False
        return result


class Pairs(beam.PTransform):
    def __init__(self, batching):
        super().__init__()
        self.batching = batching

    def expand(self, pcoll):
        return pcoll | beam.Map(lambda text: (text[:8], text)) | self.batching


def seconds(number, keys, transform=None, unbounded=False):
    """Wall time of a pipeline on the direct runner that does nothing but batch."""
    start = time.perf_counter()
    with beam.Pipeline(runner=RUNNER, options=PipelineOptions([])) as pipeline:
        elements = (
            pipeline
            | beam.Impulse()
            | beam.ParDo(Prompts(number, keys)).with_output_types(str)
            | beam.Reshuffle()
        )
        if unbounded:
            elements |= Unbounded()
        if transform is not None:
            _ = elements | transform()
    return time.perf_counter() - start


def throughput(number=50_000, keys=200, repeats=5):
    """Elements per second through keying and batching, all variants in turn."""
    variants = {
        "pass-through": (None, False),
        "Beam, within bundles": (lambda: beam.BatchElements(SIZE, SIZE), False),
        "Beam, in state": (
            lambda: beam.BatchElements(SIZE, SIZE, max_batch_duration_secs=1),
            False,
        ),
        "by key, grouped": (lambda: BatchElements(SIZE, SIZE, key_fn=key_of), False),
        "by key, grouped, adaptive": (lambda: BatchElements(1, SIZE, key_fn=key_of), False),
        "by key, in state": (lambda: BatchElements(SIZE, SIZE, key_fn=key_of), True),
        "rows by key, grouped": (lambda: Pairs(BatchByKey(max_batch_size=SIZE)), False),
    }
    times = {name: [] for name in variants}
    for repeat in range(repeats + 1):
        for name, (transform, unbounded) in variants.items():
            taken = seconds(number, keys, transform, unbounded)
            if repeat:  # the first round warms up
                times[name].append(taken)
    medians = {name: statistics.median(values) for name, values in times.items()}
    stateful = medians["Beam, in state"]
    print(f"\n{number:,} elements, {keys} keys, batches of {SIZE}, median of {repeats}")
    print(f"{'':28}{'seconds':>9}{'elements/s':>12}{'net s':>8}{'x Beam in state':>17}")
    for name, median in medians.items():
        net = median - medians["pass-through"]
        print(f"{name:28}{median:9.2f}{number / median:12,.0f}{net:8.2f}{stateful / median:17.2f}")


def extraction():
    """Microseconds per key, of short prompts and of those of a megabyte."""
    print(f"\n{'key extraction':28}{'1 kB, us':>9}{'1 MB, us':>9}{'ratio':>7}")
    fillers = {"short": "x" * 1_000, "long": "x" * 1_000_000}
    chat = {
        name: [{"role": "system", "content": text}, {"role": "user", "content": "?"}]
        for name, text in fillers.items()
    }
    for label, key_fn, inputs in (
        ("prompt, default", PromptPrefixKeyFn(512), fillers),
        ("prompt, two delimiters", PromptPrefixKeyFn(512, ("\n\n", ":")), fillers),
        ("chat, default", ChatPrefixKeyFn(512), chat),
    ):
        short, long = (
            min(timeit.repeat(lambda v=value, f=key_fn: f(v), number=5_000, repeat=30)) / 5_000
            for value in inputs.values()
        )
        print(f"{label:28}{short * 1e6:9.2f}{long * 1e6:9.2f}{long / short:7.2f}")


def scaling(counts):
    """Time and memory of one element per key, each run in a process of its own."""
    print(f"\n{'distinct keys':28}{'seconds':>9}{'us/key':>9}{'MB':>7}{'MB pass-through':>17}")
    for count in counts:
        results = {}
        for mode in ("pass", "batch"):
            command = [sys.executable, "-m", "benchmarks.batching", "--one", mode, str(count)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            results[mode] = json.loads(output.splitlines()[-1])
        taken, memory = results["batch"]
        print(
            f"{count:<28,}{taken:9.1f}{taken / count * 1e6:9.0f}{memory:7.0f}"
            f"{results['pass'][1]:17.0f}"
        )


class Distinct(beam.DoFn):
    def __init__(self, number):
        self.number = number

    def process(self, _):
        return (f"{i:08d}{'x' * 40}" for i in range(self.number))


def one(mode, count):
    start = time.perf_counter()
    with beam.Pipeline(runner=RUNNER, options=PipelineOptions([])) as pipeline:
        source = beam.ParDo(Distinct(count)).with_output_types(str)
        elements = pipeline | beam.Impulse() | source | beam.Reshuffle()
        if mode == "batch":
            elements |= BatchElements(key_fn=key_of)
        _ = elements | beam.Map(len)
    taken = time.perf_counter() - start
    print(json.dumps([taken, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))


def main():
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["throughput", "extraction", "scaling"])
    parser.add_argument("--keys", nargs="+", type=int, default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--elements", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        return one(arguments.one[0], int(arguments.one[1]))
    if "throughput" in arguments.what:
        throughput(arguments.elements, repeats=arguments.repeats)
    if "extraction" in arguments.what:
        extraction()
    if "scaling" in arguments.what:
        scaling(arguments.keys)
    return None


if __name__ == "__main__":
    main()
