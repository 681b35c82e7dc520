"""Our decoder of configuration rows agrees with Beam's encoder, and reads nothing else."""

import contextlib
import math
from typing import Any

import pytest
from apache_beam.coders import RowCoder
from apache_beam.portability.api import schema_pb2
from apache_beam.typehints.schemas import named_tuple_from_schema
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from beam_llm_expansion.errors import RequestError
from beam_llm_expansion.payloads import decode_row

ATOMIC = {
    schema_pb2.BOOLEAN: st.booleans(),
    schema_pb2.BYTE: st.integers(0, 2**7 - 1),  # Beam's encoder takes no negative ones
    schema_pb2.INT16: st.integers(-(2**15), 2**15 - 1),
    schema_pb2.INT32: st.integers(-(2**31), 2**31 - 1),
    schema_pb2.INT64: st.integers(-(2**63), 2**63 - 1),
    schema_pb2.FLOAT: st.floats(width=32, allow_nan=False),
    schema_pb2.DOUBLE: st.floats(allow_nan=False),
    schema_pb2.STRING: st.text("aZ é€😀\0\n", max_size=8),
}


@st.composite
def fields(draw: Any, depth: int = 0) -> tuple[schema_pb2.FieldType, Any, Any]:
    """A type, a value for Beam's encoder, and the value that we read."""
    kind = schema_pb2.FieldType(nullable=draw(st.booleans()))
    if kind.nullable and draw(st.integers(0, 3)) == 0:
        kind.atomic_type = schema_pb2.STRING
        return kind, None, None
    shape = draw(st.sampled_from(["atomic", "list", "map", "row"] if depth < 3 else ["atomic"]))
    if shape == "atomic":
        kind.atomic_type = draw(st.sampled_from(list(ATOMIC)))
        value = draw(ATOMIC[kind.atomic_type])
        return kind, value, value
    if shape == "row":
        schema, given, read = draw(rows(depth + 1))
        kind.row_type.schema.CopyFrom(schema)
        return kind, given, read
    inner = draw(st.sampled_from(list(ATOMIC)))
    if shape == "list":
        kind.array_type.element_type.atomic_type = inner
        value = draw(st.lists(ATOMIC[inner], max_size=5))
        return kind, value, value
    kind.map_type.key_type.atomic_type = schema_pb2.STRING
    kind.map_type.value_type.atomic_type = inner
    mapping = draw(st.dictionaries(ATOMIC[schema_pb2.STRING], ATOMIC[inner], max_size=5))
    return kind, mapping, mapping


@st.composite
def rows(draw: Any, depth: int = 0) -> tuple[schema_pb2.Schema, Any, Any]:
    members = draw(st.lists(fields(depth), min_size=1, max_size=9 - 2 * depth))
    schema = schema_pb2.Schema(
        fields=[schema_pb2.Field(name=f"f{i}", type=kind) for i, (kind, _, _) in enumerate(members)]
    )
    row = named_tuple_from_schema(schema)(*(given for _, given, _ in members))
    # Null fields are left out, and so are rows of nothing but nulls.
    read = {
        f"f{i}": value
        for i, (kind, _, value) in enumerate(members)
        if value is not None and not (kind.HasField("row_type") and value == {})
    }
    return schema, row, read


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(rows())
def test_it_reads_what_beam_writes(made: tuple[schema_pb2.Schema, Any, Any]) -> None:
    schema, row, read = made
    data = RowCoder(schema).encode(row)
    assert decode_row(schema, data) == read
    for cut in range(len(data)):  # and never past the end
        with pytest.raises(RequestError):
            decode_row(schema, data[:cut])
    with pytest.raises(RequestError, match="after its last field"):
        decode_row(schema, data + b"\0")


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(rows(), st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(
    made: tuple[schema_pb2.Schema, Any, Any], data: bytes
) -> None:
    with contextlib.suppress(RequestError):
        decode_row(made[0], data)


def schema_of(kind: schema_pb2.FieldType) -> schema_pb2.Schema:
    return schema_pb2.Schema(fields=[schema_pb2.Field(name="knob", type=kind)])


LOGICAL = schema_pb2.FieldType(
    logical_type=schema_pb2.LogicalType(urn="beam:logical:pythonsdk_any:v1")
)


def test_a_list_of_unknown_type_may_be_empty_alone() -> None:
    schema = schema_of(schema_pb2.FieldType(array_type=schema_pb2.ArrayType(element_type=LOGICAL)))
    assert decode_row(schema, b"\x01\x00" + bytes(4)) == {"knob": []}
    with pytest.raises(RequestError, match=r"knob.*pythonsdk_any"):
        decode_row(schema, b"\x01\x00\x00\x00\x00\x01\x00")


@pytest.mark.parametrize("count", [b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\x80\x00\x00\x00"])
def test_a_count_is_not_believed(count: bytes) -> None:
    kind = schema_pb2.FieldType(atomic_type=schema_pb2.STRING)
    schema = schema_of(schema_pb2.FieldType(array_type=schema_pb2.ArrayType(element_type=kind)))
    with pytest.raises(RequestError, match="shorter than its schema says"):
        decode_row(schema, b"\x01\x00" + count)


def test_fields_that_the_sender_did_not_know_are_absent() -> None:
    kind = schema_pb2.FieldType(atomic_type=schema_pb2.DOUBLE)
    schema = schema_of(kind)
    schema.fields.add(name="newer", type=kind)
    one = RowCoder(schema_of(kind)).encode(named_tuple_from_schema(schema_of(kind))(math.pi))
    assert decode_row(schema, one) == {"knob": math.pi}
