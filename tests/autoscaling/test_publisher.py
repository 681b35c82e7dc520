"""The publisher: the latest value alone, never zero, and nothing left behind."""

import gc
import logging
import math
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from apache_beam.metrics.execution import MetricsEnvironment
from apache_beam.metrics.monitoring_infos import extract_distribution
from pages import page, serving

from beam_llm.autoscaling import (
    AutoscalingMetricConfig,
    NumLoadedModelsPublisher,
    PrometheusNumLoadedModelsPublisher,
    publisher,
)
from beam_llm.autoscaling.publisher import metric_name, published

_tags = count()


@pytest.fixture
def tag() -> Iterator[str]:
    """A tag of the test's own, of whose publishers no thread is left."""
    name = f"publisher-{next(_tags)}"
    yield name
    wait_for(lambda: threads(name) == 0)


def threads(tag: str) -> int:
    return sum(t.name == f"beam-llm-capacity-{tag}" for t in threading.enumerate())


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.002)


def seen_by_the_runner(tag: str) -> tuple[int, int, int, int] | None:
    """Count, sum, least and greatest of the distribution, if there is one."""
    infos = MetricsEnvironment.process_wide_container().to_runner_api_monitoring_infos(None)
    name = metric_name(tag)
    for info in infos.values():
        if (info.labels["NAMESPACE"], info.labels["NAME"]) == (name.namespace, name.name):
            return extract_distribution(info)
    return None


def test_the_runner_sees_the_latest_value_alone(tag: str) -> None:
    values = iter([10, 30, 20])
    polling = NumLoadedModelsPublisher(lambda: next(values), tag, interval_secs=1000).start()
    wait_for(lambda: seen_by_the_runner(tag))
    assert seen_by_the_runner(tag) == (1, 10, 10, 10)
    assert polling.poll() == 30
    assert seen_by_the_runner(tag) == (1, 30, 30, 30)
    polling.poll()
    assert seen_by_the_runner(tag) == (1, 20, 20, 20)
    polling.stop()
    assert seen_by_the_runner(tag) == (1, 20, 20, 20)  # never zero, at the end neither
    name = metric_name(tag)
    assert (name.namespace, name.name) == ("BeamML_ModelManager", f"num_loaded_models_{tag}")


@pytest.mark.parametrize("nothing", [None, 0, -3, math.nan, math.inf])
def test_what_is_no_capacity_is_not_published(tag: str, nothing: Any) -> None:
    values = [nothing, 7, nothing]
    polling = NumLoadedModelsPublisher(lambda: values.pop(0), tag, interval_secs=1000).start()
    wait_for(lambda: polling.polls)
    assert seen_by_the_runner(tag) is None
    assert polling.poll() == 7
    assert polling.poll() is None
    assert seen_by_the_runner(tag) == (1, 7, 7, 7)
    polling.stop()


@pytest.mark.parametrize(
    ("aggregation", "wanted"),
    [
        ("last", [5, 1, 9, 3, 4]),
        ("max", [5, 5, 9, 9, 9]),
        ("lifetime_max", [5, 5, 9, 9, 9]),
        ("mean", [5, 3, 5, 4, 5]),  # of the latest three, rounded
        ("p50", [5, 1, 5, 3, 4]),
        ("p90", [5, 5, 9, 9, 9]),
        ("p1", [5, 1, 1, 1, 3]),
        ("p100", [5, 5, 9, 9, 9]),
    ],
)
def test_aggregations(tag: str, aggregation: str, wanted: list[int]) -> None:
    values = iter([5.2, 0.6, 9.0, 3.3, 4.1])
    polling = NumLoadedModelsPublisher(
        lambda: next(values), tag, interval_secs=1000, aggregation=aggregation, aggregation_count=3
    )
    publisher._current[tag] = polling
    try:
        assert [polling.poll() for _ in range(5)] == wanted
    finally:
        polling.stop()


def test_lifetime_max_outlives_the_recent_values(tag: str) -> None:
    values = iter([9, 1, 2, 3])
    for aggregation, last in (("lifetime_max", 9), ("max", 3)):
        values = iter([9, 1, 2, 3])
        polling = NumLoadedModelsPublisher(
            lambda values=values: next(values), tag, aggregation=aggregation, aggregation_count=2
        )
        publisher._current[tag] = polling
        assert [polling.poll() for _ in range(4)][-1] == last
        polling.stop()


