"""A short run of the fuzzer; `python tests/expansion/fuzz.py` is the long one."""

from pathlib import Path

from fuzz import fuzz
from serving import serving


def test_mutated_requests_do_no_harm(tmp_path: Path) -> None:
    with serving("--log-level=ERROR") as service:
        outcomes = fuzz(service, 3_000, 7, tmp_path / "canary")
    assert sum(outcomes.values()) == 3_000
    assert outcomes["refused"] > 1_000
    assert outcomes["expanded"] > 20
