"""Row-in, row-out language-model transforms: only wiring.

A row is keyed by the start of its prompt, batched with rows of the same key, and sent;
several batches are under way at once, and each row comes back with its own timestamp, in
its own window.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import queue
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import apache_beam as beam
import msgspec
from apache_beam import typehints
from apache_beam.pvalue import Row, TaggedOutput
from apache_beam.transforms.window import NonMergingWindowFn
from apache_beam.typehints.row_type import RowTypeConstraint
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import WindowedValue

from beam_llm import validation
from beam_llm.batching import BatchByKey
from beam_llm.config import PER_ROW_KNOBS, ChatConfig, CompletionsConfig, LLMConfig, Section
from beam_llm.keys import encode_key
from beam_llm.metrics import StepMetrics
from beam_llm.prefixes import ChatPrefixKeyFn, PromptPrefixKeyFn
from beam_llm.rows import Prompter, RowError, storable, token_estimate
from beam_llm.vllm.client import Client, Reply, RequestError, ServerSettings, Submission

_LOGGER = logging.getLogger("beam_llm")
_FAILED = "failed"

KeyFn = Callable[[Any], Any]
Fields = Sequence[tuple[str, Any]]


class RowFailedError(Exception):
    """A row failed, and the step has no error output to take it."""


class _LLMTransform(beam.PTransform):
    """What the language-model transforms share."""

    config_model: type[LLMConfig]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _describe(cls)

    def __init__(self, **config: Any):
        super().__init__()
        self._name = type(self).__name__
        self._config = validation.load(self.config_model, config, self._name)
        hints = {
            hint: value
            for hint, value in msgspec.structs.asdict(self._config.resource_hints).items()
            if value is not None
        }
        if hints:
            # On the composite: on the inference step alone they would give it an
            # environment of its own, and part it from its batches.
            self.with_resource_hints(**hints)

    def annotations(self) -> dict[str, Any]:
        return {**super().annotations(), "model_identifier": self._config.identifier}

    def expand(self, input_or_inputs: Any) -> Any:
        rows = input_or_inputs
        fields = _row_fields(rows.element_type, self._name)
        prompter = Prompter(self._config)
        _check_fields(self._config, prompter, fields, self._name)
        fail = _FailureMaker(self._name, self._config.error_handling is not None)

        key_fn = _key_fn(self._config, prompter, self._name)
        mergeable = not isinstance(rows.windowing.windowfn, NonMergingWindowFn)
        unkeyable = None
        if mergeable and key_fn is not None:
            _LOGGER.info(
                "%s: rows in session windows are not batched, and so not keyed", self.label
            )
        if mergeable or (key_fn is None and rows.is_bounded):
            # Nothing to gain from batches: requests of single rows overlap as well, and
            # state would see the windows of a session before they are merged.
            batches = rows | "Alone" >> beam.ParDo(_Alone())
        else:
            keyed, unkeyable = rows | "Key" >> beam.ParDo(
                _Key(key_fn, prompter, fail)
            ).with_outputs(_FAILED, main="keyed")
            # Else rows would be pickled on their way through the shuffle.
            keyed.element_type = typehints.Tuple[typehints.Any, rows.element_type]
            batches = keyed | "Batch" >> _batcher(self._config, prompter)

        answered, failed = batches | "Ask" >> beam.ParDo(
            _Ask(self._config, prompter, [name for name, _ in fields], fail)
        ).with_outputs(_FAILED, main="answered")
        answered = answered | "Answered" >> beam.Map(_same).with_output_types(
            RowTypeConstraint.from_fields([*fields, *_output_fields(self._config)])
        )
        if self._config.error_handling is None:
            return answered
        if unkeyable is not None:
            failed = (failed, unkeyable) | "AllFailed" >> beam.Flatten()
        failed = failed | "Failed" >> beam.Map(_same).with_output_types(
            RowTypeConstraint.from_fields(
                [("element", rows.element_type), ("msg", str), ("stack", str)]
            )
        )
        return {"output": answered, self._config.error_handling.output: failed}


def _row_type(fields: Sequence[tuple[str, Any]]) -> RowTypeConstraint:
    return RowTypeConstraint.from_fields(fields)


def _fields_of(row_type: RowTypeConstraint) -> Fields:
    return list(row_type._fields)  # pyright: ignore[reportPrivateUsage]


def _same(element: Any) -> Any:
    return element


# What goes in and out


def _output_fields(config: LLMConfig) -> Fields:
    prefix = config.details_prefix
    usage = _row_type(
        [
            ("prompt_tokens", Optional[int]),
            ("cached_tokens", Optional[int]),
            ("completion_tokens", Optional[int]),
        ]
    )
    return [
        (config.output_field, Optional[str]),
        (f"{prefix}finish_reason", Optional[str]),
        (f"{prefix}usage", usage),
        (f"{prefix}model", str),
    ]


def _row_fields(element_type: Any, name: str) -> Fields:
    row_type = (
        element_type
        if isinstance(element_type, RowTypeConstraint)
        else RowTypeConstraint.from_user_type(element_type)
    )
    if row_type is None:
        raise validation.ConfigError(
            name,
            [
                validation.Problem(
                    (),
                    f"its input has no schema (its elements are {element_type}): give it rows, for"
                    " instance from MapToFields, or beam.Map(lambda x: beam.Row(text=str(x)))",
                )
            ],
        )
    return _fields_of(row_type)


def _check_fields(config: LLMConfig, prompter: Prompter, fields: Fields, name: str) -> None:
    """Checks what the configuration says of fields against those of the input."""
    known = dict(fields)
    problems: list[validation.Problem] = []

    def unknown(path: validation.Path, field: str, among: Sequence[str]) -> None:
        if among:
            hint = validation.nearest(field, among)
            words = f"the input has no field '{field}'{hint} (fields: {', '.join(among)})"
        else:
            words = f"'{field}' is not there: '{field.rpartition('.')[0]}' is no nested row"
        problems.append(validation.Problem(path, words))

    for place, template in zip(_template_places(config), prompter.templates, strict=True):
        for path in dict.fromkeys(template.fields):
            at, kind = fields, None
            for step in path.split("."):
                kind = dict(at).get(step)
                if kind is None:
                    unknown(place, path, [n for n, _ in at])
                    break
                nested = _nested_type(kind)
                at = _fields_of(nested) if nested is not None else []
            else:
                if _plain_type(kind) is bytes:
                    problems.append(
                        validation.Problem(
                            place, f"field '{path}' holds bytes: decode it to text first"
                        )
                    )
    for knob in PER_ROW_KNOBS:
        column = getattr(config.per_row, knob)
        if column is not None and column not in known:
            unknown(("per_row", knob), column, list(known))
    key_field = config.prefix_batching.key_field
    if key_field is not None and key_field not in known:
        unknown(("prefix_batching", "key_field"), key_field, list(known))

    outputs = [field for field, _ in _output_fields(config)]
    for field in outputs:
        clash = "the input" if field in known else None
        if outputs.count(field) > 1 and field == config.output_field:
            clash = "the step's own output"
        if clash:
            knob = "output_field" if field == config.output_field else "details_prefix"
            remedy = "another name" if knob == "output_field" else "a prefix, such as 'second_'"
            problems.append(
                validation.Problem((knob,), f"{clash} already has a field '{field}': give {remedy}")
            )
    if problems:
        raise validation.ConfigError(name, list(dict.fromkeys(problems)))


def _template_places(config: LLMConfig) -> list[validation.Path]:
    if isinstance(config, ChatConfig):
        return [("messages", i, "content") for i in range(len(config.messages))]
    return [("prompt",)]


def _plain_type(kind: Any) -> Any:
    """The type without its ``Optional``."""
    arguments = [a for a in typing.get_args(kind) if a is not type(None)]
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return arguments[0] if union and len(arguments) == 1 else kind


def _nested_type(kind: Any) -> RowTypeConstraint | None:
    plain = _plain_type(kind)
    return (
        plain if isinstance(plain, RowTypeConstraint) else RowTypeConstraint.from_user_type(plain)
    )


# Keys and batches


def _key_fn(config: LLMConfig, prompter: Prompter, name: str) -> KeyFn | None:
    """Gives what keys a row, or None when every row has the same key."""
    batching = config.prefix_batching
    if batching.mode == "none":
        return None
    if batching.key_field is not None:
        return _FieldKey(batching.key_field)
    if batching.key_fn is not None:
        return _imported(batching.key_fn, name)
    delimiters = batching.prefix_delimiters
    extractor: Any = (ChatPrefixKeyFn if isinstance(config, ChatConfig) else PromptPrefixKeyFn)(
        batching.prefix_char_len, *(() if delimiters is None else (delimiters,))
    )
    if not prompter.templates[0].varies_within(batching.prefix_char_len, extractor.delimiters):
        _LOGGER.info(
            "no field within the first %d characters of the prompt: every row shares that prefix"
            " already, so rows are not keyed",
            batching.prefix_char_len,
        )
        return None
    return _PromptKey(prompter, extractor)


def _imported(path: str, name: str) -> KeyFn:
    module, _, attributes = path.partition(":")
    wrong = None
    found: Any = None
    try:
        found = importlib.import_module(module)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
        if not callable(found):
            wrong = f"'{path}' is a {type(found).__name__}, not a function"
    except (ImportError, AttributeError) as error:
        wrong = f"'{path}' is not there: {error}"
    if wrong is not None:
        problem = validation.Problem(("prefix_batching", "key_fn"), wrong)
        raise validation.ConfigError(name, [problem])
    return found


class _FieldKey:
    def __init__(self, field: str):
        self._field = field

    def __call__(self, row: Any) -> Any:
        return getattr(row, self._field)

    def __repr__(self) -> str:
        return f"key_field {self._field}"


class _PromptKey:
    def __init__(self, prompter: Prompter, extractor: KeyFn):
        self._prompter = prompter
        self._extractor = extractor

    def __call__(self, row: Any) -> Any:
        return self._extractor(self._prompter.prompt(row))


def _batcher(config: LLMConfig, prompter: Prompter) -> BatchByKey:
    shards: Any = config.prefix_batching.num_shards
    if config.prefix_batching.num_shards_by_key:
        shards = _ShardsByKey(config.prefix_batching.num_shards_by_key, shards)
    weight = config.batching.max_batch_weight
    return BatchByKey(
        max_batch_size=config.batching.max_batch_size,
        max_batch_duration_secs=config.batching.max_batch_duration_secs,
        max_batch_weight=weight,
        element_size_fn=None
        if weight is None
        else lambda row: token_estimate(prompter.prompt(row)),
        num_shards=shards,
    )


class _ShardsByKey:
    """Shards of a key, by its text."""

    def __init__(self, by_key: dict[str, int], default: int):
        self._by_key = by_key
        self._default = default

    def __call__(self, key: Any) -> int:
        return self._by_key.get(str(key), self._default)


class _Alone(beam.DoFn):
    """Makes a batch of each row."""

    def process(self, element: Any, timestamp: Any = beam.DoFn.TimestampParam) -> Iterator[Any]:
        yield None, [(element, timestamp)]


class _FailureMaker:
    """Makes the error row of a failed row, or raises where no error output takes it."""

    def __init__(self, name: str, has_output: bool):
        self._name = name
        self._has_output = has_output

    def __call__(self, row: Any, error: RowError | RequestError) -> Row:
        if not self._has_output:
            raise RowFailedError(
                f"{self._name}: a row failed: {error}. The row: {_shortened(repr(row))}."
                " With error_handling: {output: NAME}, such rows go to an output of their own."
            ) from None
        stack = f"{self._name}: {type(error).__name__}: {error}"
        if isinstance(error, RequestError):
            stack += f" [kind={error.kind} status={error.status} attempts={error.attempts}]"
        return Row(element=storable(row), msg=storable(str(error)), stack=storable(stack))


def _shortened(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else text[:limit] + "…"


class _Key(beam.DoFn):
    """Keys rows, and sorts out those that make no prompt before they are shuffled."""

    def __init__(self, key_fn: KeyFn | None, prompter: Prompter, fail: _FailureMaker):
        self._key_fn = key_fn
        self._prompter = prompter
        self._fail = fail

    def setup(self) -> None:
        self._metrics = StepMetrics()

    def process(self, element: Any) -> Iterator[Any]:
        try:
            self._prompter.call(element)
            key = None if self._key_fn is None else _key(self._key_fn, element)
        except RowError as error:
            self._metrics.read(1)
            self._metrics.failed(error)
            yield TaggedOutput(_FAILED, self._fail(element, error))
        else:
            yield key, element


def _key(key_fn: KeyFn, row: Any) -> Any:
    try:
        key = key_fn(row)
        encode_key(key)  # what cannot be encoded fails its row here, not the bundle later
        return key
    except RowError:
        raise
    except Exception as error:  # a user's function may raise anything
        raise RowError("key", f"{key_fn!r} raised {type(error).__name__}: {error}") from error


# Requests


class _Ask(beam.DoFn):
    """Asks the server about batches of rows, several at once.

    Results are emitted as they come, with their row's timestamp and window, at the
    latest when the bundle finishes.
    """

    def __init__(
        self, config: LLMConfig, prompter: Prompter, fields: Sequence[str], fail: _FailureMaker
    ):
        server = config.server
        self._settings = ServerSettings(
            None if server.endpoint is not None else validation.server_spec(config),
            server.endpoint,
            server.api_key_env,
            config.requests,
        )
        self._model = config.model
        self._outputs = [name for name, _ in _output_fields(config)]
        self._prompter = prompter
        self._fields = list(fields)
        self._fail = fail
        # Twice what is sent at once: the server has work while results are taken.
        self._most_rows = 2 * config.requests.max_in_flight

    def setup(self) -> None:
        self._client: Client | None = self._settings.open()
        self._metrics = StepMetrics()

    def start_bundle(self) -> None:
        self._under_way: dict[Submission, tuple[list[tuple[Any, Timestamp]], Any]] = {}
        self._rows = 0
        # A queue for each bundle: what an abandoned one still gets disturbs nobody.
        self._done: queue.SimpleQueue[Submission] = queue.SimpleQueue()

    def process(self, element: Any, window: Any = beam.DoFn.WindowParam) -> Iterator[Any]:
        rows = element[1]
        self._metrics.read(len(rows))
        calls: list[Any] = []
        members: list[tuple[Any, Timestamp]] = []
        for row, timestamp in rows:
            try:
                calls.append(self._prompter.call(row))
                members.append((row, timestamp))
            except RowError as error:
                yield self._failed(row, error, timestamp, window)
        if calls and self._client is not None:
            submission = self._client.submit(calls, self._done.put)
            self._under_way[submission] = (members, window)
            self._rows += len(calls)
        while self._under_way:
            try:
                submission = self._done.get(block=self._rows >= self._most_rows)
            except queue.Empty:
                break
            yield from self._results(submission)

    def finish_bundle(self) -> Any:
        while self._under_way:
            yield from self._results(self._done.get())

    def teardown(self) -> None:
        self._abandon()
        self._client = None

    def _results(self, submission: Submission) -> Iterator[Any]:
        members, window = self._under_way.pop(submission)
        self._rows -= len(members)
        try:
            outcomes = submission.result()
            for (row, timestamp), outcome in zip(members, outcomes, strict=True):
                if isinstance(outcome, Reply):
                    self._metrics.answered(outcome)
                    yield WindowedValue(self._answered(row, outcome), timestamp, (window,))
                else:
                    yield self._failed(row, outcome, timestamp, window)
        except Exception:
            self._abandon()
            raise

    def _answered(self, row: Any, reply: Reply) -> Row:
        answer = reply.answer
        choice = answer.choices[0]
        usage = answer.usage
        text, finish_reason, usage_field, model = self._outputs
        values = {name: getattr(row, name) for name in self._fields}
        values[text] = choice.text
        values[finish_reason] = choice.finish_reason
        values[usage_field] = Row(
            prompt_tokens=usage and usage.prompt_tokens,
            cached_tokens=usage and usage.cached_tokens,
            completion_tokens=usage and usage.completion_tokens,
        )
        values[model] = answer.model or self._model
        return Row(**values)

    def _failed(
        self, row: Any, error: RowError | RequestError, timestamp: Timestamp, window: Any
    ) -> TaggedOutput:
        self._metrics.failed(error)
        return TaggedOutput(_FAILED, WindowedValue(self._fail(row, error), timestamp, (window,)))

    def _abandon(self) -> None:
        for submission in getattr(self, "_under_way", ()):
            submission.cancel()


# Constructors as Beam YAML reads them


def _describe(transform: type[_LLMTransform]) -> None:
    """Gives a transform the signature and documentation of its configuration.

    Beam YAML reads a transform's schema and documentation from its constructor.
    """
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    lines = [inspect.getdoc(transform) or "", "", "Args:"]
    knobs = msgspec.structs.fields(transform.config_model)
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

    def __init__(self: Any, **config: Any) -> None:  # noqa: N807
        _LLMTransform.__init__(self, **config)

    __init__.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    transform.__init__ = __init__  # type: ignore[method-assign]
    transform.__doc__ = "\n".join(lines)


def _description(kind: Any) -> str:
    notes = [note for note in getattr(kind, "__metadata__", ()) if isinstance(note, msgspec.Meta)]
    return next((note.description for note in notes if note.description), "")


def _beam_type(kind: Any) -> Any:
    """Translates a knob's type to one that Beam's schemas have."""
    kind = _plain_type(kind)
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


class VLLMCompletions(_LLMTransform):
    """Completes a prompt made from each row, and adds the text to the row.

    Rows in, the same rows out with the text, `finish_reason`, `usage` and `model`. With
    `error_handling`, failed rows go to a second output as `element`, `msg`, `stack`.
    """

    config_model = CompletionsConfig


class VLLMChat(_LLMTransform):
    """Asks a chat model about each row, and adds its reply to the row.

    Rows in, the same rows out with the reply, `finish_reason`, `usage` and `model`. With
    `error_handling`, failed rows go to a second output as `element`, `msg`, `stack`.
    """

    config_model = ChatConfig
