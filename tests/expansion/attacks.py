"""Requests that make Beam's own expansion service do what it should not.

Each is harmless: what it runs makes an empty folder, the canary.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apache_beam.coders.coders import serialize_coder
from apache_beam.internal import pickler
from apache_beam.portability.api import (
    beam_expansion_api_pb2,
    beam_runner_api_pb2,
    external_transforms_pb2,
)
from google.protobuf import wrappers_pb2
from serving import CANARY_MODULE, MINIMAL, NAMED_TRANSFORM, named_payload, request

Request = beam_expansion_api_pb2.ExpansionRequest


class _Canary:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: Path):
        self._folder = str(folder)

    def __reduce__(self) -> Any:
        return os.mkdir, (self._folder,)


def _pickled(canary: Path) -> bytes:
    return pickler.dumps(_Canary(canary))


@dataclass(frozen=True)
class Attack:
    """A request that executes something.

    Attributes:
      make: Makes the request, given where the canary goes.
      refused: Part of our answer; None where what is dangerous is dropped, and the rest served.
    """

    make: Callable[[Path], Request]
    refused: str | None


def benign() -> Request:
    """A request that Beam's own service answers too."""
    asked = request()
    asked.transform.spec.urn = NAMED_TRANSFORM
    asked.transform.spec.payload = named_payload("beam_llm.VLLMCompletions", MINIMAL)
    return asked


def _pickled_transform(canary: Path) -> Request:
    asked = benign()
    asked.transform.spec.urn = "beam:transform:pickled_python:v1"
    asked.transform.spec.payload = _pickled(canary)
    return asked


def _pickled_do_fn(canary: Path) -> bytes:
    return beam_runner_api_pb2.ParDoPayload(
        do_fn=beam_runner_api_pb2.FunctionSpec(
            urn="beam:dofn:pickled_python_info:v1", payload=_pickled(canary)
        )
    ).SerializeToString()


def _do_fn_as_transform(canary: Path) -> Request:
    asked = benign()
    asked.transform.spec.urn = "beam:transform:pardo:v1"
    asked.transform.spec.payload = _pickled_do_fn(canary)
    return asked


def _do_fn_as_producer(canary: Path) -> Request:
    asked = benign()
    (producer,) = asked.components.transforms.values()
    producer.spec.urn = "beam:transform:pardo:v1"
    producer.spec.payload = _pickled_do_fn(canary)
    return asked


def _do_fn_elsewhere(canary: Path) -> Request:
    asked = benign()
    (name,) = asked.transform.inputs.values()
    other = asked.components.transforms["other"]
    other.unique_name = "other"
    other.spec.urn = "beam:transform:pardo:v1"
    other.spec.payload = _pickled_do_fn(canary)
    asked.components.pcollections["unused"].CopyFrom(asked.components.pcollections[name])
    other.outputs["out"] = "unused"
    return asked


def _evil_coder(canary: Path) -> beam_runner_api_pb2.Coder:
    return beam_runner_api_pb2.Coder(
        spec=beam_runner_api_pb2.FunctionSpec(
            urn="beam:coder:pickled_python:v1",
            payload=wrappers_pb2.BytesValue(
                value=serialize_coder(_Canary(canary))
            ).SerializeToString(),
        )
    )


def _input_coder(canary: Path) -> Request:
    asked = benign()
    (name,) = asked.transform.inputs.values()
    asked.components.coders["evil"].CopyFrom(_evil_coder(canary))
    asked.components.pcollections[name].coder_id = "evil"
    return asked


def _nested_coder(canary: Path) -> Request:
    asked = benign()
    (name,) = asked.transform.inputs.values()
    asked.components.coders["evil"].CopyFrom(_evil_coder(canary))
    asked.components.coders["list"].spec.urn = "beam:coder:iterable:v1"
    asked.components.coders["list"].component_coder_ids.append("evil")
    asked.components.pcollections[name].coder_id = "list"
    return asked


def _coder_id(canary: Path) -> Request:
    asked = benign()
    (name,) = asked.transform.inputs.values()
    # Beam takes the id of a coder that is not there for a pickled type.
    asked.components.pcollections[name].coder_id = _pickled(canary).decode()
    return asked


def _output_coder(canary: Path) -> Request:
    asked = benign()
    asked.components.coders["evil"].CopyFrom(_evil_coder(canary))
    asked.output_coder_requests["output"] = "evil"
    return asked


def _window_fn(canary: Path) -> Request:
    asked = benign()
    (windowing,) = asked.components.windowing_strategies.values()
    windowing.window_fn.urn = "beam:window_fn:pickled_python:v1"
    windowing.window_fn.payload = wrappers_pb2.BytesValue(
        value=_pickled(canary)
    ).SerializeToString()
    return asked


def _callable_value(canary: Path) -> Request:
    asked = benign()
    source = f"import os\nos.mkdir({str(canary)!r})\nlambda x: x"
    # A value that evaluates its source when it is decoded. Written as text: here it must not.
    asked.transform.spec.payload = named_payload(
        "beam_llm.VLLMCompletions", {**MINIMAL, "model": source}
    )
    payload = external_transforms_pb2.ExternalConfigurationPayload.FromString(
        asked.transform.spec.payload
    )
    (kwargs,) = (field for field in payload.schema.fields if field.name == "kwargs")
    kwargs.type.row_type.schema.id = "callable"
    for field in kwargs.type.row_type.schema.fields:
        if field.name == "model":
            field.type.logical_type.urn = "beam:logical_type:python_callable:v1"
            field.type.logical_type.representation.atomic_type = 7
    asked.transform.spec.payload = payload.SerializeToString()
    return asked


def _function_of_ours(canary: Path) -> Request:
    asked = benign()
    asked.transform.spec.payload = named_payload(
        "beam_llm.cli.demo.write_demo_data", {"file": f"{canary}/written", "packages": 1}
    )
    return asked


def _key_fn(canary: Path) -> Request:
    asked = benign()
    asked.transform.spec.payload = named_payload(
        "beam_llm.VLLMCompletions",
        {**MINIMAL, "prefix_batching": {"key_fn": f"{CANARY_MODULE}:Runner"}},
    )
    return asked


ATTACKS = {
    "a pickled transform": Attack(_pickled_transform, "is not served here"),
    "a pickled DoFn for a transform": Attack(_do_fn_as_transform, "is not served here"),
    "a pickled DoFn that makes the input": Attack(_do_fn_as_producer, "the transform that makes"),
    "a pickled DoFn that nothing needs": Attack(_do_fn_elsewhere, None),
    "a pickled coder of the input": Attack(_input_coder, "may carry code"),
    "a pickled coder inside another": Attack(_nested_coder, "may carry code"),
    "a coder's id that is a pickle": Attack(_coder_id, "is not in the request"),
    "a pickled coder of an output": Attack(_output_coder, None),
    "a pickled window function": Attack(_window_fn, "may carry code"),
    "source code among the arguments": Attack(_callable_value, "logical type"),
    "a function of our package": Attack(_function_of_ours, "is not served here"),
    "a key function": Attack(_key_fn, "names a function to import"),
}
