"""Pipelines in Java, run: rows unchanged, Beam's own caller, and the example beside YAML."""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from serving import STANDIN, Service

from beam_llm.config import CompletionsConfig, Server
from beam_llm.pipelines import PipelineFile
from beam_llm.validation import server_spec
from beam_llm.vllm.server import VLLMServer, VLLMServerSpec

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "expansion_service/java/example"
HANG_SECS = 120.0

# The example's step, in YAML.
PIPELINE = """
pipeline:
  transforms:
    - type: ReadFromJson
      name: Questions
      config: {path: "{{ input }}"}
    - type: VLLMChat
      name: Label
      input: Questions
      config:
        model: "{{ model }}"
        messages:
          - {role: system, content: "{guide}"}
          - {role: user, content: "{summary}"}
        output_field: label
        sampling: {max_tokens: 8, temperature: 0}
        per_row: {choices: choices}
        requests: {max_in_flight: 16}
        server:
          args: [--enforce-eager, --max-model-len=2048, --dtype=float32]
          env: {VLLM_CPU_KVCACHE_SPACE: "1", HF_HUB_OFFLINE: "1"}
        error_handling: {output: failures}
    - type: WriteToJson
      name: Labels
      input: Label
      config: {path: "{{ output }}/labels"}
    - type: WriteToJson
      name: Failures
      input: Label.failures
      config: {path: "{{ output }}/failures"}
"""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """The address of a stand-in that runs."""
    spec = VLLMServerSpec(identifier="java", model="m", env={"PYTHONPATH": str(STANDIN)})
    with VLLMServer.acquire(spec) as server:
        yield f"{server.wait_ready().url}/v1"


