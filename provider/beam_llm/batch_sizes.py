"""Batch sizes that are learned per key, from the time that batches take.

Beam's estimator does the learning: it fits fixed and marginal cost, and grows the size until
the fixed cost is a small part. It sees the time that the steps fused after the batching take;
where those only start a request and give its result later, `BatchLatencies` tells it.
"""

from collections import OrderedDict, deque
from collections.abc import Generator
from contextlib import contextmanager
from copy import copy
from threading import Lock
from typing import Any

from apache_beam.transforms import util
from apache_beam.utils.shared import Shared

from beam_llm.keys import encode_key

_BeamEstimator: Any = util._BatchSizeEstimator  # pyright: ignore[reportPrivateUsage]


class Estimator(_BeamEstimator):
    """Beam's `_BatchSizeEstimator`, also for keys of which few sizes were seen."""

    @staticmethod
    def linear_regression(xs: Any, ys: Any) -> tuple[float, float]:
        """Fits `ys = a + b * xs`. Returns a and b."""
        # Of two sizes, Beam's dropping of outliers can leave one, which makes no line.
        few = len(set(xs)) < 3
        fit = _BeamEstimator.linear_regression_no_numpy if few else _BeamEstimator.linear_regression
        return fit(xs, ys)


# Keys whose sizes a process remembers. An estimator keeps up to 100 timings, 11 kB.
_MAX_KEYS = 1024
# Latencies that wait for a key to be batched again.
_MAX_REPORTS = 32


class BatchLatencies:
    """Latencies of batches, from the step that measures them back to the one that batches.

    A step that keeps several batches in flight takes next to no time in `process`, and sizes
    learned from that run away: 1, 2, 4 … up to the maximum. Give one of these to the batching
    and to that step, and report there how long each batch took. The two meet where they run
    in one process, which is where a runner fuses them; elsewhere, sizes stay at the minimum.
    """

    def __init__(self):
        self._shared = Shared()
        self._held: _Reports | None = None

    def report(self, key: Any, size: int, seconds: float) -> None:
        """Tells what a batch took.

        Args:
            key: The key of the batch, as the batching gave it.
            size: Its number of elements.
            seconds: From the start of its request to the end.
        """
        self._reports.add(encode_key(key), size, seconds)

    def take(self, batch_key: bytes) -> list[tuple[int, float]]:
        """Returns and forgets what was reported for an encoded key: sizes and seconds."""
        return self._reports.take(batch_key)

    @property
    def _reports(self) -> Any:
        # The handle keeps a weak reference only.
        reports = self._held
        if reports is None:
            reports = self._held = self._shared.acquire(_Reports)
        return reports

    def __getstate__(self) -> dict[str, Any]:
        return {"_shared": self._shared, "_held": None}


class _Reports:
    def __init__(self):
        self._by_key: OrderedDict[bytes, deque[tuple[int, float]]] = OrderedDict()
        self._lock = Lock()

    def add(self, batch_key: bytes, size: int, seconds: float) -> None:
        with self._lock:
            reports = self._by_key.setdefault(batch_key, deque(maxlen=_MAX_REPORTS))
            reports.append((size, seconds))
            if len(self._by_key) > _MAX_KEYS:
                self._by_key.popitem(last=False)

    def take(self, batch_key: bytes) -> list[tuple[int, float]]:
        with self._lock:
            return list(self._by_key.pop(batch_key, ()))


class BatchSize:
    """The batch size of one key.

    Args:
        estimator: Beam's, of this key alone.
        batch_key: The encoded key, for which `latencies` are reported.
        latencies: Where to learn from, instead of from `timed`.
    """

    def __init__(
        self,
        estimator: Any,
        batch_key: bytes = b"",
        latencies: BatchLatencies | None = None,
    ):
        self._estimator = estimator
        self._batch_key = batch_key
        self._latencies = latencies
        self._next: int | None = None

    @property
    def target(self) -> int:
        """The size that the next batch should have."""
        # Estimated when asked for: most keys of a large job end with their first batch.
        target = self._next
        if target is None:
            if self._latencies is not None:
                for size, seconds in self._latencies.take(self._batch_key):
                    self._learn(size, seconds)
            target = self._next = int(self._estimator.next_batch_size())
        return target

    @contextmanager
    def timed(self, size: float) -> Generator[None]:
        """Wraps the yield of a batch, whose time is that of the steps after it."""
        if self._latencies is None:
            with self._estimator.record_time(size):
                yield
        else:
            yield
        self._next = None

    def _learn(self, size: int, seconds: float) -> None:
        # The estimator takes timings from its clock alone.
        self._estimator._clock = iter((0.0, seconds)).__next__
        with self._estimator.record_time(size):
            pass


class BatchSizes:
    """The batch sizes of the keys that a process saw last.

    In the process rather than in state, where an estimator would be read and written with
    every batch: a key that moves to another worker learns its size anew.

    Args:
        estimator: Of which each key gets a copy that has learned nothing.
        latencies: Where to learn from, instead of from the time after the batching.
    """

    def __init__(self, estimator: Any, latencies: BatchLatencies | None = None):
        self._estimator = estimator
        self._latencies = latencies
        self._fixed: BatchSize | None = None
        if estimator._min_batch_size == estimator._max_batch_size:
            self._fixed = BatchSize(estimator)
        self._by_key: OrderedDict[bytes, BatchSize] = OrderedDict()
        self._lock = Lock()

    def of(self, batch_key: bytes) -> BatchSize:
        """Returns the size of an encoded key."""
        if self._fixed is not None:
            return self._fixed
        with self._lock:
            size = self._by_key.get(batch_key)
            if size is None:
                # A shallow copy shares clock and metrics; what was learned is set anew.
                estimator = copy(self._estimator)
                estimator._data = []
                estimator._batch_size_num_seen = {}
                size = self._by_key[batch_key] = BatchSize(estimator, batch_key, self._latencies)
                if len(self._by_key) > _MAX_KEYS:
                    self._by_key.popitem(last=False)
            else:
                self._by_key.move_to_end(batch_key)
            return size
