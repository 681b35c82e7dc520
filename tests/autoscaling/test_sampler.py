"""The sampler, on pages that are right and on pages that are not."""

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import PAGES, PageServer, page, sends, serving
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from beam_llm.autoscaling import PrometheusCounterGaugeSampler, Reading
from beam_llm.autoscaling import sampler as sampler_module
from beam_llm.autoscaling.sampler import PrometheusLittlesLawSampler

DONE, RUNNING = "done_total", "running"


def sampler_of(url: Any, **options: Any) -> PrometheusCounterGaugeSampler:
    return PrometheusCounterGaugeSampler(url, DONE, RUNNING, **{"timeout_secs": 30, **options})


def sample(answer: Any, **options: Any) -> tuple[float, float] | None:
    with serving(answer) as server:
        return sampler_of(server.url, **options).sample()


def test_series_of_one_name_are_summed() -> None:
    text = (
        "# HELP done_total Done.\n# TYPE done_total counter\n"
        'done_total{reason="stop"} 3\ndone_total{reason="length"} 4\n'
        "# TYPE running gauge\n"
        'running{engine="0"} 1.0\nrunning{engine="1"} 2.0\n'
        'done_total_created 1.7e9\nrunning_requests{engine="0"} 70\nnot_done_total 9\n'
    )
    assert sample(text) == (7, 3)
    assert sample(text, exclude_labels={"reason": ["length"]}) == (3, 3)
    assert sample(text, exclude_labels={"engine": ["1"]}) == (7, 3)  # of the counter alone
    assert sample(text, counter_unit=2) == (3.5, 3)


def test_the_whole_reading() -> None:
    text = "done_total 5\nrunning 2\nwaiting 1\nhits_total 8\n"
    with serving(text) as server:
        looking = sampler_of(
            server.url,
            waiting_name="waiting",
            extra_names={"hits": "hits_total", "more": "not_there"},
        )
        assert looking.read() == Reading(5, 2, 1, {"hits": 8})
        silent = sampler_of(server.url, waiting_name="not_there")
        assert silent.read() == Reading(5, 2, None, {})


def test_only_series_with_the_wanted_labels_count() -> None:
    text = (
        'done_total{model="a"} 3\ndone_total{model="b"} 40\n'
        'running{model="a"} 1\nrunning{model="b"} 20\nrunning 100\n'
    )
    assert sample(text, match_labels={"model": "a"}) == (3, 1)
    assert sample(text, match_labels={"model": "c"}) is None


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("8.128902e+06", 8128902),
        ("1E3", 1000),
        ("7 1395066363000", 7),  # with a time
        ("7\t", 7),
        ("0", 0),
        ("NaN", None),
        ("+Inf", None),
        ("-Inf", None),
        ("-1", None),
        ("seven", None),
        ("", None),
        ("1_000", None),
    ],
)
def test_values(value: str, read: float | None) -> None:
    text = f"done_total {value}\nrunning 2\n"
    assert sample(text) == (None if read is None else (read, 2))
    text = f'running{{a="b"}} {value}\ndone_total 2\n'
    assert sample(text) == (None if read is None else (2, read))


def test_one_bad_series_makes_no_sample_of_the_others() -> None:
    assert sample('done_total{a="1"} 3\ndone_total{a="2"} NaN\nrunning 2\n') is None


def test_escaped_labels() -> None:
    tricky = '{path="C:\\\\DIR\\\\\\"x\\" } # {\\n",reason="abort"}'
    text = f"done_total{tricky} 3\ndone_total 4\nrunning{tricky} 2\n"
    assert sample(text) == (7, 2)
    assert sample(text, exclude_labels={"reason": ["abort"]}) == (4, 2)
    assert sample(text, match_labels={"path": 'C:\\DIR\\"x" } # {\n'}) == (3, 2)


def openmetrics(end: str = "# EOF\n") -> bytes:
    text = (
        "# TYPE done counter\n"
        'done_total{a="b"} 17.0 1520879607.789 # {trace_id="KOO5S4vxi0o"} 0.67\n'
        'done_total{a="c"} 3 # {trace_id="x y"} 1.0 1520879607.789\n'
        "done_created 1520430000.123\n# TYPE running gauge\n# UNIT running ratio\nrunning 2\n"
    )
    return page(text + end, kind="application/openmetrics-text; version=1.0.0; charset=utf-8")