def run_java(java: Path, name: str, *options: str, without: str | None = None) -> str:
    """Runs a program of the integration module."""
    module = java / "integration/target"
    libraries = (module / "classpath").read_text().split(":")
    if without is not None:
        libraries = [library for library in libraries if without not in library]
    done = subprocess.run(
        [
            "java",
            "-cp",
            ":".join([str(module / "classes"), *libraries]),
            f"io.beamllm.integration.{name}",
            "--runner=PortableRunner",
            *options,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(pattern: Path) -> list[dict[str, Any]]:
    files = sorted(pattern.parent.glob(pattern.name + "*"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.prism
def test_rows_come_back_as_they_went(
    java_build: Path, local_service: Service, prism_jobs: str, endpoint: str, tmp_path: Path
) -> None:
    said = run_java(
        java_build,
        "RoundTrip",
        f"--jobEndpoint={prism_jobs}",
        f"--service={local_service.address}",
        f"--endpoint={endpoint}",
        f"--output={tmp_path / 'rows'}",
    )
    # Each row's id, time and window, and which of its fields changed in type or value.
    assert sorted((tmp_path / "rows").read_text().splitlines()) == [
        "1 1000 0 []",
        "13 13000 10000 []",
        "2 2000 0 []",
    ]
    config = CompletionsConfig(model="m", prompt="p", server=Server(endpoint=endpoint))
    assert f"annotation {config.identifier}" in said.splitlines()


@pytest.mark.prism
def test_beams_own_caller_needs_no_jar_of_ours(
    java_build: Path, local_service: Service, prism_jobs: str, endpoint: str, tmp_path: Path
) -> None:
    run_java(
        java_build,
        "StockCaller",
        f"--jobEndpoint={prism_jobs}",
        f"--service={local_service.address}",
        f"--endpoint={endpoint}",
        f"--output={tmp_path / 'rows'}",
        without="beam-llm-java",
    )
    (answered,) = rows(tmp_path / "rows-output")
    assert {name: answered[name] for name in ("id", "text", "reply")} == {
        "id": 1,
        "text": "good",
        "reply": "Say good",
    }
    (failed,) = rows(tmp_path / "rows-failures")
    assert failed["element"] == {"id": 2, "text": "BAD"}
    assert "BAD prompts" in failed["msg"]


def run_example(jobs: str, questions: Path, output: Path, model: str, **environment: str) -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(EXAMPLE / "run_local.py"),
            jobs,
            f"--input={questions}",
            f"--output={output}",
            f"--model={model}",
            "--cpu=true",
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def run_yaml(folder: Path, questions: Path, output: Path, model: str, **environment: str) -> None:
    pipeline = folder / "pipeline.yaml"
    pipeline.write_text(PIPELINE)
    variables = [f"--var=input={questions}", f"--var=output={output}", f"--var=model={model}"]
    done = subprocess.run(
        [sys.executable, "-m", "beam_llm", "run", str(pipeline), *variables],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr


def labels(output: Path) -> dict[tuple[str, str], str]:
    return {(row["package"], row["question"]): row["label"] for row in rows(output / "labels")}


def failed(output: Path) -> list[str]:
    """The words of the failures; Beam YAML writes their rows as lists."""
    return sorted(row["msg"] for row in rows(output / "failures"))


def write_questions(path: Path, packages: int) -> None:
    subprocess.run(
        [sys.executable, "-m", "beam_llm", "demo-data", str(path), f"--packages={packages}"],
        check=True,
        capture_output=True,
    )


def of_mark(mark: str) -> list[psutil.Process]:
    """The running processes that were started, by whatever way, under this mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get("BEAM_LLM_TEST") == mark
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_the_example_does_as_the_same_yaml_and_leaves_nothing(
    java_build: Path, tmp_path: Path
) -> None:
    questions = tmp_path / "questions.jsonl"
    write_questions(questions, 4)
    with questions.open("a") as file:
        bad = {"package": "bad", "summary": "BAD", "question": "q", "guide": "g", "choices": "[]"}
        for choices in ("[]", '["a"]'):
            file.write(json.dumps({**bad, "question": choices, "choices": choices}) + "\n")
    mark = uuid.uuid4().hex
    (tmp_path / "run").mkdir()
    environment = {
        "PYTHONPATH": str(STANDIN),
        "XDG_RUNTIME_DIR": str(tmp_path / "run"),
        "BEAM_LLM_TEST": mark,
    }
    run_example("python", questions, tmp_path / "java", "m", **environment)
    deadline = time.monotonic() + HANG_SECS
    while left := of_mark(mark):
        psutil.wait_procs(left, timeout=1)
        assert time.monotonic() < deadline, left
    run_yaml(tmp_path, questions, tmp_path / "yaml", "m", **environment)
    assert len(labels(tmp_path / "java")) == 12
    assert labels(tmp_path / "java") == labels(tmp_path / "yaml")
    assert len(failed(tmp_path / "java")) == 2
    assert failed(tmp_path / "java") == failed(tmp_path / "yaml")


@pytest.mark.vllm
@pytest.mark.prism
def test_labels_of_the_real_model_are_those_of_the_same_yaml(
    java_build: Path, prism: str, real_model: str, tmp_path: Path
) -> None:
    questions = tmp_path / "questions.jsonl"
    write_questions(questions, 10)
    pipeline = tmp_path / "pipeline.yaml"
    pipeline.write_text(PIPELINE)
    variables = {"model": real_model, "input": "i", "output": "o"}
    ((_, config),) = PipelineFile(pipeline, variables).llm_configs()
    # Held for both: they describe the same server, and so share it.
    with VLLMServer.acquire(server_spec(config)) as server:
        generation = server.wait_ready().generation
        sockets = server.log_path.parent.glob
        # A server of an earlier test may still be leaving.
        before = set(sockets("*.sock"))
        run_example(f"prism={prism}", questions, tmp_path / "java", real_model)
        run_yaml(tmp_path, questions, tmp_path / "yaml", real_model)
        assert server.wait_ready().generation == generation
        assert set(sockets("*.sock")) <= before
    assert len(labels(tmp_path / "java")) == 30
    assert labels(tmp_path / "java") == labels(tmp_path / "yaml")
    assert failed(tmp_path / "java") == failed(tmp_path / "yaml") == []
    assert len(set(labels(tmp_path / "java").values())) > 3
