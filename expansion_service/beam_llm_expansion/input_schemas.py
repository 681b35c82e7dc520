"""Input schemas that Beam's Python SDK cannot handle, said once and clearly."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator

from apache_beam.portability import common_urns
from apache_beam.portability.api import schema_pb2
from apache_beam.typehints.schemas import PYTHON_ANY_URN, LogicalType

from beam_llm_expansion.errors import RequestError

_MAX_DEPTH = 20
_MAX_FIELDS = 2_000
_ID = re.compile(r"[A-Za-z0-9_-]{0,100}")
_CALLABLE_URN = common_urns.python_callable.urn


def check_schema(schema: schema_pb2.Schema, place: str) -> None:
    """Checks that Beam can read rows of a schema, and that they carry no code.

    Args:
      schema: The schema.
      place: The input, for messages.

    Raises:
      RequestError: Some fields are unusable; all of them are named.
    """
    if _fields(schema) > _MAX_FIELDS:
        raise RequestError(f"{place}: its schema has more than {_MAX_FIELDS} fields")
    problems = list(_problems(schema, "", 0))
    if problems:
        raise RequestError(
            f"{place}: fields that Beam's Python SDK cannot read: {'; '.join(problems)}. Rename or"
            " convert them before this step"
        )


def _fields(schema: schema_pb2.Schema) -> int:
    """Counts fields, nested ones included, until there are too many."""
    count = 0
    schemas = [schema]
    while schemas and count <= _MAX_FIELDS:
        for field in schemas.pop().fields:
            count += 1
            types = [field.type]
            while types:
                kind = types.pop()
                if kind.HasField("row_type"):
                    schemas.append(kind.row_type.schema)
                elif kind.HasField("map_type"):
                    types += [kind.map_type.key_type, kind.map_type.value_type]
                elif kind.HasField("array_type"):
                    types.append(kind.array_type.element_type)
                elif kind.HasField("iterable_type"):
                    types.append(kind.iterable_type.element_type)
    return count


def _problems(schema: schema_pb2.Schema, path: str, depth: int) -> Iterator[str]:
    if depth > _MAX_DEPTH:
        yield f"'{path}' nests more than {_MAX_DEPTH} deep"
        return
    # Beam makes the name of a class of it.
    if not _ID.fullmatch(schema.id):
        yield f"the schema{f' of {path!r}' if path else ''} has an id that is no identifier"
    seen: set[str] = set()
    for field in schema.fields:
        name = field.name
        at = f"{path}.{name}" if path else name
        if not name.isidentifier():
            yield f"'{at}' is no Python name"
        elif keyword.iskeyword(name):
            yield f"'{at}' is a word of the Python language"
        elif name.startswith("_"):
            yield f"'{at}' starts with '_'"
        elif name in seen:
            yield f"'{at}' is there twice"
        seen.add(name)
        yield from _type_problems(field.type, at, depth + 1)


def _type_problems(kind: schema_pb2.FieldType, at: str, depth: int) -> Iterator[str]:
    if depth > _MAX_DEPTH:
        yield f"'{at}' nests more than {_MAX_DEPTH} deep"
        return
    which = kind.WhichOneof("type_info")
    if which == "row_type":
        yield from _problems(kind.row_type.schema, at, depth)
    elif which in ("array_type", "iterable_type"):
        yield from _type_problems(getattr(kind, which).element_type, at, depth + 1)
    elif which == "map_type":
        yield from _type_problems(kind.map_type.key_type, at, depth + 1)
        yield from _type_problems(kind.map_type.value_type, at, depth + 1)
    elif which == "logical_type":
        urn = kind.logical_type.urn
        types = LogicalType._known_logical_types  # pyright: ignore[reportPrivateUsage]
        if urn == _CALLABLE_URN or (
            types.get_logical_type_by_urn(urn) is None and urn != PYTHON_ANY_URN
        ):
            yield f"'{at}' is of the logical type '{urn[:200]}'"
    elif which is None or kind.atomic_type == schema_pb2.UNSPECIFIED:
        yield f"'{at}' has no type"
