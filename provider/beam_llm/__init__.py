"""Prefix-batched LLM inference for Apache Beam, served by vLLM.

Names are imported when they are first used, so that what needs no Beam (the command
line, checks of a configuration) does not import it.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from beam_llm.batching import BatchElements as BatchElements
    from beam_llm.batching import WithBatchKey as WithBatchKey
    from beam_llm.inference import ModelHandler as ModelHandler
    from beam_llm.inference import RunInference as RunInference
    from beam_llm.prefixes import ChatPrefixKeyFn as ChatPrefixKeyFn
    from beam_llm.prefixes import PrefixBatchingConfig as PrefixBatchingConfig
    from beam_llm.prefixes import PromptPrefixKeyFn as PromptPrefixKeyFn
    from beam_llm.transforms import BatchByPrefix as BatchByPrefix
    from beam_llm.transforms import VLLMChat as VLLMChat
    from beam_llm.transforms import VLLMCompletions as VLLMCompletions
    from beam_llm.validation import ConfigError as ConfigError
    from beam_llm.vllm.handlers import OpenAIChatMessage as OpenAIChatMessage
    from beam_llm.vllm.handlers import VLLMChatModelHandler as VLLMChatModelHandler
    from beam_llm.vllm.handlers import VLLMCompletionsModelHandler as VLLMCompletionsModelHandler

_HOMES = {
    "BatchByPrefix": "transforms",
    "BatchElements": "batching",
    "ChatPrefixKeyFn": "prefixes",
    "ConfigError": "validation",
    "ModelHandler": "inference",
    "OpenAIChatMessage": "vllm.handlers",
    "PrefixBatchingConfig": "prefixes",
    "PromptPrefixKeyFn": "prefixes",
    "RunInference": "inference",
    "VLLMChat": "transforms",
    "VLLMChatModelHandler": "vllm.handlers",
    "VLLMCompletions": "transforms",
    "VLLMCompletionsModelHandler": "vllm.handlers",
    "WithBatchKey": "batching",
}

__all__ = ["PROVIDERS_YAML", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]

#: Path of the Beam YAML provider listing, for ``providers: [{include: …}]``.
PROVIDERS_YAML = str(Path(__file__).with_name("providers.yaml"))


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'beam_llm' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"beam_llm.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
