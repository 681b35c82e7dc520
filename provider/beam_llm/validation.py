"""Checks configurations: every problem at once, in one wording everywhere.

A configuration is checked against the JSON Schema of its model, then by the rules
that span several knobs. Nothing here imports Beam or vLLM.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import jsonschema
import msgspec

from beam_llm.autoscaling.config import autoscaling_rules
from beam_llm.config import (
    AGGREGATION,
    PRINTABLE,
    Autoscaling,
    BatchByPrefixConfig,
    ChatConfig,
    CompletionsConfig,
    KeyedConfig,
    LLMConfig,
    Section,
)
from beam_llm.schemas import json_schema
from beam_llm.templates import Template, TemplateError
from beam_llm.vllm.server import VLLMServerSpec

Path = tuple[str | int, ...]
Model = TypeVar("Model", bound=Section)


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration.

    Attributes:
      path: Keys and indices that lead to the knob.
      message: What was received and what is allowed.
    """

    path: Path
    message: str

    def __str__(self) -> str:
        return f"{dotted(self.path)}: {self.message}" if self.path else self.message


class ConfigError(ValueError):
    """A configuration that cannot be used; lists every problem found."""

    def __init__(self, name: str, problems: Sequence[Problem]):
        self.name = name
        self.problems = tuple(problems)
        lines = [f"{name}: {problem}" for problem in problems]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.name, self.problems))


def dotted(path: Iterable[str | int]) -> str:
    """Writes a path as people do: ``messages[0].content``."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text


def load(model: type[Model], raw: Any, name: str) -> Model:
    """Makes a checked configuration from plain data.

    Args:
      model: The configuration model.
      raw: Mappings, lists and scalars as YAML, a Beam Row or keyword arguments give
        them; sections may be model instances. Nulls mean "absent".
      name: The transform's name, for messages.

    Returns:
      The configuration.

    Raises:
      ConfigError: Anything is wrong; all of it is listed.
    """
    problems, config = check(model, raw)
    if problems or config is None:
        raise ConfigError(name, problems)
    return config


def check(model: type[Model], raw: Any) -> tuple[list[Problem], Model | None]:
    """Finds every problem of a configuration.

    Args:
      model: The configuration model.
      raw: As in ``load``.

    Returns:
      The problems, and the configuration if there are none.
    """
    data = plain(raw)
    validator = jsonschema.Draft202012Validator(json_schema(model))
    errors = sorted(validator.iter_errors(data), key=lambda e: [str(s) for s in e.absolute_path])
    # A dict for a set in order: jsonschema reports "required" once for each missing key.
    problems = list(dict.fromkeys(p for error in errors for p in _explain(error)))
    odd = {problem.path: problem for problem in _not_finite(data)}
    problems = [*(p for p in problems if p.path not in odd), *odd.values()]
    if problems:
        return problems, None
    # JSON has no integers apart from numbers: 16.0 is one to the schema, and to other languages.
    config = msgspec.convert(integral(data), model)
    problems = list(_rules(config))
    return problems, None if problems else config


def plain(value: Any) -> Any:
    """Turns rows, models and tuples into plain data, and drops what is null."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value)
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        mapping = cast("Mapping[Any, Any]", value)
        return {str(k): plain(v) for k, v in mapping.items() if v is not None}
    if isinstance(value, list | tuple):
        return [plain(v) for v in cast("Sequence[Any]", value)]
    return value


