"""Batches of elements that share a key, with sizes learned per key.

    elements ── WithBatchKey ──> (key bytes, element) ── gather ──> (key bytes, run)
        bounded:    ── GroupByKey ── cut each group into consecutive batches
        unbounded:  ── state and timers per key: cut when full, flush when due

A *run* holds consecutive elements of one key and window. Elements travel in runs because
state and shuffle cost per item, not per element.
"""

import logging
import math
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

import apache_beam as beam
from apache_beam import coders, typehints
from apache_beam.coders.typecoders import registry
from apache_beam.metrics.metric import Metrics
from apache_beam.transforms import userstate, util, window
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.typehints.decorators import IOTypeHints
from apache_beam.utils.shared import Shared
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import WindowedValue

from beam_llm.keys import encode_key
from beam_llm.shards import ShardSpec, shard_counter, validate_shards

__all__ = [
    "BatchByKey",
    "BatchElements",
    "KeyFunctionError",
    "ShardSpec",
    "WithBatchKey",
    "validate_keyed_batching",
    "validate_shards",
]

_LOGGER = logging.getLogger(__name__)

DEFAULT_MAX_BATCH_DURATION_SECS = 1.0

_METRICS = "beam_llm"
_SHARD_BYTES = 8
# Elements that a bundle holds back to put into runs. Large enough that hundreds of keys get
# runs of several elements, small enough for a bundle of megabyte prompts.
_MAX_GATHERED = 1024
# Keys whose batch sizes a process remembers. An estimator keeps up to 100 timings, 11 kB.
_MAX_LEARNED_KEYS = 1024
# Entries of a bag that is appended to until then, and rewritten with one.
_MAX_HELD_ENTRIES = 64


class KeyFunctionError(ValueError):
    """A key function failed on an element; the cause is what it raised."""


def validate_keyed_batching(
    key_fn: object,
    num_shards: object = 1,
    *,
    length_fn: object = None,
    element_size_fn: object = None,
    max_batch_weight: object = None,
    max_batch_duration_secs: object = None,
    prefix: str = "",
) -> None:
    """Checks the parameters of keyed batching against each other.

    `BatchElements`, the model handlers and the row transforms all use this check.

    Args:
        key_fn: Function from element to key, or None.
        num_shards: A `ShardSpec`; other than 1 only with a `key_fn`.
        length_fn: Beam's length bucketing, which excludes `key_fn`.
        element_size_fn: Function from element to weight, or None.
        max_batch_weight: Largest sum of weights in a batch; only with `element_size_fn`.
        max_batch_duration_secs: Longest wait of an element, in seconds, or None.
        prefix: What the caller puts before `key_fn` and `num_shards` in its own parameter
            names, such as `batch_`.

    Raises:
        TypeError: A parameter is of the wrong type.
        ValueError: A parameter is out of bounds, or excludes another one.
    """
    key_name = f"{prefix}key_fn"
    shards_name = f"{prefix}key_num_shards" if prefix else "num_shards"
    for name, function in ((key_name, key_fn), ("element_size_fn", element_size_fn)):
        if function is not None and not callable(function):
            raise TypeError(f"{name}: {function!r} is not callable; allowed: a callable or None")
    validate_shards(num_shards, shards_name)
    if key_fn is None and num_shards != 1:
        raise ValueError(f"{shards_name}: {num_shards!r} needs {key_name}; allowed without it: 1")
    if key_fn is not None and length_fn is not None:
        raise ValueError(
            f"length_fn: {length_fn!r} cannot go together with {key_name}: both choose the key "
            "that elements are batched under; allowed: one of the two"
        )
    if max_batch_weight is not None:
        _check_number("max_batch_weight", max_batch_weight, positive=True)
        if element_size_fn is None:
            raise ValueError(
                f"max_batch_weight: {max_batch_weight!r} needs element_size_fn, which tells what "
                "an element weighs; allowed without it: None"
            )
    if max_batch_duration_secs is not None:
        _check_number("max_batch_duration_secs", max_batch_duration_secs)


def _check_number(name: str, value: object, *, positive: bool = False) -> None:
    allowed = f"a number {'above' if positive else 'of at least'} 0"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: {value!r} is a {type(value).__name__}; allowed: {allowed}")
    if not (value > 0 if positive else value >= 0) or value == math.inf:
        raise ValueError(f"{name}: {value!r} is out of bounds; allowed: {allowed}")


