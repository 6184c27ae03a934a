"""Simulated jobs: the model counts what is lost, the clock is virtual, and real writers commit in it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tools.goodput import model, ranks
from tools.goodput.agreement import TOLERANCE, agreement
from tools.goodput.kills import Lives
from tools.goodput.model import Way
from tools.goodput.traces import LARGEST, Failure, exponential, recorded
from tools.goodput.world import World

SAVED = Way("fulls", interval=10, stall=0.0, durable=0.5, restore=2.0)


def test_a_job_without_failures_pays_for_its_saves() -> None:
    found = model.simulated(SAVED, 1.0, 1000.0, [])
    assert (found.useful, found.again, found.goodput) == (1000, 0, 1.0)
    slow = model.simulated(Way("slow", 10, 5.0, 0.5, 2.0), 1.0, 1500.0, [])
    assert slow.useful == 1000
    assert slow.stalls == 500
    assert slow.goodput == pytest.approx(1000 / 1500)


@pytest.mark.parametrize(
    ("at", "durable", "kept"),
    [(105.2, 0.5, 100), (100.2, 0.5, 90), (100.7, 0.5, 100), (125.0, 20.0, 100), (9.0, 0.5, 0), (50.0, math.inf, 0)],
)
def test_a_failure_loses_what_is_not_durable(at: float, durable: float, kept: int) -> None:
    way = Way("fulls", 10, 0.0, durable, 2.0)
    found = model.simulated(way, 1.0, at, [Failure(at - 1e-9, 1, 4)])
    assert found.useful == kept
    assert found.again == int(at - 1e-9) - kept
    assert found.recovery == (2.0 if kept else 0.0)


def test_what_is_in_memory_survives_processes_but_not_machines() -> None:
    way = Way("replica", 100, 0.0, 0.5, 9.0, every=1, near_restore=1.0)
    software = model.simulated(way, 1.0, 150.5, [Failure(150.4, 0, 4)])
    assert (software.useful, software.recovery) == (150, 1.0)
    machine = model.simulated(way, 1.0, 150.5, [Failure(150.4, 1, 4)])
    assert (machine.useful, machine.recovery) == (100, 9.0)
    peers = Way("peers", 1, 0.0, math.inf, math.inf, every=1, near_restore=1.0, peers=True)
    assert model.simulated(peers, 1.0, 150.5, [Failure(150.4, 1, 4)]).useful == 150
    assert model.simulated(peers, 1.0, 150.5, [Failure(150.4, 3, 4)]).useful == 0, "a machine and its peer are gone"


def test_a_failure_while_restoring_begins_it_anew() -> None:
    way = Way("fulls", 10, 0.0, 0.0, 5.0)
    found = model.simulated(way, 1.0, 120.0, [Failure(100.5, 0, 1), Failure(103.5, 0, 1)], restart=1.0)
    assert found.recovery == pytest.approx(3.0 + 6.0)
    assert found.useful == 100 + int(120 - 109.5)
    assert found.failures == 2


def test_the_model_agrees_with_the_formula_of_the_paper() -> None:
    way = Way("fulls", 10, 0.3, 4.0, 3.0)
    failures = exponential(100_000.0, 8, 4000.0, seed=3)
    assert len(failures) == pytest.approx(200, rel=0.2)
    exact = model.simulated(way, 0.5, 100_000.0, failures).goodput
    assert model.formula(way, 0.5, 100_000.0, len(failures)) == pytest.approx(exact, rel=0.02)
    assert model.stalled(10, 1.0, 100.0, 4) == 15.0
    assert model.stalled(10, 1.0, 20.0, 4, own=0.2) == 0.2


def test_the_model_is_held_against_a_job_that_was_killed() -> None:
    """Two kills, by hand: 40 steps and all are durable; 76 more, 6 of them are lost; 75 more."""
    each, kills = [0.5] * (40 + 76 + 75), [20.2, 60.2]
    lives = Lives(100.0, useful=185, again=6, down=[2.0, 2.0], each=each, start=0.0)
    fulls = Way("fulls", interval=10, stall=0.1, durable=0.1, restore=1.0)
    found = agreement(lives, fulls, 0.49, kills)
    assert found.again == (6, 6)
    assert found.off < 0.01
    assert found.goodput[0] == pytest.approx(185 * 0.49 / 100)
    for wrong in (replace(fulls, interval=70), replace(fulls, durable=25.0), replace(fulls, durable=math.inf)):
        assert agreement(lives, wrong, 0.49, kills).off > TOLERANCE, wrong
    assert agreement(replace(lives, down=[9.0, 9.0]), fulls, 0.49, kills).off > TOLERANCE


def test_the_recorded_trace() -> None:
    failures = recorded()
    assert len(failures) == 46
    assert failures[0] == Failure(630.0, 20, 56)
    assert all(0 <= one.lost <= one.workers <= LARGEST for one in failures)
    scaled = recorded(21.5)
    assert scaled[0].at == pytest.approx(1.0)
    assert [one.at for one in failures] == sorted(one.at for one in failures)


def test_threads_take_turns_in_virtual_time() -> None:
    world, seen = World(), []

    def work(number: int) -> None:
        for _ in range(3):
            world.sleep(10.0 + number)
            seen.append((world.monotonic(), number, world.rank()))
        world.meet(2, lambda: seen.append((world.now, -1, None)))

    world.run([lambda: work(0), lambda: work(1)])
    assert seen == [(10, 0, 0), (11, 1, 1), (20, 0, 0), (22, 1, 1), (30, 0, 0), (33, 1, 1), (33, -1, None)]
    world.sleep(1e9)  # a thread of no world does not wait

    def fails() -> None:
        raise ValueError("it broke")

    with pytest.raises(ValueError, match="it broke"):
        world.run([fails, lambda: world.sleep(1.0)])


def test_real_writers_commit_in_virtual_time() -> None:
    two, eight = ranks.simulated(2, steps=3), ranks.simulated(8, steps=3)
    for found in (two, eight):
        assert found.equal
        assert found.phases["next"].seconds < 2
        assert found.phases["next"].requests == found.size + 5, "a segment each; rank 0's tree, slot and looks"
    sent = [one.phases["next"].calls - one.phases["next"].polls for one in (two, eight)]
    assert sent[1] < 8 / 2 * sent[0] * 1.2, "messages grow with the ranks"


def test_nothing_grows_faster_than_the_ranks() -> None:
    """In the first save, too: rank 0 must not ask a slow bucket once for each rank, while all ranks look for it."""
    slow = ranks.Costs(request=0.3)
    few, many = ranks.simulated(12, 1, slow), ranks.simulated(36, 1, slow)
    for name in ("open", "first"):
        for what in ("calls", "polls", "bytes_0", "requests"):
            growth = getattr(many.phases[name], what) / getattr(few.phases[name], what)
            assert growth < 36 / 12 * 1.2, (name, what, growth)
        assert many.phases[name].requests_0 == few.phases[name].requests_0, name