def test_openmetrics_with_exemplars() -> None:
    assert sample(sends(openmetrics())) == (20, 2)
    assert sample(sends(openmetrics(end=""))) is None  # half-written, as its format can tell


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
            st.floats(0, 1e12, allow_nan=False),
        ),
        min_size=1,
        max_size=6,
        unique_by=lambda pair: pair[0],
    ),
    st.booleans(),
)
def test_what_the_library_writes_is_read_back(
    series: list[tuple[str, float]], as_openmetrics: bool
) -> None:
    registry = CollectorRegistry()
    done = Counter("done", "Help with \\ and \n", ["label"], registry=registry)
    gauge = Gauge("running", "done_total 99", registry=registry)
    for label, value in series:
        done.labels(label).inc(value)
    gauge.set(3)
    generate = generate_openmetrics if as_openmetrics else generate_latest
    kind = "application/openmetrics-text" if as_openmetrics else "text/plain"
    found = sample(sends(page(generate(registry), kind=kind)))
    assert found is not None
    assert math.isclose(found[0], math.fsum(value for _, value in series), rel_tol=1e-12)
    assert found[1] == 3


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=400) | st.text(max_size=200).map(str.encode))
def test_no_page_raises_or_makes_up_a_sample(body: bytes) -> None:
    assert sample(body) is None


def page_lines() -> list[bytes]:
    return (PAGES / "vllm.txt").read_bytes().splitlines(keepends=True)


GOOD = b"done_total 5\nrunning 2\n"


def drip(data: bytes, closing: threading.Event) -> Callable[[socket.socket, bytes], None]:
    """Sends byte by byte, each well within any time-out of a socket, for ever."""

    def answer(connection: socket.socket, _: bytes) -> None:
        for byte in data:
            connection.sendall(bytes([byte]))
            if closing.wait(0.05):
                return
        closing.wait()

    return answer


