"""Reads a server's counter and gauge from its Prometheus metrics page.

The page is somebody else's: it may be gone, slow, huge, cut off or no page at all. Then there
is no sample, and a warning now and then.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import SplitResult, urlsplit

from prometheus_client.parser import text_string_to_metric_families

_LOGGER = logging.getLogger("beam_llm")
_WARN_EVERY_SECS = 600.0
MAX_PAGE_BYTES = 8 << 20
_CHUNK_BYTES = 1 << 16
_ACCEPT = "text/plain;version=0.0.4;q=1, application/openmetrics-text;q=0.5"

Labels = Mapping[str, str]


class PageError(Exception):
    """A page that cannot be used, in words for a log."""


@dataclass(frozen=True)
class Reading:
    """What one look at the page gave.

    Attributes:
      completed_total: Requests completed since the server started.
      running: Requests under way.
      waiting: Requests that wait at the server; None where it does not tell.
      extras: Further figures of the page, as far as they are there, by our name.
    """

    completed_total: float
    running: float
    waiting: float | None = None
    extras: Mapping[str, float] = field(default_factory=dict[str, float])


class Sampler(Protocol):
    """What a publisher reads a server with."""

    def read(self) -> Reading | None:
        """One look; None when there is nothing to be seen. Raises nothing."""
        ...

    def close(self) -> None:
        """Ends a look that is under way, from any thread."""
        ...


class PrometheusCounterGaugeSampler:
    """Samples a server's completed requests and requests under way.

    Series of one name are summed over their labels. Redirects are not followed. Safe to use
    from one thread; ``close`` may come from another.

    Args:
      metrics_url: Address of the page, or a function that gives it, or None while there is
        none.
      counter_name: Counter of completed requests, as the page writes it.
      gauge_name: Gauge of requests under way.
      waiting_name: Gauge of requests that wait at the server, if it has one.
      exclude_labels: Values by label: the counter's series with one of them do not count,
        such as finishes that are no completions.
      match_labels: Value by label: only series of these count, of all names.
      counter_unit: How much of the counter is one message, such as the mean number of tokens
        of one where the server counts only tokens.
      extra_names: Further figures to read where they are there: metric names by our names.
      timeout_secs: Longest time of one look, all together [s].
      max_bytes: A longer page is not read.

    Raises:
      ValueError: The address is not an HTTP URL, or a number is not positive.
    """

    def __init__(
        self,
        metrics_url: str | Callable[[], str | None],
        counter_name: str,
        gauge_name: str,
        *,
        waiting_name: str | None = None,
        exclude_labels: Mapping[str, Collection[str]] | None = None,
        match_labels: Labels | None = None,
        counter_unit: float = 1.0,
        extra_names: Mapping[str, str] | None = None,
        timeout_secs: float = 2.0,
        max_bytes: int = MAX_PAGE_BYTES,
    ):
        if isinstance(metrics_url, str):
            split_url(metrics_url)
        for name, value in {
            "counter_unit": counter_unit,
            "timeout_secs": timeout_secs,
            "max_bytes": max_bytes,
        }.items():
            if not value > 0:
                raise ValueError(f"{name}: {value!r} is not positive")
        self._metrics_url = metrics_url
        self._counter_name = counter_name
        self._gauge_name = gauge_name
        self._waiting_name = waiting_name
        self._exclude_labels = dict(exclude_labels or {})
        self._match_labels = dict(match_labels or {})
        self._counter_unit = counter_unit
        self._extra_names = dict(extra_names or {})
        self._timeout_secs = timeout_secs
        self._max_bytes = max_bytes
        names = [counter_name, gauge_name, *([waiting_name] if waiting_name else [])]
        self._lines = _lines_of([*names, *self._extra_names.values()])
        self._page = _Page()
        self._warned = -math.inf
        self._silent = 0

    @property
    def metrics_url(self) -> str | None:
        """Address of the page, at this moment."""
        url = self._metrics_url
        return url if isinstance(url, str) else url()

    def sample(self) -> tuple[float, float] | None:
        """Looks once. Returns ``(completed_total, running)``, or None. Raises nothing."""
        reading = self.read()
        return None if reading is None else (reading.completed_total, reading.running)

    def read(self) -> Reading | None:
        """Looks once, and gives all that is to be seen, or None. Raises nothing."""
        url = None
        try:
            url = self.metrics_url
            if url is None:
                return None
            return self._reading(self._page.get(url, self._timeout_secs, self._max_bytes))
        except Exception as error:  # a page can be wrong in more ways than we know
            if not self._page.closed:
                self._warn(url, error)
            return None

    def close(self) -> None:
        """Ends a look that is under way, from any thread. There is none after it."""
        self._page.close()

    def _reading(self, page: bytes) -> Reading | None:
        values = self._parsed(page)
        for name in (self._counter_name, self._gauge_name):
            if name not in values:
                labels = " with the wanted labels" if self._filtered else ""
                raise PageError(f"it has no {name}{labels}")
        running = self._running(values[self._gauge_name])
        if running is None:
            return None
        return Reading(
            values[self._counter_name] / self._counter_unit,
            running,
            None if self._waiting_name is None else values.get(self._waiting_name),
            {ours: values[name] for ours, name in self._extra_names.items() if name in values},
        )

    def _running(self, gauge: float) -> float | None:
        return gauge

    @property
    def _filtered(self) -> bool:
        return bool(self._match_labels or self._exclude_labels)

    def _parsed(self, page: bytes) -> dict[str, float]:
        """Sums the values of the page by the names that count."""
        text = "".join(line + "\n" for line in self._lines.findall(page.decode()))
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not self._counts(sample.name, sample.labels):
                    continue
                value = float(sample.value)
                if not math.isfinite(value) or value < 0:
                    raise PageError(f"{sample.name} is {value}")
                values[sample.name] = values.get(sample.name, 0.0) + value
        return values

    def _counts(self, name: str, labels: Labels) -> bool:
        if any(labels.get(label) != value for label, value in self._match_labels.items()):
            return False
        return name != self._counter_name or not any(
            labels.get(label) in values for label, values in self._exclude_labels.items()
        )

    def _warn(self, url: str | None, error: Exception) -> None:
        now = time.monotonic()
        if now - self._warned < _WARN_EVERY_SECS:
            self._silent += 1
            return
        more = f" ({self._silent} times more since the last warning)" if self._silent else ""
        self._warned, self._silent = now, 0
        _LOGGER.warning(
            "capacity metric: no sample from %s: %s%s",
            url,
            error if isinstance(error, PageError) else f"{type(error).__name__}: {error}",
            more,
        )


class PrometheusLittlesLawSampler(PrometheusCounterGaugeSampler):
    """Samples a server that has no gauge of running requests, by Little's law.

    The mean number under way is the rate of the counter of all requests' durations: where N
    are under way, N seconds of them end in each second. The first look gives no sample.

    Args:
      metrics_url: As for ``PrometheusCounterGaugeSampler``.
      counter_name: Counter of completed requests.
      duration_name: Counter of the time that completed requests took.
      durations_per_sec: Its unit: 1e6 for microseconds.
      clock: Gives the time [s].
      **options: As for ``PrometheusCounterGaugeSampler``.
    """

    def __init__(
        self,
        metrics_url: str | Callable[[], str | None],
        counter_name: str,
        duration_name: str,
        *,
        durations_per_sec: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ):
        super().__init__(metrics_url, counter_name, duration_name, **options)
        if not durations_per_sec > 0:
            raise ValueError(f"durations_per_sec: {durations_per_sec!r} is not positive")
        self._durations_per_sec = durations_per_sec
        self._clock = clock
        self._last: tuple[float, float] | None = None

    def _running(self, gauge: float) -> float | None:
        now, total = self._clock(), gauge / self._durations_per_sec
        last, self._last = self._last, (now, total)
        if last is None or now <= last[0] or total < last[1]:
            return None
        return (total - last[1]) / (now - last[0])


class _Page:
    """Gets a page, within bounds of time and size that the other side cannot stretch."""

    def __init__(self) -> None:
        self.closed = False
        self._connection: http.client.HTTPConnection | None = None

    def get(self, url: str, timeout_secs: float, max_bytes: int) -> bytes:
        """The page's bytes, which are all of it."""
        parts = split_url(url)
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        connection = kind(parts.hostname or "", parts.port, timeout=timeout_secs)
        # A time-out of the socket's counts anew with each byte.
        late = threading.Event()
        watch = threading.Timer(timeout_secs, lambda: (late.set(), self._abort()))
        watch.daemon = True
        self._connection = connection
        watch.start()
        try:
            connection.connect()
            if self.closed:
                raise PageError("closed")
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", path, headers={"Accept": _ACCEPT, "Connection": "close"})
            with connection.getresponse() as response:
                return _body(response, max_bytes)
        except (OSError, http.client.HTTPException):
            if late.is_set():
                raise PageError(f"it takes longer than {timeout_secs:g} s") from None
            raise
        finally:
            self._connection = None
            watch.cancel()
            watch.join()
            connection.close()

    def close(self) -> None:
        self.closed = True
        self._abort()

    def _abort(self) -> None:
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)


