"""What workers install: the files that the operator staged, and no others."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio
from apache_beam.portability import common_urns
from apache_beam.portability.api import (
    beam_artifact_api_pb2,
    beam_artifact_api_pb2_grpc,
    beam_runner_api_pb2,
)
from google.protobuf.message import DecodeError

_CHUNK_BYTES = 1024 * 1024
_DEFERRED = common_urns.artifact_types.DEFERRED.urn


@dataclass(frozen=True)
class _Staged:
    """A file for workers.

    Attributes:
      name: What Beam's worker looks for.
      content: The bytes, or the file that the operator named.
    """

    name: str
    content: bytes | Path

    def digest(self) -> str:
        if isinstance(self.content, bytes):
            return hashlib.sha256(self.content).hexdigest()
        with self.content.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


class Artifacts(beam_artifact_api_pb2_grpc.ArtifactRetrievalServiceServicer):
    """Serves staged files by the digest that an expansion named.

    Nothing that a client sends is taken for a path, an address or a content.
    """

    def __init__(self, requirements_file: str | None, extra_packages: tuple[str, ...]):
        """Stages files.

        Args:
          requirements_file: Requirements for workers to install.
          extra_packages: Packages for workers to install.
        """
        staged: list[_Staged] = []
        if requirements_file is not None:
            staged.append(_Staged("requirements.txt", Path(requirements_file).read_bytes()))
        if extra_packages:
            names = [os.path.basename(package) for package in extra_packages]
            staged += [_Staged(n, Path(p)) for n, p in zip(names, extra_packages, strict=True)]
            # The list that Beam's worker goes by (`runners/portability/stager.py`).
            listed = "".join(f"{name}\n" for name in names)
            staged.append(_Staged("extra_packages.txt", listed.encode()))
        self._staged = {file.digest(): file for file in staged}

    def named(self) -> list[beam_runner_api_pb2.ArtifactInformation]:
        """Gives the staged files as an environment's dependencies."""
        return [
            beam_runner_api_pb2.ArtifactInformation(
                type_urn=_DEFERRED,
                type_payload=beam_runner_api_pb2.DeferredArtifactPayload(
                    key=digest
                ).SerializeToString(),
                role_urn=common_urns.artifact_roles.STAGING_TO.urn,
                role_payload=beam_runner_api_pb2.ArtifactStagingToRolePayload(
                    staged_name=file.name
                ).SerializeToString(),
            )
            for digest, file in self._staged.items()
        ]

    async def ResolveArtifacts(  # noqa: N802 - Beam's name
        self,
        request: beam_artifact_api_pb2.ResolveArtifactsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> beam_artifact_api_pb2.ResolveArtifactsResponse:
        """Gives the same artifacts back, if all are ours."""
        if not all(self._find(artifact) for artifact in request.artifacts):
            await _refuse(context)
        return beam_artifact_api_pb2.ResolveArtifactsResponse(replacements=request.artifacts)

    async def GetArtifact(  # noqa: N802 - Beam's name
        self,
        request: beam_artifact_api_pb2.GetArtifactRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[beam_artifact_api_pb2.GetArtifactResponse]:
        """Sends a staged file."""
        file = self._find(request.artifact)
        if file is None:
            await _refuse(context)
        if isinstance(file.content, bytes):
            yield beam_artifact_api_pb2.GetArtifactResponse(data=file.content)
            return
        with file.content.open("rb") as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                yield beam_artifact_api_pb2.GetArtifactResponse(data=chunk)

    def _find(self, artifact: beam_runner_api_pb2.ArtifactInformation) -> _Staged | None:
        if artifact.type_urn != _DEFERRED:
            return None
        try:
            payload = beam_runner_api_pb2.DeferredArtifactPayload.FromString(artifact.type_payload)
        except DecodeError:
            return None
        return self._staged.get(payload.key)


async def _refuse(context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
    await context.abort(
        grpc.StatusCode.PERMISSION_DENIED,
        "not an artifact of this service: it serves what its own expansions name, by their digest",
    )
