"""The container, compose and Kubernetes files, as far as schemas and our own settings tell."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from serving import Certificates, Service, serving_here, tls

from beam_llm_expansion.settings import ENVIRONMENT_PREFIX, Settings, read

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "expansion_service/deploy"


def variables(environment: dict[str, str]) -> set[str]:
    names = {name for name in environment if name.startswith(ENVIRONMENT_PREFIX)}
    return {name.removeprefix(ENVIRONMENT_PREFIX).lower() for name in names}


def test_the_compose_file_is_one() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "check_jsonschema",
            "--builtin-schema=vendor.compose-spec",
            str(DEPLOY / "compose.yaml"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    (service,) = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].values()
    assert variables(service["environment"]) <= set(Settings.__struct_fields__)
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).exists()
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert service["healthcheck"]["test"] == ["CMD", "python", "-m", "beam_llm_expansion.health"]


def test_the_container_file_copies_what_is_there_and_sets_what_we_know() -> None:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    for line in text.splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            *sources, _ = line.split()[1:]
            assert all((ROOT / source).exists() for source in sources), line
    given = dict(re.findall(rf"({ENVIRONMENT_PREFIX}\w+)=(\S+)", text))
    assert variables(given) <= set(Settings.__struct_fields__)
    assert read([], {**given, f"{ENVIRONMENT_PREFIX}INSECURE": "true"}).host == "0.0.0.0"
    assert "USER 10001" in text


def test_the_kubernetes_manifest_is_one(tmp_path: Path) -> None:
    documents: list[Any] = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    for document in documents:
        kubernetes_validate.validate(document, "1.31", strict=True)
    config, deployment, service = documents
    values = yaml.safe_load(config["data"]["service.yaml"])
    for name in ("tls_cert", "tls_key", "tls_client_ca"):
        (tmp_path / name).touch()
        values[name] = str(tmp_path / name)
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump(values))
    settings = read([f"--config={file}"], {})
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {
        "grpc": settings.port,
        "health": settings.health_port,
        "metrics": settings.metrics_port,
    }
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["port"] == settings.health_port
    assert service["spec"]["ports"][0]["targetPort"] == "grpc"
    grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > settings.grace_secs


def asked(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "beam_llm_expansion.health", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_health_command(service: Service) -> None:
    assert asked(service.address).returncode == 0
    unserved = asked("127.0.0.1:1")
    assert unserved.returncode == 1
    assert "UNAVAILABLE" in unserved.stderr


def test_probes_reach_health_beside_tls(tmp_path: Path, caplog: Any) -> None:

    ours = Certificates(tmp_path / "ours")
    caplog.set_level("INFO", "beam_llm_expansion")
    with serving_here(**tls(ours.server, ours.ca), health_port=0):
        (said,) = (record for record in caplog.records if record.message == "serving health")
        assert asked(said.fields["address"]).returncode == 0
