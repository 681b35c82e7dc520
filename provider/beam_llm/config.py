"""Typed configuration of every transform: the one source of every knob.

Each field carries its description, unit, bounds and an example. The constructors'
checks, the YAML signature and the published JSON Schemas are all read from here.
Nothing in this module imports Beam.

Every knob is a plain JSON type so that it survives a Beam ``Row``: YAML ``remote``
providers and Java send a configuration as one. Absent (or null) means the default.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

#: What an integer of a Beam Row can hold.
INT64 = (-(2**63), 2**63 - 1)
#: Longer than any wait that is meant, and short enough for every clock.
YEAR_SECS = 31_536_000


class Deprecated(NamedTuple):
    """A knob that is to be replaced (``docs/versioning.md`` has the rules).

    Attributes:
      since: The release that deprecated it, such as ``0.3``.
      replacement: Path of the knob to use in its place; None when it has no effect any more.
    """

    since: str
    replacement: str | None

    def __str__(self) -> str:
        use = f"use {self.replacement}" if self.replacement else "it has no effect"
        return f"since {self.since}: {use}"


def exact(pattern: str) -> str:
    r"""Makes ``$`` the end of the text, as it is in JSON Schema.

    Python's lets a line break follow, which YAML's ``|`` puts there.

    Args:
      pattern: An expression of JSON Schema (ECMA-262), with ``$`` at its end alone.

    Returns:
      The expression for Python: with ``\Z``.
    """
    return pattern.removesuffix("$") + r"\Z" if pattern.endswith("$") else pattern


def _meta(
    description: str,
    *,
    example: Any = None,
    unit: str | None = None,
    deprecated: Deprecated | None = None,
    **bounds: Any,
) -> Meta:
    """Builds a field's metadata.

    Args:
      description: What the knob does, in a sentence or two.
      example: A valid value, shown in the reference and in schemas.
      unit: Unit of the value, when it has one.
      deprecated: Since when and for what it is to be replaced.
      **bounds: ``ge``, ``gt``, ``le``, ``lt``, ``min_length``, ``pattern``, …
    """
    extra: dict[str, Any] = {}
    if "pattern" in bounds:
        bounds["pattern"] = exact(bounds["pattern"])
    if unit:
        extra["x-unit"] = unit
    if deprecated:
        extra |= {"deprecated": True, "x-deprecated": str(deprecated)}
    return Meta(
        description=description,
        examples=None if example is None else [example],
        extra_json_schema=extra or None,
        **bounds,
    )


class Section(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, frozen=True):
    """Base of all configuration models."""


# Beam's rows have no fields that start with an underscore.
FIELD_NAME = r"^[A-Za-z][A-Za-z0-9_]*$"
FIELD_NAME_START = r"^([A-Za-z][A-Za-z0-9_]*)?$"
CALLABLE = r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*$"
# Printable ASCII; `#`, `?` and, in the host, `/` apart.
ADDRESS = r'^https?://[!"$-.0->@-~]+[!"$->@-~]*$'
#: What Beam's annotations can hold.
PRINTABLE = r"^[ -~]+$"
#: How recent values become the published one.
AGGREGATION = r"^(last|lifetime_max|max|mean|p([1-9][0-9]?|100))$"
# What Beam reads as one.
MEMORY_SIZE = r"^ *([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)? *([KMGTP]i?)?B *$"

#: What text of a form is, in words.
FORMS = {
    FIELD_NAME: "a field name: letters, digits and '_', starting with a letter",
    FIELD_NAME_START: "the start of a field name: letters, digits and '_', starting with a letter",
    CALLABLE: "a callable such as package.module:function",
    ADDRESS: "an address such as http://127.0.0.1:8000/v1",
    PRINTABLE: "printable ASCII text, and not empty",
    AGGREGATION: "last, lifetime_max, max, mean or a percentile such as p90",
    MEMORY_SIZE: "an amount of memory such as 30GB or 1.5GiB",
}


def _form(pattern: str) -> Meta:
    """Lets text have one of these forms."""
    return Meta(pattern=exact(pattern))


class Message(Section, frozen=True):
    """One message of a chat prompt."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant"],
        _meta("Who speaks.", example="user"),
    ]
    content: Annotated[
        str,
        _meta(
            "Text with `{field}` placeholders, filled from the row. Literal braces are doubled.",
            example="Label this ticket: {text}",
        ),
    ]


