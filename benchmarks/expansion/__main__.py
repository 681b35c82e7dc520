"""Ours beside Beam's own service: `python -m benchmarks.expansion`.

Both expand the same transform for the same input, in turns, so that the machine's moods fall on
both. Beam's service has no discovery; it is asked by class name, as ours is here.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
from apache_beam.portability.api import (
    beam_expansion_api_pb2,
    beam_expansion_api_pb2_grpc,
    beam_runner_api_pb2,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/expansion"))
from serving import MINIMAL, NAMED_TRANSFORM, Service, named_payload, request, serving, stock

GLOB = "--fully_qualified_name_glob=beam_llm.*"
ROUNDS = 5


def by_class_name() -> beam_expansion_api_pb2.ExpansionRequest:
    asked = request()
    asked.transform.spec.CopyFrom(
        beam_runner_api_pb2.FunctionSpec(
            urn=NAMED_TRANSFORM, payload=named_payload("beam_llm.VLLMCompletions", MINIMAL)
        )
    )
    return asked


@contextlib.contextmanager
def client(service: Service) -> Iterator[beam_expansion_api_pb2_grpc.ExpansionServiceStub]:
    with service.channel() as channel:
        yield beam_expansion_api_pb2_grpc.ExpansionServiceStub(channel)


def timed(stub: beam_expansion_api_pb2_grpc.ExpansionServiceStub, asked: object) -> float:
    began = time.perf_counter()
    answer = stub.Expand(asked, timeout=600)
    assert not answer.error, answer.error
    return time.perf_counter() - began


def start_secs(which: str) -> tuple[float, float]:
    """Times from starting a service until it serves, and until its first expansion."""
    began = time.perf_counter()
    with serving() if which == "ours" else stock(GLOB) as service, service.channel() as channel:
        grpc.channel_ready_future(channel).result(120)
        ready = time.perf_counter() - began
        timed(beam_expansion_api_pb2_grpc.ExpansionServiceStub(channel), by_class_name())
        return ready, time.perf_counter() - began


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def line(what: str, ours: float, stocks: float, unit: str) -> None:
    print(f"| {what} | {ours:.1f} {unit} | {stocks:.1f} {unit} | {ours / stocks:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description="Ours beside Beam's own expansion service.")
    parser.add_argument("--expansions", type=int, default=200, help="in turn, of each service")
    parser.add_argument("--memory", type=int, default=10_000, help="expansions to hold memory")
    parser.add_argument("--starts", type=int, default=ROUNDS)
    arguments = parser.parse_args()

    starts: dict[str, list[tuple[float, float]]] = {"ours": [], "stock": []}
    for _ in range(arguments.starts):
        for which, taken in starts.items():
            taken.append(start_secs(which))
    print("| | ours | Beam's | ratio |\n| --- | --- | --- | --- |")
    for at, what in enumerate(("serving", "first expansion")):
        medians = (statistics.median(times[at] for times in taken) for taken in starts.values())
        line(f"start to {what}, median", *medians, "s")

    asked = by_class_name()
    with (
        tempfile.TemporaryDirectory() as folder,
        serving("--log-level=ERROR", "--max-pending=64", env={"TMPDIR": folder}) as ours,
        stock(GLOB) as theirs,
        client(ours) as to_ours,
        client(theirs) as to_theirs,
    ):
        for stub in (to_ours, to_theirs):
            for _ in range(5):
                timed(stub, asked)
        mine: list[float] = []
        stocks: list[float] = []
        for _ in range(arguments.expansions):
            mine.append(timed(to_ours, asked) * 1000)
            stocks.append(timed(to_theirs, asked) * 1000)
        for share in (0.5, 0.99):
            line(
                f"expansion, p{share * 100:.0f}",
                quantile(mine, share),
                quantile(stocks, share),
                "ms",
            )

        at_once: tuple[list[float], list[float]] = ([], [])
        for _ in range(4):  # in turns as well
            for stub, taken in zip((to_ours, to_theirs), at_once, strict=True):
                with concurrent.futures.ThreadPoolExecutor(16) as pool:
                    share = arguments.expansions // 4
                    futures = [pool.submit(timed, stub, asked) for _ in range(share)]
                    taken += [future.result() * 1000 for future in futures]
        for share in (0.5, 0.99):
            line(
                f"16 clients at once, p{share * 100:.0f}",
                *(quantile(taken, share) for taken in at_once),
                "ms",
            )

        discoveries = []
        for _ in range(200):
            began = time.perf_counter()
            to_ours.DiscoverSchemaTransform(beam_expansion_api_pb2.DiscoverSchemaTransformRequest())
            discoveries.append((time.perf_counter() - began) * 1000)
        print(
            f"| discovery, p50 and p99 | {quantile(discoveries, 0.5):.1f} and"
            f" {quantile(discoveries, 0.99):.1f} ms | none | |"
        )

        process = psutil.Process(ours.process.pid)
        sizes: list[str] = []
        for number in range(arguments.memory):
            timed(to_ours, asked)
            if number % max(1, arguments.memory // 5) == 0 or number == arguments.memory - 1:
                sizes.append(f"{process.memory_info().rss / 2**20:.0f}")
        print(f"| memory over {arguments.memory} expansions, MiB | {', '.join(sizes)} | | |")
        print(f"| files left | {len(list(Path(folder).iterdir()))} | | |")


if __name__ == "__main__":
    main()
