"""Asks a service on this machine for its health: ``python -m beam_llm_expansion.health``.

For a container's health check. The address is the first argument, else what the service's
variables say: its port for health where there is one, else its port, in plaintext.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_TIMEOUT_SECS = 4.0


def main() -> int:
    """Asks.

    Returns:
      0 if it serves, else 1.
    """
    port = next(
        (
            os.environ[name]
            for name in ("BEAM_LLM_EXPANSION_HEALTH_PORT", "BEAM_LLM_EXPANSION_PORT")
            if name in os.environ
        ),
        "8097",
    )
    address = sys.argv[1] if len(sys.argv) > 1 else f"127.0.0.1:{port}"
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_SECS)
        except grpc.RpcError as error:
            print(f"{address}: {error.code().name}", file=sys.stderr)  # type: ignore[attr-defined]
            return 1
    print(f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}")
    return int(answer.status != health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    sys.exit(main())
