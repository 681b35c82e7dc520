"""Rows in, prompts out: what a row becomes before a server sees it. No Beam runner here."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import msgspec

from beam_llm.config import (
    PER_ROW_KNOBS,
    BatchByPrefixConfig,
    ChatConfig,
    CompletionsConfig,
    KeyedConfig,
    LLMConfig,
    Sampling,
)
from beam_llm.templates import Template
from beam_llm.validation import integral
from beam_llm.vllm.client import Call
from beam_llm.vllm.protocol import CHAT_PATH, COMPLETIONS_PATH


class RowError(Exception):
    """A row that makes no prompt.

    Attributes:
      kind: ``null_field``, ``empty_prompt``, ``invalid_text``, ``sampling`` or ``key``.
    """

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.kind, self.message))

    def __str__(self) -> str:
        return f"{self.message} ({self.kind})"


def as_text(value: Any) -> str:
    """Writes a field's value into a prompt.

    Text is taken as it is, numbers as Python writes them, Beam's timestamps as RFC 3339,
    and booleans, lists, maps and nested rows as JSON.
    """
    if isinstance(value, str):
        return value
    if hasattr(value, "tolist"):
        value = value.tolist()  # numpy's
    if hasattr(value, "to_rfc3339"):
        return value.to_rfc3339()
    structured = hasattr(value, "_asdict") or dataclasses.is_dataclass(value)
    if isinstance(value, bool) or structured or isinstance(value, list | Mapping):
        return json.dumps(_jsonable(value), ensure_ascii=False)
    if isinstance(value, Sequence):
        return json.dumps(_jsonable(list(value)), ensure_ascii=False)
    return str(value)


def _jsonable(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        value = value._asdict()
    elif dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_jsonable(v) for v in value]
    return float(value) if isinstance(value, Decimal) else str(value)


def storable(value: Any) -> Any:
    """Gives the same value with lone surrogates escaped, so that any coder can write it."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if hasattr(value, "_asdict"):
        fields = {k: storable(v) for k, v in value._asdict().items()}
        return type(value)(**fields)
    if isinstance(value, Mapping):
        return {storable(k): storable(v) for k, v in value.items()}
    if isinstance(value, list):
        return [storable(v) for v in value]
    return value


def _is_null(value: Any) -> bool:
    # Beam's CSV and JSON sources write what is missing as NaN, or as pandas' NaT.
    if isinstance(value, str | int | bytes) or value is None:
        return value is None
    if isinstance(value, float):
        return math.isnan(value)
    return bool(value != value) if not hasattr(value, "__len__") else False


class _Filled:
    """A template bound to the way its fields are read from a row."""

    def __init__(self, text: str):
        self.template = Template.parse(text)
        self._getters: list[tuple[str, Callable[[Any], Any]]] = [
            (path, operator.attrgetter(path)) for path in self.template.fields
        ]

    def __call__(self, row: Any) -> str:
        values: list[str] = []
        for path, get in self._getters:
            try:
                value = get(row)
            except AttributeError:
                value = None  # below a nested row that is null
            if _is_null(value):
                raise RowError("null_field", f"field '{path}' is null")
            if isinstance(value, bytes):
                raise RowError("invalid_text", f"field '{path}' holds bytes: decode it first")
            values.append(as_text(value))
        text = self.template.render(values)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RowError(
                "invalid_text",
                f"the prompt is not valid Unicode: a lone surrogate"
                f" U+{ord(text[error.start]):04X} at character {error.start}",
            ) from None
        return text


Prompt = str | list[dict[str, str]]


class Prompts:
    """Fills the templates of a configuration."""

    def __init__(self, config: KeyedConfig):
        self._roles: list[str] | None = None
        texts: list[str] = []
        if isinstance(config, ChatConfig):
            texts = [message.content for message in config.messages]
            self._roles = [message.role for message in config.messages]
        elif isinstance(config, CompletionsConfig | BatchByPrefixConfig):
            texts = [] if config.prompt is None else [config.prompt]
        else:
            raise TypeError(f"no prompt in a {type(config).__name__}")
        self._texts = [_Filled(text) for text in texts]

    @property
    def templates(self) -> list[Template]:
        """The templates, in the order of the prompt."""
        return [text.template for text in self._texts]

    def prompt(self, row: Any) -> Prompt:
        """Fills the templates: the prompt, or the conversation as OpenAI's messages.

        Raises:
          RowError: The row has a null or unusable field.
        """
        if self._roles is None:
            return self._texts[0](row) if self._texts else ""
        return [
            {"role": role, "content": text(row)}
            for role, text in zip(self._roles, self._texts, strict=True)
        ]

    def check(self, row: Any) -> Prompt:
        """Gives the prompt of a row of which more can be made than a prompt.

        Raises:
          RowError: Something the row needs for that is missing or out of bounds.
        """
        return self.prompt(row)


