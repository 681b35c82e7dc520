"""What the tests of the Java client share: the built classes, and services to run against."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JAVA = ROOT / "expansion_service/java"


def maven(*goals: str) -> None:
    """Runs Maven on all modules."""
    done = subprocess.run(
        ["mvn", "--batch-mode", "--quiet", "--no-transfer-progress", *goals],
        cwd=JAVA,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


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
    """The folder of the Maven modules, compiled, with the unit tests run."""
    maven("package")
    return JAVA
