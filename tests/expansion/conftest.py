from collections.abc import Iterator

import pytest
from serving import Service, serving


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    """A service with the default limits, which the tests share."""
    with serving("--metrics-port=0", "--reflection") as started:
        yield started


@pytest.fixture(scope="session")
def with_workers() -> Iterator[Service]:
    """A service that runs workers here, with the stand-in in the place of vLLM."""
    with serving("--serve-loopback-worker") as started:
        yield started