class WithBatchKey(beam.DoFn):
    """Keys every element by `key_fn(element)`, as bytes that are the same on every worker.

    The key holds nothing of the worker, so that equal keys meet wherever they were made (see
    `beam_llm.keys` for what is equal). A key with several shards becomes that many keys, of
    which each element gets a random one: a runner handles one key on one worker at a time.

    Args:
        key_fn: Function from element to key.
        num_shards: Sub-keys per key: an int, a mapping from key to int (1 for keys not in
            it; a key that cannot be hashed is looked up by its `str()`), or a callable.

    Raises:
        TypeError: A parameter is of the wrong type.
        ValueError: A number of shards is below 1.
        KeyFunctionError: `key_fn` raised, gave a key of an unsupported type, or the callable
            gave no valid number of shards (while the pipeline runs).
    """

    def __init__(self, key_fn: Callable[[Any], Any], num_shards: ShardSpec = 1):
        if key_fn is None:
            raise TypeError("key_fn: None is not callable; allowed: a callable")
        validate_keyed_batching(key_fn, num_shards)
        self._key_fn = key_fn
        self._shards_of = shard_counter(num_shards)

    def process(self, element: Any) -> Iterable[tuple[bytes, Any]]:
        """Gives `(key, element)`; the key begins with the shard, 8 bytes big-endian."""
        try:
            key = self._key_fn(element)
            shards = self._shards_of(key)
            encoded = encode_key(key)
        except Exception as error:
            raise _failed("key_fn", self._key_fn, error, element) from error
        shard = random.randrange(shards) if shards > 1 else 0  # noqa: S311
        return ((shard.to_bytes(_SHARD_BYTES, "big") + encoded, element),)

    def default_type_hints(self) -> Any:
        """None: the annotations say less than `infer_output_type`, and would win."""
        return IOTypeHints.empty()

    def infer_output_type(self, input_type: Any) -> Any:
        """Keeps the element type, and with it the coder."""
        return typehints.Tuple[bytes, input_type]


