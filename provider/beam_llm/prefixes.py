"""Batch keys of prompts: the leading part that an LLM server can reuse from its cache.

A server keeps the key-value cache of the prompts it has seen, and computes only what follows
the longest prefix that it has in there. Two prompts belong together when they start alike.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from beam_llm.shards import ShardSpec, validate_shards

DEFAULT_PREFIX_CHAR_LEN = 512
"""Characters; about 128 tokens of English: vLLM's block on CPUs, eight of its blocks on GPUs.

Shorter and unrelated prompts share a key; longer and related ones part over their questions.
"""

DEFAULT_NUM_SHARDS = 8
"""Of 160,000 requests under a sine load on up to 50 workers, 4 shards left up to 33,000 queued
behind hot prefixes; 8 left none (the reference figures of the specification)."""


class PromptPrefixKeyFn:
    r"""The key of a completion prompt: its beginning.

    That is the prompt up to the earliest delimiter, when one starts within the first
    `prefix_char_len` characters, else the first `prefix_char_len` characters. Nothing beyond
    them is looked at, so a prompt of a megabyte costs what a short one costs.

    >>> key_fn = PromptPrefixKeyFn(512, delimiters=("\n\n", ":"))
    >>> key_fn("Choose one of these: bug, question, praise. It crashes.")
    'Choose one of these'

    Args:
        prefix_char_len: Characters that count at most, at least 1.
        delimiters: What ends a prefix, a blank line by default. `":"` suits prompts such as
            "Choose one of these: …". Empty for none. A prompt that begins with a delimiter
            has the empty key.

    Raises:
        TypeError: An argument is of another type (at construction); the prompt is not a
            `str` (when called).
        ValueError: `prefix_char_len` is below 1, or a delimiter is empty.
    """

    def __init__(
        self,
        prefix_char_len: int = DEFAULT_PREFIX_CHAR_LEN,
        delimiters: Sequence[str] = ("\n\n",),
    ):
        _check_prefix_char_len(prefix_char_len)
        _check_delimiters(delimiters, "delimiters")
        self.prefix_char_len = prefix_char_len
        self.delimiters = tuple(delimiters)

    def __call__(self, prompt: Any) -> str:
        """Returns the key of one prompt."""
        if not isinstance(prompt, str):
            raise TypeError(
                f"{type(self).__name__}: a prompt must be a str, got {type(prompt).__name__}"
            )
        return self._prefix(prompt)

    def _prefix(self, text: str) -> str:
        end = self.prefix_char_len
        for delimiter in self.delimiters:
            start = text.find(delimiter, 0, end - 1 + len(delimiter))
            if start >= 0:
                end = start
        return text[:end]

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((type(self), self.prefix_char_len, self.delimiters))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.prefix_char_len}, delimiters={self.delimiters!r})"


class ChatPrefixKeyFn(PromptPrefixKeyFn):
    """The key of a list of chat messages: role and leading content of the first one.

    >>> ChatPrefixKeyFn(8)([{"role": "system", "content": "You label tickets."}])
    'system: You labe'

    Takes messages as dictionaries of OpenAI's schema or as Beam's `OpenAIChatMessage`, with
    content as text or as a list of parts of which the first is text. Anything else is an
    error: a key made of it would put unrelated chats together.

    Args:
        prefix_char_len: Characters of the content that count at most, at least 1.
        delimiters: What ends a prefix; nothing by default, since system prompts have blank
            lines in the middle.

    Raises:
        TypeError: The messages are of another schema (when called); also as for prompts.
        ValueError: There are no messages (when called); also as for prompts.
    """

    def __init__(
        self,
        prefix_char_len: int = DEFAULT_PREFIX_CHAR_LEN,
        delimiters: Sequence[str] = (),
    ):
        super().__init__(prefix_char_len, delimiters)

    def __call__(self, prompt: Any) -> str:
        """Returns the key of one list of messages."""
        if not isinstance(prompt, list | tuple):
            raise self._wrong("a list of messages", prompt)
        messages = cast("Sequence[Any]", prompt)
        if not messages:
            raise ValueError(f"{type(self).__name__}: the list of messages is empty")
        role, content = _role_and_content(messages[0])
        if not isinstance(role, str):
            raise self._wrong("a first message with a role of type str", messages[0])
        if isinstance(content, list | tuple):
            content = _first_text(cast("Sequence[Any]", content))
        if not isinstance(content, str):
            raise self._wrong(
                "a first message whose content is text or begins with a text part", messages[0]
            )
        return f"{role}: {self._prefix(content)}"

    def _wrong(self, expected: str, got: object) -> TypeError:
        return TypeError(
            f"{type(self).__name__}: expected {expected}, got {type(got).__name__}: {_short(got)}"
        )


class PrefixExtractor(Protocol):
    """The constructor of a handler's default key function."""

    def __call__(
        self, prefix_char_len: int, delimiters: Sequence[str] = ...
    ) -> Callable[[Any], Any]:
        """Makes the key function."""
        ...