class Prompter(Prompts):
    """Makes the request of a row, from a configuration."""

    def __init__(self, config: LLMConfig):
        super().__init__(config)
        self._static: dict[str, Any] = _request_fields(config.sampling)
        # A server of ours serves one model, whatever name it goes by.
        if config.server.endpoint is not None:
            self._static["model"] = config.model
        self._per_row: list[tuple[str, str]] = [
            (knob, column)
            for knob in PER_ROW_KNOBS
            if (column := getattr(config.per_row, knob)) is not None
        ]
        self._path, self._name = (
            (COMPLETIONS_PATH, "prompt") if self._roles is None else (CHAT_PATH, "messages")
        )

    def prompt(self, row: Any) -> Prompt:
        """Fills the templates: the prompt, or the conversation as OpenAI's messages.

        Raises:
          RowError: The row has a null or unusable field, or the prompt is empty.
        """
        prompt = super().prompt(row)
        if not prompt:
            raise RowError("empty_prompt", "the prompt is empty")
        return prompt

    def check(self, row: Any) -> Prompt:
        """Gives the prompt of a row that makes a request.

        Raises:
          RowError: The row makes no prompt, or a per-row value is out of bounds.
        """
        prompt = self.prompt(row)
        if self._per_row:
            self._row_sampling(row)
        return prompt

    def call(self, row: Any) -> Call:
        """Makes the request of a row.

        Raises:
          RowError: The row makes no prompt, or a per-row value is out of bounds.
        """
        body = {self._name: self.prompt(row), **self._static}
        if self._per_row:
            fields = self._row_sampling(row)
            if not _CONSTRAINT_FIELDS.isdisjoint(fields):
                for name in _CONSTRAINT_FIELDS:  # the row's constraint replaces the step's
                    body.pop(name, None)
            body.update(fields)
        return Call(self._path, msgspec.json.encode(body))

    def _row_sampling(self, row: Any) -> dict[str, Any]:
        given: dict[str, Any] = {}
        for knob, column in self._per_row:
            value = getattr(row, column)
            if hasattr(value, "tolist"):
                value = value.tolist()  # numpy's, from Beam's CSV and JSON sources
            if _is_null(value):
                continue
            value = integral(value)  # a column with gaps is one of floats there
            try:
                if knob in _LISTS and isinstance(value, str):
                    value = msgspec.json.decode(value)  # many formats have no lists
                given[knob] = msgspec.convert(value, _SAMPLING_TYPES[knob])
            except (msgspec.ValidationError, msgspec.DecodeError) as error:
                raise RowError(
                    "sampling", f"sampling.{knob} from column '{column}': {error}"
                ) from None
        constraints = [knob for knob in _CONSTRAINTS if knob in given]
        if len(constraints) > 1:
            raise RowError(
                "sampling", f"only one of {', '.join(constraints)} can constrain a reply"
            )
        try:
            return _request_fields(Sampling(**given))
        except ValueError as error:
            raise RowError("sampling", str(error)) from None


_CONSTRAINTS = ("choices", "regex", "json_schema")
_LISTS = frozenset({"stop", "choices"})
_CONSTRAINT_FIELDS = frozenset({"structured_outputs", "response_format"})
_SAMPLING_TYPES: dict[str, Any] = {
    field.name: field.type for field in msgspec.structs.fields(Sampling)
}


def _request_fields(sampling: Sampling) -> dict[str, Any]:
    """Writes sampling knobs as the fields of a request's body."""
    fields: dict[str, Any] = {
        name: value
        for name in Sampling.__struct_fields__
        if (value := getattr(sampling, name)) is not None
    }
    extra = fields.pop("extra_body", None)
    if (choices := fields.pop("choices", None)) is not None:
        fields["structured_outputs"] = {"choice": choices}
    if (regex := fields.pop("regex", None)) is not None:
        fields["structured_outputs"] = {"regex": regex}
    if (schema := fields.pop("json_schema", None)) is not None:
        # OpenAI's form, which vLLM understands as well.
        fields["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "reply", "schema": json.loads(schema)},
        }
    if extra is not None:
        fields.update(json.loads(extra))
    return fields


def token_estimate(prompt: Prompt) -> int:
    """Estimates a prompt's tokens as a quarter of its UTF-8 bytes, at least 1.

    English text has about four bytes a token in the vocabularies of current models; a
    budget wants the right magnitude, not the exact count.
    """
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    return max(1, sum(len(text.encode()) for text in texts) // 4)