def test_a_signal_that_raises_is_logged_now_and_then_and_polled_again(
    tag: str, caplog: pytest.LogCaptureFixture
) -> None:
    tries = count(1)

    def signal() -> float:
        if next(tries) % 3:
            raise RuntimeError("no luck")
        return 10**30  # more than a metric holds

    polling = NumLoadedModelsPublisher(signal, tag, interval_secs=0.001).start()
    wait_for(lambda: polling.polls["value"] >= 5)
    polling.stop()
    assert polling.polls["error"] >= 10
    assert published(tag) == 1 << 53
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "no luck" in caplog.text


def test_stop_is_quick_and_can_be_repeated(tag: str) -> None:
    polling = NumLoadedModelsPublisher(lambda: 1, tag, interval_secs=10_000)
    polling.stop()
    with pytest.raises(RuntimeError, match="was started or stopped before"):
        polling.start()
    polling = NumLoadedModelsPublisher(lambda: 1, tag, interval_secs=10_000).start()
    with pytest.raises(RuntimeError, match="was started or stopped before"):
        polling.start()
    stopping = [threading.Thread(target=polling.stop) for _ in range(5)]
    for thread in stopping:
        thread.start()
    for thread in stopping:
        thread.join(60)
        assert not thread.is_alive()
    polling.stop()
    assert not polling.running


def test_stop_from_the_signal_itself(tag: str) -> None:
    polling = NumLoadedModelsPublisher(lambda: polling.stop() or 5, tag, interval_secs=0.001)
    polling.start()
    wait_for(lambda: not polling.running)
    assert published(tag) is None


def test_the_owners_end_is_the_publishers(tag: str) -> None:
    class Server:
        pass

    server = Server()
    ended = threading.Event()
    polling = NumLoadedModelsPublisher(
        lambda: 5, tag, interval_secs=10_000, owner=server, on_stop=ended.set
    ).start()
    wait_for(lambda: published(tag))
    assert polling.running
    del server
    gc.collect()
    assert ended.wait(60)
    wait_for(lambda: not polling.running)


def test_a_publisher_does_not_keep_its_owner_in_a_cycle(tag: str) -> None:
    class Server:
        def __init__(self) -> None:
            self.publisher = NumLoadedModelsPublisher(
                lambda: 5, tag, interval_secs=10_000, owner=self
            ).start()

    Server()
    gc.collect()
    wait_for(lambda: threads(tag) == 0)


def test_random_interleavings_never_show_zero_or_a_stale_value(tag: str) -> None:
    """Publishers that start, poll, reload, supersede, stop and are collected, in any order."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    wrong: list[Any] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.0002):
            for name in tags:
                seen = seen_by_the_runner(name)
                if seen is not None and not (seen[0] == 1 and seen[1] == seen[2] == seen[3] > 0):
                    wrong.append(seen)

    tags = [f"{tag}-{i}" for i in range(2)]
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for seed in range(1_000):
            interleave(random.Random(seed), tags[seed % 2])
    finally:
        done.set()
        watcher.join()
        sys.setswitchinterval(before)
    assert wrong == []
    for name in tags:
        wait_for(lambda name=name: threads(name) == 0)
        assert name not in publisher._current


def poll_traced(polling: NumLoadedModelsPublisher, at_line: Callable[[int], None]) -> int:
    """Polls, with a call at each line of the publisher's code. Returns how many there were."""
    lines = count()

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != publisher.__file__:
            return None
        if event == "line":
            at_line(next(lines))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        polling.poll()
    finally:
        sys.settrace(before)
    return next(lines)


def test_at_no_line_of_a_poll_does_the_runner_see_less_than_one_value(tag: str) -> None:
    numbers = count(1)
    polling = NumLoadedModelsPublisher(lambda: next(numbers), tag, interval_secs=1000).start()
    wait_for(lambda: published(tag) == 1)
    seen: list[Any] = []
    assert poll_traced(polling, lambda _: seen.append(seen_by_the_runner(tag))) > 10
    polling.stop()
    assert published(tag) == 2
    assert set(seen) <= {(1, 1, 1, 1), (1, 2, 2, 2)}


def test_at_whatever_line_of_a_poll_a_newer_one_begins_the_old_one_is_silent(tag: str) -> None:
    line, lines = 0, 100
    while line < lines:
        lines = begin_at(line, tag)
        line += 1
    assert line > 10


