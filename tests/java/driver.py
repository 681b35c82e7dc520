"""Drives the Java client: its builders and expansions in a process that answers line by line."""

import contextlib
import json
import subprocess
from pathlib import Path
from typing import Any

from beam_llm.registry import TransformSpec

CLASSES = {"VLLMChat": "VllmChat", "VLLMCompletions": "VllmCompletions"}


def class_name(spec: TransformSpec) -> str:
    """The transform's class in Java."""
    return CLASSES.get(spec.name, spec.name)


class Builders:
    """The Java builders."""

    def __init__(self, java: Path):
        client = java / "client/target"
        libraries = (java / "example/target/classpath").read_text()
        self.command = [
            "java",
            "-Xshare:auto",
            "-cp",
            f"{client}/test-classes:{client}/classes:{libraries}",
            "io.beamllm.Conformance",
        ]
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )

    def __call__(
        self, spec: TransformSpec, config: dict[str, Any], **expansion: Any
    ) -> dict[str, Any]:
        """Builds a transform; with `service` and `fields`, expands it there over such rows."""
        request = {"class": class_name(spec), "config": config, **expansion}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def setters(self, *classes: str) -> dict[str, dict[str, list[str]]]:
        done = subprocess.run(
            [*self.command, "describe", *classes], capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout)

    def __enter__(self) -> "Builders":
        return self

    def __exit__(self, *exception: object) -> None:
        with self.process, contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
