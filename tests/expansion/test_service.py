"""The service's life: health, metrics, signals, limits in time and number, TLS."""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from apache_beam.portability.api import (
    beam_artifact_api_pb2,
    beam_expansion_api_pb2,
    beam_expansion_api_pb2_grpc,
    beam_runner_api_pb2,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from prometheus_client.parser import text_string_to_metric_families
from serving import MINIMAL, Certificates, Service, request, serving, serving_here, tls

from beam_llm_expansion.server import Server
from beam_llm_expansion.settings import Settings, SettingsError

EXPANSION = "org.apache.beam.model.expansion.v1.ExpansionService"
ARTIFACTS = "org.apache.beam.model.job_management.v1.ArtifactRetrievalService"


def health(service: Service, name: str = "") -> Any:
    with service.channel() as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=60).status


def test_health_overall_and_by_service(service: Service) -> None:
    for name in ("", EXPANSION, ARTIFACTS):
        assert health(service, name) == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as unknown:
        health(service, "other")
    assert unknown.value.code() == grpc.StatusCode.NOT_FOUND


def test_reflection_as_grpcurl_does_it(service: Service) -> None:
    with service.channel() as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {EXPANSION, ARTIFACTS, "grpc.health.v1.Health"} <= set(database.get_services())
        file = database.FindFileContainingSymbol(EXPANSION)
    (described,) = file.service
    assert {method.name for method in described.method} == {"Expand", "DiscoverSchemaTransform"}


def test_reflection_is_off_unless_asked_for(with_workers: Service) -> None:
    with with_workers.channel() as channel, pytest.raises(grpc.RpcError) as refused:
        ProtoReflectionDescriptorDatabase(channel).get_services()
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


def metrics(service: Service) -> dict[tuple[str, ...], float]:
    with urllib.request.urlopen(f"http://{service.metrics_address}/metrics") as page:
        families = text_string_to_metric_families(page.read().decode())
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
        if family.name.startswith("beam_llm_expansion")
    }


def test_metrics_by_transform_and_outcome(service: Service) -> None:
    before = metrics(service)
    assert not service.expand(request()).error
    assert service.expand(request({"model": "m"})).error
    assert service.expand(request(urn="other")).error
    service.discover()
    after = metrics(service)
    name = "beam_llm_expansion_requests_total"
    for labels in (
        ("expand", "ok", "VLLMCompletions"),
        ("expand", "invalid", "VLLMCompletions"),
        ("expand", "forbidden", "other"),
        ("discover", "ok", "other"),
    ):
        assert after[(name, *labels)] == before.get((name, *labels), 0) + 1
    assert after["beam_llm_expansion_in_flight",] == 0
    seconds = "beam_llm_expansion_request_seconds_count"
    assert after[seconds, "expand"] == before.get((seconds, "expand"), 0) + 3


def test_logs_are_json_where_asked_and_a_client_makes_no_lines() -> None:
    with serving("--log-format=json") as started:
        started.expand(request({**MINIMAL, "error_handling": {"output": "a\nb"}}))
        started.terminate()
        lines = [json.loads(line) for line in started.log.read_text().splitlines()[1:]]
    (answered,) = (line for line in lines if line["message"] == "answered")
    assert answered["outcome"] == "invalid"
    assert answered["transform"] == "VLLMCompletions"
    assert re.fullmatch("[0-9a-f]{16}", answered["request"])
    assert answered["level"] == "INFO"


# Ends


def test_it_ends_with_its_parent() -> None:
    with serving("--exit-with-parent", stdin=subprocess.PIPE) as started:
        assert started.process.stdin is not None
        started.process.stdin.close()
        assert started.process.wait(60) == 0


def test_a_taken_port_is_said(service: Service) -> None:
    port = int(service.address.rpartition(":")[2])
    with pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{port}: it is taken"):
        asyncio.run(Server(Settings(port=port)).start())


def test_the_address_file_is_there_while_it_serves(tmp_path: Path) -> None:
    address_file = tmp_path / "address"
    with serving(f"--address-file={address_file}") as started:
        assert address_file.read_text().strip() == started.address
        assert started.terminate() == 0
    assert not list(tmp_path.iterdir())