class BatchElements(beam.BatchElements):
    """Beam's `BatchElements`, plus batches by key and by weight.

    Without `key_fn` and `max_batch_weight` it is Beam's transform. With `key_fn`, elements of
    one key meet in one batch, on whatever worker they started, and a batch holds one key only.
    Its size grows per key from `min_batch_size` towards `max_batch_size`, by the time that
    the steps fused after it take; the two being equal fixes it. A batch carries the timestamp
    of its window's end.

    Unbounded input is batched in state: an incomplete batch leaves after
    `max_batch_duration_secs`, and at the end of its window at the latest; until then it holds
    the watermark. Bounded input is grouped without state: nothing waits, and the duration has
    no meaning. Elements of session windows meet only where their unmerged windows are equal,
    that is, hardly ever; a warning says so.

    Metrics, in the namespace `beam_llm`: counters `batches` and `flush_full`, `flush_weight`,
    `flush_timer`, `flush_window`, `flush_end_of_group`; distributions `batch_size`,
    `batch_weight` (rounded) and, for bounded input, `elements_per_key`.

    >>> with beam.Pipeline() as pipeline:
    ...     batches = (
    ...         pipeline
    ...         | beam.Create(["spam ham", "spam eggs", "soup"])
    ...         | BatchElements(key_fn=lambda text: text.split()[0], min_batch_size=8)
    ...     )

    Args:
        min_batch_size: As in Beam; also of a batch of one key.
        max_batch_size: As in Beam; also of a batch of one key.
        target_batch_overhead: As in Beam, measured per key.
        target_batch_duration_secs: As in Beam, measured per key.
        target_batch_duration_secs_including_fixed_cost: As in Beam, measured per key.
        max_batch_duration_secs: Longest wait of an element of unbounded input, in seconds.
            With `key_fn`, unset means 1 s, and 0 that an element waits only for the others of
            its bundle.
        key_fn: Function from element to key; see `beam_llm.keys` for the types of keys.
        num_shards: Random sub-keys per key, so that one key can use several workers: an int,
            a mapping from key to int, or a callable. Only with `key_fn`.
        max_batch_weight: Largest sum of `element_size_fn` in a batch, apart from its number
            of elements, which the sizes bound. A heavier element goes alone. Without it,
            `element_size_fn` counts towards the sizes, as in Beam.
        **kwargs: Beam's `element_size_fn`, `variance`, `clock`, `record_metrics`,
            `length_fn` and `bucket_boundaries`.

    Raises:
        TypeError: A parameter is of the wrong type.
        ValueError: A parameter is out of bounds, or excludes another one.
    """

    def __init__(
        self,
        min_batch_size: int = 1,
        max_batch_size: int = 10000,
        target_batch_overhead: Any = 0.05,
        target_batch_duration_secs: Any = 10,
        target_batch_duration_secs_including_fixed_cost: Any = None,
        max_batch_duration_secs: Any = None,
        *,
        key_fn: Callable[[Any], Any] | None = None,
        num_shards: ShardSpec = 1,
        max_batch_weight: float | None = None,
        **kwargs: Any,
    ):
        super().__init__(
            min_batch_size,
            max_batch_size,
            target_batch_overhead,
            target_batch_duration_secs,
            target_batch_duration_secs_including_fixed_cost,
            max_batch_duration_secs,
            **kwargs,
        )
        own = key_fn is not None or max_batch_weight is not None
        validate_keyed_batching(
            key_fn,
            num_shards,
            length_fn=kwargs.get("length_fn"),
            element_size_fn=kwargs.get("element_size_fn"),
            max_batch_weight=max_batch_weight,
            max_batch_duration_secs=max_batch_duration_secs if own else None,
        )
        if own:
            _check_size("min_batch_size", min_batch_size)
            _check_size("max_batch_size", max_batch_size)
        self._key_fn = key_fn
        self._num_shards = num_shards
        self._rules = _Rules(
            estimator=self._batch_size_estimator,
            weigh=kwargs.get("element_size_fn"),
            max_weight=max_batch_weight,
            clock=self._clock,
        )

    def with_exception_handling(self, **kwargs: Any) -> beam.PTransform:
        """Returns this transform with a second output, for elements that fail alone.

        Those are the elements for which `key_fn` or `element_size_fn` raises or gives what it
        must not.

        Args:
            **kwargs: As for `beam.ParDo.with_exception_handling`.

        Returns:
            A transform that gives `(batches, bad)`, with `bad` of
            `(element, (exception type, repr, traceback lines))`, as in Beam.

        Raises:
            ValueError: There is neither a `key_fn` nor a `max_batch_weight`.
        """
        if not self._is_own():
            raise ValueError("with_exception_handling: allowed with key_fn or max_batch_weight")
        key: Any = self._key()
        return _WithErrors(key.with_exception_handling(**kwargs), self._batch, self.label)

    def expand(self, pcoll: Any) -> Any:
        """Batches the elements."""
        if not self._is_own():
            return super().expand(pcoll)
        return self._batch(pcoll | "Key" >> self._key(), pcoll.element_type)

    def _is_own(self) -> bool:
        return self._key_fn is not None or self._rules.max_weight is not None

    def _key(self) -> beam.ParDo:
        return beam.ParDo(_Key(self._keying(), self._rules.weigh))

    def _batch(self, keyed: Any, element_type: Any) -> Any:
        duration = self._max_batch_dur
        if self._key_fn is not None:
            batches = keyed | _Batches(self._rules, duration, element_type)
        elif duration is not None:
            batches = keyed | _Batches(self._rules, duration, element_type, stateful=True)
        else:
            batches = keyed | _BundleBatches(self._rules, element_type)
        batches.element_type = typehints.List[element_type]
        return batches

    def _keying(self) -> beam.DoFn:
        if self._key_fn is not None:
            return WithBatchKey(self._key_fn, self._num_shards)
        if self._length_fn is not None:
            return util.WithLengthBucketKey(self._length_fn, self._bucket_boundaries)
        return util.WithSharedKey()


class _WithErrors(beam.PTransform):
    """`BatchElements` with an error output, which the type hints of Beam's do not allow for."""

    def __init__(self, key: beam.PTransform, batch: Callable[[Any, Any], Any], label: str):
        super().__init__(label)
        self._key = key
        self._batch = batch

    def expand(self, input_or_inputs: Any) -> Any:
        keyed, bad = input_or_inputs | "Key" >> self._key
        return self._batch(keyed, input_or_inputs.element_type), bad


