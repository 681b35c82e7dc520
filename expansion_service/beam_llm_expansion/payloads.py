"""Reads configurations: rows in Beam's row encoding, from a stranger.

Beam's own decoder is not used here. In its compiled form it reads past the end of a short
payload, into the memory of the process; it evaluates the values of some logical types; and
it registers every schema that it meets, for good.

The encoding is that of ``beam:coder:row:v1`` (Beam's ``beam_runner_api.proto``).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from apache_beam.portability.api import schema_pb2

from beam_llm_expansion.errors import RequestError

_MAX_DEPTH = 20

_Decoder = Callable[["_Reader"], Any]


def decode_row(schema: schema_pb2.Schema, data: bytes) -> dict[str, Any]:
    """Decodes a row of plain values.

    Args:
      schema: Its schema: atomic types, lists, maps and rows.
      data: The encoded row.

    Returns:
      The values by field; nested rows as mappings. Fields that are null or absent are left
      out, and so are nested rows of nothing but nulls: that is how a client writes a section
      that is not set.

    Raises:
      RequestError: The data does not fit the schema, or holds values of other types.
    """
    reader = _Reader(data)
    row = _row(schema, "", 0)(reader)
    if reader.rest:
        raise RequestError(f"the configuration has {reader.rest} bytes after its last field")
    return row


class _Reader:
    """Bytes, never read past their end."""

    def __init__(self, data: bytes):
        self._data = data
        self._at = 0

    @property
    def rest(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        if size > self.rest:
            raise RequestError("the configuration is shorter than its schema says")
        taken = self._data[self._at : self._at + size]
        self._at += size
        return taken

    def varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & (2**64 - 1)
        raise RequestError("the configuration holds an integer without an end")

    def count(self) -> int:
        """How many elements follow; each takes a byte or more."""
        (count,) = struct.unpack(">i", self.take(4))
        if not 0 <= count <= self.rest:
            raise RequestError("the configuration is shorter than its schema says")
        return count


# Schemas are compiled once, so that the work is bounded by the size of the request:
# a list may hold many rows of a schema with many fields.


def _row(schema: schema_pb2.Schema, path: str, depth: int) -> Callable[[_Reader], dict[str, Any]]:
    if depth > _MAX_DEPTH:
        raise RequestError(f"{path}: nested more than {_MAX_DEPTH} deep")
    fields = list(schema.fields)
    names = [field.name for field in fields]
    if len(set(names)) < len(names):
        raise RequestError(f"{path or 'the configuration'}: two fields of one name")
    order = list(range(len(fields)))
    if schema.encoding_positions_set:
        order.sort(key=lambda i: fields[i].encoding_position)
    columns = [
        (i, names[i], _value(fields[i].type, f"{path}.{names[i]}".lstrip("."), depth + 1))
        for i in order
    ]

    def decode(reader: _Reader) -> dict[str, Any]:
        present = reader.varint()
        if present > len(columns):
            raise RequestError(
                f"{path or 'the configuration'}: {present} fields, in a schema of {len(columns)}"
            )
        nulls = reader.take(reader.varint())
        row: dict[str, Any] = {}
        for i, name, column in columns[:present]:
            if i // 8 < len(nulls) and nulls[i // 8] >> (i % 8) & 1:
                continue
            value = column(reader)
            if value is not None:
                row[name] = value
        return row

    return decode


def _value(kind: schema_pb2.FieldType, path: str, depth: int) -> _Decoder:
    """Gives the decoder of a value that is there."""
    which = kind.WhichOneof("type_info")
    if which == "atomic_type" and kind.atomic_type in _ATOMIC:
        return _ATOMIC[kind.atomic_type]
    if which == "row_type":
        row = _row(kind.row_type.schema, path, depth)
        return lambda reader: row(reader) or None
    if which in ("array_type", "iterable_type"):
        element = _element(getattr(kind, which).element_type, f"{path}[]", depth)
        return lambda reader: [element(reader) for _ in range(reader.count())]
    if which == "map_type":
        if kind.map_type.key_type.atomic_type == schema_pb2.STRING:
            key = _element(kind.map_type.key_type, path, depth)
            value = _element(kind.map_type.value_type, f"{path}.*", depth)
            return lambda reader: {key(reader): value(reader) for _ in range(reader.count())}
        which = "map whose keys are no strings"
    if which == "logical_type":
        which = f"value of the logical type {kind.logical_type.urn}"
    words = f"{path}: a {which or 'value of no type'}; a knob is text, a number, a boolean, a list"
    return _refuse(f"{words}, a map or a row")


def _refuse(message: str) -> _Decoder:
    # When a value comes, not before: clients give an empty list of unknown type such a schema.
    def refuse(reader: _Reader) -> Any:
        del reader
        raise RequestError(message, "forbidden")

    return refuse


def _element(kind: schema_pb2.FieldType, path: str, depth: int) -> _Decoder:
    if depth > _MAX_DEPTH:
        raise RequestError(f"{path}: nested more than {_MAX_DEPTH} deep")
    decode = _value(kind, path, depth + 1)
    empty = {} if kind.WhichOneof("type_info") == "row_type" else None

    def element(reader: _Reader) -> Any:
        if kind.nullable and reader.take(1) == b"\0":
            return None
        value = decode(reader)
        return empty if value is None else value

    return element


def _text(reader: _Reader) -> str:
    try:
        return reader.take(reader.varint()).decode()
    except UnicodeDecodeError:
        raise RequestError("the configuration holds text that is not UTF-8") from None


def _signed(bits: int) -> _Decoder:
    def decode(reader: _Reader) -> int:
        value = reader.varint() & (2**bits - 1)
        return value - 2**bits if value >> (bits - 1) else value

    return decode


def _fixed(form: str) -> _Decoder:
    packed = struct.Struct(form)
    return lambda reader: packed.unpack(reader.take(packed.size))[0]


_ATOMIC: dict[int, _Decoder] = {
    # No knob is bytes: the check of the configuration says so.
    schema_pb2.BYTES: lambda reader: reader.take(reader.varint()),
    schema_pb2.BOOLEAN: lambda reader: reader.take(1) != b"\0",
    schema_pb2.BYTE: _fixed(">b"),
    schema_pb2.INT16: _fixed(">h"),
    schema_pb2.INT32: _signed(32),
    schema_pb2.INT64: _signed(64),
    schema_pb2.FLOAT: _fixed(">f"),
    schema_pb2.DOUBLE: _fixed(">d"),
    schema_pb2.STRING: _text,
}
