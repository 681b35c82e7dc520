"""What all tests share: real models, real runners, and a stand-in vLLM for faults and volume."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
STANDIN = Path(__file__).parent / "standin_vllm"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Fails what would be skipped, where everything that tests need is installed."""
    report = yield
    if (
        report.skipped
        and os.environ.get("BEAM_LLM_FAIL_ON_SKIP")
        and not hasattr(report, "wasxfail")
    ):
        report.outcome = "failed"
        report.longrepr = f"skipped, where nothing may be: {report.longrepr}"
    return report


@pytest.fixture(autouse=True, scope="session")
def _own_runtime_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps the tests' servers apart from those that the user runs."""
    directory = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(directory))
        yield


@pytest.fixture
def standin_env() -> dict[str, str]:
    """Variables under which `vllm serve` is a stand-in: for faults and volume."""
    return {"PYTHONPATH": str(STANDIN)}


@pytest.fixture(scope="session")
def tiny_model() -> str:
    """A random model of three million parameters, for mechanics."""
    from tiny_model import make_tiny_model

    return str(make_tiny_model(ROOT / ".cache/models/tiny"))


@pytest.fixture(scope="session")
def real_model() -> str:
    """SmolLM2-135M-Instruct."""
    path = ROOT / ".cache/models/smollm2-135m-instruct"
    if not (path / "config.json").exists():
        pytest.skip(f"no model in {path}: run `make setup`")
    return str(path)


@pytest.fixture(scope="session")
def prism() -> str:
    """Path of the Prism binary."""
    path = ROOT / ".cache/bin/prism"
    found = str(path) if path.exists() else shutil.which("prism")
    if found is None:
        pytest.skip("no Prism: it is built with Go, by `make setup`")
    return found