class BatchByKey(beam.PTransform):
    """Batches pairs of key and value, keeping each value's event timestamp.

    What the row transforms use: a consumer can give every row its own timestamp back, in the
    window of the batch. The batch itself carries the earliest of its timestamps, so that no
    row is late after it.

    Unbounded input is batched in state, as in `BatchElements`. Bounded input is grouped, and
    a group is split only where it exceeds a batch's size or weight, into consecutive batches;
    shards would part it further and are not used.

    Yields `(key, [(value, timestamp), …])`, the key as it came in with the first value.

    Args:
        max_batch_size: Most values of a batch, at least 1.
        max_batch_duration_secs: Longest wait of a value of unbounded input, in seconds; None
            for 1 s, 0 for as long as its bundle lasts.
        max_batch_weight: Largest sum of `element_size_fn` in a batch; a heavier value goes
            alone.
        element_size_fn: Function from value to weight; only with `max_batch_weight`.
        num_shards: Random sub-keys per key in unbounded input, as in `BatchElements`.
        reshuffle: Whether to spread the batches of bounded input over the workers, which
            costs a shuffle. Without it all batches of a key are made on one worker.

    Raises:
        TypeError: A parameter is of the wrong type.
        ValueError: A parameter is out of bounds, or excludes another one.
    """

    def __init__(
        self,
        *,
        max_batch_size: int,
        max_batch_duration_secs: float | None = None,
        max_batch_weight: float | None = None,
        element_size_fn: Callable[[Any], float] | None = None,
        num_shards: ShardSpec = 1,
        reshuffle: bool = True,
    ):
        super().__init__()
        _check_size("max_batch_size", max_batch_size)
        validate_keyed_batching(
            _first,
            num_shards,
            element_size_fn=element_size_fn,
            max_batch_weight=max_batch_weight,
            max_batch_duration_secs=max_batch_duration_secs,
        )
        if element_size_fn is not None and max_batch_weight is None:
            raise ValueError(
                f"element_size_fn: {element_size_fn!r} needs max_batch_weight; allowed without "
                "it: None"
            )
        self._rules = _Rules(
            estimator=_Estimator(max_batch_size, max_batch_size, record_metrics=False),
            weigh=element_size_fn,
            max_weight=max_batch_weight,
            rows=True,
        )
        self._max_batch_duration_secs = max_batch_duration_secs
        self._num_shards = num_shards
        self._reshuffle = reshuffle

    def expand(self, input_or_inputs: Any) -> Any:
        """Batches the pairs."""
        pcoll = input_or_inputs
        key_type, value_type = getattr(
            pcoll.element_type, "tuple_types", (typehints.Any, typehints.Any)
        )
        row_type = typehints.Tuple[value_type, Timestamp]
        shards = 1 if pcoll.is_bounded else self._num_shards
        batches = (
            pcoll
            | "Key" >> beam.ParDo(_Key(WithBatchKey(_first, shards), self._rules.weigh, rows=True))
            | _Batches(self._rules, self._max_batch_duration_secs, value_type, key_type)
        )
        batches.element_type = typehints.Tuple[key_type, typehints.List[row_type]]
        if batches.is_bounded and self._reshuffle:
            return batches | "Spread" >> beam.Reshuffle()
        return batches


def _first(pair: tuple[Any, Any]) -> Any:
    return pair[0]


def _check_size(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{name}: {value!r} is a {type(value).__name__}; allowed: an integer of at least 1"
        )
    if value < 1:
        raise ValueError(f"{name}: {value} is less than the minimum of 1")


def _failed(parameter: str, function: Any, error: object, element: Any) -> KeyFunctionError:
    name = getattr(function, "__qualname__", None) or repr(function)
    if isinstance(error, Exception):
        error = f"failed: {type(error).__name__}: {error}"
    shown = repr(element)
    shown = shown if len(shown) <= 200 else shown[:199] + "…"
    return KeyFunctionError(f"{parameter} {name} {error}; element: {shown}")


_Estimator: Any = util._BatchSizeEstimator  # pyright: ignore[reportPrivateUsage]

_Run: TypeAlias = tuple[Any, list[Any], list[int] | None, list[float] | None]
"""Key as it came in, values, timestamps in microseconds, weights; None for what is not kept.

A plain tuple, since that is what Beam's tuple coder gives back."""


@dataclass(frozen=True)
class _Rules:
    """What a batch may hold, and what it looks like.

    Attributes:
        estimator: The sizes, to be learned per key from a fresh copy of this one.
        weigh: Function from element to weight, or None: all weigh the same.
        max_weight: Bound of a batch's weight; None when the weights are the sizes.
        rows: Whether to keep keys and timestamps, and yield `(key, [(value, timestamp)])`.
        clock: Wall clock, seconds since the epoch.
    """

    estimator: Any
    weigh: Callable[[Any], float] | None = None
    max_weight: float | None = None
    rows: bool = False
    clock: Callable[[], float] = time.time

    def bounds(self, target: int) -> tuple[float, float]:
        """The number of elements and the weight at which a batch is complete."""
        if self.weigh is None:
            return target, math.inf
        return (math.inf, target) if self.max_weight is None else (target, self.max_weight)

    def output(self, run: _Run, in_window: Any) -> WindowedValue:
        key, values, timestamps, _ = run
        if timestamps is None:
            return WindowedValue(values, in_window.max_timestamp(), (in_window,))
        rows = [
            (value, Timestamp(micros=micros))
            for value, micros in zip(values, timestamps, strict=True)
        ]
        return WindowedValue((key, rows), Timestamp(micros=min(timestamps)), (in_window,))


