"""The schedule at its limits: bounds that are met exactly, gaps that were measured, first and last of a cycle."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ckptstore.errors import UsageError
from ckptstore.write.policy.delta_interval import (
    DEPTH_LIMIT,
    Decision,
    DeltaSizes,
    Form,
    RestoreBound,
    Schedule,
    best_interval,
)

FREE = RestoreBound(times=None)
"""No bound but the depth."""


@pytest.mark.parametrize("text", ["0x", "0s", "0GB", "-0s", "1e999x", "1e999s", "1x,0s", "none,2"])
def test_bounds_are_positive_and_finite(text: str) -> None:
    with pytest.raises(UsageError, match="give 3x"):
        RestoreBound.parse(text)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("3b", 3),
        ("3KB", 3000),
        ("3mb", 3 * 10**6),
        ("3GB", 3 * 10**9),
        ("3TB", 3 * 10**12),
        ("3KiB", 3 << 10),
        ("3MiB", 3 << 20),
        ("3gib", 3 << 30),
        ("3TiB", 3 << 40),
        ("none, 2.5kb", 2500),
    ],
)
def test_bytes_have_units(text: str, nbytes: int) -> None:
    assert RestoreBound.parse(text) == RestoreBound(None, nbytes, None)


def test_by_default_a_restore_costs_four_fulls_and_fifty_deltas() -> None:
    assert RestoreBound() == RestoreBound(4.0, None, None, 50)
    assert DEPTH_LIMIT == 50


def test_the_tightest_bound_counts() -> None:
    assert RestoreBound(None).limit(1000.0, 10.0) == math.inf
    assert RestoreBound(3.0).limit(1000.0, None) == 3000.0
    assert RestoreBound(None, nbytes=1500).limit(1000.0, None) == 1500.0
    assert RestoreBound(None, seconds=30.0).limit(1000.0, 10.0) == 300.0
    assert RestoreBound(None, seconds=30.0).limit(1000.0, None) == math.inf  # nothing is measured yet
    assert RestoreBound(None, seconds=30.0).limit(1000.0, 0.0) == math.inf
    assert RestoreBound(3.0, 2900, 30.0).limit(1000.0, 100.0) == 2900.0
    assert RestoreBound(3.0, 2900, 30.0).limit(1000.0, 90.0) == 2700.0
    assert RestoreBound(2.5, 2900, 30.0).limit(1000.0, 90.0) == 2500.0


def test_sizes_of_gaps_that_were_measured_are_what_was_measured() -> None:
    assert DeltaSizes(1000.0).expect(3) == pytest.approx(700.0)
    sizes = DeltaSizes(1000.0, {2: 500.0, 8: 620.0, 16: 600.0})
    assert [sizes.expect(gap) for gap in (1, 2, 4, 8, 16)] == pytest.approx([500, 500, 560, 620, 600])
    assert sizes.expect(64) == 600.0  # smaller than at half the gap: it does not continue to fall
    rising = DeltaSizes(1000.0, {2: 500.0, 4: 530.0, 8: 600.0})
    assert rising.expect(32) == pytest.approx(740.0)  # the slope of the last octave
    assert rising.expect(1 << 20) == 1000.0  # never more than a full
    one = DeltaSizes(1000.0, {4: 500.0})
    assert one.expect(16) == pytest.approx(560.0)  # before anything else is known
    near = DeltaSizes(1000.0, {5: 400.0, 6: 500.0})
    assert near.expect(12) == pytest.approx(530.0)  # nothing is known an octave below: as if one were


def test_a_gap_that_is_measured_again_moves_all() -> None:
    sizes = DeltaSizes(1000.0)
    sizes.observe(2, 500.0)
    sizes.observe(4, 600.0)
    assert sizes.sizes == {2: 500.0, 4: 600.0}
    sizes.observe(2, 250.0)
    assert sizes.sizes[2] == pytest.approx(500 * 0.5**0.3)
    assert sizes.sizes[4] == pytest.approx(600 * 0.5**0.3)


def test_of_long_gaps_one_in_each_octave_is_known() -> None:
    schedule = Schedule(1 << 30)
    run(schedule, 3000)
    assert schedule.sizes is not None
    assert sorted(schedule.sizes.sizes)[126:] == [127, 128, 256, 512, 1024, 2048]
    decision = schedule.decide()
    assert (decision.base, decision.gap, decision.keep) == (0, 3000, False)


def test_the_best_interval_is_the_cheapest_that_fits() -> None:
    flat = DeltaSizes(1000.0, {1: 500.0, 128: 500.0})
    # Chains of one delta at most: the longer the cycle the better, until fulls are as rare as possible.
    assert best_interval(flat, 1500.0) == 128
    assert best_interval(flat, 1499.0) == 0
    assert best_interval(flat, 1500.0, depth=0) == 0
    assert best_interval(flat, math.inf, depth=1) == 128
    dear = DeltaSizes(1000.0, {1: 100.0, 2: 900.0, 128: 900.0})
    assert best_interval(dear, math.inf) == 1
    assert best_interval(dear, 1100.0) == best_interval(dear, 1100.0, form="paper") == 1
    assert best_interval(dear, 1099.0) == 0
    assert best_interval(DeltaSizes(1000.0, {1: 1000.0, 128: 1000.0}), math.inf) == 0


@pytest.mark.parametrize("interval", [0, -1, 1.0, True, "3", None])
def test_an_interval_is_a_number_from_one(interval: Any) -> None:
    with pytest.raises(UsageError, match="interval"):
        Schedule(interval)
    assert Schedule(1).current == 1
    assert Schedule().current == 4


def run(schedule: Schedule, count: int, delta: int = 100) -> list[Decision]:
    found = []
    for _ in range(count):
        decision = schedule.decide()
        found.append(decision)
        schedule.written(decision, 1000 if decision.base is None else delta)
    return found


def test_a_cycle_of_anchors() -> None:
    found = run(Schedule(3, "anchor", FREE), 7)
    assert found == [
        Decision(None, 0, True, ()),
        Decision(0, 1, False, ()),
        Decision(0, 2, False, ()),
        Decision(0, 3, True, (0,)),
        Decision(3, 1, False, ()),
        Decision(3, 2, False, ()),
        Decision(3, 3, True, (3,)),
    ]


def test_a_cycle_of_the_paper() -> None:
    found = run(Schedule(2, "paper", FREE), 6)
    assert found == [
        Decision(None, 0, True, ()),
        Decision(0, 1, True, ()),
        Decision(0, 2, True, (0,)),
        Decision(1, 2, True, (1,)),
        Decision(2, 2, True, (2,)),
        Decision(3, 2, True, (3,)),
    ]


@pytest.mark.parametrize("form", ["anchor", "paper"])
def test_a_chain_has_as_many_deltas_as_it_may(form: Form) -> None:
    found = run(Schedule(1, form, RestoreBound(None, depth=3)), 9)
    assert [decision.base is None for decision in found] == [True, False, False, False] * 2 + [True]
    assert run(Schedule(1, form, RestoreBound(None, depth=0)), 3) == [
        Decision(None, 0, True, ()),
        Decision(None, 0, True, (0,)),
        Decision(None, 0, True, (0,)),
    ]


def test_a_chain_may_cost_exactly_its_bound() -> None:
    for nbytes, deltas in ((1700, 1), (1699, 0)):  # 700 are expected of a delta before one was written
        schedule = Schedule(1, "anchor", RestoreBound(None, nbytes=nbytes))
        assert sum(decision.base is not None for decision in run(schedule, 2)) == deltas
    schedule = Schedule(1, "anchor", RestoreBound(None, seconds=20.0), rate=100.0)  # 2,000 bytes
    assert [decision.base is None for decision in run(schedule, 9, delta=500)] == [True, False, False] * 3


def test_deltas_that_do_not_pay_are_tried_again_after_sixteen_fulls() -> None:
    schedule = Schedule(1, "anchor", FREE)
    found = run(schedule, 40, delta=980)
    assert found[1] == Decision(0, 1, True, (0,))  # not known yet
    assert [place for place, decision in enumerate(found) if decision.base is not None] == [1, 18, 35]
    assert found[18] == Decision(0, 1, False, (0,))  # no checkpoint builds on it
    cheap = Schedule(1, "anchor", FREE)
    assert sum(decision.base is None for decision in run(cheap, 40, delta=979)) == 1


def test_a_restart_begins_with_a_full_and_keeps_what_was_learned() -> None:
    schedule = Schedule(2, "anchor", FREE)
    assert schedule.sizes is None
    run(schedule, 4)
    sizes = schedule.sizes
    assert sizes is not None
    assert sizes.sizes == pytest.approx({1: 100.0, 2: 100.0})
    schedule.restart()
    assert schedule.decide() == Decision(None, 0, True, ())
    assert schedule.sizes is sizes
    assert run(schedule, 2)[1] == Decision(0, 1, False, ())


def written(schedule: Schedule) -> int:
    decision = schedule.decide()
    return schedule.written(decision, 1000 if decision.base is None else 100)


def test_numbers_count_from_the_full() -> None:
    schedule = Schedule(5, "anchor", FREE)
    assert [written(schedule) for _ in range(4)] == [0, 1, 2, 3]
    schedule.restart()
    assert [written(schedule) for _ in range(3)] == [0, 1, 2]


def test_only_an_automatic_interval_is_chosen_again() -> None:
    bound = RestoreBound(None, depth=1)
    fixed = Schedule(3, "anchor", bound)
    run(fixed, 2)
    fixed.restart()
    run(fixed, 6)
    assert fixed.current == 3
    free = Schedule("auto", "anchor", bound)
    run(free, 2)
    assert free.current == 4
    free.restart()
    run(free, 1)
    assert free.sizes is not None
    assert free.current == best_interval(free.sizes, math.inf, depth=1) > 4
