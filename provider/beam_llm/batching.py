"""Batches of elements that share a key: the transforms.

`beam_llm.keys` says which keys are equal, `beam_llm.batch_sizes` how large batches get, and
`beam_llm.runs` how they come about.
"""

import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import apache_beam as beam
from apache_beam import typehints
from apache_beam.transforms import util
from apache_beam.typehints.decorators import IOTypeHints
from apache_beam.utils.timestamp import Timestamp

from beam_llm.batch_sizes import BatchLatencies, Estimator
from beam_llm.keys import encode_key
from beam_llm.runs import SHARD_BYTES, Batches, BundleBatches, Rules
from beam_llm.shards import ShardSpec, shard_counter, validate_shards

__all__ = [
    "BatchByKey",
    "BatchElements",
    "BatchLatencies",
    "KeyFunctionError",
    "ShardSpec",
    "WithBatchKey",
    "validate_keyed_batching",
    "validate_shards",
]


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
        return ((shard.to_bytes(SHARD_BYTES, "big") + encoded, element),)

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
        self._rules = Rules(
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
            batches = keyed | Batches(self._rules, duration, element_type)
        elif duration is not None:
            batches = keyed | Batches(self._rules, duration, element_type, stateful=True)
        else:
            batches = keyed | BundleBatches(self._rules, element_type)
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
        min_batch_size: Lets the sizes in unbounded input grow from here, per key, by the time
            that the steps fused after this one take. None for `max_batch_size` at once.
        latencies: Where a later step reports what batches took, to learn from that instead;
            only with `min_batch_size`.

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
        min_batch_size: int | None = None,
        latencies: BatchLatencies | None = None,
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
        if latencies is not None and min_batch_size is None:
            raise ValueError(
                f"latencies: {latencies!r} needs min_batch_size, from which the sizes grow; "
                "allowed without it: None"
            )
        if min_batch_size is None:
            min_batch_size = max_batch_size
        _check_size("min_batch_size", min_batch_size)
        self._bounds = min_batch_size, max_batch_size
        self._latencies = latencies
        self._weigh = element_size_fn
        self._max_weight = max_batch_weight
        self._estimator()
        self._max_batch_duration_secs = max_batch_duration_secs
        self._num_shards = num_shards
        self._reshuffle = reshuffle

    def expand(self, input_or_inputs: Any) -> Any:
        """Batches the pairs."""
        pcoll = input_or_inputs
        key_type, value_type = getattr(
            pcoll.element_type, "tuple_types", (typehints.Any, typehints.Any)
        )
        shards = 1 if pcoll.is_bounded else self._num_shards
        rules = Rules(
            estimator=self._estimator(grows=not pcoll.is_bounded),
            weigh=self._weigh,
            max_weight=self._max_weight,
            rows=True,
            latencies=self._latencies,
        )
        batches = (
            pcoll
            | "Key" >> beam.ParDo(_Key(WithBatchKey(_first, shards), self._weigh, rows=True))
            | "Batch" >> Batches(rules, self._max_batch_duration_secs, value_type, key_type)
        )
        # Plain numbers cross the shuffle in half the time that timestamps take.
        batches.element_type = typehints.Tuple[
            key_type, typehints.List[value_type], typehints.List[int]
        ]
        if batches.is_bounded and self._reshuffle:
            batches |= "Spread" >> beam.Reshuffle()
        rows = batches | "Rows" >> beam.MapTuple(_rows)
        rows.element_type = typehints.Tuple[
            key_type, typehints.List[typehints.Tuple[value_type, Timestamp]]
        ]
        return rows

    def _estimator(self, grows: bool = True) -> Any:
        least, most = self._bounds
        return Estimator(least if grows else most, most, record_metrics=False)


def _first(pair: tuple[Any, Any]) -> Any:
    return pair[0]


def _rows(key: Any, values: list[Any], micros: list[int]) -> Any:
    timestamps = {at: Timestamp(micros=at) for at in set(micros)}  # mostly few: they cost
    return key, [(value, timestamps[at]) for value, at in zip(values, micros, strict=True)]


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
            keyed = [(bytes(SHARD_BYTES) + encode_key(key), element) for key, _ in keyed]
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