class _Key(beam.DoFn):
    """Keys each element, and weighs it when there is a function for that.

    Apart from `_Gather`, so that an element that fails here can go alone to an error output.
    """

    def __init__(self, keying: beam.DoFn, weigh: Callable[[Any], float] | None, rows: bool = False):
        self._keying = keying
        self._weigh = weigh
        self._rows = rows

    def setup(self) -> None:
        self._keying.setup()

    def process(self, element: Any) -> Iterable[tuple[bytes, Any]]:
        keyed = self._keying.process(element)
        if not isinstance(self._keying, WithBatchKey):
            keyed = [(bytes(_SHARD_BYTES) + encode_key(key), element) for key, _ in keyed]
        if self._weigh is not None:
            weight = self._weight(self._weigh, element)
            keyed = [(key, (element, weight)) for key, _ in keyed]
        return keyed

    def _weight(self, weigh: Callable[[Any], Any], element: Any) -> float:
        try:
            weight = weigh(element[1] if self._rows else element)
        except Exception as error:
            raise _failed("element_size_fn", weigh, error, element) from error
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight >= 0:
            problem = f"gave {weight!r}; allowed: a number of at least 0"
            raise _failed("element_size_fn", weigh, problem, element)
        return weight

    def default_type_hints(self) -> Any:
        return IOTypeHints.empty()

    def infer_output_type(self, input_type: Any) -> Any:
        if self._weigh is not None:
            input_type = typehints.Tuple[input_type, float]
        return typehints.Tuple[bytes, input_type]


class _Gather(beam.DoFn):
    """Puts the elements of a bundle into runs of one key and window.

    A run carries the earliest timestamp of its elements, which holds the watermark for them.
    """

    def __init__(self, rules: _Rules, max_gathered: int):
        self._weighted = rules.weigh is not None
        self._rows = rules.rows
        self._max_gathered = max_gathered

    def start_bundle(self) -> None:
        self._windows: dict[Any, dict[bytes, _Gathered]] = {}
        self._gathered = 0
        self._window = None

    def process(
        self,
        element: tuple[bytes, Any],
        timestamp: Any = beam.DoFn.TimestampParam,
        in_window: Any = beam.DoFn.WindowParam,
    ) -> Iterable[WindowedValue] | None:
        batch_key, value = element
        # One window object mostly serves a whole bundle; hashing it costs more than the rest.
        if in_window is not self._window:
            self._window = in_window
            self._by_key = self._windows.setdefault(in_window, {})
        run = self._by_key.get(batch_key)
        micros = timestamp.micros
        if run is None:
            run = self._by_key[batch_key] = _Gathered(micros)
        elif micros < run.earliest:
            run.earliest = micros
        if self._weighted:
            value, weight = value
            run.weights.append(weight)
        if self._rows:
            key, value = value
            if not run.values:
                run.key = key
            run.timestamps.append(micros)
        run.values.append(value)
        self._gathered += 1
        return self._drain() if self._gathered >= self._max_gathered else None

    def finish_bundle(self) -> Any:  # Beam declares None, and takes values
        return self._drain()

    def _drain(self) -> Iterable[WindowedValue]:
        windows = self._windows
        self.start_bundle()
        for in_window, by_key in windows.items():
            for batch_key, gathered in by_key.items():
                run: _Run = (
                    gathered.key,
                    gathered.values,
                    gathered.timestamps if self._rows else None,
                    gathered.weights if self._weighted else None,
                )
                earliest = Timestamp(micros=gathered.earliest)
                yield WindowedValue((batch_key, run), earliest, (in_window,))


@dataclass(slots=True)
class _Gathered:
    earliest: int
    key: Any = None
    values: list[Any] = field(default_factory=list)
    timestamps: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)


class _Batches(beam.PTransform):
    """Keyed elements to batches: grouped when bounded, else in state."""

    def __init__(
        self,
        rules: _Rules,
        max_batch_duration_secs: float | None,
        value_type: Any,
        key_type: Any = typehints.Any,
        stateful: bool = False,
    ):
        super().__init__()
        self._rules = rules
        self._duration = max_batch_duration_secs
        self._run_type = _run_type(key_type, value_type)
        self._stateful = stateful

    def expand(self, input_or_inputs: Any) -> Any:
        keyed = input_or_inputs
        windowing = keyed.windowing
        if not isinstance(windowing.windowfn, window.NonMergingWindowFn):
            _LOGGER.warning(
                "%s: %s merges windows, and batches are made before that: elements meet in a "
                "batch only where their windows are equal, hardly ever. Re-window before.",
                self.label,
                windowing.windowfn,
            )
        gather = beam.ParDo(_Gather(self._rules, _MAX_GATHERED))
        runs = keyed | "Gather" >> gather.with_output_types(typehints.Tuple[bytes, self._run_type])
        if self._stateful or not keyed.is_bounded:
            seconds = DEFAULT_MAX_BATCH_DURATION_SECS if self._duration is None else self._duration
            coder = registry.get_coder(self._run_type)
            return runs | "Buffer" >> beam.ParDo(_buffering(self._rules, seconds, coder))
        runs._windowing = _grouping_windows(windowing, self._rules.rows)
        batches = runs | beam.GroupByKey() | "Cut" >> beam.ParDo(_Cut(self._rules))
        batches._windowing = windowing
        return batches