class Sampling(Section, frozen=True):
    """How the reply is generated. Names and meanings are vLLM's (`SamplingParams`)."""

    max_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=INT64[1])] | None,
        _meta(
            "Most tokens to generate; the server's default when absent.", example=64, unit="tokens"
        ),
    ] = None
    min_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=INT64[1])] | None,
        _meta("Fewest tokens to generate before a stop counts.", example=1, unit="tokens"),
    ] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None,
        _meta("Randomness; 0 always takes the likeliest token.", example=0.0),
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        _meta("Sample from the likeliest tokens of this total probability.", example=0.9),
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=-1, le=INT64[1])] | None,
        _meta("Sample from the K likeliest tokens; -1 means all.", example=40),
    ] = None
    min_p: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        _meta("Least probability of a token, relative to the likeliest.", example=0.05),
    ] = None
    presence_penalty: Annotated[
        Annotated[float, Meta(ge=-2, le=2)] | None,
        _meta("Positive values discourage tokens already present.", example=0.2),
    ] = None
    frequency_penalty: Annotated[
        Annotated[float, Meta(ge=-2, le=2)] | None,
        _meta("Positive values discourage frequent tokens.", example=0.2),
    ] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(gt=0, le=100)] | None,
        _meta("Values above 1 discourage repetition.", example=1.1),
    ] = None
    seed: Annotated[
        Annotated[int, Meta(ge=INT64[0], le=INT64[1])] | None,
        _meta("Seed of the random generator.", example=1),
    ] = None
    stop: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...] | None,
        _meta("Texts that end the reply; they are not part of it.", example=["\n\n"]),
    ] = None
    choices: Annotated[
        Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(min_length=1)] | None,
        _meta(
            "The reply is exactly one of these.",
            example=["bug", "question", "praise"],
        ),
    ] = None
    regex: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        _meta("The reply matches this expression.", example=r"\d{4}"),
    ] = None
    json_schema: Annotated[
        Annotated[str, Meta(min_length=2)] | None,
        _meta(
            "The reply is JSON of this JSON Schema, given as a string.",
            example='{"type": "object"}',
        ),
    ] = None
    extra_body: Annotated[
        Annotated[str, Meta(min_length=2)] | None,
        _meta(
            "Further fields of the request's body, as a JSON object in a string, for what has no"
            " knob here.",
            example='{"chat_template_kwargs": {"enable_thinking": false}}',
        ),
    ] = None


#: Sampling knobs whose value one row may choose, by column.
PER_ROW_KNOBS = tuple(name for name in Sampling.__struct_fields__ if name != "extra_body")

PerRow = msgspec.defstruct(
    "PerRow",
    [
        (
            name,
            Annotated[
                Annotated[str, _form(FIELD_NAME)] | None,
                _meta(
                    f"Column that holds the row's `sampling.{name}`; null there means the"
                    " configured value."
                    + (" A list, or one written as JSON." if name in ("stop", "choices") else ""),
                    example=f"{name}_column",
                ),
            ],
            None,
        )
        for name in PER_ROW_KNOBS
    ],
    bases=(Section,),
    namespace={"__doc__": "Sampling knobs taken from a column of the row, by column name."},
    module=__name__,
    kw_only=True,
    frozen=True,
)


class Requests(Section, frozen=True):
    """How requests are sent to the server."""

    max_in_flight: Annotated[
        int,
        _meta(
            "Most requests under way at once, in each worker process, of the steps with the same"
            " `requests` on one server.",
            example=64,
            ge=1,
            le=4096,
        ),
    ] = 64
    timeout_secs: Annotated[
        float,
        _meta(
            "Longest time one attempt of one request may take.",
            example=600,
            unit="seconds",
            gt=0,
            le=YEAR_SECS,
        ),
    ] = 600.0
    max_retries: Annotated[
        int,
        _meta(
            "Further attempts after a connection error, a timeout, an answer that cannot be read,"
            " 408, 425, 429 or 5xx, with exponential, jittered backoff. A restart of our own"
            " server does not count.",
            example=5,
            ge=0,
            le=100,
        ),
    ] = 5


