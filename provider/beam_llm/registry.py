"""Every transform, declared once. Nothing here imports Beam."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from beam_llm.config import BatchByPrefixConfig, ChatConfig, CompletionsConfig, KeyedConfig


@dataclass(frozen=True)
class TransformSpec:
    """One transform.

    Attributes:
      name: Name in YAML and in Python.
      urn: Schema-transform URN, for other languages.
      config: Model of its configuration.
      builder: ``module:class`` of the Beam transform, imported when it is needed.
      inputs: Names of the input collections of rows.
      outputs: Names of the output collections of rows. With ``error_handling`` there is one
        more, of the name given there.
    """

    name: str
    urn: str
    config: type[KeyedConfig]
    builder: str
    inputs: tuple[str, ...] = ("input",)
    outputs: tuple[str, ...] = ("output",)

    @property
    def doc(self) -> str:
        """What it does, in a sentence."""
        return (self.config.__doc__ or "").strip()

    def load(self) -> Any:
        """Imports the transform's class (and Beam with it)."""
        module, _, name = self.builder.partition(":")
        return getattr(importlib.import_module(module), name)


TRANSFORMS = {
    spec.name: spec
    for spec in (
        TransformSpec(
            "VLLMCompletions",
            "beam:schematransform:beam_llm:vllm_completions:v1",
            CompletionsConfig,
            "beam_llm.transforms:VLLMCompletions",
        ),
        TransformSpec(
            "VLLMChat",
            "beam:schematransform:beam_llm:vllm_chat:v1",
            ChatConfig,
            "beam_llm.transforms:VLLMChat",
        ),
        TransformSpec(
            "BatchByPrefix",
            "beam:schematransform:beam_llm:batch_by_prefix:v1",
            BatchByPrefixConfig,
            "beam_llm.transforms:BatchByPrefix",
        ),
    )
}