@pytest.fixture
def slow_import(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Variables for a service in which importing `slow_keys` waits for a file called `go`."""
    (tmp_path / "slow_keys.py").write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(tmp_path / 'began')!r}).touch()\n"
        f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
        "def key(row): return row.text\n"
    )
    yield {"PYTHONPATH": str(tmp_path)}
    (tmp_path / "go").touch()


SLOW = {**MINIMAL, "prefix_batching": {"key_fn": "slow_keys:key"}}


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_sigterm_finishes_what_runs_and_refuses_the_rest(
    tmp_path: Path, slow_import: dict[str, str]
) -> None:
    with (
        serving("--allow-callables", env=slow_import) as started,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        running = pool.submit(started.expand, request(SLOW))
        wait_for(tmp_path / "began")
        started.process.send_signal(signal.SIGTERM)
        with started.channel() as channel:
            stub = beam_expansion_api_pb2_grpc.ExpansionServiceStub(channel)
            deadline = time.monotonic() + 60
            code = None
            while code != grpc.StatusCode.UNAVAILABLE and time.monotonic() < deadline:
                with contextlib.suppress(grpc.RpcError):
                    stub.DiscoverSchemaTransform(
                        beam_expansion_api_pb2.DiscoverSchemaTransformRequest(), timeout=5
                    )
                    continue
                code = grpc.StatusCode.UNAVAILABLE
        assert not running.done()
        (tmp_path / "go").touch()
        assert not running.result(60).error
        assert started.process.wait(60) == 0


def test_the_grace_is_bounded(tmp_path: Path, slow_import: dict[str, str]) -> None:
    with (
        serving("--allow-callables", "--grace-secs=0.2", env=slow_import) as started,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        running = pool.submit(started.expand, request(SLOW))
        wait_for(tmp_path / "began")
        assert started.terminate() == 0
        with pytest.raises(grpc.RpcError):
            running.result(60)


def test_an_expansion_over_time_is_given_up_and_health_says_so(
    tmp_path: Path, slow_import: dict[str, str]
) -> None:
    flags = ("--allow-callables", "--timeout-secs=0.5", "--max-pending=2")
    with (
        serving(*flags, env=slow_import) as started,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        tried = [pool.submit(started.expand, request(SLOW)) for _ in range(3)]
        codes: list[Any] = []
        for attempt in tried:
            with pytest.raises(grpc.RpcError) as failed:
                attempt.result(60)
            codes.append(failed.value.code())
        assert sorted(code.name for code in codes) == [
            "DEADLINE_EXCEEDED",
            "DEADLINE_EXCEEDED",
            "RESOURCE_EXHAUSTED",
        ]
        assert health(started) == health_pb2.HealthCheckResponse.NOT_SERVING
        (tmp_path / "go").touch()
        deadline = time.monotonic() + 60
        while health(started) != health_pb2.HealthCheckResponse.SERVING:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert started.expand(request({"model": "m"})).error


def test_kill_during_an_expansion_and_start_again(
    tmp_path: Path, slow_import: dict[str, str]
) -> None:
    with serving("--allow-callables", env=slow_import, check_exit=False) as first:
        port = first.address.rpartition(":")[2]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            running = pool.submit(first.expand, request(SLOW))
            wait_for(tmp_path / "began")
            first.process.kill()
            with pytest.raises(grpc.RpcError) as failed:
                running.result(60)
    assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
    (tmp_path / "go").touch()
    with serving("--allow-callables", f"--port={port}", env=slow_import) as second:
        assert second.address == first.address
        assert not second.expand(request(SLOW)).error


# Clients in numbers, and bad ones


def test_200_connections_at_once(service: Service) -> None:
    host, port = service.address.split(":")
    with contextlib.ExitStack() as stack:
        for _ in range(200):  # half of an HTTP/2 greeting each, and then nothing
            half = stack.enter_context(socket.create_connection((host, int(port))))
            half.sendall(b"PRI * HTTP/2.0\r\n")
        channels = [
            stack.enter_context(grpc.insecure_channel(service.address, [("grpc.channel_id", i)]))
            for i in range(200)
        ]
        asked = health_pb2.HealthCheckRequest()
        answers = [
            health_pb2_grpc.HealthStub(channel).Check.future(asked, timeout=60)
            for channel in channels
        ]
        assert {answer.result().status for answer in answers} == {1}
        connected = psutil.Process(service.process.pid).net_connections("inet")
        established = [c for c in connected if c.status == psutil.CONN_ESTABLISHED]
        assert len(established) >= 300
        assert not service.expand(request()).error


def test_a_client_that_sends_slowly_keeps_nobody_waiting(service: Service) -> None:
    host, port = service.address.split(":")
    with socket.create_connection((host, int(port))) as slow:
        for byte in b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n":
            slow.sendall(bytes([byte]))
            assert health(service) == health_pb2.HealthCheckResponse.SERVING


def test_noise_is_hung_up_on(service: Service) -> None:
    host, port = service.address.split(":")
    for noise in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\x16\x03\x01" + bytes(512)):
        with socket.create_connection((host, int(port)), timeout=30) as client:
            client.sendall(noise)
            with contextlib.suppress(ConnectionResetError):
                while client.recv(4096):
                    pass
    assert not service.expand(request()).error


def test_expansions_wait_for_each_other_and_all_are_answered(service: Service) -> None:
    asked = request()
    threads = 16
    barrier = threading.Barrier(threads)

    def one() -> str:
        barrier.wait()
        return service.expand(asked).error

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        assert {f.result() for f in [pool.submit(one) for _ in range(threads)]} == {""}


# Staged files


def test_staged_files_reach_workers_and_nothing_else_does(tmp_path: Path) -> None:
    requirements = tmp_path / "reqs.txt"
    requirements.write_text("some-package==1\n")
    package = tmp_path / "own-1-py3-none-any.whl"
    package.write_bytes(os.urandom(3_000_000))
    settings = {
        "requirements_file": str(requirements),
        "extra_packages": (str(package),),
        "sdk_container_image": "example/worker:1",
    }
    with serving_here(**settings) as started, started.artifacts() as stub:
        response = started.expand(request())
        (name,) = {
            step.environment_id
            for step in response.components.transforms.values()
            if step.spec.urn == "beam:transform:pardo:v1"
        }
        environment = response.components.environments[name]
        assert environment.urn == "beam:env:docker:v1"
        assert b"example/worker:1" in environment.payload
        assert str(tmp_path).encode() not in environment.SerializeToString()
        resolved = stub.ResolveArtifacts(
            beam_artifact_api_pb2.ResolveArtifactsRequest(artifacts=environment.dependencies)
        )
        fetched: dict[str, bytes] = {}
        for artifact in resolved.replacements:
            role = beam_runner_api_pb2.ArtifactStagingToRolePayload.FromString(
                artifact.role_payload
            )
            parts = stub.GetArtifact(beam_artifact_api_pb2.GetArtifactRequest(artifact=artifact))
            fetched[role.staged_name] = b"".join(part.data for part in parts)
    assert fetched == {
        "requirements.txt": requirements.read_bytes(),
        package.name: package.read_bytes(),
        "extra_packages.txt": f"{package.name}\n".encode(),
    }


@pytest.mark.parametrize(
    ("kind", "given", "payload"),
    [
        ("EXTERNAL", "pool:50000", b"pool:50000"),
        ("PROCESS", "/opt/boot", b"/opt/boot"),
        ("LOOPBACK", None, b"127.0.0.1:"),
    ],
)
def test_worker_environments(kind: Any, given: str | None, payload: bytes) -> None:
    with serving_here(environment_type=kind, environment_config=given) as started:
        response = started.expand(request())
    (environment,) = (
        environment
        for name, environment in response.components.environments.items()
        if name.startswith("external_1")
    )
    assert environment.urn.split(":")[2] == {"LOOPBACK": "external"}.get(kind, kind.lower())
    assert payload in environment.payload


# TLS


def ask(address: str, ca: Path | None, pair: tuple[Path, Path] | None = None) -> str:
    """Asks for the transforms.

    Returns:
      The status, or OK.
    """
    credentials = grpc.ssl_channel_credentials(
        root_certificates=ca and ca.read_bytes(),
        private_key=pair and pair[1].read_bytes(),
        certificate_chain=pair and pair[0].read_bytes(),
    )
    with grpc.secure_channel(address, credentials) as channel:
        stub = beam_expansion_api_pb2_grpc.ExpansionServiceStub(channel)
        try:
            stub.DiscoverSchemaTransform(
                beam_expansion_api_pb2.DiscoverSchemaTransformRequest(), timeout=60
            )
        except grpc.RpcError as error:
            return error.code().name
        return "OK"


def test_mutual_tls_admits_known_clients_alone(tmp_path: Path) -> None:
    ours, others = Certificates(tmp_path / "ours"), Certificates(tmp_path / "others")
    with serving_here(**tls(ours.server, ours.ca)) as started:
        assert ask(started.address, ours.ca, ours.client) == "OK"
        assert ask(started.address, ours.ca) == "UNAVAILABLE"
        assert ask(started.address, ours.ca, others.client) == "UNAVAILABLE"
        expired = ours.issue(tmp_path / "expired", "client.example", expired=True)
        assert ask(started.address, ours.ca, expired) == "UNAVAILABLE"
        with pytest.raises(grpc.RpcError):
            started.discover()  # in plaintext
        assert ask(started.address, ours.ca, ours.client) == "OK"


def test_clients_refuse_wrong_servers(tmp_path: Path) -> None:
    ours, others = Certificates(tmp_path / "ours"), Certificates(tmp_path / "others")
    expired = ours.issue(tmp_path / "expired", expired=True)
    misnamed = ours.issue(tmp_path / "misnamed", "other.example")
    for pair, ca in ((ours.server, others.ca), (expired, ours.ca), (misnamed, ours.ca)):
        with serving_here(**tls(pair)) as started:
            assert ask(started.address, ca) == "UNAVAILABLE"


def test_a_key_of_another_certificate_is_said(tmp_path: Path) -> None:
    ours = Certificates(tmp_path / "ours")
    with (
        pytest.raises(SettingsError, match="or the certificate and key are unusable"),
        serving_here(**tls((ours.server[0], ours.client[1]))),
    ):
        pass


def test_plaintext_beyond_the_machine_warns(caplog: pytest.LogCaptureFixture) -> None:
    with serving_here(host="0.0.0.0", insecure=True):
        assert "plaintext beyond this machine" in caplog.text
