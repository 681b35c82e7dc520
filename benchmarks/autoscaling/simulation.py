"""A pool of workers that is sized by what they report, simulated second by second.

The runner is Dataflow's rule: ceil(backlog / reported) workers, where reported is the mean of
what the workers report, within bounds; without a report the pool stays as it is. Workers
take a while to start, and a new one knows nothing. The backlog is all that has arrived and
is not done.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from beam_llm.autoscaling import AutoscalingMetricConfig, CapacityEstimator


@dataclass(frozen=True)
class Server:
    """What one worker can do.

    A request takes ``base_secs + per_request_secs * running``: the more run, the longer.

    Attributes:
      slots: Most requests under way.
      base_secs: Time of a request alone [s].
      per_request_secs: What each other one adds [s].
      queues: Whether requests beyond the slots wait at the server, which then tells, or at
        the client.
    """

    slots: int = 16
    base_secs: float = 0.8
    per_request_secs: float = 0.05
    queues: bool = False

    def rate(self, running: float) -> float:
        """Completions [1/s] with so many under way."""
        return running / (self.base_secs + self.per_request_secs * running)

    @property
    def most(self) -> float:
        """Completions [1/s] of a full worker."""
        return self.rate(self.slots)


@dataclass(frozen=True)
class Scenario:
    """A load, and the pool's bounds.

    Attributes:
      name: In tables.
      load: Arrivals [1/s] at a time [s].
      initial: Messages there at the start.
      secs: How long it goes on [s].
      drain_secs: The target drain time [s].
      server: Of each worker.
      start_secs: How long a worker takes to start [s].
      decide_secs: Time between the runner's decisions [s].
      first: Workers at the start.
      most: The pool's upper bound.
      feed: What workers are given in all [1/s], however many there are: a slow step before,
        or few keys. What is held up there counts as backlog.
    """

    name: str
    load: Callable[[float], float]
    initial: float = 0
    secs: int = 3600
    drain_secs: float = 60.0
    server: Server = field(default_factory=Server)
    start_secs: int = 120
    decide_secs: int = 60
    first: int = 1
    most: int = 100
    feed: float = math.inf


@dataclass
class Outcome:
    """What became of a pool.

    Attributes:
      pool: Workers that were paid for, at each second.
      backlog: Messages at each second.
      done: Messages answered.
      reported: What the runner was told at each of its decisions [messages]; None if nothing.
    """

    pool: list[int] = field(default_factory=list)
    backlog: list[float] = field(default_factory=list)
    done: float = 0.0
    reported: list[float | None] = field(default_factory=list)

    @property
    def worker_hours(self) -> float:
        return sum(self.pool) / 3600

    @property
    def mean_wait_secs(self) -> float:
        """How long a message was there, in the mean, by Little's law [s]."""
        return sum(self.backlog) / max(1.0, self.done)

    @property
    def final(self) -> float:
        """The pool over the last tenth, in the mean."""
        last = self.pool[-len(self.pool) // 10 :]
        return sum(last) / len(last)


class _Worker:
    def __init__(self, estimator: CapacityEstimator | None, phase: int):
        self.estimator = estimator
        self.completed = 0.0
        self.held = 0.0
        self.phase = phase  # pools are not polled in step


Maker = Callable[[Scenario], CapacityEstimator]
_POLL_SECS = 5


def run(
    scenario: Scenario,
    make: Maker | None = None,
    *,
    fixed: int | None = None,
    oracle: bool = False,
    seed: int = 0,
) -> Outcome:
    """Plays a scenario.

    Args:
      scenario: What happens.
      make: Makes a worker's estimator.
      fixed: A pool of this size instead, from the beginning.
      oracle: Reports what a full worker can do, from the beginning.
      seed: Of the arrivals and of what a completion rate varies by.
    """
    rng = random.Random(seed)
    outcome = Outcome()

    def worker() -> _Worker:
        return _Worker(make(scenario) if make is not None else None, rng.randrange(_POLL_SECS))

    workers = [worker() for _ in range(fixed or scenario.first)]
    starting: list[int] = []  # when they will be there
    queue = scenario.initial
    server = scenario.server
    for now in range(scenario.secs):
        for _ in range(sum(1 for ready in starting if ready <= now)):
            workers.append(worker())
        starting = [ready for ready in starting if ready > now]
        queue += _poisson(rng, scenario.load(now))
        feed = scenario.feed
        rng.shuffle(workers)
        for i, one in enumerate(workers):
            room = 2 * server.slots - one.held if server.queues else server.slots - one.held
            given = min(room, queue, feed / (len(workers) - i))
            one.held += given
            queue -= given
            feed -= given
            running = min(server.slots, one.held)
            done = min(one.held, server.rate(running) * rng.uniform(0.9, 1.1))
            if one.estimator is not None and (now + one.phase) % _POLL_SECS == 0:
                # What a page shows: whole requests, at one moment.
                shown = min(server.slots, math.floor(running + rng.random()))
                waiting = math.floor(one.held - running) if server.queues else None
                one.estimator.observe(now, math.floor(one.completed), shown, waiting)
            one.held -= done
            one.completed += done
            outcome.done += done
        backlog = queue + sum(one.held for one in workers)
        if fixed is None and now % scenario.decide_secs == scenario.decide_secs - 1:
            said = [one.estimator.estimate() for one in workers if one.estimator is not None]
            known = [value for value in said if value is not None]
            reported = (
                server.most * scenario.drain_secs
                if oracle
                else sum(known) / len(known)
                if known
                else None
            )
            outcome.reported.append(reported)
            if reported is not None:
                wanted = min(scenario.most, max(1, math.ceil(backlog / reported)))
                while len(workers) + len(starting) > wanted and (starting or len(workers) > 1):
                    if starting:
                        starting.pop()
                    else:
                        queue += workers.pop().held  # asked again by another
                starting += [now + scenario.start_secs] * (wanted - len(workers) - len(starting))
        outcome.pool.append(len(workers) + len(starting))
        outcome.backlog.append(backlog)
    return outcome


def fewest(scenario: Scenario, seed: int = 0) -> int:
    """The smallest constant pool that would have done.

    At any moment of the second half it holds no more than it works off in the target drain
    time; or, where no pool does that, hardly more than the largest pool.
    """

    def held(size: int) -> float:
        backlog = run(scenario, fixed=size, seed=seed).backlog
        return max(backlog[len(backlog) // 2 :])

    least = held(scenario.most)
    for size in range(1, scenario.most):
        if held(size) <= max(size * scenario.server.most * scenario.drain_secs, 1.05 * least):
            return size
    return scenario.most


def specification_model(
    report: Callable[[float], float], steps: int, first: int = 5, most: int = 60
) -> list[int]:
    """The fluid model of the specification: 10/s a worker, 5/s offered, 60 always queued.

    Args:
      report: What a worker reports when it is asked for so many a second.
      steps: How many decisions.
      first: Workers at the start.
      most: The pool's upper bound.

    Returns:
      The pool, before each decision.
    """
    pool = [first]
    for _ in range(steps):
        pool.append(min(most, max(1, math.ceil(60 / report(5 / pool[-1]) - 1e-9))))
    return pool


def _poisson(rng: random.Random, mean: float) -> int:
    if mean <= 0:
        return 0
    if mean > 50:
        return max(0, round(rng.gauss(mean, math.sqrt(mean))))
    limit, count, product = math.exp(-mean), 0, rng.random()
    while product > limit:
        count += 1
        product *= rng.random()
    return count


def day(mean: float, period: float = 3600.0) -> Callable[[float], float]:
    """A load that rises and falls between 0 and twice its mean."""
    return lambda now: mean * (1 - math.cos(2 * math.pi * now / period))


def steps(*levels: tuple[float, float]) -> Callable[[float], float]:
    """A load by (from when [s], arrivals [1/s])."""
    return lambda now: [rate for since, rate in levels if since <= now][-1]


SCENARIOS: tuple[Scenario, ...] = (
    Scenario("steady 25/s", steps((0, 25)), initial=600),
    Scenario("bursts of 1,200 on 4/s", lambda now: 40 if now % 900 < 30 else 4, initial=600),
    Scenario("steps 5, 60, 5/s", steps((0, 5), (1200, 60), (2400, 5)), initial=600),
    Scenario("day, 0 to 60/s", day(30), secs=7200),
    Scenario("batch of 40,000", steps((0, 0)), initial=40_000, secs=1800),
    Scenario("25/s, queue at the server", steps((0, 25)), 600, server=Server(queues=True)),
    Scenario("25/s, time constant", steps((0, 25)), 600, server=Server(16, 1.6, 0.0)),
    Scenario("3/s, never full", steps((0, 3)), first=4),
    Scenario("held up: 20/s, 3,000 queued", steps((0, 20)), 3_000, feed=20),
    Scenario("held up: 5/s, 600 queued", steps((0, 5)), 600, feed=5),
    Scenario("held up at times, 25/s", steps((0, 25)), 600, feed=40, first=3),
)


def estimators() -> dict[str, Maker]:
    """The estimators that are compared, by name."""

    def named(name: str, known: bool = False) -> Maker:
        def make(scenario: Scenario) -> CapacityEstimator:
            return AutoscalingMetricConfig(
                estimator=name,
                target_drain_secs=scenario.drain_secs,
                interval_secs=_POLL_SECS,
                full_concurrency=scenario.server.slots if known else None,
            ).make_estimator()

        return make

    return {
        "plain rate": lambda scenario: PlainRate(scenario.drain_secs),
        "completion_rate": named("completion_rate"),
        "saturated, limit learned": named("saturated_completion_rate"),
        "saturated, limit known": named("saturated_completion_rate", known=True),
    }


class PlainRate:
    """Completions a second over the latest minute, times the drain time: what not to do."""

    def __init__(self, multiplier: float, window_secs: float = 60.0):
        self._multiplier = multiplier
        self._window_secs = window_secs
        self._samples: list[tuple[float, float]] = []

    def observe(
        self, time: float, completed_total: float, running: float, waiting: float | None = None
    ) -> None:
        self._samples.append((time, completed_total))
        self._samples = [s for s in self._samples if s[0] >= time - self._window_secs]

    def estimate(self) -> float | None:
        if not self._samples:
            return None
        (began, first), (ended, last) = self._samples[0], self._samples[-1]
        if ended == began or last == first:
            return None
        return max(1.0, (last - first) / (ended - began) * self._multiplier)
