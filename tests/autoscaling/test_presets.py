"""Other servers than vLLM, on pages as their documentation shows them."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from pages import PAGES, PageServer, page

from beam_llm.autoscaling import AutoscalingMetricConfig, Reading, presets
from beam_llm.autoscaling.publisher import published
from beam_llm.autoscaling.sampler import PrometheusCounterGaugeSampler


def text_of(name: str) -> str:
    return (PAGES / f"{name}.txt").read_text()


def growing(text: str, counters: dict[str, float], seconds: Callable[[], float]) -> PageServer:
    """Serves a page whose counters grow at these rates [1/s], all of a name's series alike."""

    def grown(line: str) -> str:
        for name, rate in counters.items():
            if line.startswith(name + "{") or line.startswith(name + " "):
                head, _, value = line.rpartition(" ")
                return f"{head} {float(value) + rate * seconds()}"
        return line

    def answer(connection: Any, _: bytes) -> None:
        connection.sendall(page("\n".join(map(grown, text.splitlines())) + "\n"))

    return PageServer(answer)


def test_sglang() -> None:
    server = growing(text_of("sglang"), {}, lambda: 0)
    try:
        assert presets.sglang(server.url).read() == Reading(
            10_512 + 744,
            162,
            2_826,
            {"prefix_cache_queries": 8_128_902, "prefix_cache_hits": 61_055},
        )
        other = presets.sglang(server.url, match_labels={"model_name": "another"})
        assert other.sample() is None
    finally:
        server.close()


def test_sglang_before_its_first_request_has_no_counter() -> None:
    text = "".join(
        line + "\n"
        for line in text_of("sglang").splitlines()
        if not line.startswith("sglang:num_requests_total{")
    )
    server = growing(text, {}, lambda: 0)
    try:
        assert presets.sglang(server.url).sample() is None
    finally:
        server.close()


def test_llama_cpp_counts_tokens_which_become_messages() -> None:
    server = growing(text_of("llama_cpp"), {}, lambda: 0)
    try:
        assert presets.llama_cpp(server.url, tokens_per_message=128).read() == Reading(200, 4, 11)
    finally:
        server.close()


def sampler_of(name: str, url: str, clock: Callable[[], float]) -> PrometheusCounterGaugeSampler:
    if name == "sglang":
        return presets.sglang(url)
    if name == "llama_cpp":
        return presets.llama_cpp(url, 128)
    return presets.triton(url, "bert", clock=clock)


@pytest.mark.parametrize(
    ("name", "rates", "per_second"),
    [
        ("sglang", {"sglang:num_requests_total": 2.5}, 5.0),  # two series
        ("llama_cpp", {"llamacpp:tokens_predicted_total": 640.0}, 5.0),
        (
            "triton",
            # Two versions with 2.5 a second each, of 0.8 s: 2 under way each.
            {"nv_inference_request_success": 2.5, "nv_inference_request_duration_us": 2e6},
            5.0,
        ),
    ],
)
def test_each_gives_the_capacity_of_a_steady_server(
    name: str, rates: dict[str, float], per_second: float
) -> None:
    now = 0.0
    server = growing(text_of(name), rates, lambda: now)
    tag = f"preset-{name}"
    try:
        sampler = sampler_of(name, server.url, lambda: now)
        config = AutoscalingMetricConfig(target_drain_secs=60, min_completions=1)
        estimator = config.make_estimator()
        for _ in range(200):
            reading = sampler.read()
            if reading is not None:
                estimator.observe(now, reading.completed_total, reading.running, reading.waiting)
            now += 5
        assert estimator.estimate() == pytest.approx(60 * per_second)
        if name == "triton":
            assert reading.running == pytest.approx(4)
            assert reading.waiting == 3
        publisher = config.make_publisher(sampler, tag).start()
        publisher.stop()
        assert published(tag) is None  # one sample says nothing
    finally:
        server.close()


def test_the_pages_are_whole() -> None:
    for name in ("sglang", "llama_cpp", "triton", "vllm"):
        text = text_of(name)
        assert text.endswith("\n")
        assert re.search(r"^# TYPE \S+ counter$", text, re.MULTILINE)
