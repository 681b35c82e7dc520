"""Measures the capacity metric: see README.md beside this file.

python -m benchmarks.autoscaling [loop] [cost] [memory]
"""

import argparse
import dataclasses
import gc
import statistics
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import psutil

from beam_llm.autoscaling import AutoscalingMetricConfig, PrometheusNumLoadedModelsPublisher
from beam_llm.autoscaling.publisher import CapacitySignal
from beam_llm.autoscaling.sampler import Reading
from beam_llm.vllm import capacity
from benchmarks.autoscaling.simulation import SCENARIOS, estimators, fewest, run
from benchmarks.common import ROOT

PAGE = ROOT / "tests/autoscaling/pages/vllm.txt"
SERVER = """
import http.server, sys
page = open(sys.argv[1], "rb").read()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=1.0.0")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""
DRAIN_SECS = (60.0, 300.0)
SEEDS = 3


def loop() -> None:
    """Every estimator in every scenario, beside perfect knowledge and the fewest workers."""
    makers = estimators()
    for drain_secs in DRAIN_SECS:
        print(f"\ntarget drain time {drain_secs:.0f} s; medians of {SEEDS} runs")
        print(f"{'':32}{'':26} worker hours  pool at end  peak  mean wait, s")
        for scenario in SCENARIOS:
            played = dataclasses.replace(scenario, drain_secs=drain_secs)
            size = fewest(played)
            rows = {
                f"{size} workers, always": lambda seed, p=played, n=size: run(
                    p, fixed=n, seed=seed
                ),
                "perfect knowledge": lambda seed, p=played: run(p, oracle=True, seed=seed),
                **{
                    name: lambda seed, p=played, m=make: run(p, m, seed=seed)
                    for name, make in makers.items()
                },
            }
            for i, (name, play) in enumerate(rows.items()):
                outcomes = [play(seed) for seed in range(SEEDS)]
                hours, final, peak, wait = (
                    statistics.median(getattr(o, field) for o in outcomes)
                    if field != "peak"
                    else statistics.median(max(o.pool) for o in outcomes)
                    for field in ("worker_hours", "final", "peak", "mean_wait_secs")
                )
                title = scenario.name if i == 0 else ""
                print(f"{title:32}{name:26}{hours:13.1f}{final:13.1f}{peak:6.0f}{wait:14.1f}")


def cost() -> None:
    """What one poll of the real page of vLLM takes, all threads of this process together."""
    config = AutoscalingMetricConfig()
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(PAGE)], stdout=subprocess.PIPE, text=True
    )
    try:
        port = int(server.stdout.readline())
        polling = PrometheusNumLoadedModelsPublisher(
            f"http://127.0.0.1:{port}/metrics",
            capacity.COMPLETED,
            capacity.RUNNING,
            "cost",
            config,
            waiting_name=capacity.WAITING,
            exclude_labels=capacity.NO_COMPLETIONS,
        )
        for _ in range(50):
            polling.poll()
        cpu, wall = [], []
        for _ in range(1_000):
            began_cpu, began = time.process_time(), time.perf_counter()
            polling.poll()
            cpu.append(1_000 * (time.process_time() - began_cpu))
            wall.append(1_000 * (time.perf_counter() - began))
        assert polling.signal.latest is not None
    finally:
        server.kill()
        server.wait()
    mean = statistics.fmean(cpu)
    print(f"\none poll of vLLM's page ({PAGE.stat().st_size:,} bytes), 1,000 polls")
    print(f"CPU, ms    mean {mean:.2f}  median {statistics.median(cpu):.2f}", end="  ")
    print(f"p99 {statistics.quantiles(cpu, n=100)[98]:.2f}")
    print(f"wall, ms   median {statistics.median(wall):.2f}")
    print(f"of a core, every {config.interval_secs:g} s: {mean / config.interval_secs / 10:.3f} %")


class _Samples:
    """A server that is full now and then, sampled a million times."""

    def __init__(self) -> None:
        self.ticks = 0

    def read(self) -> Reading:
        self.ticks += 1
        full = self.ticks // 100 % 3 > 0
        return Reading(3.0 * self.ticks, 64 if full else self.ticks % 7, 5 if full else 0)

    def close(self) -> None:
        pass


def memory() -> None:
    """Memory over a million samples, estimated and published as always."""
    for name in ("completion_rate", "saturated_completion_rate"):
        config = AutoscalingMetricConfig(
            estimator=name, aggregation="p90", interval_secs=3600, window_secs=14_400
        )
        samples = _Samples()
        signal = CapacitySignal(
            samples, config.make_estimator(), clock=lambda s=samples: 5.0 * s.ticks
        )
        polling = config.make_publisher(signal, f"memory-{name}").start()  # polled by hand
        sizes = []
        tracemalloc.start()
        for checkpoint in (1_000, 10_000, 100_000, 1_000_000):
            while samples.ticks < checkpoint:
                polling.poll()
            gc.collect()
            sizes.append(f"{tracemalloc.get_traced_memory()[0] / 1024:.0f}")
        tracemalloc.stop()
        polling.stop()
        print(f"\n{name}: KiB after 1,000, 10,000, 100,000, 1,000,000 samples: {', '.join(sizes)}")
    print(f"resident: {psutil.Process().memory_info().rss / 2**20:.0f} MiB")


PARTS = {"loop": loop, "cost": cost, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=Path(__file__).parent.name)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    for part in parser.parse_args().parts or PARTS:
        PARTS[part]()


if __name__ == "__main__":
    main()
