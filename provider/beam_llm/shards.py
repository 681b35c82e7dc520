"""How many random sub-keys a batch key is spread over."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

from beam_llm.config import INT64

ShardSpec: TypeAlias = int | Mapping[Any, int] | Callable[[Any], int]
"""One count for all keys, a count per key (1 for keys not listed), or key → count."""


def validate_shards(num_shards: object, parameter: str = "num_shards") -> None:
    """Checks a shard specification as far as it can be seen before any key is.

    Args:
        num_shards: The specification, a `ShardSpec`.
        parameter: What the caller calls it, for the message.

    Raises:
        TypeError: It is neither an integer (`bool` is none), a mapping nor a callable.
        ValueError: A count is below 1.
    """
    if isinstance(num_shards, Mapping):
        for key, count in cast("Mapping[object, object]", num_shards).items():
            _check_count(count, f"{parameter}[{key!r}]")
    elif isinstance(num_shards, int) or not callable(num_shards):
        _check_count(num_shards, parameter, or_else=", a mapping from key to int, or a callable")


def shard_counter(num_shards: ShardSpec) -> Callable[[Any], int]:
    """Returns the function from key to shard count that a specification stands for.

    A mapping is looked up by the key, or by `str(key)` when the key cannot be hashed. What a
    callable returns is checked with each call, with the errors of `validate_shards`.
    """
    validate_shards(num_shards)
    if isinstance(num_shards, Mapping):
        counts = num_shards

        def look_up(key: Any) -> int:
            try:
                return counts.get(key, 1)
            except TypeError:
                return counts.get(str(key), 1)

        return look_up
    if isinstance(num_shards, int):
        return lambda key: num_shards

    def call(key: Any) -> int:
        count = num_shards(key)
        name = getattr(num_shards, "__qualname__", type(num_shards).__qualname__)
        _check_count(count, f"num_shards ({name}) for the key {key!r:.200}")
        return count

    return call


def _check_count(count: object, parameter: str, or_else: str = "") -> None:
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(
            f"{parameter}: {count!r} is a {type(count).__name__}; allowed: an integer of at "
            f"least 1{or_else}"
        )
    if count < 1:
        raise ValueError(f"{parameter}: {count} is less than the minimum of 1")
    if count > INT64[1]:
        raise ValueError(f"{parameter}: {count} is greater than the maximum of {INT64[1]}")