class _BundleBatches(beam.PTransform):
    """Keyed elements to batches within their bundle."""

    def __init__(self, rules: _Rules, value_type: Any):
        super().__init__()
        self._rules = rules
        self._run_type = _run_type(typehints.Any, value_type)

    def expand(self, input_or_inputs: Any) -> Any:
        keyed = input_or_inputs
        gather = beam.ParDo(_Gather(self._rules, _MAX_GATHERED))
        return (
            keyed
            | "Gather" >> gather.with_output_types(typehints.Tuple[bytes, self._run_type])
            | "Single" >> beam.Map(_group_of_one)
            | "Cut" >> beam.ParDo(_Cut(self._rules, last="bundle"))
        )


def _group_of_one(keyed: tuple[bytes, _Run]) -> tuple[bytes, list[_Run]]:
    return keyed[0], [keyed[1]]


def _run_type(key_type: Any, value_type: Any) -> Any:
    return typehints.Tuple[key_type, typehints.List[value_type], typehints.Any, typehints.Any]


def _grouping_windows(windowing: Windowing, rows: bool) -> Windowing:
    """The windows as they are, each grouped once.

    A trigger of the input would give panes, and accumulated ones twice; merging would give
    elements other windows than they have. For rows, which get their own timestamps back, a
    group holds the watermark at its earliest row: else Prism drops them all as late when they
    are windowed anew. Not otherwise, since Beam's direct runner groups ten times as fast in
    the default windowing as in any other.
    """
    if windowing.is_default() and not rows:
        return windowing
    window_fn = windowing.windowfn
    if not isinstance(window_fn, window.NonMergingWindowFn):
        window_fn = util._IdentityWindowFn(  # pyright: ignore[reportPrivateUsage]
            window_fn.get_window_coder()
        )
    combine = window.TimestampCombiner
    return Windowing(
        window_fn,
        timestamp_combiner=combine.OUTPUT_AT_EARLIEST if rows else combine.OUTPUT_AT_EOW,
        allowed_lateness=windowing.allowed_lateness.micros // 1_000_000,
        environment_id=windowing.environment_id,
    )


class _BatchSize:
    """The batch size of one key, learned from the time that its batches take."""

    def __init__(self, estimator: Any):
        self._estimator = estimator
        self._next: int | None = None

    @property
    def target(self) -> int:
        # Estimated when asked for: most keys of a large job end with their first batch.
        target = self._next
        if target is None:
            target = self._next = int(self._estimator.next_batch_size())
        return target

    @contextmanager
    def timed(self, size: float) -> Generator[None]:
        with self._estimator.record_time(size):
            yield
        self._next = None


class _BatchSizes:
    """The batch sizes of the keys that a process saw last.

    In the process rather than in state, where an estimator would be read and written with
    every batch: a key that moves to another worker learns its size anew.
    """

    def __init__(self, estimator: Any):
        self._estimator = estimator
        self._fixed = None
        if estimator._min_batch_size == estimator._max_batch_size:
            self._fixed = _BatchSize(estimator)
        self._by_key: OrderedDict[bytes, _BatchSize] = OrderedDict()
        self._lock = Lock()

    def of(self, batch_key: bytes) -> _BatchSize:
        if self._fixed is not None:
            return self._fixed
        with self._lock:
            size = self._by_key.get(batch_key)
            if size is None:
                # A shallow copy shares clock and metrics; what was learned is set anew.
                estimator = copy(self._estimator)
                estimator._data = []
                estimator._batch_size_num_seen = {}
                size = self._by_key[batch_key] = _BatchSize(estimator)
                if len(self._by_key) > _MAX_LEARNED_KEYS:
                    self._by_key.popitem(last=False)
            else:
                self._by_key.move_to_end(batch_key)
            return size


class _Batch(NamedTuple):
    run: _Run
    weight: float
    reason: str


