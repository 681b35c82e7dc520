"""Equal keys have equal bytes, in every process."""

import dataclasses
import enum
import math
import multiprocessing
import subprocess
import sys
from typing import NamedTuple

import apache_beam as beam
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_llm.keys import encode_key


@dataclasses.dataclass(frozen=True)
class Tenant:
    name: str
    tier: int
    note: str = dataclasses.field(default="", compare=False)


class Point(NamedTuple):
    x: int
    y: int


KEYS = [
    None, 0, 1, -1, 255, -256, 10**40, 0.5, -0.5, math.inf, -math.inf, math.nan, "", "a", "1",
    "Grüße 🦜", "\ud800", b"", b"a", (), (1,), ((1,),), [], [1], [None], set(), {1}, {}, {"a": 1},
    {1, "a", None, (2, 3)}, {"b": {3, 1, 2}, "a": [1, {"c"}]}, ("a", "b"), ("ab",), ("a", "b", ""),
    Tenant("x", 1), Tenant("x", 2), beam.Row(a=1), beam.Row(b=1), beam.Row(a=1, b=2),
    beam.Row(b=2, a=1),
]  # fmt: skip

EQUAL = [
    (1, 1.0), (1, True), (0, False), (0.0, -0.0), (0, -0.0), (2**60, float(2**60)),
    (math.nan, float("nan")), (math.nan, -math.nan), (Point(1, 2), (1.0, 2)),
    ({1, 2}, frozenset([2, True])), ({"a": 1, "b": 2}, {"b": 2.0, "a": True}),
    (b"a", bytearray(b"a")), ([1, [2]], [True, [2.0]]), (Tenant("x", 1), Tenant("x", True, "n")),
]  # fmt: skip

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
keys = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.frozensets(scalars, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


def _has_nan(key):
    if isinstance(key, float):
        return math.isnan(key)
    if isinstance(key, dict):
        return any(map(_has_nan, key.values()))
    return isinstance(key, (list, tuple, frozenset)) and any(map(_has_nan, key))


@given(keys, keys)
def test_bytes_are_equal_exactly_where_keys_are(a, b):
    if not _has_nan(a):
        assert encode_key(a) == encode_key(a)
        assert (encode_key(a) == encode_key(b)) == (a == b)


@pytest.mark.parametrize(("a", "b"), EQUAL)
def test_equal_keys_meet(a, b):
    assert encode_key(a) == encode_key(b)


def test_different_keys_do_not_meet():
    assert len({encode_key(key) for key in KEYS}) == len(KEYS)


@pytest.mark.parametrize("key", [object(), 1j, Tenant, enum.Enum("Colour", "RED").RED, (1, [1j])])
def test_other_types_are_named(key):
    with pytest.raises(TypeError, match=r"a batch key cannot be a \w+\.\w+.*; allowed: None"):
        encode_key(key)


ENCODE_SETS = """
from beam_llm.keys import encode_key
print(encode_key([{"spam", "eggs", None, 1.5}, {"b": {"x", "y", "z"}, "a": float("nan")}]).hex())
"""


def test_hash_seed_does_not_matter():
    encoded = {
        subprocess.run(
            [sys.executable, "-c", ENCODE_SETS],
            env={"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(encoded) == 1
    assert encoded.pop().strip() == encode_key(
        [{"spam", "eggs", None, 1.5}, {"b": {"x", "y", "z"}, "a": math.nan}]
    ).hex()  # fmt: skip


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_start_method_does_not_matter(method):
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply(encode_key, (KEYS,)) == encode_key(KEYS)


def test_main_module_has_one_name(monkeypatch):
    monkeypatch.setattr(Tenant, "__module__", "__main__")
    encoded = encode_key(Tenant("x", 1))
    monkeypatch.setattr(Tenant, "__module__", "__mp_main__")
    assert encode_key(Tenant("x", 1)) == encoded