def integral(value: Any) -> Any:
    """Gives the same value with whole floats as integers, inside lists and mappings as well."""
    if isinstance(value, dict):
        return {k: integral(v) for k, v in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [integral(v) for v in cast("list[Any]", value)]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _not_finite(value: Any, path: Path = ()) -> Iterator[Problem]:
    if isinstance(value, dict):
        for key, inner in cast("dict[str, Any]", value).items():
            yield from _not_finite(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(cast("list[Any]", value)):
            yield from _not_finite(inner, (*path, i))
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(path, f"{value} is not a finite number")


def nearest(word: str, known: Iterable[str]) -> str:
    """Suggests a known name for a misspelt one: ``"; did you mean 'x'?"``, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


_TYPE_NAMES = {
    "object": "a mapping",
    "array": "a list",
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
}
_PATTERNS = {
    r"^[A-Za-z_][A-Za-z0-9_]*$": "a field name: letters, digits and '_', not starting with a digit",
    r"^([A-Za-z_][A-Za-z0-9_]*)?$": "the start of a field name: letters, digits and '_'",
    r"^https?://[^\s/?#]+[^\s?#]*$": "an address such as http://127.0.0.1:8000/v1",
    r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$": "a callable such as package.module:function",
    PRINTABLE: "printable ASCII text, and not empty",
    AGGREGATION: "last, lifetime_max, max, mean or a percentile such as p90",
}


_KINDS: dict[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    dict: "a mapping",
    list: "a list",
}


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 80 else text[:77] + "…"


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def _explain(error: jsonschema.ValidationError) -> Iterator[Problem]:
    path = tuple(error.absolute_path)
    value, limit = error.instance, cast("Any", error.validator_value)
    schema = cast("dict[str, Any]", error.schema)
    match error.validator:
        case "additionalProperties":
            known = list(schema["properties"])
            for key in cast("dict[str, Any]", value):
                if key not in known:
                    yield Problem(
                        (*path, key),
                        f"unknown key{nearest(key, known)} (allowed: {', '.join(known)})",
                    )
        case "required":
            for key in cast("list[str]", limit):
                if key not in cast("dict[str, Any]", value):
                    doc = schema["properties"][key].get("description", "")
                    yield Problem((*path, key), f"required, and missing: {doc}")
        case "type":
            hint = ""
            if limit == "string" and isinstance(value, dict):
                hint = ": quote text that begins with a brace" if len(value) < 2 else ""  # pyright: ignore[reportUnknownArgumentType]
            yield Problem(
                path, f"{_shown(value)} is {_kind(value)}, not {_TYPE_NAMES[limit]}{hint}"
            )
        case "minimum":
            yield Problem(path, f"{_shown(value)} is less than the minimum of {limit}")
        case "maximum":
            yield Problem(path, f"{_shown(value)} is greater than the maximum of {limit}")
        case "exclusiveMinimum":
            yield Problem(path, f"{_shown(value)} is not greater than {limit}")
        case "exclusiveMaximum":
            yield Problem(path, f"{_shown(value)} is not less than {limit}")
        case "enum":
            allowed = cast("list[Any]", limit)
            hint = nearest(str(value), [str(a) for a in allowed])
            yield Problem(
                path, f"{_shown(value)} is not one of {', '.join(map(_shown, allowed))}{hint}"
            )
        case "minLength" | "minItems":
            unit = "character" if error.validator == "minLength" else "item"
            plural = "" if limit == 1 else "s"
            yield Problem(path, f"{_shown(value)} is too short: at least {limit} {unit}{plural}")
        case "pattern":
            yield Problem(
                path, f"{_shown(value)} is not {_PATTERNS.get(limit, 'of the form ' + str(limit))}"
            )
        case _:
            yield Problem(path, error.message)


def _rules(config: Section) -> Iterator[Problem]:
    if isinstance(config, KeyedConfig):
        yield from _keyed_rules(config)
    if isinstance(config, LLMConfig):
        yield from _llm_rules(config)
    if isinstance(config, BatchByPrefixConfig):
        yield from _batch_by_prefix_rules(config)
    if isinstance(config, CompletionsConfig):
        yield from _template_rules(("prompt",), config.prompt)
    if isinstance(config, ChatConfig):
        for i, message in enumerate(config.messages):
            yield from _template_rules(("messages", i, "content"), message.content)


def _template_rules(path: Path, text: str) -> Iterator[Problem]:
    try:
        Template.parse(text)
    except TemplateError as error:
        yield Problem(path, str(error))


def _exclusive(section: Section, path: Path, *names: str) -> Iterator[Problem]:
    given = [name for name in names if getattr(section, name) is not None]
    if len(given) > 1:
        yield Problem(
            (*path, given[1]),
            f"given beside {given[0]}: only one of {', '.join(names)} can be",
        )


def _json_rules(path: Path, text: str | None) -> Iterator[Problem]:
    if text is None:
        return
    try:
        value = json.loads(text)
    except ValueError as error:
        yield Problem(path, f"{_shown(text)} is not JSON: {error}")
        return
    if not isinstance(value, dict):
        yield Problem(path, f"{_shown(text)} is JSON but not an object")
    elif path[-1] == "json_schema":
        try:
            jsonschema.Draft202012Validator.check_schema(cast("dict[str, Any]", value))
        except jsonschema.SchemaError as error:
            where = dotted(error.absolute_path)
            yield Problem(
                path, f"not a JSON Schema: {where + ': ' if where else ''}{error.message}"
            )


# Beam takes each of these for the main output of a transform with several.
_MAIN_OUTPUTS = ("output", "good")


def _keyed_rules(config: KeyedConfig) -> Iterator[Problem]:
    if config.error_handling is not None and config.error_handling.output in _MAIN_OUTPUTS:
        yield Problem(
            ("error_handling", "output"),
            f"{_shown(config.error_handling.output)} names the main output: take another name",
        )

    prefix, batching = config.prefix_batching, config.batching
    yield from _exclusive(prefix, ("prefix_batching",), "key_field", "key_fn")
    if prefix.mode == "none":
        for name in ("key_field", "key_fn", "prefix_delimiters", "num_shards_by_key"):
            if getattr(prefix, name) is not None:
                yield Problem(("prefix_batching", name), "has no effect with mode: none")
    for i, delimiter in enumerate(prefix.prefix_delimiters or ()):
        if len(delimiter) > prefix.prefix_char_len:
            yield Problem(
                ("prefix_batching", "prefix_delimiters", i),
                f"{_shown(delimiter)} is longer than prefix_char_len, {prefix.prefix_char_len}",
            )
    if batching.max_batch_weight is not None and batching.weight == "rows":
        yield Problem(
            ("batching", "max_batch_weight"),
            "needs weight: tokens; with weight: rows, max_batch_size is the limit",
        )
    if batching.min_batch_size > batching.max_batch_size:
        yield Problem(
            ("batching", "min_batch_size"),
            f"{batching.min_batch_size} is greater than max_batch_size, {batching.max_batch_size}",
        )


def _batch_by_prefix_rules(config: BatchByPrefixConfig) -> Iterator[Problem]:
    prefix = config.prefix_batching
    own_key = prefix.key_field is not None or prefix.key_fn is not None
    if prefix.mode == "none":
        yield Problem(("prefix_batching", "mode"), '"none" would leave nothing to batch by')
    elif config.prompt is None and not own_key:
        yield Problem(("prompt",), "required, unless prefix_batching has a key_field or key_fn")
    if config.prompt is None and config.batching.weight == "tokens":
        yield Problem(("batching", "weight"), '"tokens" needs the prompt whose tokens they are')
    if config.prompt is not None:
        yield from _template_rules(("prompt",), config.prompt)


def _llm_rules(config: LLMConfig) -> Iterator[Problem]:
    sampling = config.sampling
    yield from _exclusive(sampling, ("sampling",), "choices", "regex", "json_schema")
    yield from _json_rules(("sampling", "json_schema"), sampling.json_schema)
    yield from _json_rules(("sampling", "extra_body"), sampling.extra_body)

    for knob, message in autoscaling_rules(config.autoscaling):
        yield Problem(("autoscaling", knob), message)

    server = config.server
    if server.endpoint is not None:
        if server.metrics_endpoint is None and config.autoscaling not in (
            Autoscaling(),
            Autoscaling(enabled=False),
        ):
            yield Problem(
                ("autoscaling",),
                "has no effect with server.endpoint unless server.metrics_endpoint names its"
                " metrics page",
            )
        for name in ("args", "env", "env_from_worker"):
            if getattr(server, name):
                yield Problem(
                    ("server", name),
                    "has no effect with server.endpoint, which uses a server that runs already",
                )
    else:
        for name in ("api_key_env", "metrics_endpoint"):
            if getattr(server, name) is not None:
                yield Problem(("server", name), "needs server.endpoint")
        try:
            server_spec(config)
        except ValueError as error:
            yield _located(("server",), str(error))


def _located(path: Path, message: str) -> Problem:
    """Takes an argument's place (``args[2]: …``) from a message into the problem's path."""
    place = re.match(r"(\w+)(?:\[(\d+)\])?: ", message)
    if place is None:
        return Problem(path, message)
    index = () if place[2] is None else (int(place[2]),)
    return Problem((*path, place[1], *index), message[place.end() :])


def server_spec(config: LLMConfig) -> VLLMServerSpec:
    """The server that a configuration asks to be started on each worker."""
    server = config.server
    return VLLMServerSpec(
        identifier=config.identifier,
        model=config.model,
        args=server.args,
        env=server.env,
        env_from_worker=server.env_from_worker,
        startup_timeout_secs=server.startup_timeout_secs,
    )
