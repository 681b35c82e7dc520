"""What the tests of the Java client share: the built classes, and services to run against."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JAVA = ROOT / "expansion_service/java"
sys.path += [str(ROOT / "tests/expansion"), str(JAVA / "example")]

from driver import Builders  # noqa: E402
from run_local import job_service  # noqa: E402
from serving import STANDIN, Service, serving  # noqa: E402


@pytest.fixture(scope="session")
def jdk() -> None:
    """Java 17 or newer, and Maven."""
    for tool in ("java", "javac", "mvn"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} here: the Java client needs JDK 17 and Maven")
    release = subprocess.run(
        ["javac", "-version"], capture_output=True, text=True, check=True
    ).stdout.split()[-1]
    if int(release.partition(".")[0]) < 17:
        pytest.skip(f"JDK {release} here: the Java client's tests need JDK 17")


@pytest.fixture(scope="session")
def java_build(jdk: None) -> Path:
    """The folder of the Maven modules, built and with their unit tests run."""
    done = subprocess.run(
        ["mvn", "--batch-mode", "--quiet", "--no-transfer-progress", "package"],
        cwd=JAVA,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return JAVA


@pytest.fixture(scope="module")
def builders(java_build: Path) -> Iterator[Builders]:
    """The Java builders, in one process."""
    with Builders(java_build) as found:
        yield found


@pytest.fixture(scope="session")
def local_service() -> Iterator[Service]:
    """An expansion service that runs workers here, with the stand-in in the place of vLLM."""
    path = os.pathsep.join(filter(None, (str(STANDIN), os.environ.get("PYTHONPATH"))))
    with serving("--environment-type=LOOPBACK", env={"PYTHONPATH": path}) as started:
        yield started


@pytest.fixture(scope="session")
def prism_jobs(prism: str) -> Iterator[str]:
    """The address of a running Prism."""
    with job_service(f"prism={prism}") as address:
        yield address