def begin_at(line: int, tag: str) -> int:
    """Begins a newer publisher at a line of the old one's poll. Returns how many there are."""
    numbers = count(1)
    old = NumLoadedModelsPublisher(lambda: next(numbers), tag, interval_secs=1000).start()
    wait_for(lambda: old.polls["value"])
    new = NumLoadedModelsPublisher(lambda: None, tag, interval_secs=1000)
    there: list[int | None] = []

    def begin() -> None:
        new.start()
        there.append(published(tag))

    beginning = threading.Thread(target=begin)

    def at_line(number: int) -> None:
        if number == line:
            beginning.start()
            beginning.join(0.05)  # it waits where the old one holds the lock

    lines = poll_traced(old, at_line)
    beginning.join(60)
    assert [published(tag)] == there, line
    old.poll()
    assert [published(tag)] == there, line
    new.stop()
    return lines


class _Owner:
    pass


_generations = count(1)


def interleave(rng: random.Random, tag: str) -> None:
    alive: list[tuple[int, NumLoadedModelsPublisher, list[_Owner]]] = []
    newest = 0
    frozen: int | None = None  # what was there when the newest began

    def check() -> None:
        value = published(tag)
        if value is not None and value != frozen:
            assert value // 1_000_000 >= newest, (value, newest)

    def start() -> None:
        nonlocal newest, frozen
        generation = next(_generations)
        numbers = count(generation * 1_000_000)

        def signal() -> float | None:
            kind = chance.random()
            if kind < 0.1:
                raise RuntimeError
            if kind < 0.3:
                return chance.choice([0, None, math.nan, -1])
            if kind < 0.4:
                time.sleep(0.0005)  # while others go on
            return next(numbers)

        chance = random.Random(rng.random())
        owners = [_Owner()]
        polling = NumLoadedModelsPublisher(
            signal,
            tag,
            interval_secs=chance.choice([0.0002, 0.002, 5]),
            owner=owners[0] if chance.random() < 0.7 else None,
        ).start()
        frozen, newest = published(tag), generation
        if frozen is not None and frozen // 1_000_000 == generation:
            frozen = None  # it was quick
        alive.append((generation, polling, owners))

    def stop() -> None:
        rng.choice(alive)[1].stop()

    def poll() -> None:
        rng.choice(alive)[1].poll()

    def collect() -> None:
        owners = rng.choice(alive)[2]
        owners.clear()
        if rng.random() < 0.1:
            gc.collect()

    def reload() -> None:
        alive[-1][1].stop()
        start()

    def elsewhere() -> None:
        thread = threading.Thread(target=rng.choice([poll, stop, collect]))
        thread.start()
        others.append(thread)

    others: list[threading.Thread] = []
    start()
    for _ in range(rng.randrange(3, 9)):
        rng.choice([start, stop, poll, poll, collect, reload, elsewhere])()
        check()
        if rng.random() < 0.3:
            time.sleep(rng.choice([0, 0.0003]))
            check()
    for thread in others:
        thread.join()
    for _, polling, _ in alive:
        polling.stop()
    check()


def test_a_forked_child_publishes_nothing_of_its_parents(tag: str) -> None:
    polling = NumLoadedModelsPublisher(lambda: 5, tag, interval_secs=10_000).start()
    wait_for(lambda: published(tag))
    child = os.fork()
    if child == 0:
        code = 0 if published(tag) is None and publisher.publishers() == [] else 1
        os._exit(code)
    _, status = os.waitpid(child, 0)
    polling.stop()
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_page_is_scraped_estimated_and_published(
    tag: str, caplog: pytest.LogCaptureFixture
) -> None:
    answered = count(1)

    def answer(connection: Any, _: bytes) -> None:
        connection.sendall(page(f"done_total {10 * next(answered)}\nrunning 4\nwaiting 1\n"))

    caplog.set_level(logging.INFO)
    config = AutoscalingMetricConfig(interval_secs=0.05, window_secs=1, target_drain_secs=60)
    with serving(answer) as server:
        polling = PrometheusNumLoadedModelsPublisher(
            server.url, "done_total", "running", tag, config, waiting_name="waiting"
        ).start()
        wait_for(lambda: published(tag))
        polling.stop()
    # 10 completions in each interval of 50 ms, or of what the machine makes of it.
    assert 1 < published(tag) <= 12_000
    assert f"num_loaded_models_{tag} is {published(tag)}" in caplog.text


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"interval_secs": 0}, "interval_secs: 0 is not positive"),
        ({"aggregation": "p0"}, "aggregation: 'p0' is not last"),
        ({"aggregation": "last\n"}, "aggregation: "),
        ({"aggregation_count": 0}, "aggregation_count: 0 is less than 1"),
        ({"tag": ""}, "tag: it is empty"),
    ],
)
def test_arguments_are_checked(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NumLoadedModelsPublisher(lambda: 1, **{"tag": "t", **wrong})