def _body(response: http.client.HTTPResponse, max_bytes: int) -> bytes:
    if response.status != 200:
        note = ", and redirects are not followed" if response.getheader("Location") else ""
        raise PageError(f"HTTP {response.status}{note}")
    encoding = response.getheader("Content-Encoding", "identity")
    if encoding != "identity":
        raise PageError(f"it is encoded as {encoding}, which nobody asked for")
    body = bytearray()
    while len(body) <= max_bytes and (response.length or 0) <= max_bytes:
        chunk = response.read(_CHUNK_BYTES)
        if not chunk:
            break
        body += chunk
    else:
        raise PageError(f"it is longer than {max_bytes:,} bytes")
    openmetrics = "openmetrics" in response.getheader("Content-Type", "")
    if response.length or not body.endswith(b"# EOF\n" if openmetrics else b"\n"):
        raise PageError("it is cut off")
    return bytes(body)


def split_url(url: str, name: str = "metrics_url") -> SplitResult:
    """Takes the address of a page apart.

    Args:
      url: The address.
      name: What to call it in an error.

    Raises:
      ValueError: It is not an HTTP URL with a host.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{name}: {url!r} is not an address such as http://HOST:PORT/metrics")
    return parts


def _lines_of(names: Iterable[str]) -> re.Pattern[str]:
    alternatives = "|".join(re.escape(name) for name in names)
    return re.compile(rf"^(?:{alternatives})[ \t{{].*", re.MULTILINE)
