"""The service's life: ports, health, metrics, and a graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import prometheus_client
from apache_beam.portability.api import (
    beam_artifact_api_pb2,
    beam_artifact_api_pb2_grpc,
    beam_expansion_api_pb2,
    beam_expansion_api_pb2_grpc,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from beam_llm_expansion.artifacts import Artifacts
from beam_llm_expansion.metrics import Metrics
from beam_llm_expansion.service import ExpansionService
from beam_llm_expansion.settings import Settings, SettingsError
from beam_llm_expansion.workers import WorkerPool, worker_environment

_LOGGER = logging.getLogger("beam_llm_expansion")

_SERVICES = tuple(
    service.full_name
    for service in (
        beam_expansion_api_pb2.DESCRIPTOR.services_by_name["ExpansionService"],
        beam_artifact_api_pb2.DESCRIPTOR.services_by_name["ArtifactRetrievalService"],
    )
)
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Server:
    """The expansion service, its health and its metrics."""

    def __init__(self, settings: Settings):
        """Makes a server; nothing listens yet."""
        self._settings = settings
        self._health = HealthServicer()
        self._metrics = Metrics()
        self._pool: WorkerPool | None = None
        self._grpc = grpc.aio.server(options=_options(settings))
        self._probes: grpc.aio.Server | None = None
        self._service: ExpansionService | None = None
        self._metrics_server: Any = None
        self._updates: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Serves.

        Returns:
          The bound address.

        Raises:
          SettingsError: A port cannot be had, or a file cannot be used.
        """
        settings = self._settings
        artifacts = Artifacts(settings.requirements_file, settings.extra_packages)
        pool_address = None
        if settings.serve_loopback_worker or settings.environment_type == "LOOPBACK":
            self._pool = WorkerPool()
            pool_address = await self._pool.start()
        environment = worker_environment(settings, artifacts.named(), pool_address)
        offered = pool_address if settings.serve_loopback_worker else None
        loop = asyncio.get_running_loop()
        self._service = ExpansionService(
            settings, environment, offered, self._metrics, lambda stuck: self._stuck(loop, stuck)
        )
        beam_expansion_api_pb2_grpc.add_ExpansionServiceServicer_to_server(
            self._service, self._grpc
        )
        beam_artifact_api_pb2_grpc.add_ArtifactRetrievalServiceServicer_to_server(
            artifacts, self._grpc
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        if settings.reflection:
            from grpc_reflection.v1alpha import reflection

            names = (*_SERVICES, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
            reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), self._grpc)
        port = self._bind()
        address = _address(settings.host, port)
        if settings.metrics_port is not None:
            self._serve_metrics(settings.metrics_host, settings.metrics_port)
        if settings.health_port is not None:
            self._probes = grpc.aio.server(options=_options(settings))
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._probes)
            place = _address(settings.health_host, settings.health_port)
            try:
                bound = self._probes.add_insecure_port(place)
            except RuntimeError:
                raise SettingsError(f"expansion service: cannot listen on {place}") from None
            await self._probes.start()
            fields = {"address": _address(settings.health_host, bound)}
            _LOGGER.info("serving health", extra={"fields": fields})
        await self._grpc.start()
        await self._set_health(_SERVING)
        if settings.address_file is not None:
            _write(Path(settings.address_file), f"{address}\n")
        _LOGGER.info("serving", extra={"fields": {"address": address, "tls": self._has_tls}})
        return address

    async def stop(self) -> bool:
        """Refuses what is new, lets what runs finish within the grace, and leaves nothing.

        Returns:
          Whether an expansion is abandoned: its thread runs on.
        """
        _LOGGER.info("stopping", extra={"fields": {"grace_secs": self._settings.grace_secs}})
        await self._health.enter_graceful_shutdown()
        if self._settings.address_file is not None:
            Path(self._settings.address_file).unlink(missing_ok=True)
        await self._grpc.stop(self._settings.grace_secs)
        if self._probes is not None:
            await self._probes.stop(0)
        abandoned = self._service is not None and self._service.close()
        if self._pool is not None:
            await self._pool.stop()
        if self._metrics_server is not None:
            self._metrics_server.shutdown()
            self._metrics_server.server_close()
        return abandoned

    @property
    def _has_tls(self) -> bool:
        return self._settings.tls_cert is not None

    def _bind(self) -> int:
        settings = self._settings
        address = _address(settings.host, settings.port)
        try:
            if settings.tls_cert is None or settings.tls_key is None:
                if not settings.is_loopback:
                    _LOGGER.warning(
                        "plaintext beyond this machine: whoever reaches the port can ask for"
                        " expansions, and read and change what others ask",
                        extra={"fields": {"address": address}},
                    )
                return self._grpc.add_insecure_port(address)
            pair = (Path(settings.tls_key).read_bytes(), Path(settings.tls_cert).read_bytes())
            ca = None
            if settings.tls_client_ca is not None:
                ca = Path(settings.tls_client_ca).read_bytes()
            credentials = grpc.ssl_server_credentials(
                [pair], root_certificates=ca, require_client_auth=ca is not None
            )
            return self._grpc.add_secure_port(address, credentials)
        except (RuntimeError, ValueError) as error:
            del error  # gRPC's own words name its source files
            reason = "it is taken, or not of this machine" + (
                ", or the certificate and key are unusable" if self._has_tls else ""
            )
            raise SettingsError(
                f"expansion service: cannot listen on {address}: {reason}"
            ) from None

    def _serve_metrics(self, host: str, port: int) -> None:
        try:
            self._metrics_server, _ = prometheus_client.start_http_server(
                port, host, self._metrics.registry
            )
        except OSError as error:
            raise SettingsError(
                f"expansion service: cannot serve metrics on {host}:{port}: {error.strerror}"
            ) from None
        bound = self._metrics_server.server_port
        _LOGGER.info("serving metrics", extra={"fields": {"address": f"{host}:{bound}"}})

    async def _set_health(self, status: Any) -> None:
        for name in ("", *_SERVICES):
            await self._health.set(name, status)

    def _stuck(self, loop: asyncio.AbstractEventLoop, stuck: bool) -> None:
        if stuck:
            _LOGGER.error("an expansion does not end: not serving until it does")
        task = loop.create_task(self._set_health(_NOT_SERVING if stuck else _SERVING))
        self._updates.add(task)
        task.add_done_callback(self._updates.discard)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _options(settings: Settings) -> list[tuple[str, Any]]:
    idle = int(settings.max_connections_idle_secs * 1000)
    return [
        ("grpc.max_receive_message_length", settings.max_request_bytes),
        # The limit is for what arrives, and would not see what it unpacks to.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.max_concurrent_streams", 100),
        ("grpc.max_connection_idle_ms", idle),
        ("grpc.server_handshake_timeout_ms", 10_000),
        # A peer that is gone without a word is noticed, and forgotten.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        # Else a second service takes the port's connections in turn.
        ("grpc.so_reuseport", 0),
    ]


def _write(path: Path, text: str) -> None:
    """Writes a file so that a reader sees all of it or none."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        raise SettingsError(f"address_file: '{path}' cannot be written: {error.strerror}") from None


async def serve(settings: Settings) -> bool:
    """Serves until a signal, or the end of standard input, says to stop.

    Args:
      settings: The settings.

    Returns:
      Whether an expansion is abandoned: its thread runs on.
    """
    server = Server(settings)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if settings.exit_with_parent:
        threading.Thread(target=_wait_for_end, args=(loop, stop), daemon=True).start()
    try:
        print(await server.start(), flush=True)
        await stop.wait()
    finally:
        abandoned = await server.stop()
    return abandoned


def _wait_for_end(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    while os.read(sys.stdin.fileno(), 65_536):
        pass
    with contextlib.suppress(RuntimeError):  # the loop is gone
        loop.call_soon_threadsafe(stop.set)
