"""Batch keys as bytes that are the same in every process, interpreter and language.

A runner groups by the encoded key. Beam's own coders encode a set in hash order, a dictionary
in insertion order, and 1, 1.0 and True as three different keys; pickles differ from one
process to the next. The encoding here depends on the key's value alone:

* Keys that are equal in Python have equal bytes: `1`, `1.0` and `True`; `0.0` and `-0.0`; a
  NamedTuple and the tuple it equals; a `set` and a `frozenset`; dictionaries in any order.
* Keys that are not equal have different bytes. Two exceptions: every NaN is one key, though
  no NaN equals another, and a dataclass is its class name and compared fields, even when it
  was declared with `eq=False`.
"""

import dataclasses
import math
import numbers
import struct
from collections.abc import Iterable, Mapping
from typing import Any, cast

from apache_beam.pvalue import Row

_SUPPORTED = (
    "None, bool, int, float, str, bytes, and tuples, lists, sets, dictionaries, dataclasses, "
    "NamedTuples and Beam Rows of these"
)


def encode_key(key: Any) -> bytes:
    """Encodes a batch key canonically.

    Args:
        key: None, bool, int, float, str or bytes, or a tuple, list, set, dictionary,
            dataclass, NamedTuple or `beam.Row` of these, nested as deep as you like.

    Returns:
        A type tag of one byte and the value. Integers are hexadecimal, floats that are no
        integers IEEE 754 big-endian, strings UTF-8, and the items of a container each
        preceded by their length.

    Raises:
        TypeError: The key, or something in it, is of another type.
    """
    if isinstance(key, str):
        # Lone surrogates are legal in Python's strings, and come out of broken input.
        return b"s" + key.encode("utf-8", "surrogatepass")
    if isinstance(key, bytes | bytearray):
        return b"b" + key
    if key is None:
        return b"0"
    if isinstance(key, int | numbers.Integral):
        return b"i%x" % int(key)
    if isinstance(key, float):
        if key.is_integer():
            return b"i%x" % int(key)
        return b"n" if math.isnan(key) else b"f" + struct.pack(">d", key)
    if isinstance(key, tuple):
        return b"t" + _join(map(encode_key, cast("tuple[Any, ...]", key)))
    if isinstance(key, list):
        return b"l" + _join(map(encode_key, cast("list[Any]", key)))
    if isinstance(key, set | frozenset):
        return b"e" + _join(sorted(map(encode_key, cast("set[Any]", key))))
    if isinstance(key, Mapping):
        items = cast("Mapping[Any, Any]", key).items()
        return b"m" + _join(sorted(_join(map(encode_key, item)) for item in items))
    if isinstance(key, Row):
        return b"r" + _join(_join(map(encode_key, item)) for item in key.as_dict().items())
    if dataclasses.is_dataclass(key) and not isinstance(key, type):
        fields = (getattr(key, f.name) for f in dataclasses.fields(key) if f.compare)
        return b"d" + _join([_class_name(type(key)), *map(encode_key, fields)])
    raise TypeError(
        f"a batch key cannot be a {type(key).__module__}.{type(key).__qualname__}; "
        f"allowed: {_SUPPORTED}"
    )


def _join(parts: Iterable[bytes]) -> bytes:
    return b"".join(b"%d:%b" % (len(part), part) for part in parts)


def _class_name(cls: type) -> bytes:
    # A spawned process imports the main module under another name.
    module = "__main__" if cls.__module__ == "__mp_main__" else cls.__module__
    return f"{module}.{cls.__qualname__}".encode()
