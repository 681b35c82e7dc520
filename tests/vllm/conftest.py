import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from server_helpers import STANDIN, Holder, processes_with_marker, wait_nothing_left

from beam_llm.vllm.server import VLLMServer, VLLMServerSpec


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime directory of the test's own, of which nothing is left running afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="bl-"))  # pytest's would be long for a socket
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    try:
        yield directory
        wait_nothing_left(directory)
    finally:
        for process in processes_with_marker(directory):
            with contextlib.suppress(psutil.Error):
                process.kill()
        shutil.rmtree(directory)


@pytest.fixture
def standin(runtime: Path) -> Callable[..., VLLMServerSpec]:
    """Specs of stand-in servers; keyword arguments in capitals are their behaviours."""

    def spec(identifier: str = "standin", **settings: object) -> VLLMServerSpec:
        behaviours = {name: str(settings.pop(name)) for name in [*settings] if name.isupper()}
        env = {"PYTHONPATH": str(STANDIN), **behaviours}
        return VLLMServerSpec(identifier=identifier, **{"model": "m", "env": env, **settings})

    return spec


@pytest.fixture
def hold(runtime: Path) -> Iterator[Callable[[VLLMServerSpec], Holder]]:
    """Starts processes that hold a server, and ends them after the test."""
    holders: list[Holder] = []

    def start(spec: VLLMServerSpec) -> Holder:
        holders.append(Holder(spec))
        return holders[-1]

    try:
        yield start
    finally:
        for holder in holders:
            holder.close()


@pytest.fixture
def acquire(runtime: Path) -> Iterator[Callable[[VLLMServerSpec], VLLMServer]]:
    """Acquires servers in this process, and closes them after the test."""
    servers: list[VLLMServer] = []

    def start(spec: VLLMServerSpec) -> VLLMServer:
        servers.append(VLLMServer.acquire(spec))
        return servers[-1]

    try:
        yield start
    finally:
        for server in servers:
            server.close()
