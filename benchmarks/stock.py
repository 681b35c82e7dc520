"""Beam's own vLLM handler, pointed at a server that runs already.

Importing this imports vLLM, as Beam's module does.
"""

from typing import Any

from apache_beam.ml.inference import vllm_inference


class RunningServer:
    """What Beam's handler needs of a server of its own."""

    def __init__(self, port: int):
        self._port = port

    def get_server_port(self) -> int:
        """The port on loopback."""
        return self._port

    def check_connectivity(self) -> None:
        """Asked when a request fails; the failure itself is raised after it."""


class StockHandler(vllm_inference.VLLMCompletionsModelHandler):
    """Beam's handler: all of it but the start of the server."""

    def __init__(self, model_name: str, port: int, **batching: Any):
        super().__init__(model_name, **batching)
        self._port = port

    def load_model(self) -> Any:
        """Gives the running server."""
        return RunningServer(self._port)