class _Filling:
    """A batch being filled from runs."""

    def __init__(self, rules: _Rules, size: _BatchSize):
        self._rules = rules
        self._size = size
        self._begin()

    def _begin(self) -> None:
        self.key: Any = None
        self.values: list[Any] = []
        self.timestamps: list[int] | None = [] if self._rules.rows else None
        self.weights: list[float] | None = [] if self._rules.weigh else None
        self.weight: float = 0

    @property
    def run(self) -> _Run:
        return self.key, self.values, self.timestamps, self.weights

    def load(self, runs: Iterable[_Run], weight: float) -> None:
        """Takes in what waited, which is less than a batch."""
        for run in runs:
            self._append(run, 0, len(run[1]))
        self.weight = weight

    def add(self, run: _Run) -> Iterator[_Batch]:
        """Adds a run, and gives the batches that it completes."""
        _, values, _, weights = run
        start = 0
        while start < len(values):
            stop, reason = self._end(start, len(values), weights)
            self._append(run, start, stop)
            start = stop
            if reason is not None:
                yield self.close(reason)

    def close(self, reason: str) -> _Batch:
        """Ends the batch as it is, and begins another one."""
        batch = _Batch(self.run, self.weight, reason)
        self._begin()
        return batch

    def _append(self, run: _Run, start: int, stop: int) -> None:
        key, values, timestamps, weights = run
        if not self.values:
            self.key = key
        self.values += values[start:stop]
        if self.timestamps is not None and timestamps is not None:
            self.timestamps += timestamps[start:stop]
        if self.weights is not None and weights is not None:
            self.weights += weights[start:stop]

    def _end(self, start: int, stop: int, weights: list[float] | None) -> tuple[int, str | None]:
        """Where among `start` to `stop` the batch ends, and why it does (None: it goes on)."""
        count = len(self.values)
        max_count, max_weight = self._rules.bounds(self._size.target)
        if weights is None:
            end = start + max(int(max_count) - count, 0)
            reason = "full" if end <= stop else None
            end = min(end, stop)
            self.weight += end - start
            return end, reason
        too_heavy = "full" if self._rules.max_weight is None else "weight"
        for index in range(start, stop):
            if count >= max_count:
                return index, "full"
            if count and self.weight + weights[index] > max_weight:
                return index, too_heavy
            self.weight += weights[index]
            count += 1
            if count >= max_count:
                return index + 1, "full"
            if self.weight >= max_weight:
                return index + 1, too_heavy
        return stop, None


class _Batching(beam.DoFn):
    """What the DoFns that give batches share: sizes, timing, metrics."""

    def __init__(self, rules: _Rules):
        self._rules = rules
        self._shared = Shared()
        self._count = Metrics.counter(_METRICS, "batches")
        self._size_distribution = Metrics.distribution(_METRICS, "batch_size")
        self._weight_distribution = Metrics.distribution(_METRICS, "batch_weight")
        self._reasons = {
            reason: Metrics.counter(_METRICS, f"flush_{reason}")
            for reason in ("full", "weight", "timer", "window", "end_of_group", "bundle")
        }

    def setup(self) -> None:
        self._sizes = self._shared.acquire(lambda: _BatchSizes(self._rules.estimator))

    def _emit(self, batch: _Batch, size: _BatchSize, in_window: Any) -> Iterator[WindowedValue]:
        count = len(batch.run[1])
        self._count.inc()
        self._reasons[batch.reason].inc()
        self._size_distribution.update(count)
        if self._rules.weigh is not None:
            self._weight_distribution.update(round(batch.weight))
        by_count = self._rules.weigh is None or self._rules.max_weight is not None
        with size.timed(count if by_count else batch.weight):
            yield self._rules.output(batch.run, in_window)


class _Cut(_Batching):
    """Cuts groups into consecutive batches."""

    def __init__(self, rules: _Rules, last: str = "end_of_group"):
        super().__init__(rules)
        self._last = last
        self._elements_per_key = Metrics.distribution(_METRICS, "elements_per_key")

    def process(
        self, group: tuple[bytes, Iterable[_Run]], in_window: Any = beam.DoFn.WindowParam
    ) -> Iterator[WindowedValue]:
        batch_key, runs = group
        size = self._sizes.of(batch_key[_SHARD_BYTES:])
        filling = _Filling(self._rules, size)
        elements = 0
        for run in runs:
            elements += len(run[1])
            for batch in filling.add(run):
                yield from self._emit(batch, size, in_window)
        if filling.values:
            yield from self._emit(filling.close(self._last), size, in_window)
        self._elements_per_key.update(elements)


