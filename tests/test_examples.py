"""Every example, through the command that its first lines give, on the real vLLM.

The examples assert their own outcome. They need no language skill here: a tiny random
model serves them, started once and shared, since they all describe the same server.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from beam_llm.pipelines import PipelineFile
from beam_llm.validation import server_spec
from beam_llm.vllm.server import VLLMServer

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "yaml_examples"
# These need more than a model, or one that knows a language (tests/test_real_vllm.py).
JSON = "json_fields.yaml"
STREAMING = "streaming.yaml"
ON_ENDPOINT = "endpoint.yaml"
QUICKSTART = "quickstart.yaml"
WITHOUT_A_MODEL = "batches.yaml"
PLAIN = sorted(
    path.name
    for path in EXAMPLES.glob("*.yaml")
    if path.name not in (JSON, STREAMING, ON_ENDPOINT, QUICKSTART, WITHOUT_A_MODEL)
)

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def server(tiny_model: str) -> Iterator[VLLMServer]:
    """Holds the server that the examples share."""
    example = PipelineFile(EXAMPLES / "chat.yaml", {"model": tiny_model})
    ((_, config),) = example.llm_configs()
    with VLLMServer.acquire(server_spec(config)) as held:
        held.wait_ready()
        yield held


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "beam_llm", "run", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def rows(pattern: Path) -> list[dict[str, object]]:
    files = sorted(pattern.parent.glob(pattern.name + "*"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.parametrize("name", PLAIN)
def test_example(name: str, server: VLLMServer, tiny_model: str, tmp_path: Path) -> None:
    generation = server.wait_ready().generation
    done = run(f"yaml_examples/{name}", f"--var=model={tiny_model}", f"--var=output={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "Summary" in done.stdout
    # The same server, by the same identifier: none was started for the example.
    assert server.wait_ready().generation == generation
    assert list(server.log_path.parent.glob("*.sock")) == [server.log_path.with_suffix(".sock")]


def test_dead_letters_are_beside_the_results(
    server: VLLMServer, tiny_model: str, tmp_path: Path
) -> None:
    done = run(
        "yaml_examples/dead_letters.yaml", f"--var=model={tiny_model}", f"--var=output={tmp_path}"
    )
    assert {row["id"] for row in rows(tmp_path / "replies.json")} == {1, 4}
    assert {row["id"] for row in rows(tmp_path / "dead_letters.json")} == {2, 3}
    said = " ".join(done.stdout.split())
    assert "1 null_field, 1 refused → Ask.failures → " in said
    assert "DeadLetters (" in said


def test_batches_alone() -> None:
    done = run(f"yaml_examples/{WITHOUT_A_MODEL}")
    assert done.returncode == 0, done.stderr
    assert "server" not in done.stdout


def test_endpoint(server: VLLMServer, tiny_model: str) -> None:
    url = server.wait_ready().url
    done = run(
        f"yaml_examples/{ON_ENDPOINT}", f"--var=model={tiny_model}", f"--var=endpoint={url}/v1"
    )
    assert done.returncode == 0, done.stderr
    assert "server start" not in done.stdout


@pytest.mark.prism
def test_streaming_on_prism(
    server: VLLMServer, tiny_model: str, tmp_path: Path, prism: str
) -> None:
    done = run(
        f"yaml_examples/{STREAMING}",
        f"--var=model={tiny_model}",
        f"--var=output={tmp_path}",
        "--runner=PrismRunner",
        f"--prism_location={prism}",
        "--environment_type=LOOPBACK",
        "--streaming",
    )
    assert done.returncode == 0, done.stderr
    counted = rows(tmp_path / "counts.json")
    assert {row["answered"] for row in counted} == {True}
    assert sum(int(str(row["rows"])) for row in counted) == 21
    assert len(counted) > 1  # several windows


def test_plain_beam_yaml_runs_an_example_with_the_provider_listing(
    server: VLLMServer, tiny_model: str, tmp_path: Path
) -> None:
    from beam_llm import PROVIDERS_YAML

    text = (EXAMPLES / "chat.yaml").read_text()
    pipeline = tmp_path / "pipeline.yaml"
    pipeline.write_text(f"{text}\nproviders:\n  - include: {PROVIDERS_YAML}\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "apache_beam.yaml.main",
            f"--yaml_pipeline_file={pipeline}",
            "--runner=FnApiRunner",
            f"--jinja_variables={json.dumps({'model': tiny_model})}",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
