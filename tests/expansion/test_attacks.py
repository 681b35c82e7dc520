"""What a stranger may try. Each attack succeeds against Beam's own service, and fails here."""

import re
import shutil
import sys
from collections.abc import Callable, Iterator
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
    external_transforms_pb2,
    schema_pb2,
)
from apache_beam.typehints.row_type import RowTypeConstraint
from attacks import ATTACKS, Attack, benign
from serving import MINIMAL, Service, named_payload, request, serving, stock

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the canary module makes."""
    return tmp_path_factory.mktemp("canaries") / "imported"


@pytest.fixture(scope="module")
def ours(imported: Path) -> Iterator[Service]:
    env = {"PYTHONPATH": str(HERE), "CANARY": str(imported)}
    with serving(env=env) as started:
        yield started
        # After all of it, the same answer as ever.
        assert not started.expand(request()).error


@pytest.fixture(scope="module")
def beams(imported: Path) -> Iterator[Service]:
    # With the filter that a careful operator would set.
    env = {"PYTHONPATH": str(HERE), "CANARY": str(imported)}
    with stock("--fully_qualified_name_glob=beam_llm.*", env=env) as started:
        yield started


def made(canary: Path, imported: Path) -> bool:
    found = canary.exists() or imported.exists()
    for folder in (canary, imported):
        shutil.rmtree(folder, ignore_errors=True)
    return found


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_ours_executes_nothing(
    attack: Attack, ours: Service, tmp_path: Path, imported: Path
) -> None:
    response = ours.expand(attack.make(tmp_path / "canary"))
    assert not made(tmp_path / "canary", imported)
    if attack.refused is None:
        assert not response.error
        assert not response.components.transforms.keys() & {"other"}
    else:
        assert attack.refused in response.error
        assert not response.HasField("transform")


def test_beams_own_executes_all_of_them(beams: Service, tmp_path: Path, imported: Path) -> None:
    tried: dict[str, bool] = {}
    for number, (name, attack) in enumerate(ATTACKS.items()):
        canary = tmp_path / f"canary{number}"
        beams.expand(attack.make(canary))
        tried[name] = made(canary, imported)
    assert tried == dict.fromkeys(ATTACKS, True)


# What a client is handed


def local_file(path: Path) -> beam_runner_api_pb2.ArtifactInformation:
    return beam_runner_api_pb2.ArtifactInformation(
        type_urn="beam:artifact:type:file:v1",
        type_payload=beam_runner_api_pb2.ArtifactFilePayload(path=str(path)).SerializeToString(),
    )


def address(path: Path) -> beam_runner_api_pb2.ArtifactInformation:
    return beam_runner_api_pb2.ArtifactInformation(
        type_urn="beam:artifact:type:url:v1",
        type_payload=beam_runner_api_pb2.ArtifactUrlPayload(
            url=f"file://{path}"
        ).SerializeToString(),
    )


def deferred(path: Path) -> beam_runner_api_pb2.ArtifactInformation:
    return beam_runner_api_pb2.ArtifactInformation(
        type_urn="beam:artifact:type:deferred:v1",
        type_payload=beam_runner_api_pb2.DeferredArtifactPayload(key=str(path)).SerializeToString(),
    )


def fetched(service: Service, artifact: beam_runner_api_pb2.ArtifactInformation) -> bytes:
    asked = beam_artifact_api_pb2.GetArtifactRequest(artifact=artifact)
    with service.artifacts() as stub:
        return b"".join(part.data for part in stub.GetArtifact(asked, timeout=60))


@pytest.mark.parametrize("kind", [local_file, address, deferred])
def test_no_file_of_the_machine_is_handed_out(
    kind: Callable[[Path], beam_runner_api_pb2.ArtifactInformation],
    ours: Service,
    beams: Service,
    tmp_path: Path,
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"hush")
    if kind is not deferred:  # which Beam's own service does not know
        assert fetched(beams, kind(secret)) == b"hush"
    with pytest.raises(grpc.RpcError) as refused:
        fetched(ours, kind(secret))
    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
    resolve = beam_artifact_api_pb2.ResolveArtifactsRequest(artifacts=[kind(secret)])
    with ours.artifacts() as stub, pytest.raises(grpc.RpcError) as refused:
        stub.ResolveArtifacts(resolve, timeout=60)
    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED


def test_an_environment_that_names_a_command_is_not_handed_on(
    ours: Service, beams: Service
) -> None:
    asked = benign()
    (windowing,) = asked.components.windowing_strategies.values()
    command = asked.components.environments["command"]
    command.urn = "beam:env:process:v1"
    command.payload = beam_runner_api_pb2.ProcessPayload(command="/bin/evil").SerializeToString()
    windowing.environment_id = "command"
    assert "command" in beams.expand(asked).components.environments
    assert "'beam:env:process:v1' may name a command" in ours.expand(asked).error
    choice = asked.components.environments["choice"]
    choice.urn = "beam:env:anyof:v1"
    choice.payload = beam_runner_api_pb2.AnyOfEnvironmentPayload(
        environments=[command]
    ).SerializeToString()
    windowing.environment_id = "choice"
    assert "'beam:env:process:v1' may name a command" in ours.expand(asked).error
    # One that nothing needs is dropped.
    windowing.environment_id = ""
    response = ours.expand(asked)
    assert not response.error
    assert not response.components.environments.keys() & {"command", "choice"}


def overlong_model() -> bytes:
    """Arguments with a model of 100 bytes, of which seven are there."""
    kwargs = schema_pb2.Schema(
        fields=[
            schema_pb2.Field(name="model", type=schema_pb2.FieldType(atomic_type=schema_pb2.BYTES))
        ]
    )
    schema = schema_pb2.Schema(
        fields=[
            schema_pb2.Field(
                name="constructor", type=schema_pb2.FieldType(atomic_type=schema_pb2.STRING)
            ),
            schema_pb2.Field(
                name="kwargs",
                type=schema_pb2.FieldType(row_type=schema_pb2.RowType(schema=kwargs)),
            ),
        ]
    )
    name = b"beam_llm.VLLMCompletions"
    payload = b"\x02\x00" + bytes([len(name)]) + name + b"\x01\x00" + b"\x64too few"
    return external_transforms_pb2.ExternalConfigurationPayload(
        schema=schema, payload=payload
    ).SerializeToString()


def test_no_memory_of_the_process_is_handed_out(ours: Service, beams: Service) -> None:
    asked = benign()
    asked.transform.spec.payload = overlong_model()
    # Beam's compiled decoder reads on, past the end of the message; the answer quotes it.
    assert re.search(r"too few.{20}", beams.expand(asked).error)
    assert ours.expand(asked).error.startswith("the configuration is shorter than its schema says")


def test_errors_hold_no_traceback_and_no_path(ours: Service, beams: Service) -> None:
    asked = benign()
    asked.transform.spec.payload = named_payload(
        "beam_llm.VLLMCompletions", {**MINIMAL, "prompt": "{txt}"}
    )
    problem = "VLLMCompletions: prompt: the input has no field 'txt'; did you mean 'text'?"
    of_beam = beams.expand(asked).error
    assert "Traceback" in of_beam
    assert sys.prefix in of_beam
    of_ours = ours.expand(asked).error
    assert problem in of_beam
    assert of_ours.startswith(problem)
    assert "Traceback" not in of_ours
    assert "/" not in of_ours


def test_trouble_is_logged_under_the_id_that_the_client_gets(ours: Service) -> None:
    asked = benign()
    asked.transform.unique_name = "a/" * 2  # a name that Beam makes nothing of
    (windowing,) = asked.components.windowing_strategies.values()
    windowing.window_fn.urn = "beam:window_fn:fixed_windows:v1"
    windowing.window_fn.payload = b"\xff"
    with ours.channel() as channel:
        stub = beam_expansion_api_pb2_grpc.ExpansionServiceStub(channel)
        response, call = stub.Expand.with_call(asked, timeout=60)
    metadata = dict(call.trailing_metadata())
    request_id = metadata["beam-llm-request-id"]
    assert response.error == (
        f"the transform could not be expanded; the service's log says why (request {request_id})"
    )
    log = ours.log.read_text()
    assert f'request="{request_id}"' in log
    assert "Traceback" in log[log.index(request_id) :]


# Where it listens, and what it leaves


def listening(service: Service) -> set[str]:
    connections = psutil.Process(service.process.pid).net_connections("inet")
    # gRPC's sockets speak IPv6, with IPv4 addresses mapped into it.
    return {
        c.laddr.ip.removeprefix("::ffff:") for c in connections if c.status == psutil.CONN_LISTEN
    }


def test_it_listens_on_loopback_alone(ours: Service, beams: Service) -> None:
    assert listening(beams) & {"0.0.0.0", "::"}
    assert listening(ours) == {"127.0.0.1"}


def test_expansions_leave_no_files(tmp_path: Path) -> None:
    env = {"TMPDIR": str(tmp_path)}
    with stock("--fully_qualified_name_glob=beam_llm.*", env=env) as other:
        other.expand(benign())
    assert list(tmp_path.iterdir())
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    with serving(env=env) as started:
        for _ in range(3):
            assert not started.expand(benign()).error
        assert not list(tmp_path.iterdir())
        started.terminate()
    assert not list(tmp_path.iterdir())


def test_a_schema_of_one_client_does_not_meet_that_of_another(
    ours: Service, beams: Service
) -> None:
    """Schemas have ids; Beam takes the first that it sees of an id for all."""

    def of_id(asked: beam_expansion_api_pb2.ExpansionRequest) -> Any:
        (coder,) = (
            c for c in asked.components.coders.values() if c.spec.urn == "beam:coder:row:v1"
        )
        schema = schema_pb2.Schema.FromString(coder.spec.payload)
        schema.id = "shared"
        coder.spec.payload = schema.SerializeToString()
        return asked

    first = request(element_type=RowTypeConstraint.from_fields([("other", int)]))
    first.transform.spec.CopyFrom(benign().transform.spec)
    for service in (ours, beams):
        assert "the input has no field 'text'" in service.expand(of_id(first)).error
    assert not ours.expand(of_id(benign())).error
    assert "the input has no field 'text'" in beams.expand(of_id(benign())).error
