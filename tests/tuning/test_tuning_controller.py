"""The controller: traces of bandwidth and failures, and the actions that it must never take."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import UsageError
from ckptstore.tuning import Change, Configuration, Controller, Job, best
from tests.forms import short_or

JOB = Job(8.7e9, 2e9, mtbf=4 * 3600, iteration=0.5, load_full=5, merge_batch=0.15, replay_diff=0.02)


def excess(controller: Controller, truth: Job) -> float:
    """How much more than the best for `truth` the controller's configuration wastes."""
    model, now = truth.model(), controller.configuration
    target = best(model)
    return model.total(now.interval, now.batch) / model.total(target.interval, target.batch) - 1


class Simulation:
    """A run in simulated time: trains an interval, writes a full, fails when the trace says so, adapts."""

    def __init__(self, controller: Controller, seed: int = 0) -> None:
        self.controller = controller
        self.changes: list[Change] = []
        self.random = random.Random(seed)
        self.until_failure = math.inf

    def run(self, truth: Job, hours: float, noise: float, gap: Callable[[], float]) -> None:
        clock = 0.0
        self.until_failure = gap()
        while clock < hours * 3600:
            now = self.controller.configuration
            assert 1 <= now.batch <= now.interval
            left = now.interval * truth.iteration
            while self.until_failure < left:
                self.controller.ran(self.until_failure)
                self.controller.failed()
                clock, left, self.until_failure = clock + self.until_failure, left - self.until_failure, gap()
            self.controller.ran(left)
            clock, self.until_failure = clock + left, self.until_failure - left
            speed = truth.bandwidth * math.exp(self.random.uniform(-noise, noise))
            self.controller.wrote(truth.full_bytes, truth.full_bytes / speed)
            clock += truth.full_bytes / speed
            if change := self.controller.adapt():
                self.changes.append(change)


def test_it_starts_at_the_best_for_what_is_known() -> None:
    assert Controller(JOB).configuration == best(JOB.model())
    assert Controller(JOB).adapt() is None
    assert Controller(JOB, start=Configuration(7, 3)).configuration == Configuration(7, 3)


@pytest.mark.parametrize("bandwidth", [0.05, 0.3, 4, 30])
def test_a_changed_bandwidth_is_followed(bandwidth: float) -> None:
    truth = replace(JOB, bandwidth=JOB.bandwidth * bandwidth)
    simulation = Simulation(Controller(JOB))
    simulation.run(JOB, 100, 0.1, lambda: JOB.mtbf)
    assert simulation.changes == []
    simulation.run(truth, 200, 0.1, lambda: JOB.mtbf)
    assert simulation.changes
    assert excess(simulation.controller, truth) < 0.03
    settled = len(simulation.changes)
    assert settled <= 8
    simulation.run(truth, 200, 0.1, lambda: JOB.mtbf)
    assert len(simulation.changes) <= settled + 1  # it may have come to rest on the way, at the edge of its tolerance
    simulation.run(JOB, 200, 0.1, lambda: JOB.mtbf)  # and back
    assert excess(simulation.controller, JOB) < 0.03


@pytest.mark.parametrize("factor", [0.05, 0.25, 4, 20])
def test_a_changed_failure_rate_is_followed(factor: float) -> None:
    truth = replace(JOB, mtbf=JOB.mtbf * factor)
    simulation = Simulation(Controller(JOB))
    simulation.run(truth, 60 * truth.mtbf / 3600, 0.1, lambda: truth.mtbf)
    assert excess(simulation.controller, truth) < 0.03
    assert 1 <= len(simulation.changes) <= 12


def test_random_failures_at_random_bandwidth() -> None:
    """Poisson failures: the estimate of M keeps wandering, the waste stays near the best and changes stay rare."""
    simulation = Simulation(Controller(JOB), seed=3)
    rng = random.Random(4)
    seen: list[float] = []
    failures = 0

    def gap() -> float:
        nonlocal failures
        failures += 1
        seen.append(excess(simulation.controller, JOB))
        return rng.expovariate(1 / JOB.mtbf)

    simulation.run(JOB, 400 * JOB.mtbf / 3600, 0.3, gap)
    assert failures > 300
    assert sum(seen) / len(seen) < 0.03
    assert len(simulation.changes) < failures / 3


def test_a_quiet_run_raises_the_mtbf_without_a_failure() -> None:
    controller = Controller(JOB)
    for _ in range(10):
        controller.ran(10 * JOB.mtbf)
        controller.adapt()
    assert controller.job.mtbf > 10 * JOB.mtbf
    assert controller.configuration.interval > best(JOB.model()).interval