def _buffering(rules: _Rules, max_duration_secs: float, run_coder: coders.Coder) -> beam.DoFn:
    """Makes the stateful DoFn; the coder of its state must be known when its class is made."""
    runs_spec = userstate.BagStateSpec("runs", run_coder)
    held_spec = userstate.BagStateSpec("held", coders.FastPrimitivesCoder())
    window_timer_spec = userstate.TimerSpec("window_end", TimeDomain.WATERMARK)
    duration_timer_spec = userstate.TimerSpec("duration", TimeDomain.REAL_TIME)
    runs_state: Any = beam.DoFn.StateParam(runs_spec)
    held_state: Any = beam.DoFn.StateParam(held_spec)
    window_end: Any = beam.DoFn.TimerParam(window_timer_spec)
    duration_end: Any = beam.DoFn.TimerParam(duration_timer_spec)

    class Buffer(_Batching):
        """Keeps incomplete batches in state.

        The highest entry of `held` is (number of values, weight, earliest timestamp in
        microseconds, due time in seconds since the epoch) of all that is in `runs`. Both, and
        the timers, are there only while something waits. `held` is a bag because the SDK
        spends about 1 ms to size each state that it replaces.
        """

        def process(
            self,
            element: tuple[bytes, _Run],
            timestamp: Any = beam.DoFn.TimestampParam,
            in_window: Any = beam.DoFn.WindowParam,
            runs: Any = runs_state,
            held: Any = held_state,
            window_timer: Any = window_end,
            duration_timer: Any = duration_end,
        ) -> Iterator[WindowedValue]:
            batch_key, run = element
            size = self._sizes.of(batch_key[_SHARD_BYTES:])
            waiting = list(held.read())
            count, weight, hold, due = max(waiting, default=(0, 0, 0, 0.0))
            new_count, new_weight = count + len(run[1]), _add(weight, run)
            max_count, max_weight = self._rules.bounds(size.target)
            if new_count >= max_count or new_weight >= max_weight:
                filling = _Filling(self._rules, size)
                if waiting:
                    filling.load(list(runs.read()), weight)
                    runs.clear()
                    held.clear()
                for batch in filling.add(run):
                    yield from self._emit(batch, size, in_window)
                if not filling.values:
                    if waiting:
                        window_timer.clear()
                        duration_timer.clear()
                    return
                # What is left came with this run, as whatever waited went with the first batch.
                run, waiting = filling.run, []
                new_count, new_weight = len(run[1]), filling.weight
            runs.add(run)
            if not waiting:
                hold, due = timestamp.micros, self._rules.clock() + max_duration_secs
                window_timer.set(in_window.max_timestamp())
                duration_timer.set(due)
            elif timestamp.micros < hold:
                # A timer holds the watermark at the element that sets it: the earliest must.
                hold = timestamp.micros
                duration_timer.set(due)
            if len(waiting) >= _MAX_HELD_ENTRIES:
                held.clear()
            held.add((new_count, new_weight, hold, due))

        @userstate.on_timer(window_timer_spec)
        def at_window_end(
            self,
            batch_key: Any = beam.DoFn.KeyParam,
            in_window: Any = beam.DoFn.WindowParam,
            runs: Any = runs_state,
            held: Any = held_state,
            duration_timer: Any = duration_end,
        ) -> Iterator[WindowedValue]:
            yield from self._flush("window", batch_key, in_window, runs, held, duration_timer)

        @userstate.on_timer(duration_timer_spec)
        def when_due(
            self,
            batch_key: Any = beam.DoFn.KeyParam,
            in_window: Any = beam.DoFn.WindowParam,
            runs: Any = runs_state,
            held: Any = held_state,
            window_timer: Any = window_end,
        ) -> Iterator[WindowedValue]:
            yield from self._flush("timer", batch_key, in_window, runs, held, window_timer)

        def _flush(
            self, reason: str, batch_key: bytes, in_window: Any, runs: Any, held: Any, timer: Any
        ) -> Iterator[WindowedValue]:
            waiting = list(held.read())
            if not waiting:
                return
            size = self._sizes.of(batch_key[_SHARD_BYTES:])
            filling = _Filling(self._rules, size)
            filling.load(list(runs.read()), max(waiting)[1])
            runs.clear()
            held.clear()
            timer.clear()
            yield from self._emit(filling.close(reason), size, in_window)

    return Buffer(rules)


def _add(weight: float, run: _Run) -> float:
    """The weight with the run's, added up in the order in which `_Filling` does."""
    _, values, _, weights = run
    if weights is None:
        return weight + len(values)
    for more in weights:
        weight += more
    return weight
