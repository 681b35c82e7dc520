"""Expansion from Beam's TypeScript SDK."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from serving import Service

HERE = Path(__file__).parent
MODULES = HERE.parent.parent / ".cache/npm/node_modules"


def test_the_typescript_sdk_expands_by_urn_and_by_class_name(service: Service) -> None:
    node = shutil.which("node")
    if node is None or not (MODULES / "apache-beam").exists():
        pytest.skip("no Node.js, or no apache-beam in .cache/npm: `make setup` installs it")
    done = subprocess.run(
        [node, str(HERE / "client.js"), service.address],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NODE_PATH": str(MODULES)},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"coders": ["beam:coder:row:v1"] * 2, "annotated": 2}