class PrefixBatching(Section, frozen=True):
    """Which rows share a batch, and so the server's KV cache."""

    mode: Annotated[
        Literal["none", "fixed"],
        _meta(
            "`fixed` keys rows by the start of their prompt; `none` does not key them.",
            example="fixed",
        ),
    ] = "fixed"
    prefix_char_len: Annotated[
        int,
        _meta(
            "How much of the prompt makes the key.",
            example=512,
            unit="characters",
            ge=1,
            le=INT64[1],
        ),
    ] = 512
    prefix_delimiters: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...] | None,
        _meta(
            "The key ends at the first of these, when one starts within `prefix_char_len`"
            " characters. Default: a blank line for prompts, none for chat.",
            example=[":"],
        ),
    ] = None
    key_field: Annotated[
        Annotated[str, _form(FIELD_NAME)] | None,
        _meta(
            "Column whose value is the key, in place of the prompt's start.",
            example="customer",
        ),
    ] = None
    key_fn: Annotated[
        Annotated[str, _form(CALLABLE)] | None,
        _meta(
            "`module:function` that takes the row and returns its key, in place of the"
            " prompt's start.",
            example="my_package.keys:by_customer",
        ),
    ] = None
    num_shards: Annotated[
        int,
        _meta(
            "Into how many random shards a key is spread in streaming, so that a hot key is not"
            " held to one worker. Batch pipelines split a key only above a batch's size.",
            example=8,
            ge=1,
            le=INT64[1],
        ),
    ] = 8
    num_shards_by_key: Annotated[
        dict[str, Annotated[int, Meta(ge=1, le=INT64[1])]] | None,
        _meta(
            "Shards of single keys, by the key's text; `num_shards` for the rest.",
            example={"acme": 32},
        ),
    ] = None


class Batching(Section, frozen=True):
    """How large a batch gets and how long a row waits for one."""

    min_batch_size: Annotated[
        int,
        _meta(
            "In streaming, the batches of a key grow from this size towards `max_batch_size`, by"
            " the time that they take; with both equal the size is fixed. Batch pipelines split"
            " a key only above `max_batch_size`.",
            example=8,
            unit="rows",
            ge=1,
            le=100_000,
        ),
    ] = 1
    max_batch_size: Annotated[
        int, _meta("Most rows of one batch.", example=64, unit="rows", ge=1, le=100_000)
    ] = 64
    max_batch_duration_secs: Annotated[
        float,
        _meta(
            "Longest wait of an incomplete batch, in streaming.",
            example=1.0,
            unit="seconds",
            gt=0,
            le=YEAR_SECS,
        ),
    ] = 1.0
    max_batch_weight: Annotated[
        Annotated[int, Meta(ge=1, le=INT64[1])] | None,
        _meta(
            "Most weight of one batch; a heavier row goes alone.",
            example=65_536,
            unit="of `weight`",
        ),
    ] = None
    weight: Annotated[
        Literal["rows", "tokens"],
        _meta(
            "What a row weighs: 1, or its prompt's tokens, estimated as a quarter of its UTF-8"
            " bytes.",
            example="tokens",
        ),
    ] = "rows"


