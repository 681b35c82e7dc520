"""Decides what a request may ask for, before anything in it is decoded.

A request names one of our transforms, its configuration and its input PCollections. From
those we follow the coders, windowing strategies and environments that they need, and check
each by its URN against what is known to carry no code. Everything else that came with the
request is dropped unread; upstream transforms too, which Beam's own service executes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from apache_beam.portability import common_urns, python_urns
from apache_beam.portability.api import (
    beam_expansion_api_pb2,
    beam_runner_api_pb2,
    external_transforms_pb2,
    schema_pb2,
)
from google.protobuf.message import DecodeError, Message

from beam_llm import validation
from beam_llm.registry import TRANSFORMS, TransformSpec
from beam_llm_expansion.errors import RequestError
from beam_llm_expansion.input_schemas import check_schema
from beam_llm_expansion.payloads import decode_row

SCHEMA_TRANSFORM_URN = common_urns.schematransform_based_expand.urn
NAMED_TRANSFORM_URN = "beam:transforms:python:fully_qualified_named"

#: Transforms by what a stock ``PythonExternalTransform`` calls them.
BY_CLASS_NAME = {f"beam_llm.{name}": spec for name, spec in TRANSFORMS.items()}
BY_URN = {spec.urn: spec for spec in TRANSFORMS.values()}

_MAX_DEPTH = 20
_MAX_NAME = 1_000
_MAX_CODER_SIZE = 100
_MAX_REQUIREMENTS = 100

_CODERS = common_urns.coders
# Coders that are defined by their URN, and at most by other coders.
_PLAIN_CODERS = frozenset(
    {
        _CODERS.BOOL.urn,
        _CODERS.BYTES.urn,
        _CODERS.DOUBLE.urn,
        _CODERS.ITERABLE.urn,
        _CODERS.KV.urn,
        _CODERS.NULLABLE.urn,
        _CODERS.STRING_UTF8.urn,
        _CODERS.VARINT.urn,
        python_urns.TUPLE_CODER,
    }
)
_WINDOW_CODERS = frozenset({_CODERS.GLOBAL_WINDOW.urn, _CODERS.INTERVAL_WINDOW.urn})
_WINDOW_FNS = frozenset(
    {
        common_urns.global_windows.urn,
        common_urns.fixed_windows.urn,
        common_urns.sliding_windows.urn,
        common_urns.session_windows.urn,
    }
)
_ENVIRONMENTS = common_urns.environments
# The client's own, which are handed back to it as they are.
_PLAIN_ENVIRONMENTS = frozenset(
    {_ENVIRONMENTS.DEFAULT.urn, _ENVIRONMENTS.DOCKER.urn, _ENVIRONMENTS.EXTERNAL.urn}
)

Proto = TypeVar("Proto", bound=Message)


@dataclass(frozen=True)
class Admitted:
    """What is left of a request.

    Attributes:
      spec: The transform.
      config: Its checked configuration, as plain data.
      label: Its unique name in the client's pipeline.
      namespace: Prefix of the ids that the expansion makes.
      inputs: Ids of the input PCollections by tag.
      components: The PCollections, and what they reach.
      requirements: URNs that the client's pipeline requires of its runner already.
    """

    spec: TransformSpec
    config: Mapping[str, Any]
    label: str
    namespace: str
    inputs: Mapping[str, str]
    components: beam_runner_api_pb2.Components
    requirements: tuple[str, ...]


def admit(
    request: beam_expansion_api_pb2.ExpansionRequest,
    *,
    max_components: int,
    allow_callables: bool,
) -> Admitted:
    """Checks a request.

    Args:
      request: As it came.
      max_components: Most components it may have, used or not.
      allow_callables: Whether a configuration may name a function to import.

    Returns:
      What the expansion needs of it.

    Raises:
      RequestError: It is refused.
    """
    components = request.components
    parts = (
        components.transforms,
        components.pcollections,
        components.windowing_strategies,
        components.coders,
        components.environments,
    )
    count = sum(map(len, parts)) + len(request.output_coder_requests)
    if count > max_components:
        raise RequestError(f"the request has {count} components; at most {max_components} are read")
    for what, name in (
        ("namespace", request.namespace),
        ("transform's name", request.transform.unique_name),
    ):
        if not 0 < len(name) <= _MAX_NAME or not name.isprintable():
            raise RequestError(f"the {what} is not 1 to {_MAX_NAME} printable characters")
    if len(request.requirements) > _MAX_REQUIREMENTS or any(
        len(requirement) > _MAX_NAME for requirement in request.requirements
    ):
        raise RequestError(f"more than {_MAX_REQUIREMENTS} requirements, or one too long")

    spec, raw = _transform(request.transform)
    config = _checked(spec, raw, allow_callables)
    inputs = dict(request.transform.inputs)
    _check_inputs(spec, inputs)
    reached = _Reached(request)
    for tag, pcollection in sorted(inputs.items()):
        reached.pcollection(pcollection, f"input '{_short(tag)}'")
    return Admitted(
        spec,
        config,
        request.transform.unique_name,
        request.namespace,
        inputs,
        reached.components,
        tuple(request.requirements),
    )


def asked_for(request: beam_expansion_api_pb2.ExpansionRequest) -> str:
    """Gives the name of the transform that a request asks for, empty if it is none of ours.

    For logs and metrics; admission decides.
    """
    spec = request.transform.spec
    try:
        if spec.urn == SCHEMA_TRANSFORM_URN:
            urn = external_transforms_pb2.SchemaTransformPayload.FromString(spec.payload).identifier
            return BY_URN[urn].name
        return BY_URN[spec.urn].name
    except (DecodeError, KeyError):
        return ""


def _parsed(kind: type[Proto], payload: bytes, what: str) -> Proto:
    try:
        return kind.FromString(payload)
    except DecodeError:
        raise RequestError(f"{what} is no {kind.DESCRIPTOR.name}") from None


def _short(text: str, limit: int = 200) -> str:
    shown = text if text.isprintable() else ascii(text)
    return shown if len(shown) <= limit else shown[:limit] + "…"


# The transform and its configuration


def _transform(
    transform: beam_runner_api_pb2.PTransform,
) -> tuple[TransformSpec, dict[str, Any]]:
    urn, payload = transform.spec.urn, transform.spec.payload
    if transform.subtransforms:
        raise RequestError("the transform has parts: only our own are expanded here", "forbidden")
    if urn == SCHEMA_TRANSFORM_URN:
        schema_transform = _parsed(
            external_transforms_pb2.SchemaTransformPayload, payload, "the transform's payload"
        )
        return _known(BY_URN, schema_transform.identifier, "schema transform"), decode_row(
            schema_transform.configuration_schema, schema_transform.configuration_row
        )
    if urn == NAMED_TRANSFORM_URN:
        return _named_transform(payload)
    spec = _known(BY_URN, urn, "transform")
    configuration = _parsed(
        external_transforms_pb2.ExternalConfigurationPayload, payload, "the transform's payload"
    )
    return spec, decode_row(configuration.schema, configuration.payload)


def _named_transform(payload: bytes) -> tuple[TransformSpec, dict[str, Any]]:
    """Reads what ``PythonExternalTransform`` sends: a class and its keyword arguments."""
    configuration = _parsed(
        external_transforms_pb2.ExternalConfigurationPayload, payload, "the transform's payload"
    )
    # The class is looked at before its arguments are.
    schema = configuration.schema
    row = decode_row(schema, configuration.payload)
    spec = _known(BY_CLASS_NAME, row.get("constructor"), "class")
    unknown = sorted(set(row) - {"constructor", "args", "kwargs"})
    kwargs = row.get("kwargs", {})
    if unknown or not isinstance(kwargs, dict):
        raise RequestError(f"{spec.name}: the payload is no constructor and its arguments")
    if row.get("args"):
        raise RequestError(f"{spec.name}: positional arguments: name each knob")
    return spec, kwargs


def _known(known: Mapping[str, TransformSpec], name: Any, what: str) -> TransformSpec:
    spec = known.get(name) if isinstance(name, str) else None
    if spec is None:
        given = f"'{_short(name)}'" if isinstance(name, str) else "none"
        hint = validation.nearest(str(name)[:_MAX_NAME], known)
        raise RequestError(
            f"the {what} {given} is not served here{hint} (there are: {', '.join(sorted(known))})",
            "forbidden",
        )
    return spec


def _checked(spec: TransformSpec, raw: dict[str, Any], allow_callables: bool) -> dict[str, Any]:
    try:
        config = validation.load(spec.config, raw, spec.name)
    except validation.ConfigError as error:
        raise RequestError(str(error)) from None
    if not allow_callables:
        for path in _callables(raw):
            problem = validation.Problem(
                path,
                "names a function to import, which this service does not do for its callers (its"
                " operator can allow it: --allow-callables)",
            )
            raise RequestError(str(validation.ConfigError(spec.name, [problem])), "forbidden")
    del config
    return raw


def _callables(raw: Mapping[str, Any]) -> Iterable[validation.Path]:
    prefix_batching = raw.get("prefix_batching")
    if isinstance(prefix_batching, dict) and prefix_batching.get("key_fn") is not None:
        yield ("prefix_batching", "key_fn")
    if raw.get("key_fn") is not None:
        yield ("key_fn",)


# What the inputs reach


def _check_inputs(spec: TransformSpec, inputs: Mapping[str, str]) -> None:
    # A single input goes by whatever name the client's language gives it.
    if len(inputs) != len(spec.inputs) or (len(inputs) > 1 and set(inputs) != set(spec.inputs)):
        raise RequestError(
            f"{spec.name}: {len(inputs)} inputs, where it takes {', '.join(spec.inputs)}"
        )


class _Reached:
    """The components that inputs reach, checked on the way."""

    def __init__(self, request: beam_expansion_api_pb2.ExpansionRequest):
        self._all = request.components
        self._prefix = f"{request.namespace}_"
        self.components = beam_runner_api_pb2.Components()
        self._coder_sizes: dict[str, int] = {}
        self._producers: dict[str, list[str]] = {}
        for transform in request.components.transforms.values():
            for output in transform.outputs.values():
                self._producers.setdefault(output, []).append(transform.spec.urn)

    def pcollection(self, name: str, place: str) -> None:
        pcollection = self._take("pcollections", name, place)
        for urn in self._producers.get(name, ()):
            if urn != common_urns.primitives.IMPULSE.urn:
                raise RequestError(
                    f"{place}: the request has the transform that makes it ('{_short(urn)}'): send"
                    " its schema and windows, not the steps before ours",
                    "forbidden",
                )
        self._coder(pcollection.coder_id, place)
        self._windowing(pcollection.windowing_strategy_id, place)

    def _take(self, kind: str, name: str, place: str) -> Any:
        """Takes a component along, unread."""
        known = getattr(self._all, kind)
        what = kind.replace("_", " ").removesuffix("s").replace("strategie", "strategy")
        if name not in known:
            raise RequestError(f"{place}: its {what} '{_short(name)}' is not in the request")
        if name.startswith(self._prefix):
            raise RequestError(
                f"{place}: its {what} '{_short(name)}' has the namespace of the expansion's own"
            )
        taken = getattr(self.components, kind)[name]
        taken.CopyFrom(known[name])
        return taken

    def _coder(self, name: str, place: str, depth: int = 0) -> int:
        """Checks a coder and its parts.

        Returns:
          Of how many it is made, counted as often as they occur: a few coders that share
          parts may stand for millions, which Beam would spell out.
        """
        if name in self._coder_sizes:
            return self._coder_sizes[name]
        if depth > _MAX_DEPTH:
            raise RequestError(
                f"{place}: its coders nest more than {_MAX_DEPTH} deep, or endlessly"
            )
        coder = self._take("coders", name, place)
        urn = coder.spec.urn
        if urn == _CODERS.ROW.urn:
            check_schema(
                _parsed(schema_pb2.Schema, coder.spec.payload, f"{place}: its schema"), place
            )
        elif urn not in _PLAIN_CODERS and urn not in _WINDOW_CODERS:
            raise RequestError(
                f"{place}: its coder '{_short(urn)}' may carry code, and is not decoded here: give"
                " it rows, for instance beam.Map(lambda x: beam.Row(text=str(x)))",
                "forbidden",
            )
        size = 1
        for component in coder.component_coder_ids:
            size += self._coder(component, place, depth + 1)
            if size > _MAX_CODER_SIZE:
                raise RequestError(f"{place}: its coder has more than {_MAX_CODER_SIZE} parts")
        self._coder_sizes[name] = size
        return size

    def _windowing(self, name: str, place: str) -> None:
        windowing = self._take("windowing_strategies", name, place)
        urn = windowing.window_fn.urn
        if urn not in _WINDOW_FNS:
            raise RequestError(
                f"{place}: its window function '{_short(urn)}' may carry code, and is not decoded"
                " here: use global, fixed, sliding or session windows",
                "forbidden",
            )
        if windowing.window_coder_id:
            self._coder(windowing.window_coder_id, place)
        if windowing.environment_id:
            environment = self._take("environments", windowing.environment_id, place)
            _check_environment(environment, place, 0)


def _check_environment(
    environment: beam_runner_api_pb2.Environment, place: str, depth: int
) -> None:
    urn = environment.urn
    if urn == _ENVIRONMENTS.ANYOF.urn and depth < _MAX_DEPTH:
        inner = _parsed(
            beam_runner_api_pb2.AnyOfEnvironmentPayload,
            environment.payload,
            f"{place}: its environment",
        )
        for choice in inner.environments:
            _check_environment(choice, place, depth + 1)
    elif urn not in _PLAIN_ENVIRONMENTS and environment.payload:  # a mere name has no command
        raise RequestError(
            f"{place}: its environment '{_short(urn)}' may name a command: use a container"
            " (DOCKER) or a worker that runs already (EXTERNAL)",
            "forbidden",
        )
