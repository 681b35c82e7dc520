"""The estimators in the loop that they are for: a pool sized by what its workers report."""

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.autoscaling.simulation import (
    SCENARIOS,
    PlainRate,
    Scenario,
    Server,
    estimators,
    fewest,
    run,
    specification_model,
)

from beam_llm.autoscaling import AutoscalingMetricConfig

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
MAKERS = estimators()
DEFAULT = MAKERS["saturated, limit known"]  # what the vLLM handlers and transforms use


def scenario(name: str, **changes: float) -> Scenario:
    return dataclasses.replace(BY_NAME[name], **changes)


def test_the_default_estimator_is_the_one_that_the_evidence_is_for() -> None:
    assert AutoscalingMetricConfig().estimator == "saturated_completion_rate"


@pytest.mark.parametrize(
    "name", ["steady 25/s", "steps 5, 60, 5/s", "25/s, queue at the server", "25/s, time constant"]
)
@pytest.mark.parametrize("seed", [1, 2])
def test_with_work_enough_the_pool_is_that_of_perfect_knowledge(name: str, seed: int) -> None:
    played = scenario(name, secs=2400)
    perfect = run(played, oracle=True, seed=seed)
    found = run(played, DEFAULT, seed=seed)
    assert found.worker_hours == pytest.approx(perfect.worker_hours, rel=0.15)
    assert found.mean_wait_secs == pytest.approx(perfect.mean_wait_secs, rel=0.2)


@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_held_up_elsewhere_does_not_grow_the_pool_without_end(seed: int) -> None:
    """Workers starve while a backlog stands: more of them would help nobody."""
    played = scenario("held up: 20/s, 3,000 queued", secs=2400, most=40)
    perfect = run(played, oracle=True, seed=seed)
    found = run(played, DEFAULT, seed=seed)
    assert found.worker_hours <= 1.1 * perfect.worker_hours
    assert found.final <= 3 * fewest(played, seed)
    for name in ("plain rate", "completion_rate"):
        walked = run(played, MAKERS[name], seed=seed)
        assert walked.final > 4 * found.final, name


def test_the_target_drain_time_is_what_a_standing_load_waits() -> None:
    for drain_secs in (60.0, 240.0):
        found = run(scenario("steady 25/s", drain_secs=drain_secs), DEFAULT)
        assert found.mean_wait_secs == pytest.approx(drain_secs, rel=0.25)


def test_the_fluid_model_of_the_specification() -> None:
    """10/s a worker, 5/s offered, 60 always queued: what each estimator walks to."""
    server = Server()
    assert server.most == pytest.approx(10)

    def asked(rate: float) -> float:
        """Requests under way when so many a second are asked."""
        return rate * server.base_secs / (1 - rate * server.per_request_secs)

    def pool_of(make: object) -> list[int]:
        estimator = make(Scenario("fluid", lambda _: 5, drain_secs=5.0))
        now, done = 0.0, 0.0

        def report(rate: float) -> float:
            nonlocal now, done
            for _ in range(120):
                now, done = now + 5, done + 5 * rate
                estimator.observe(now, done, asked(rate))
            return estimator.estimate()

        report(server.most)  # there was work once
        return specification_model(report, steps=4)

    def plain(_: Scenario) -> PlainRate:
        return PlainRate(5.0)

    assert pool_of(plain) == [5, 12, 29, 60, 60]
    assert pool_of(DEFAULT) == [5, 2, 2, 2, 2]  # of which one would do
    assert pool_of(MAKERS["saturated, limit learned"]) == [5, 2, 2, 2, 2]
    softened = pool_of(MAKERS["completion_rate"])
    assert softened == sorted(softened)
    assert softened[-1] > 30
