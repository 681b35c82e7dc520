"""Where workers run the transforms, and the worker pool for local runs."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import grpc.aio
from apache_beam.portability.api import (
    beam_fn_api_pb2,
    beam_fn_api_pb2_grpc,
    beam_runner_api_pb2,
)
from apache_beam.transforms import environments as beam_environments

from beam_llm_expansion.settings import Settings, is_loopback

_LOGGER = logging.getLogger(__name__)
_STOP_SECS = 10.0
# Its constructors are hidden from type checkers by a decorator.
environments: Any = beam_environments


def worker_environment(
    settings: Settings,
    artifacts: Sequence[beam_runner_api_pb2.ArtifactInformation],
    pool: str | None,
) -> beam_environments.Environment:
    """Gives the environment that expanded transforms ask for.

    Args:
      settings: The service's settings.
      artifacts: What workers install.
      pool: Address of our own worker pool, where there is one.
    """
    capabilities = environments.python_sdk_capabilities()
    match settings.environment_type:
        case "EXTERNAL" | "LOOPBACK":
            return environments.ExternalEnvironment(
                settings.environment_config or pool, capabilities=capabilities, artifacts=artifacts
            )
        case "PROCESS":
            return environments.ProcessEnvironment(
                settings.environment_config, capabilities=capabilities, artifacts=artifacts
            )
        case "DOCKER":
            return environments.DockerEnvironment(
                container_image=settings.sdk_container_image,
                capabilities=environments.python_sdk_docker_capabilities(),
                artifacts=artifacts,
            )


def offer_pool(
    environment: beam_runner_api_pb2.Environment, pool: str
) -> beam_runner_api_pb2.Environment:
    """Gives a choice of an environment and our own worker pool, which local runners take.

    Beam's own choice has no resource hints; here each part has them.
    """
    local = beam_runner_api_pb2.Environment()
    local.CopyFrom(environment)
    local.urn, payload = environments.ExternalEnvironment(pool).to_runner_api_parameter(None)
    local.payload = payload.SerializeToString()
    return environments.AnyOfEnvironment.create_proto([environment, local])


class WorkerPool(beam_fn_api_pb2_grpc.BeamFnExternalWorkerPoolServicer):
    """Starts a worker process for each that a runner on this machine asks for."""

    def __init__(self) -> None:
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        beam_fn_api_pb2_grpc.add_BeamFnExternalWorkerPoolServicer_to_server(self, self._server)

    async def start(self) -> str:
        """Listens on loopback.

        Returns:
          The address.
        """
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        """Ends every worker."""
        await self._server.stop(0)
        await asyncio.gather(*(self._end(worker) for worker in list(self._workers)))

    async def StartWorker(  # noqa: N802 - Beam's name
        self,
        request: beam_fn_api_pb2.StartWorkerRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> beam_fn_api_pb2.StartWorkerResponse:
        """Starts a worker for a runner on this machine."""
        del context
        control = request.control_endpoint.url
        if not is_loopback(control.rpartition(":")[0]):
            return beam_fn_api_pb2.StartWorkerResponse(
                error="this pool serves runners on its own machine alone"
            )
        if request.worker_id in self._workers:
            return beam_fn_api_pb2.StartWorkerResponse(error="there is a worker of this name")
        # It reads its standard input, and so learns of our end, however we end.
        self._workers[request.worker_id] = subprocess.Popen(
            [sys.executable, "-m", "beam_llm_expansion.worker", control, request.worker_id],
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
        )
        _LOGGER.info("worker started", extra={"fields": {"worker": request.worker_id}})
        return beam_fn_api_pb2.StartWorkerResponse()

    async def StopWorker(  # noqa: N802 - Beam's name
        self,
        request: beam_fn_api_pb2.StopWorkerRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> beam_fn_api_pb2.StopWorkerResponse:
        """Ends a worker."""
        del context
        await self._end(request.worker_id)
        return beam_fn_api_pb2.StopWorkerResponse()

    async def _end(self, name: str) -> None:
        worker = self._workers.pop(name, None)
        if worker is None:
            return
        if worker.stdin is not None:
            worker.stdin.close()
        worker.terminate()
        try:
            await asyncio.to_thread(worker.wait, _STOP_SECS)
        except subprocess.TimeoutExpired:
            worker.kill()
            await asyncio.to_thread(worker.wait)
        _LOGGER.info("worker ended", extra={"fields": {"worker": name}})
