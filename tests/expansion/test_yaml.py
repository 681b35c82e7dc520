"""The examples, through the service: Beam YAML's `remote` listing, and ours over TLS."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import grpc
import pytest
import yaml
from apache_beam.transforms.external_transform_provider import ExternalTransformProvider
from apache_beam.yaml import main as beam_yaml
from serving import STANDIN, Certificates, Service, serving, serving_here, tls

from beam_llm.registry import TRANSFORMS
from beam_llm.vllm.server import VLLMServer, VLLMServerSpec
from beam_llm_expansion.client import over_tls

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "yaml_examples"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.yaml"))
STREAMING = "streaming.yaml"
BEHAVIOUR = {"PYTHONPATH": str(STANDIN), "STANDIN_OBEDIENT": "1"}


@pytest.fixture(scope="module")
def workers() -> Iterator[Service]:
    with serving("--serve-loopback-worker", env=BEHAVIOUR) as started:
        yield started


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    spec = VLLMServerSpec(identifier="expansion-examples", model="m", env=BEHAVIOUR)
    with VLLMServer.acquire(spec) as held:
        yield f"{held.wait_ready().url}/v1"


def remote(address: str) -> list[dict[str, Any]]:
    """The listing as the documentation has it."""
    return [
        {
            "type": "remote",
            "config": {"address": address},
            "transforms": {name: spec.urn for name, spec in TRANSFORMS.items()},
        }
    ]


def run(
    example: str,
    providers: list[dict[str, Any]],
    endpoint: str,
    folder: Path,
    *options: str,
) -> None:
    questions = folder / "questions.jsonl"
    row = {"package": "p", "question": "topic", "guide": "Label it.", "choices": '["a", "b"]'}
    questions.write_text("".join(json.dumps({**row, "summary": s}) + "\n" for s in ("x", "y")))
    variables = {"model": "m", "endpoint": endpoint, "input": str(questions)}
    pipeline = folder / example
    text = (EXAMPLES / example).read_text()
    pipeline.write_text(f"{text}\n{yaml.safe_dump({'providers': providers})}")
    beam_yaml.run(
        [
            f"--yaml_pipeline_file={pipeline}",
            f"--jinja_variables={json.dumps({**variables, 'output': str(folder)})}",
            *options,
        ]
    )


def rows(pattern: Path) -> list[dict[str, Any]]:
    files = sorted(pattern.parent.glob(pattern.name + "*"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def check(example: str, folder: Path) -> None:
    """Looks at what examples write; most assert their own outcome."""
    if example == "dead_letters.yaml":
        assert {row["id"] for row in rows(folder / "replies.json")} == {1, 4}
        assert {row["id"] for row in rows(folder / "dead_letters.json")} == {2, 3}
    if example == "quickstart.yaml":
        assert [row["label"] for row in rows(folder / "labels.json")] == ["a", "a"]
    if example == STREAMING:
        counted = rows(folder / "counts.json")
        assert sum(row["rows"] for row in counted) == 21


@pytest.mark.parametrize("name", [name for name in NAMES if name != STREAMING])
def test_on_the_direct_runner(
    name: str, workers: Service, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    run(name, remote(workers.address), endpoint, tmp_path, "--runner=FnApiRunner")
    check(name, tmp_path)


@pytest.mark.prism
@pytest.mark.parametrize("name", NAMES)
def test_on_prism(
    name: str,
    workers: Service,
    endpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prism: str,
) -> None:
    monkeypatch.chdir(ROOT)
    options = ["--runner=PrismRunner", f"--prism_location={prism}", "--environment_type=LOOPBACK"]
    if name == STREAMING:
        options.append("--streaming")
    run(name, remote(workers.address), endpoint, tmp_path, *options)
    check(name, tmp_path)


def test_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """The same, where the service asks both sides for certificates."""
    monkeypatch.chdir(ROOT)
    ours = Certificates(tmp_path / "certificates")
    (cert, key), ca = ours.client, ours.ca
    settings = {**tls(ours.server, ours.ca), "serve_loopback_worker": True}
    with serving_here(**settings) as started:
        given = f"{started.address!r}, ca={str(ca)!r}, cert={str(cert)!r}, key={str(key)!r}"
        listing = {
            "type": "python",
            "config": {},
            "transforms": {
                name: "from beam_llm_expansion.client import over_tls\n\n"
                f"over_tls({name!r}, {given})\n"
                for name in TRANSFORMS
            },
        }
        run("endpoint.yaml", [listing], endpoint, tmp_path, "--runner=FnApiRunner")
        wrong = over_tls("VLLMChat", started.address, ca=str(ca))
        with pytest.raises(grpc.RpcError):
            (
                beam.Pipeline()
                | beam.Create([beam.Row(text="x")])
                | wrong(model="m", messages=[{"role": "user", "content": "{text}"}])
            )


def test_a_transform_that_is_not_there_over_tls() -> None:
    with pytest.raises(ValueError, match="did you mean 'VLLMChat'"):
        over_tls("VLLMChatt", "localhost:1")


@pytest.mark.parametrize("urn_pattern", [True, False])
def test_beams_own_discovery(urn_pattern: bool, service: Service) -> None:
    """Beam's `ExternalTransformProvider` takes URNs of its own alone, unless told of ours."""
    given = {"urn_pattern": r"^beam:schematransform:beam_llm:([\w-]+):(\w+)$"}
    provider = ExternalTransformProvider(service.address, **(given if urn_pattern else {}))
    found = {urn for _, urn in provider.get_available()}
    assert found == ({spec.urn for spec in TRANSFORMS.values()} if urn_pattern else set())
    if urn_pattern:
        transform = provider.get_urn(TRANSFORMS["VLLMCompletions"].urn)
        rows = beam.Pipeline() | beam.Create([beam.Row(text="x")])
        answered = rows | transform(model="m", prompt="{text}")
        fields = set(answered.element_type._fields)
        assert {"text", "completion", "usage"} <= fields
