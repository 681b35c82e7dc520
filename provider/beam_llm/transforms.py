"""Row-in, row-out language-model transforms: only wiring.

A row is keyed by the start of its prompt, batched with rows of the same key, and sent;
several batches are under way at once, and each row comes back with its own timestamp, in
its own window.
"""

from __future__ import annotations

import importlib
import logging
import queue
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
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
from beam_llm.autoscaling import AutoscalingMetricConfig
from beam_llm.batching import BatchByKey, BatchLatencies
from beam_llm.config import (
    BatchByPrefixConfig,
    ChatConfig,
    CompletionsConfig,
    KeyedConfig,
    LLMConfig,
)
from beam_llm.keys import encode_key
from beam_llm.metrics import StepMetrics
from beam_llm.prefixes import ChatPrefixKeyFn, PromptPrefixKeyFn
from beam_llm.rows import (
    Prompt,
    Prompter,
    Prompts,
    RowError,
    as_text,
    storable,
    token_estimate,
)
from beam_llm.signatures import describe, plain_type
from beam_llm.vllm.capacity import Capacity
from beam_llm.vllm.client import Client, Reply, RequestError, ServerSettings, Submission

_LOGGER = logging.getLogger("beam_llm")
_FAILED = "failed"

KeyFn = Callable[[Any, Prompt], Any]  # of a row and the prompt made from it
Fields = Sequence[tuple[str, Any]]


class RowFailedError(Exception):
    """A row failed, and the step has no error output to take it."""


class _RowTransform(beam.PTransform):
    """What all row transforms share."""

    config_model: type[KeyedConfig]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "config_model" in vars(cls):
            describe(cls, cls.config_model)

    def __init__(self, **config: Any):
        super().__init__()
        self._name = type(self).__name__
        self._config: Any = validation.load(self.config_model, config, self._name)
        self._fail = _FailureMaker(self._name, self._config.error_handling is not None)

    def _keyed(self, rows: Any, key_fn: KeyFn | None, prompts: Prompts) -> Any:
        """Gives rows with their keys, and the failures of those that have none."""
        keyed, unkeyable = rows | "Key" >> beam.ParDo(
            _Key(key_fn, prompts, self._fail)
        ).with_outputs(_FAILED, main="keyed")
        # Else rows would be pickled on their way through the shuffle.
        fields = _row_fields(rows.element_type, self._name)
        keyed.element_type = typehints.Tuple[_key_type(self._config, fields), rows.element_type]
        return keyed, unkeyable

    def _outputs(self, rows: Any, good: Any, fields: Fields, failed: list[Any]) -> Any:
        """Gives the outputs, typed: rows of these fields, and failed rows where asked for."""
        good = good | "Good" >> beam.Map(_same).with_output_types(_row_type(fields))
        if self._config.error_handling is None:
            return good
        bad = failed[0] if len(failed) == 1 else tuple(failed) | "AllFailed" >> beam.Flatten()
        bad = bad | "Failed" >> beam.Map(_same).with_output_types(
            _row_type([("element", rows.element_type), ("msg", str), ("stack", str)])
        )
        return {"output": good, self._config.error_handling.output: bad}