@pytest.fixture
def closing() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def huge(connection: socket.socket, _: bytes) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + GOOD)
    line = b'other_metric{label="%s"} 1\n' % (b"x" * 1000)
    for _ in range(50_000):
        connection.sendall(line)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "it is cut off"),
        (b"running 2\n", "it has no done_total"),
        (b"done_total 2\n", "it has no running"),
        (b"done_total 5\nrunning 2", "it is cut off"),
        (b"\x1f\x8b\x08" + bytes(range(256)) * 9, "it is cut off"),
        (GOOD + b"\xff\xfe\n", "UnicodeDecodeError"),
        (sends(page(GOOD, Content_Length=str(len(GOOD) + 1))), "it is cut off"),
        (sends(page(b"17\r\ndone_total 5\n", Transfer_Encoding="chunked")), "IncompleteRead"),
        (sends(page(GOOD, Content_Encoding="gzip")), "encoded as gzip"),
        (sends(b"HTTP/1.1 500 Oops\r\n\r\n" + GOOD), "HTTP 500"),
        (sends(b"HTTP/1.1 404 Not Found\r\n\r\n" + GOOD), "HTTP 404"),
        (sends(b"SSH-2.0-OpenSSH\r\n"), "SSH-2.0-OpenSSH"),
        (sends(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 1000), "got more than 100 headers"),
        (sends(b"HTTP/1.1 200 OK\r\nA: " + b"b" * 100_000), "LineTooLong"),
        (sends(b""), "RemoteDisconnected"),
        (sends(page(b"", Content_Length="50000000")), "longer than 8,388,608 bytes"),
        (huge, "longer than 8,388,608 bytes"),
    ],
)
def test_a_wrong_page_is_warned_of_and_gives_no_sample(
    answer: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(answer) as server:
        assert sampler_of(server.url).sample() is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.startswith(f"capacity metric: no sample from {server.url}: ")
    assert reason in record.message


def test_redirects_are_not_followed(caplog: pytest.LogCaptureFixture) -> None:
    with serving(GOOD) as target:
        moved = f"HTTP/1.1 302 Found\r\nLocation: {target.url}\r\nContent-Length: 0\r\n\r\n"
        assert sample(sends(moved.encode())) is None
        assert target.requests == []
    assert "HTTP 302, and redirects are not followed" in caplog.text


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\nX-Long: " + b"y" * 60_000,
        b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n" + b"# " + b"y" * 59_998,
    ],
    ids=["headers", "body"],
)
def test_a_slow_page_is_given_up_in_time(
    data: bytes, closing: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(drip(data, closing)) as server:
        assert sampler_of(server.url, timeout_secs=0.3).sample() is None
        closing.set()
    assert "it takes longer than 0.3 s" in caplog.text


def test_a_look_under_way_is_ended_by_close(
    closing: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(drip(b"", closing)) as server:
        looking = sampler_of(server.url, timeout_secs=600)
        thread = threading.Thread(target=looking.sample)
        thread.start()
        while not server.requests:
            time.sleep(0.001)
        looking.close()
        thread.join(30)
        assert not thread.is_alive()
        assert looking.sample() is None
        closing.set()
    assert caplog.records == []


def test_nobody_listens_and_nobody_says_where(caplog: pytest.LogCaptureFixture) -> None:
    with serving(GOOD) as server:
        url = server.url
    assert sampler_of(url).sample() is None
    assert "ConnectionRefusedError" in caplog.text
    caplog.clear()
    assert sampler_of(lambda: None).sample() is None
    assert caplog.records == []

    def fails() -> str:
        raise RuntimeError("no address today")

    assert sampler_of(fails).sample() is None
    assert "no address today" in caplog.text


def test_warnings_are_rare(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(b"nothing\n") as server:
        looking = sampler_of(server.url)
        for _ in range(5):
            assert looking.sample() is None
        assert len(caplog.records) == 1
        later = time.monotonic() + 601
        monkeypatch.setattr(sampler_module.time, "monotonic", lambda: later)
        assert looking.sample() is None
    assert len(caplog.records) == 2
    assert "(4 times more since the last warning)" in caplog.records[1].message


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host/metrics", "http:///metrics"])
def test_an_address_that_cannot_be_one_is_an_error(url: str) -> None:
    with pytest.raises(ValueError, match="metrics_url: "):
        sampler_of(url)


def test_no_thread_and_no_socket_is_left() -> None:
    before = threading.active_count()
    with serving(GOOD) as server:
        looking = sampler_of(server.url)
        for _ in range(50):
            assert looking.sample() == (5, 2)
    assert threading.active_count() == before


def test_littles_law_gives_the_mean_under_way() -> None:
    now = 100.0

    def text(done: float, micros: float) -> bytes:
        return page(f'ok{{model="a"}} {done}\nmicros{{model="a"}} {micros}\n')

    pages = [text(10, 5e6), text(30, 25e6), text(30, 25e6), text(2, 1e6), text(12, 6e6)]
    served = iter(pages)
    server = PageServer(lambda connection, _: connection.sendall(next(served)))
    try:
        looking = PrometheusLittlesLawSampler(
            server.url, "ok", "micros", durations_per_sec=1e6, clock=lambda: now
        )
        samples = []
        for _ in pages:
            samples.append(looking.sample())
            now += 5
    finally:
        server.close()
    # 20 s of requests ended in 5 s; then nothing; then the server was restarted.
    assert samples == [None, (30, 4), (30, 0), None, (12, 1)]


def test_the_real_page_of_vllm_cut_off_anywhere_never_lies() -> None:
    """Where the server tells the length, each cut is seen; here it does not."""
    lines = page_lines()
    whole = (PAGES / "vllm.txt").read_bytes()
    name = b"vllm:request_success_total"
    positions = [i for i in range(len(whole)) if whole.startswith(name, i)]
    assert positions
    for cut in (*range(0, len(whole), len(whole) // 40), *(p + 40 for p in positions)):
        data = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(whole) + whole[:cut]
        with serving(sends(data)) as server:
            looking = PrometheusCounterGaugeSampler(
                server.url, name.decode(), "vllm:num_requests_running"
            )
            assert looking.sample() is None
    assert len(lines) > 100