class Autoscaling(Section, frozen=True):
    """What each worker tells the runner of the messages it can hold."""

    enabled: Annotated[
        bool,
        _meta(
            "Whether workers publish `num_loaded_models_TAG`, by which Dataflow sizes the pool.",
            example=True,
        ),
    ] = True
    estimator: Annotated[
        Literal["completion_rate", "saturated_completion_rate"],
        _meta(
            "`saturated_completion_rate` learns what a worker can do only while it is full, and"
            " holds that otherwise; `completion_rate` learns whenever something runs.",
            example="saturated_completion_rate",
        ),
    ] = "saturated_completion_rate"
    metric_tag: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        _meta(
            "The TAG in the metric's name. Default: the model identifier.",
            example="tickets",
        ),
    ] = None
    aggregation: Annotated[
        str,
        _meta(
            "Which of the latest `aggregation_count` estimates is published: `last`, `max`, `mean`,"
            " a percentile such as `p90`; or `lifetime_max` of all.",
            example="p90",
            pattern=AGGREGATION,
        ),
    ] = "last"
    aggregation_count: Annotated[
        int,
        _meta(
            "How many estimates `aggregation` looks at.",
            example=30,
            unit="estimates",
            ge=1,
            le=100_000,
        ),
    ] = 30
    target_drain_secs: Annotated[
        float,
        _meta(
            "How many seconds of work a worker should hold: the pool is sized to work off the"
            " backlog in about this time.",
            example=60,
            unit="seconds",
            gt=0,
            le=YEAR_SECS,
        ),
    ] = 300.0
    window_secs: Annotated[
        float,
        _meta(
            "How much of the latest learnable time the estimate rests on; several times as long as"
            " a request takes.",
            example=600,
            unit="seconds",
            gt=0,
            le=YEAR_SECS,
        ),
    ] = 300.0
    interval_secs: Annotated[
        float,
        _meta(
            "Time between two looks at the server's metrics.",
            example=5,
            unit="seconds",
            ge=0.05,
            le=3600,
        ),
    ] = 5.0
    scrape_timeout_secs: Annotated[
        float,
        _meta(
            "Longest time one look may take; a busy server answers late.",
            example=5,
            unit="seconds",
            gt=0,
            le=60,
        ),
    ] = 5.0
    min_completions: Annotated[
        int,
        _meta(
            "Fewest completed requests in the window for an estimate; always at least as many as"
            " run at once.",
            example=10,
            unit="requests",
            ge=1,
            le=INT64[1],
        ),
    ] = 10
    full_concurrency: Annotated[
        Annotated[int, Meta(ge=1, le=INT64[1])] | None,
        _meta(
            "How many requests are under way on a full worker, for `saturated_completion_rate`; one"
            " with requests that wait at the server is full in any case. Default: the lesser of"
            " `requests.max_in_flight` and `batching.max_batch_size`.",
            example=64,
            unit="requests",
        ),
    ] = None
    page_port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None,
        _meta(
            "Port of a Prometheus page with the same figures for people, in each worker; none when"
            " absent.",
            example=9400,
        ),
    ] = None
    page_host: Annotated[
        str,
        _meta(
            "Address on which that page listens. Anybody who reaches it can read it.",
            example="10.0.0.5",
            min_length=1,
        ),
    ] = "127.0.0.1"


class Server(Section, frozen=True):
    """The model server: one of ours, started on each worker, or one that runs already."""

    args: Annotated[
        tuple[str, ...],
        _meta(
            "vLLM's own command line; not `--model`, `--host` or `--port`.",
            example=["--max-model-len=4096"],
        ),
    ] = ()
    env: Annotated[
        dict[str, str],
        _meta(
            "Variables for the server. No secrets: configuration is visible in the job graph.",
            example={"VLLM_CPU_KVCACHE_SPACE": "1"},
        ),
    ] = {}
    env_from_worker: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        _meta(
            "Variables that the worker's environment must provide; missing ones are an error.",
            example=["HF_TOKEN"],
        ),
    ] = ()
    startup_timeout_secs: Annotated[
        float,
        _meta(
            "Longest time the server may take to answer.",
            example=600,
            unit="seconds",
            gt=0,
            le=YEAR_SECS,
        ),
    ] = 600.0
    endpoint: Annotated[
        Annotated[str, _form(ADDRESS)] | None,
        _meta(
            "Base address of a running OpenAI-compatible server, to use in place of starting one.",
            example="http://127.0.0.1:8000/v1",
        ),
    ] = None
    metrics_endpoint: Annotated[
        Annotated[str, _form(ADDRESS)] | None,
        _meta(
            "Address of that server's Prometheus page, for `autoscaling`; only for a server that"
            " belongs to one worker.",
            example="http://127.0.0.1:8000/metrics",
        ),
    ] = None
    api_key_env: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        _meta(
            "Variable of the worker's environment that holds the endpoint's API key.",
            example="OPENAI_API_KEY",
        ),
    ] = None


class ResourceHints(Section, frozen=True):
    """What the workers that run this transform need (Beam's resource hints)."""

    accelerator: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        _meta(
            "GPUs, in the runner's own words.",
            example="type:nvidia-l4;count:1;install-nvidia-driver",
        ),
    ] = None
    min_ram: Annotated[
        Annotated[str, _form(MEMORY_SIZE)] | None, _meta("Least memory.", example="30GB")
    ] = None
    cpu_count: Annotated[
        Annotated[int, Meta(ge=1, le=INT64[1])] | None, _meta("Least number of CPUs.", example=4)
    ] = None