class _LLMTransform(_RowTransform):
    """What the language-model transforms share."""

    _config: LLMConfig

    def __init__(self, **config: Any):
        super().__init__(**config)
        hints = {
            hint: str(value)  # a number of CPUs as well
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

        key_fn = _key_fn(self._config, self._name)
        if isinstance(key_fn, _PromptKey) and not key_fn.varies(prompter):
            _LOGGER.info(
                "no field within the first %d characters of the prompt: every row shares that"
                " prefix already, so rows are not keyed",
                self._config.prefix_batching.prefix_char_len,
            )
            key_fn = None
        mergeable = not isinstance(rows.windowing.windowfn, NonMergingWindowFn)
        latencies = None
        unkeyable: list[Any] = []
        if mergeable and key_fn is not None:
            _LOGGER.info(
                "%s: rows in session windows are not batched, and so not keyed", self.label
            )
        if mergeable or (key_fn is None and rows.is_bounded):
            # Nothing to gain from batches: requests of single rows overlap as well, and
            # state would see the windows of a session before they are merged.
            batches = rows | "Alone" >> beam.ParDo(_Alone())
        else:
            # Requests overlap, so that their time tells more than that of the step.
            latencies = None if rows.is_bounded else BatchLatencies()
            keyed, *unkeyable = self._keyed(rows, key_fn, prompter)
            batches = keyed | "Batch" >> _batcher(self._config, prompter, latencies)

        answered, failed = batches | "Ask" >> beam.ParDo(
            _Ask(self._config, prompter, [name for name, _ in fields], self._fail, latencies)
        ).with_outputs(_FAILED, main="answered")
        output = [*fields, *_output_fields(self._config)]
        return self._outputs(rows, answered, output, [failed, *unkeyable])


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


def _check_fields(config: KeyedConfig, prompts: Prompts, fields: Fields, name: str) -> None:
    """Checks what the configuration says of fields against those of the input."""
    problems = validation.field_problems(config, _names(fields))
    places = [place for place, _ in validation.template_texts(config)]
    for place, template in zip(places, prompts.templates, strict=True):
        for path in dict.fromkeys(template.fields):
            at, kind = fields, None
            for step in path.split("."):
                kind = dict(at).get(step)
                nested = None if kind is None else _nested_type(kind)
                at = _fields_of(nested) if nested is not None else []
            if kind is not None and plain_type(kind) is bytes:
                words = f"field '{path}' holds bytes: decode it to text first"
                problems.append(validation.Problem(place, words))
    key_field = config.prefix_batching.key_field
    kind = plain_type(dict(fields).get(key_field)) if key_field is not None else None
    if kind in (Decimal, Timestamp):
        words = f"field '{key_field}' is a {kind.__name__}, which cannot be a key: make it text"
        problems.append(validation.Problem(("prefix_batching", "key_field"), words))
    if problems:
        raise validation.ConfigError(name, problems)


def _names(fields: Fields) -> validation.Fields:
    """The fields with those of their nested rows."""
    found: dict[str, validation.Fields | None] = {}
    for name, kind in fields:
        nested = _nested_type(kind)
        found[name] = {} if nested is None else _names(_fields_of(nested))
    return found


def _nested_type(kind: Any) -> RowTypeConstraint | None:
    plain = plain_type(kind)
    return (
        plain if isinstance(plain, RowTypeConstraint) else RowTypeConstraint.from_user_type(plain)
    )


# Keys and batches


def _key_fn(config: KeyedConfig, name: str) -> KeyFn | None:
    """Gives what keys a row, or None when nothing does."""
    batching = config.prefix_batching
    if batching.mode == "none":
        return None
    if batching.key_field is not None:
        return _FieldKey(batching.key_field)
    if batching.key_fn is not None:
        return _OwnKey(_imported(batching.key_fn, name), batching.key_fn)
    delimiters = batching.prefix_delimiters
    extractor: Any = (ChatPrefixKeyFn if isinstance(config, ChatConfig) else PromptPrefixKeyFn)(
        batching.prefix_char_len, *(() if delimiters is None else (delimiters,))
    )
    return _PromptKey(extractor, batching.prefix_char_len)


def _key_type(config: KeyedConfig, fields: Fields) -> Any:
    """The type of the keys, as far as it is known."""
    batching = config.prefix_batching
    if batching.key_field is not None:
        return dict(fields)[batching.key_field]
    return typehints.Any if batching.key_fn is not None else Optional[str]


def _imported(path: str, name: str) -> Callable[[Any], Any]:
    module, _, attributes = path.partition(":")
    wrong = None
    found: Any = None
    try:
        found = importlib.import_module(module)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
        if not callable(found):
            wrong = f"'{path}' is a {type(found).__name__}, not a function"
    except ImportError as error:
        wrong = f"'{path}' is not there: {error} (PYTHONPATH says where modules are looked for)"
    except AttributeError as error:
        wrong = f"'{path}' is not there: {error}"
    if wrong is not None:
        problem = validation.Problem(("prefix_batching", "key_fn"), wrong)
        raise validation.ConfigError(name, [problem])
    return found


class _FieldKey:
    def __init__(self, field: str):
        self._field = field

    def __call__(self, row: Any, prompt: Prompt) -> Any:
        return getattr(row, self._field)

    def __repr__(self) -> str:
        return f"key_field {self._field}"


class _OwnKey:
    def __init__(self, function: Callable[[Any], Any], path: str):
        self._function = function
        self._path = path

    def __call__(self, row: Any, prompt: Prompt) -> Any:
        return self._function(row)

    def __repr__(self) -> str:
        return f"key_fn {self._path}"


class _PromptKey:
    def __init__(self, extractor: Any, char_len: int):
        self._extractor = extractor
        self._char_len = char_len

    def __call__(self, row: Any, prompt: Prompt) -> Any:
        return self._extractor(prompt)

    def varies(self, prompts: Prompts) -> bool:
        """Whether two rows can have different keys."""
        return prompts.templates[0].varies_within(self._char_len, self._extractor.delimiters)


def _batcher(
    config: KeyedConfig, prompts: Prompts, latencies: BatchLatencies | None = None
) -> BatchByKey:
    shards: Any = config.prefix_batching.num_shards
    if config.prefix_batching.num_shards_by_key:
        shards = _ShardsByKey(config.prefix_batching.num_shards_by_key, shards)
    batching = config.batching
    weight = batching.max_batch_weight
    return BatchByKey(
        min_batch_size=batching.min_batch_size,
        max_batch_size=batching.max_batch_size,
        max_batch_duration_secs=batching.max_batch_duration_secs,
        max_batch_weight=weight,
        element_size_fn=None if weight is None else lambda row: token_estimate(prompts.prompt(row)),
        num_shards=shards,
        latencies=latencies,
    )


class _ShardsByKey:
    """Shards of a key, by its text."""

    def __init__(self, by_key: dict[str, int], default: int):
        self._by_key = by_key
        self._default = default

    def __call__(self, key: Any) -> int:
        return self._by_key.get("None" if key is None else as_text(key), self._default)


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

    def __init__(self, key_fn: KeyFn | None, prompts: Prompts, fail: _FailureMaker):
        self._key_fn = key_fn
        self._prompts = prompts
        self._fail = fail

    def setup(self) -> None:
        self._metrics = StepMetrics()

    def process(self, element: Any) -> Iterator[Any]:
        try:
            prompt = self._prompts.check(element)
            key = None if self._key_fn is None else _key(self._key_fn, element, prompt)
        except RowError as error:
            self._metrics.read(1)
            self._metrics.failed(error)
            yield TaggedOutput(_FAILED, self._fail(element, error))
        else:
            yield key, element


def _key(key_fn: KeyFn, row: Any, prompt: Prompt) -> Any:
    try:
        key = key_fn(row, prompt)
    except RowError:
        raise
    except Exception as error:  # a user's function may raise anything
        raise RowError("key", f"{key_fn!r} raised {type(error).__name__}: {error}") from error
    try:
        encode_key(key)  # what cannot be encoded fails its row here, not the bundle later
    except Exception as error:
        raise RowError("key", f"{key_fn!r}: {error}") from error
    return key


# Requests


def _capacity(config: LLMConfig) -> Capacity | None:
    knobs, server = config.autoscaling, config.server
    if not knobs.enabled or (server.endpoint is not None and server.metrics_endpoint is None):
        return None
    published = AutoscalingMetricConfig.of(knobs)
    tag = published.resolve_tag(config.identifier, config.model)
    return Capacity.of(
        published,
        tag,
        server.metrics_endpoint,
        config.requests.max_in_flight,
        config.batching.max_batch_size,
    )


class _Ask(beam.DoFn):
    """Asks the server about batches of rows, several at once.

    Results are emitted as they come, with their row's timestamp and window, at the
    latest when the bundle finishes.
    """

    def __init__(
        self,
        config: LLMConfig,
        prompter: Prompter,
        fields: Sequence[str],
        fail: _FailureMaker,
        latencies: BatchLatencies | None,
    ):
        server = config.server
        self._settings = ServerSettings(
            None if server.endpoint is not None else validation.server_spec(config),
            server.endpoint,
            server.api_key_env,
            config.requests,
            _capacity(config),
        )
        self._model = config.model
        self._outputs = [name for name, _ in _output_fields(config)]
        self._prompter = prompter
        self._fields = list(fields)
        self._fail = fail
        self._latencies = latencies
        self._max_in_flight = config.requests.max_in_flight
        # Twice what is sent at once: the server has work while results are taken.
        self._most_rows = 2 * self._max_in_flight

    def setup(self) -> None:
        self._client: Client | None = self._settings.open()
        self._metrics = StepMetrics()

    def start_bundle(self) -> None:
        self._under_way: dict[Submission, tuple[Any, list[tuple[Any, Timestamp]], Any]] = {}
        self._rows = 0
        # A queue for each bundle: what an abandoned one still gets disturbs nobody.
        self._done: queue.SimpleQueue[Submission | None] = queue.SimpleQueue()

    def process(self, element: Any, window: Any = beam.DoFn.WindowParam) -> Iterator[Any]:
        key, rows = element
        self._metrics.batch(len(rows))
        calls: list[Any] = []
        members: list[tuple[Any, Timestamp]] = []
        for row, timestamp in rows:
            try:
                calls.append(self._prompter.call(row))
                members.append((row, timestamp))
            except RowError as error:
                yield self._failed(row, error, timestamp, window)
        if self._client is None:
            raise _abandoned()
        if calls:
            submission = self._client.submit(calls, self._done.put)
            self._under_way[submission] = (key, members, window)
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
        if self._client is None:
            raise _abandoned()

    def teardown(self) -> None:
        # Beam tears down the steps of a cancelled pipeline while another thread is in a bundle.
        self._client = None
        self._abandon()

    def _results(self, submission: Submission | None) -> Iterator[Any]:
        if submission is None or submission not in self._under_way:
            raise _abandoned()
        key, members, window = self._under_way.pop(submission)
        self._rows -= len(members)
        try:
            outcomes = submission.result()
            self._report(key, outcomes)
            for (row, timestamp), outcome in zip(members, outcomes, strict=True):
                if isinstance(outcome, Reply):
                    self._metrics.answered(outcome)
                    yield WindowedValue(self._answered(row, outcome), timestamp, (window,))
                else:
                    yield self._failed(row, outcome, timestamp, window)
        except Exception:
            self._abandon()
            raise

    def _report(self, key: Any, outcomes: Sequence[Any]) -> None:
        """Tells the batching what a batch took, the wait for a free request apart."""
        if self._latencies is not None:
            secs = [outcome.latency_secs for outcome in outcomes if isinstance(outcome, Reply)]
            if len(secs) == len(outcomes):
                longest = max(*secs, sum(secs) / self._max_in_flight)
                self._latencies.report(key, len(secs), longest)

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
        """Gives up the bundle, and lets go of the client, which Beam may keep this step for."""
        for submission in list(getattr(self, "_under_way", ())):
            submission.cancel()
        self._under_way = {}
        waited_for, self._done = getattr(self, "_done", None), queue.SimpleQueue()
        for done in (waited_for, self._done):
            if done is not None:
                done.put(None)  # ends the wait for what has been cancelled


def _abandoned() -> Exception:
    return RuntimeError("the step was torn down while it had requests under way")


# The transforms


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


class BatchByPrefix(_RowTransform):
    """Groups rows that share a prompt prefix, or another key, into batches.

    Rows in, rows of `key` and `rows` out: a batch has at most `batching.max_batch_size` rows of
    one key and one window, and the earliest of their timestamps. `key` is the prompt's start, or
    the value of `key_field`, or what `key_fn` gave, as text. With `error_handling`, rows that
    have no key go to a second output as `element`, `msg`, `stack`.
    """

    config_model = BatchByPrefixConfig

    def expand(self, input_or_inputs: Any) -> Any:
        """Groups the rows."""
        rows = input_or_inputs
        fields = _row_fields(rows.element_type, self._name)
        prompts = Prompts(self._config)
        _check_fields(self._config, prompts, fields, self._name)
        key_fn = _key_fn(self._config, self._name)
        keyed, unkeyable = self._keyed(rows, key_fn, prompts)
        key_type = _key_type(self._config, fields)
        in_words = key_type is typehints.Any
        batches = (
            keyed
            | "Batch" >> _batcher(self._config, prompts)
            | "ToRows" >> beam.Map(_batch_row, in_words)
        )
        output = [
            ("key", Optional[str] if in_words else key_type),
            ("rows", Sequence[rows.element_type]),
        ]
        return self._outputs(rows, batches, output, [unkeyable])


def _batch_row(batch: tuple[Any, list[tuple[Any, Timestamp]]], in_words: bool) -> Row:
    key, rows = batch
    return Row(
        key=as_text(key) if in_words and key is not None else key, rows=[row for row, _ in rows]
    )
