"""Checks configurations: every problem at once, in one wording everywhere.

A configuration is checked against the JSON Schema of its model, then by the rules
that span several knobs. Nothing here imports Beam or vLLM.
"""

from __future__ import annotations

import contextlib
import json
import keyword
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from beam_llm.autoscaling.config import autoscaling_rules
from beam_llm.config import (
    FORMS,
    PER_ROW_KNOBS,
    Autoscaling,
    BatchByPrefixConfig,
    ChatConfig,
    CompletionsConfig,
    KeyedConfig,
    LLMConfig,
    Section,
    Server,
    exact,
)
from beam_llm.knobs import deprecated_in
from beam_llm.prefixes import ChatPrefixKeyFn, PromptPrefixKeyFn
from beam_llm.schemas import json_schema
from beam_llm.templates import Template, TemplateError
from beam_llm.vllm.server import VLLMServerSpec

if TYPE_CHECKING:
    import jsonschema

Path = tuple[str | int, ...]
Model = TypeVar("Model", bound=Section)
#: Names of fields, each with the fields of its nested row: none for a plain value, None where
#: they are not known.
Fields = Mapping[str, "Fields | None"]

_LOGGER = logging.getLogger("beam_llm")


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration.

    Attributes:
      path: Keys and indices that lead to the knob.
      message: What was received and what is allowed.
      lint: The check that found it (``beam_llm.lints``).
    """

    path: Path
    message: str
    lint: str = "config"

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
    """Makes a checked configuration from plain data, and logs what is odd about it.

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
    for warning in warnings(config):
        _LOGGER.warning("%s: %s [%s]", name, warning, warning.lint)
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
    problems = list(_not_finite(data))
    odd = {problem.path for problem in problems}
    config: Model | None = None
    try:
        # JSON has no integers apart from numbers: 16.0 is one to the schema, and to other
        # languages.
        config = msgspec.convert(integral(data), model)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        # The schema finds every problem, where the model stops at the first.
        problems += [p for p in _schema_problems(model, data) if p.path not in odd]
        problems = problems or [_unexplained(error)]
        known = {problem.path for problem in problems}
        for path, text in _written_texts(model, data):
            problems += [p for p in _template_rules(path, text) if p.path not in known]
    if problems or config is None:
        return problems, None
    problems = list(_rules(config))
    return problems, None if problems else config