@dataclass(frozen=True)
class PrefixBatchingConfig:
    r"""How a handler batches requests by prefix.

    >>> PrefixBatchingConfig(prefix_char_len=64).resolve(PromptPrefixKeyFn)
    PromptPrefixKeyFn(64, delimiters=('\n\n',))

    Args:
        num_shards: Random sub-keys per prefix, so that a hot prefix is not capped at one
            worker: an int, a mapping from key to int, or a callable.
        prefix_char_len: Characters that make the key at most, at least 1.
        prefix_delimiters: What ends a prefix. None for the default of the extractor: a blank
            line for prompts, nothing for chat.
        key_fn: Your own function from example to key, instead of the extractor.

    Raises:
        TypeError: An argument is of another type.
        ValueError: An argument is out of bounds, or `prefix_delimiters` came with a `key_fn`,
            which would ignore them.
    """

    num_shards: ShardSpec = DEFAULT_NUM_SHARDS
    prefix_char_len: int = DEFAULT_PREFIX_CHAR_LEN
    prefix_delimiters: Sequence[str] | None = None
    key_fn: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        validate_shards(self.num_shards)
        _check_prefix_char_len(self.prefix_char_len)
        if self.prefix_delimiters is not None:
            _check_delimiters(self.prefix_delimiters, "prefix_delimiters")
            object.__setattr__(self, "prefix_delimiters", tuple(self.prefix_delimiters))
        if self.key_fn is None:
            return
        if not callable(self.key_fn):
            raise TypeError(f"key_fn: {self.key_fn!r} is not callable; allowed: a callable or None")
        if self.prefix_delimiters is not None:
            raise ValueError(
                f"prefix_delimiters: {self.prefix_delimiters!r} has no effect together with "
                "key_fn; allowed: one of the two"
            )

    def resolve(self, default_extractor_class: PrefixExtractor) -> Callable[[Any], Any]:
        """Returns the key function for a handler.

        Args:
            default_extractor_class: What makes the handler's keys unless `key_fn` does, such
                as `PromptPrefixKeyFn` or `ChatPrefixKeyFn`.
        """
        if self.key_fn is not None:
            return self.key_fn
        if self.prefix_delimiters is None:
            return default_extractor_class(self.prefix_char_len)
        return default_extractor_class(self.prefix_char_len, delimiters=self.prefix_delimiters)


def _role_and_content(message: Any) -> tuple[Any, Any]:
    if isinstance(message, Mapping):
        fields = cast("Mapping[str, Any]", message)
        return fields.get("role"), fields.get("content")
    return getattr(message, "role", None), getattr(message, "content", None)


def _first_text(parts: Sequence[Any]) -> Any:
    if not parts or not isinstance(parts[0], Mapping):
        return None
    part = cast("Mapping[str, Any]", parts[0])
    return part.get("text") if part.get("type") == "text" else None


def _check_prefix_char_len(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"prefix_char_len: {value!r} is a {type(value).__name__}; allowed: an integer of at "
            "least 1"
        )
    if value < 1:
        raise ValueError(f"prefix_char_len: {value} is less than the minimum of 1")


def _check_delimiters(value: object, parameter: str) -> None:
    # A string is a sequence of strings too: "\n\n" would silently mean two single newlines.
    if not isinstance(value, list | tuple):
        raise TypeError(
            f"{parameter}: {value!r} is a {type(value).__name__}; allowed: a list of str"
        )
    for delimiter in cast("Sequence[object]", value):
        if not isinstance(delimiter, str):
            raise TypeError(
                f"{parameter}: {delimiter!r} is a {type(delimiter).__name__}; "
                "allowed: non-empty str"
            )
        if not delimiter:
            raise ValueError(f"{parameter}: '' is empty; allowed: non-empty str")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:199] + "…"
