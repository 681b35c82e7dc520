"""Starts services, ours and Beam's own, and speaks to them as clients do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import apache_beam as beam
import grpc
import psutil
import trustme
from apache_beam.portability.api import (
    beam_artifact_api_pb2_grpc,
    beam_expansion_api_pb2,
    beam_expansion_api_pb2_grpc,
    beam_runner_api_pb2,
    external_transforms_pb2,
)
from apache_beam.runners.pipeline_context import PipelineContext
from apache_beam.transforms.external import ImplicitSchemaPayloadBuilder
from apache_beam.typehints.row_type import RowTypeConstraint

from beam_llm.registry import TRANSFORMS
from beam_llm_expansion.server import Server
from beam_llm_expansion.settings import Settings

SCHEMA_TRANSFORM = "beam:expansion:payload:schematransform:v1"
NAMED_TRANSFORM = "beam:transforms:python:fully_qualified_named"
CHAT = TRANSFORMS["VLLMChat"].urn
COMPLETIONS = TRANSFORMS["VLLMCompletions"].urn
MINIMAL = {"model": "m", "prompt": "{text}"}
#: A module whose import makes the folder that the variable CANARY names.
CANARY_MODULE = "expansion_canary"
STANDIN = Path(__file__).parent.parent / "standin_vllm"


class Service:
    """A running service.

    Attributes:
      address: Where it listens.
      process: Its process.
      log: The file with its log.
    """

    def __init__(self, address: str, process: Any, log: Path):
        self.address = address
        self.process = process
        self.log = log

    @contextlib.contextmanager
    def channel(self) -> Iterator[grpc.Channel]:
        options = [("grpc.max_receive_message_length", -1)]
        with grpc.insecure_channel(self.address, options) as channel:
            yield channel

    def expand(
        self, request: beam_expansion_api_pb2.ExpansionRequest, timeout: float = 120
    ) -> beam_expansion_api_pb2.ExpansionResponse:
        with self.channel() as channel:
            stub = beam_expansion_api_pb2_grpc.ExpansionServiceStub(channel)
            return stub.Expand(request, timeout=timeout, wait_for_ready=True)

    def discover(self) -> beam_expansion_api_pb2.DiscoverSchemaTransformResponse:
        with self.channel() as channel:
            stub = beam_expansion_api_pb2_grpc.ExpansionServiceStub(channel)
            return stub.DiscoverSchemaTransform(
                beam_expansion_api_pb2.DiscoverSchemaTransformRequest(), timeout=120
            )

    @contextlib.contextmanager
    def artifacts(self) -> Iterator[Any]:
        with self.channel() as channel:
            yield beam_artifact_api_pb2_grpc.ArtifactRetrievalServiceStub(channel)

    @property
    def metrics_address(self) -> str:
        match = re.search(r'serving metrics address="([^"]*)"', self.log.read_text())
        assert match, self.log.read_text()
        return match[1]

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextlib.contextmanager
def serving(
    *flags: str, env: Mapping[str, str] | None = None, check_exit: bool = True, **options: Any
) -> Iterator[Service]:
    """Runs our service, and sees that it ends well."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "beam_llm_expansion", "--port=0", *flags],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, **(env or {})},
                **options,
            )
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert address, log.read_text()
            yield Service(address, process, log)
            if check_exit and process.poll() is None:
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0, log.read_text()
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            process.stdout.close()
            if process.stdin is not None:
                process.stdin.close()


