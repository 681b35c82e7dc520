"""What crosses the wire of an OpenAI-compatible server.

The structures carry the attribute names of OpenAI's own client, so that code written
for Beam's stock vLLM handler (``result.inference.choices[0].text``) keeps working.
"""

from __future__ import annotations

from typing import Any

import msgspec

COMPLETIONS_PATH = "completions"
CHAT_PATH = "chat/completions"


class PromptTokensDetails(msgspec.Struct):
    """Where a prompt's tokens came from.

    Attributes:
      cached_tokens: Tokens found in the server's prefix cache.
    """

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Tokens of one request; None where a server does not tell."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: PromptTokensDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens found in the prefix cache."""
        details = self.prompt_tokens_details
        return None if details is None else details.cached_tokens


class CompletionChoice(msgspec.Struct):
    """One completion of a prompt."""

    text: str
    index: int = 0
    finish_reason: str | None = None
    stop_reason: Any = None
    logprobs: Any = None


class ChatMessage(msgspec.Struct):
    """The message of a chat model; ``content`` is None when it only reasoned or called tools."""

    role: str = "assistant"
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class ChatChoice(msgspec.Struct):
    """One reply of a chat model."""

    message: ChatMessage
    index: int = 0
    finish_reason: str | None = None
    stop_reason: Any = None
    logprobs: Any = None

    @property
    def text(self) -> str | None:
        """The reply's text."""
        return self.message.content


class Completion(msgspec.Struct):
    """Answer to a completion request."""

    choices: list[CompletionChoice]
    id: str = ""
    created: int = 0
    model: str = ""
    usage: Usage | None = None


class ChatCompletion(msgspec.Struct):
    """Answer to a chat request."""

    choices: list[ChatChoice]
    id: str = ""
    created: int = 0
    model: str = ""
    usage: Usage | None = None


Answer = Completion | ChatCompletion

_DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    COMPLETIONS_PATH: msgspec.json.Decoder(Completion),
    CHAT_PATH: msgspec.json.Decoder(ChatCompletion),
}


def decode_answer(path: str, body: bytes) -> Answer:
    """Reads a server's answer.

    Args:
      path: ``COMPLETIONS_PATH`` or ``CHAT_PATH``.
      body: JSON text in UTF-8.

    Returns:
      The answer, with at least one choice.

    Raises:
      ValueError: It is not the JSON that such a request is answered with.
    """
    answer = _DECODERS[path].decode(body)
    if not answer.choices:
        raise ValueError("the answer holds no choice")
    return answer


class _ErrorBody(msgspec.Struct):
    error: Any = None
    message: Any = None
    detail: Any = None


def error_message(body: bytes, limit: int = 2_000) -> str:
    """Finds the server's own words in the body of an error.

    Args:
      body: The body, JSON or not.
      limit: Most characters to give back.

    Returns:
      The message, else the start of the body as text.
    """
    words: Any = None
    try:
        parsed = msgspec.json.decode(body, type=_ErrorBody)
    except msgspec.DecodeError:
        pass
    else:
        words = parsed.error or parsed.message or parsed.detail
        if isinstance(words, dict):
            words = words.get("message") or words
    text = words if isinstance(words, str) else "" if words is None else str(words)
    text = text or body.decode("utf-8", "replace").strip()
    return text if len(text) <= limit else text[:limit] + "…"
