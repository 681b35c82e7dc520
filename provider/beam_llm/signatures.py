"""Constructors as Beam YAML reads them: signature and documentation from the configuration."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Sequence
from typing import Any, Optional

import msgspec
from apache_beam.typehints.row_type import RowTypeConstraint

from beam_llm.config import Section


def describe(transform: type, config_model: type[Section]) -> None:
    """Gives a transform the signature and documentation of its configuration.

    Beam YAML reads a transform's schema and documentation from its constructor.

    Args:
      transform: The transform's class, which is changed. The constructor that it inherits
        takes the configuration as keyword arguments.
      config_model: The model of its configuration.
    """
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    lines = [inspect.getdoc(transform) or "", "", "Args:"]
    knobs = msgspec.structs.fields(config_model)
    for knob in sorted(knobs, key=lambda knob: not knob.required):
        kind = _beam_type(knob.type)
        parameters.append(
            inspect.Parameter(
                knob.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if knob.required else None,
                annotation=kind if knob.required else Optional[kind],
            )
        )
        lines.append(f"    {knob.name}: {_description(knob.type)}")

    inherited: Any = transform.__init__

    def __init__(self: Any, **config: Any) -> None:  # noqa: N807
        inherited(self, **config)

    __init__.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    transform.__init__ = __init__  # type: ignore[method-assign]
    transform.__doc__ = "\n".join(lines)


def plain_type(kind: Any) -> Any:
    """Gives the type without its ``Optional``."""
    arguments = [a for a in typing.get_args(kind) if a is not type(None)]
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return arguments[0] if union and len(arguments) == 1 else kind


def _description(kind: Any) -> str:
    notes = [note for note in getattr(kind, "__metadata__", ()) if isinstance(note, msgspec.Meta)]
    return next((note.description for note in notes if note.description), "")


def _beam_type(kind: Any) -> Any:
    """Translates a knob's type to one that Beam's schemas have."""
    kind = plain_type(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _beam_type(arguments[0])
    if origin is typing.Literal:
        return str
    if origin is tuple:
        return Sequence[_beam_type(arguments[0])]
    if origin is dict:
        return dict[arguments[0], _beam_type(arguments[1])]
    if isinstance(kind, type) and issubclass(kind, Section):
        return RowTypeConstraint.from_fields(
            [
                (f.name, _beam_type(f.type) if f.required else Optional[_beam_type(f.type)])
                for f in msgspec.structs.fields(kind)
            ]
        )
    return kind