class ErrorHandling(Section, frozen=True):
    """What becomes of rows that fail."""

    output: Annotated[
        str,
        _meta(
            "Name of the output for failed rows: `element`, `msg`, `stack`.",
            example="failures",
            pattern=FIELD_NAME,
        ),
    ]


def default_identifier(
    model: str,
    args: Sequence[str],
    env: Mapping[str, str],
    env_from_worker: Sequence[str],
    endpoint: str | None,
) -> str:
    """Gives the model identifier of a server that was given none.

    Returns:
      A hash of all that makes two servers different, the same in every process.
    """
    material = msgspec.json.encode(
        (model, tuple(args), dict(env), tuple(env_from_worker), endpoint), order="deterministic"
    )
    return "beam-llm-" + hashlib.sha256(material).hexdigest()[:16]


class KeyedConfig(Section, frozen=True, kw_only=True):
    """What all transforms share that batch rows by key."""

    prefix_batching: Annotated[PrefixBatching, _meta("Which rows share a batch.")] = (
        PrefixBatching()
    )
    batching: Annotated[Batching, _meta("How large batches get.")] = Batching()
    error_handling: Annotated[
        ErrorHandling | None, _meta("What becomes of failed rows; absent, one fails the pipeline.")
    ] = None


class LLMConfig(KeyedConfig, frozen=True, kw_only=True):
    """What all language-model transforms share."""

    model: Annotated[
        str,
        _meta(
            "Path or hub name of the model.",
            example="HuggingFaceTB/SmolLM2-135M-Instruct",
            min_length=1,
        ),
    ]
    model_identifier: Annotated[
        Annotated[str, _form(PRINTABLE)] | None,
        _meta(
            "Steps with one identifier share one server on a worker. Default: a hash of `model`"
            " and of what `server` says of it.",
            example="tickets",
        ),
    ] = None
    output_field: Annotated[
        str,
        _meta("Column for the generated text.", example="reply", pattern=FIELD_NAME),
    ] = "reply"
    details_prefix: Annotated[
        str,
        _meta(
            "Put before the names of the further columns `finish_reason`, `usage` and `model`, for"
            " rows that have such columns already.",
            example="label_",
            pattern=FIELD_NAME_START,
        ),
    ] = ""
    sampling: Annotated[Sampling, _meta("How the reply is generated.")] = Sampling()
    per_row: Annotated[PerRow, _meta("Sampling knobs taken from columns.")] = PerRow()  # pyright: ignore[reportInvalidTypeForm]
    requests: Annotated[Requests, _meta("How requests are sent.")] = Requests()
    autoscaling: Annotated[Autoscaling, _meta("What workers tell of their capacity.")] = (
        Autoscaling()
    )
    server: Annotated[Server, _meta("The model server.")] = Server()
    resource_hints: Annotated[ResourceHints, _meta("What the workers need.")] = ResourceHints()

    @property
    def identifier(self) -> str:
        """The model identifier: the one given, else a stable hash of model and server."""
        if self.model_identifier is not None:
            return self.model_identifier
        server = self.server
        return default_identifier(
            self.model, server.args, server.env, server.env_from_worker, server.endpoint
        )


class CompletionsConfig(LLMConfig, frozen=True, kw_only=True):
    """Completes a prompt made from each row, and adds the text to the row."""

    prompt: Annotated[
        str,
        _meta(
            "The prompt, with `{field}` placeholders. Literal braces are doubled.",
            example="Q: {question}\nA:",
            min_length=1,
        ),
    ]
    output_field: Annotated[
        str,
        _meta("Column for the generated text.", example="completion", pattern=FIELD_NAME),
    ] = "completion"


class ChatConfig(LLMConfig, frozen=True, kw_only=True):
    """Asks a chat model about each row, and adds its reply to the row."""

    messages: Annotated[
        tuple[Message, ...],
        _meta(
            "The conversation so far, with `{field}` placeholders.",
            example=[{"role": "user", "content": "{text}"}],
            min_length=1,
        ),
    ]


class BatchByPrefixConfig(KeyedConfig, frozen=True, kw_only=True):
    """Groups rows that share a prompt prefix, or another key, into batches."""

    prompt: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        _meta(
            "The prompt whose start is the key, with `{field}` placeholders; needed unless"
            " `prefix_batching` has a `key_field` or `key_fn`. Literal braces are doubled.",
            example="{guide}\n\n{text}",
        ),
    ] = None