def schema_validator(model: type[Section]) -> jsonschema.Draft202012Validator:
    """Gives a validator of a model's schema, which finds all that is wrong.

    It reads patterns as JSON Schema does: after ``$`` comes nothing, no line break either.
    """
    import jsonschema.validators  # slow to import, and needed for what is wrong only

    def pattern(_: Any, form: str, value: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
        if isinstance(value, str) and not re.search(exact(form), value):
            yield jsonschema.ValidationError("not of the form")  # worded by `_explain`

    kind = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": pattern})
    return kind(json_schema(model))


def _schema_problems(model: type[Section], data: Any) -> Iterator[Problem]:
    errors = sorted(
        schema_validator(model).iter_errors(data),
        key=lambda error: [str(step) for step in error.absolute_path],
    )
    # What is none of the words allowed is of the wrong type besides, mostly.
    words = {tuple(e.absolute_path) for e in errors if e.validator == "enum"}
    errors = [e for e in errors if e.validator != "type" or tuple(e.absolute_path) not in words]
    # A dict for a set in order: jsonschema reports "required" once for each missing key.
    return iter(dict.fromkeys(p for error in errors for p in _explain(error)))


def _unexplained(error: msgspec.ValidationError | UnicodeEncodeError) -> Problem:
    """What the model refuses and the schema does not, such as an integer beyond 64 bits."""
    if isinstance(error, UnicodeEncodeError):
        return Problem((), f"{shown(error.object)} has half a character, which UTF-8 cannot write")
    words, _, place = str(error).partition(" - at `$")
    steps = re.findall(r"\.(\w+)|\[(\d+)\]", place)
    return Problem(tuple(key or int(index) for key, index in steps), words)


def warnings(config: Section) -> Iterator[Problem]:
    """Finds what is allowed, and mostly a mistake.

    Args:
      config: A checked configuration.

    Yields:
      The problems, each with its check's name.
    """
    for path, words in deprecated_in(config):
        yield Problem(path, f"deprecated {words}", "deprecated-knob")
    if isinstance(config, LLMConfig):
        yield from _secrets(config.server)
    if isinstance(config, KeyedConfig):
        yield from _key_warnings(config)


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
    elif isinstance(value, set | frozenset):  # YAML's `!!set`, which no row can hold
        yield Problem(path, f"{shown(value)} is a set, not a list")


def nearest(word: str, known: Iterable[str]) -> str:
    """Suggests a known name for a misspelt one: ``"; did you mean 'x'?"``, or nothing."""
    import difflib  # only mistakes need it

    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return f"; did you mean '{by_lower[close[0]]}'?" if close else ""


_TYPE_NAMES = {
    "object": "a mapping",
    "array": "a list",
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
}


_KINDS: dict[type, str] = {
    type(None): "no value",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    dict: "a mapping",
    list: "a list",
}


def shown(value: Any) -> str:
    """Writes a value into a message: as JSON, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 80 else text[:77] + "…"


def kind(value: Any) -> str:
    """Says what a value is: ``a string``."""
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
            yield Problem(path, f"{shown(value)} is {kind(value)}, not {_TYPE_NAMES[limit]}{hint}")
        case "minimum":
            yield Problem(path, f"{shown(value)} is less than the minimum of {limit}")
        case "maximum":
            yield Problem(path, f"{shown(value)} is greater than the maximum of {limit}")
        case "exclusiveMinimum":
            yield Problem(path, f"{shown(value)} is not greater than {limit}")
        case "exclusiveMaximum":
            yield Problem(path, f"{shown(value)} is not less than {limit}")
        case "enum":
            allowed = cast("list[Any]", limit)
            hint = nearest(str(value), [str(a) for a in allowed])
            yield Problem(
                path, f"{shown(value)} is not one of {', '.join(map(shown, allowed))}{hint}"
            )
        case "minLength" | "minItems":
            unit = "character" if error.validator == "minLength" else "item"
            plural = "" if limit == 1 else "s"
            yield Problem(path, f"{shown(value)} is too short: at least {limit} {unit}{plural}")
        case "pattern":
            yield Problem(
                path, f"{shown(value)} is not {FORMS.get(limit, 'of the form ' + str(limit))}"
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
        yield Problem(path, f"{shown(text)} is not JSON: {error}")
        return
    if not isinstance(value, dict):
        yield Problem(path, f"{shown(text)} is JSON but not an object")
    elif path[-1] == "json_schema":
        import jsonschema

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
            f"{shown(config.error_handling.output)} names the main output: take another name",
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
                f"{shown(delimiter)} is longer than prefix_char_len, {prefix.prefix_char_len}",
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
    if keyword.iskeyword(config.output_field):
        words = f"{shown(config.output_field)} is a word of Python's, which no field can be called"
        yield Problem(("output_field",), words)
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
            problem = _located((), str(error))
            top = problem.path[:1] == ("model",)
            yield problem if top else Problem(("server", *problem.path), problem.message)


_SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|CREDENTIALS?)($|_(?!PATH|FILE|DIR))",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"\bhf_[A-Za-z0-9]{30,}|\bsk-[\w-]{20,}|\bAKIA[0-9A-Z]{16}\b|\bgh[opsu]_[A-Za-z0-9]{36}"
    r"|PRIVATE KEY-----|://[^/@\s:]+:[^/@\s]+@|^--(hf-token|api-key)=."
)


def _secrets(server: Server) -> Iterator[Problem]:
    words = "looks like a secret, and the configuration is visible in the job graph"
    remedy = "name the variable in env_from_worker instead"
    for name, value in server.env.items():
        if value and (_SECRET_NAME.search(name) or _SECRET_VALUE.search(value)):
            yield Problem(("server", "env", name), f"{words}: {remedy}", "secret-in-config")
    for i, argument in enumerate(server.args):
        if _SECRET_VALUE.search(argument):
            yield Problem(("server", "args", i), f"{words}: {remedy}", "secret-in-config")
    if server.endpoint is not None and _SECRET_VALUE.search(server.endpoint):
        message = f"{words}: use api_key_env instead"
        yield Problem(("server", "endpoint"), message, "secret-in-config")


def prefix_key(config: KeyedConfig) -> tuple[Template, PromptPrefixKeyFn] | None:
    """Gives the template whose start keys a row, and what takes the key from it.

    Returns:
      Both, or None where rows are not keyed by a prompt.
    """
    prefix = config.prefix_batching
    texts = template_texts(config)
    if prefix.mode == "none" or prefix.key_field is not None or prefix.key_fn is not None:
        return None
    if not texts:
        return None
    kind = ChatPrefixKeyFn if isinstance(config, ChatConfig) else PromptPrefixKeyFn
    delimiters = () if prefix.prefix_delimiters is None else (prefix.prefix_delimiters,)
    return Template.parse(texts[0][1]), kind(prefix.prefix_char_len, *delimiters)


def is_keyed(config: KeyedConfig) -> bool:
    """Whether rows are keyed, so that batches hold rows of one key."""
    found = prefix_key(config)
    if found is None:
        return config.prefix_batching.mode != "none"
    template, extractor = found
    return template.varies_within(extractor.prefix_char_len, extractor.delimiters)


def _key_warnings(config: KeyedConfig) -> Iterator[Problem]:
    prefix = config.prefix_batching
    found = prefix_key(config)
    if found is None:
        return
    template, extractor = found
    length = extractor.prefix_char_len
    if not template.varies_within(length, extractor.delimiters):
        # With nothing said of prefixes, rows that share theirs are as well off without keys.
        if prefix != type(prefix)() or isinstance(config, BatchByPrefixConfig):
            part = "first message" if isinstance(config, ChatConfig) else "prompt"
            yield Problem(
                ("prefix_batching",),
                f"every row has the same key: no field within the first {length} characters of"
                f" the {part}, or before a delimiter",
                "unkeyed-prompt",
            )
        return
    role = f"{config.messages[0].role}: " if isinstance(config, ChatConfig) else ""
    start = role + template.parts[0]
    for key in prefix.num_shards_by_key or ():
        wrong = None
        if not key.startswith(start):
            wrong = f"every key begins with {shown(start)}"
        elif len(key) - len(role) > length:
            wrong = f"a key has at most {length} characters" + (" after the role" if role else "")
        else:
            for delimiter in extractor.delimiters:
                if delimiter in key[len(role) :]:
                    wrong = f"a key ends before {shown(delimiter)}"
        if wrong:
            at = ("prefix_batching", "num_shards_by_key", key)
            yield Problem(at, f"no prompt has the key {shown(key)}: {wrong}", "impossible-key")


# What a configuration says of its input's fields


def template_texts(config: KeyedConfig) -> list[tuple[Path, str]]:
    """The templates of a configuration, each with its path."""
    if isinstance(config, ChatConfig):
        return [
            (("messages", i, "content"), message.content)
            for i, message in enumerate(config.messages)
        ]
    if isinstance(config, CompletionsConfig | BatchByPrefixConfig) and config.prompt is not None:
        return [(("prompt",), config.prompt)]
    return []


def _written_texts(model: type[Section], data: Any) -> Iterator[tuple[Path, str]]:
    """The templates of data that may be wrong elsewhere."""
    found: list[tuple[Path, Any]] = []
    if isinstance(data, dict):
        data = cast("dict[str, Any]", data)
        if issubclass(model, ChatConfig):
            given = data.get("messages")
            messages = cast("list[Any]", given) if isinstance(given, list) else []
            for i, message in enumerate(messages):
                if isinstance(message, dict):
                    content = cast("dict[str, Any]", message).get("content")
                    found.append((("messages", i, "content"), content))
        elif issubclass(model, CompletionsConfig | BatchByPrefixConfig):
            found.append((("prompt",), data.get("prompt")))
    return ((path, text) for path, text in found if isinstance(text, str))


def output_columns(config: LLMConfig) -> list[str]:
    """The columns that a transform adds."""
    prefix = config.details_prefix
    details = [f"{prefix}{name}" for name in ("finish_reason", "usage", "model")]
    return [config.output_field, *details]


def field_problems(config: KeyedConfig, fields: Fields) -> list[Problem]:
    """Checks what a configuration says of fields against those of the input.

    Args:
      config: A checked configuration.
      fields: The input's fields.

    Returns:
      The problems.
    """
    columns: list[tuple[Path, Any]] = [
        (("prefix_batching", "key_field"), config.prefix_batching.key_field)
    ]
    if isinstance(config, LLMConfig):
        columns += [(("per_row", knob), getattr(config.per_row, knob)) for knob in PER_ROW_KNOBS]
    found = list(_unknown_fields(template_texts(config), columns, fields))
    if not isinstance(config, LLMConfig):
        return list(dict.fromkeys(found))

    outputs = output_columns(config)
    for field in outputs:
        clash = "the input" if field in fields else None
        if outputs.count(field) > 1 and field == config.output_field:
            clash = "the step's own output"
        if clash:
            knob = "output_field" if field == config.output_field else "details_prefix"
            remedy = "another name" if knob == "output_field" else "a prefix, such as 'second_'"
            words = f"{clash} already has a field '{field}': give {remedy}"
            found.append(Problem((knob,), words, "field-clash"))
    return list(dict.fromkeys(found))


def written_field_problems(model: type[KeyedConfig], raw: Any, fields: Fields) -> list[Problem]:
    """Checks the fields of a configuration of which something else is wrong.

    Args:
      model: The configuration model.
      raw: As in ``load``.
      fields: The input's fields.

    Returns:
      The problems of the templates and columns that can be read.
    """
    data = plain(raw)
    texts: list[tuple[Path, str]] = []
    for path, text in _written_texts(model, data):
        with contextlib.suppress(TemplateError):
            Template.parse(text)
            texts.append((path, text))
    columns: list[tuple[Path, Any]] = []
    knobs = [("prefix_batching", "key_field")]
    if issubclass(model, LLMConfig):
        knobs += [("per_row", knob) for knob in PER_ROW_KNOBS]
    for section, knob in knobs:
        given = data.get(section)
        if isinstance(given, dict):
            columns.append(((section, knob), cast("dict[str, Any]", given).get(knob)))
    return list(dict.fromkeys(_unknown_fields(texts, columns, fields)))


def _unknown_fields(
    texts: Iterable[tuple[Path, str]], columns: Iterable[tuple[Path, Any]], fields: Fields
) -> Iterator[Problem]:
    def unknown(path: Path, field: str, among: Iterable[str]) -> Problem:
        known = list(among)
        if known:
            hint = nearest(field, known)
            words = f"the input has no field '{field}'{hint} (fields: {', '.join(known)})"
        else:
            words = f"'{field}' is not there: '{field.rpartition('.')[0]}' is no nested row"
        return Problem(path, words, "unknown-field")

    for place, text in texts:
        for path in dict.fromkeys(Template.parse(text).fields):
            at: Fields | None = fields
            for step in path.split("."):
                if at is not None and step not in at:
                    yield unknown(place, path, at)
                    break
                at = None if at is None else at[step]
    for place, column in columns:
        if isinstance(column, str) and column not in fields:
            yield unknown(place, column, fields)


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