@contextlib.contextmanager
def stock(*flags: str, env: Mapping[str, str] | None = None) -> Iterator[Service]:
    """Runs Beam's own service, for comparison."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "apache_beam.runners.portability.expansion_service_main",
                    f"--port={port}",
                    *flags,
                ],
                stdout=stderr,
                stderr=stderr,
                text=True,
                env={**os.environ, **(env or {})},
            )
        try:
            address = f"127.0.0.1:{port}"
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline and process.poll() is None:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.05)
            yield Service(address, process, log)
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def serving_here(**settings: Any) -> Iterator[Service]:
    """Runs our service in this process, which is quicker."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    async def made() -> Server:
        return Server(Settings(port=0, grace_secs=1, **settings))

    try:
        server = run(made())
        try:
            yield Service(run(server.start()), psutil.Process(), Path())
        finally:
            run(server.stop())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class Certificates:
    """Certificates of a new authority, as files."""

    def __init__(self, folder: Path):
        folder.mkdir()
        self.authority = trustme.CA()
        self.server = self.issue(folder / "server")
        self.client = self.issue(folder / "client", "client.example")
        self.ca = folder / "ca.pem"
        self.authority.cert_pem.write_to_path(str(self.ca))

    def issue(self, name: Path, *hosts: str, expired: bool = False) -> tuple[Path, Path]:
        until = datetime.now(UTC) - timedelta(days=1) if expired else None
        made = self.authority.issue_cert(*(hosts or ("127.0.0.1", "localhost")), not_after=until)
        cert, key = name.with_suffix(".pem"), name.with_suffix(".key")
        cert.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        made.private_key_pem.write_to_path(str(key))
        return cert, key


def tls(pair: tuple[Path, Path], client_ca: Path | None = None) -> dict[str, Any]:
    return {
        "tls_cert": str(pair[0]),
        "tls_key": str(pair[1]),
        "tls_client_ca": client_ca and str(client_ca),
    }


def row_components(element_type: Any, **windowing: Any) -> tuple[Any, str]:
    """Components with one PCollection, as Beam's Python client writes them, and its id."""
    pipeline = beam.Pipeline()
    rows: Any = pipeline | "Rows" >> beam.Create([]).with_output_types(element_type)
    if windowing:
        rows = rows | "Window" >> beam.WindowInto(**windowing)
    rows.element_type = element_type
    context = PipelineContext()
    name = context.pcollections.get_id(rows)
    context.transforms.put_proto(
        "impulse_input",
        beam_runner_api_pb2.PTransform(
            unique_name="impulse_input",
            spec=beam_runner_api_pb2.FunctionSpec(urn="beam:transform:impulse:v1"),
            outputs={"out": name},
        ),
    )
    return context.to_runner_api(), name


TEXT_ROWS = RowTypeConstraint.from_fields([("text", str)])


def schema_payload(urn: str, config: Mapping[str, Any]) -> bytes:
    built = ImplicitSchemaPayloadBuilder(_as_rows(dict(config))).build()
    return external_transforms_pb2.SchemaTransformPayload(
        identifier=urn, configuration_schema=built.schema, configuration_row=built.payload
    ).SerializeToString()


def _as_rows(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: beam.Row(**_as_rows(value)) if isinstance(value, dict) else value
        for name, value in values.items()
    }


def request(
    config: Mapping[str, Any] | None = None,
    *,
    urn: str = COMPLETIONS,
    element_type: Any = TEXT_ROWS,
    **windowing: Any,
) -> beam_expansion_api_pb2.ExpansionRequest:
    """A request as Beam's Python client makes it."""
    components, name = row_components(element_type, **windowing)
    return beam_expansion_api_pb2.ExpansionRequest(
        components=components,
        namespace="external_1",
        transform=beam_runner_api_pb2.PTransform(
            unique_name="Ask",
            spec=beam_runner_api_pb2.FunctionSpec(
                urn=SCHEMA_TRANSFORM,
                payload=schema_payload(urn, MINIMAL if config is None else config),
            ),
            inputs={"input": name},
        ),
    )


def named_payload(constructor: str, kwargs: Mapping[str, Any], args: Any = None) -> bytes:
    """What a stock ``PythonExternalTransform`` sends."""
    values: dict[str, Any] = {
        "constructor": constructor,
        "kwargs": beam.Row(**_as_rows({**kwargs})),
    }
    if args is not None:
        values["args"] = args
    return ImplicitSchemaPayloadBuilder(values).payload()


def coder_id(components: beam_runner_api_pb2.Components, name: str) -> str:
    return components.pcollections[name].coder_id