def test_a_crash_loop_keeps_a_configuration() -> None:
    controller = Controller(JOB)
    for _ in range(500):
        controller.failed()
        controller.adapt()
    assert controller.job.mtbf >= JOB.iteration
    assert 1 <= controller.configuration.batch <= controller.configuration.interval


FACTORS = st.floats(-1.0, 1.0)


@settings(deadline=None, max_examples=short_or(24, 60))
@given(st.floats(-6, 6), st.lists(FACTORS, max_size=60), st.sampled_from([0.01, 0.02, 0.1]))
def test_no_flapping(start: float, noise: list[float], hysteresis: float) -> None:
    """Once at rest, noise of the estimate within the factor that the module's docstring proves changes nothing."""
    job = replace(JOB, bandwidth=JOB.bandwidth * math.exp(start))
    controller = Controller(JOB, hysteresis=hysteresis, writes=1)
    controller.wrote(job.full_bytes, job.full_bytes / job.bandwidth)
    while controller.adapt():
        pass
    quiet = math.log((1 + hysteresis) / (1 + hysteresis / 4)) * 0.999
    for factor in noise:
        controller.wrote(job.full_bytes, job.full_bytes / job.bandwidth * math.exp(factor * quiet))
        assert controller.adapt() is None


@settings(deadline=None, max_examples=short_or(24, 60))
@given(st.lists(st.floats(-0.2, 0.2), min_size=1, max_size=60), st.floats(-6, 6))
def test_no_flapping_in_practice(noise: list[float], start: float) -> None:
    """At the default hysteresis writes that are 20% faster or slower than the mean never change it."""
    job = replace(JOB, bandwidth=JOB.bandwidth * math.exp(start))
    controller = Controller(job)
    for factor in noise:
        controller.wrote(job.full_bytes, job.full_bytes / job.bandwidth * math.exp(factor))
        assert controller.adapt() is None


CONFIGURATIONS = st.builds(lambda b, more: Configuration(b + more, b), st.integers(1, 3000), st.integers(0, 200_000))


@settings(deadline=None, max_examples=short_or(40, 100))
@given(CONFIGURATIONS, st.floats(-8, 8), st.floats(-6, 6))
def test_from_anywhere_it_arrives_in_few_steps_that_each_help(
    start: Configuration, bandwidth: float, mtbf: float
) -> None:
    job = replace(JOB, bandwidth=JOB.bandwidth * math.exp(bandwidth), mtbf=JOB.mtbf * math.exp(mtbf))
    controller = Controller(job, start=start)
    model, target = job.model(), best(job.model())
    changes = list(itertools.takewhile(lambda change: change is not None, (controller.adapt() for _ in range(100))))
    factor = max(
        start.interval / target.interval,
        target.interval / start.interval,
        start.batch / target.batch,
        target.batch / start.batch,
    )
    assert len(changes) <= math.log2(factor) * 1.3 + 2
    assert excess(controller, job) <= 0.02
    for change in changes:
        assert change is not None
        assert 1 <= change.after.batch <= change.after.interval
        assert change.target == target
        for before, after in (
            (change.before.interval, change.after.interval),
            (change.before.batch, change.after.batch),
        ):
            assert max(before / after, after / before) <= 2 + 1 / min(before, after)  # rounding to integers
        assert model.total(change.after.interval, change.after.batch) < model.total(
            change.before.interval, change.before.batch
        )
        assert change.saves > 0


EVENTS = st.lists(
    st.tuples(st.just("wrote"), st.floats(1e6, 1e11))
    | st.tuples(st.just("ran"), st.floats(0, 1e6))
    | st.tuples(st.just("failed"), st.none()),
    max_size=80,
)


@settings(deadline=None)
@given(EVENTS)
def test_any_input_gives_a_valid_configuration(events: list[tuple[str, float | None]]) -> None:
    controller = Controller(JOB)
    for kind, value in events:
        if kind == "wrote":
            assert value is not None
            controller.wrote(JOB.full_bytes, JOB.full_bytes / value)
        elif kind == "ran":
            assert value is not None
            controller.ran(value)
        else:
            controller.failed()
        before = controller.configuration
        change = controller.adapt()
        now = controller.configuration
        assert 1 <= now.batch <= now.interval
        assert (change is None) == (now == before)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Controller(JOB, hysteresis=0),
        lambda: Controller(JOB, writes=0),
        lambda: Controller(JOB, start=Configuration(2, 3)),
        lambda: Controller(JOB).wrote(0, 1),
        lambda: Controller(JOB).wrote(1, math.nan),
        lambda: Controller(JOB).ran(-1),
    ],
)
def test_nonsense_is_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(UsageError):
        wrong()
