"""The schedule: bases by number, bounds kept, and an automatic interval close to the best fixed one."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import UsageError
from ckptstore.write.policy.delta_interval import DeltaSizes, Form, RestoreBound, Schedule, best_interval

FULL = 1000.0


def delta(gap: int, start: float = 0.5, slope: float = 0.03) -> float:
    return min(FULL, FULL * (start + slope * math.log2(gap)))


def simulate(schedule: Schedule, count: int, start: float = 0.5, slope: float = 0.03) -> tuple[float, float, int]:
    """Total bytes, most expensive restore in bytes, longest chain; checks every promise on the way."""
    costs: dict[int, float] = {}
    depths: dict[int, int] = {}
    bases: dict[int, int] = {}  # number -> checkpoint that is held in memory
    total = 0.0
    for checkpoint in range(count):
        decision = schedule.decide()
        if decision.base is None:
            nbytes, below, depth = FULL, 0.0, 0
        else:
            base = bases[decision.base]
            if decision.base != 0 or schedule.form == "anchor":
                assert decision.gap == checkpoint - base
            nbytes, below, depth = delta(decision.gap, start, slope), costs[base], depths[base] + 1
        number = schedule.written(decision, int(nbytes))
        for old in decision.forget:
            bases.pop(old, None)
        if decision.keep:
            bases[number] = checkpoint
        costs[checkpoint], depths[checkpoint] = below + nbytes, depth
        total += nbytes
        assert len(bases) <= (1 if schedule.form == "anchor" else max(1, schedule.current) + 1)
    return total, max(costs.values()), max(depths.values())


@pytest.mark.parametrize("form", ["anchor", "paper"])
@given(interval=st.integers(1, 12), times=st.floats(1.0, 6.0), count=st.integers(1, 80))
@settings(max_examples=40, deadline=None)
def test_fixed_intervals_keep_the_bound(form: Form, interval: int, times: float, count: int) -> None:
    schedule = Schedule(interval, form, RestoreBound(times=times))
    _, highest, _ = simulate(schedule, count)
    assert highest <= times * FULL * 1.05  # a delta may turn out larger than expected, by its drift


def test_depth_is_bounded() -> None:
    _, _, deepest = simulate(Schedule(1, "anchor", RestoreBound(times=None, depth=7)), 100)
    assert deepest == 7


def test_anchor_bases_are_those_of_the_definition() -> None:
    schedule = Schedule(4, "anchor", RestoreBound(times=None))
    found = []
    for number in range(13):
        decision = schedule.decide()
        schedule.written(decision, 100 if decision.base is None else 10)
        found.append(decision.base)
        if number:
            assert decision.base == 4 * ((number - 1) // 4)
    assert found[:6] == [None, 0, 0, 0, 0, 4]


def test_paper_bases_are_those_of_the_paper() -> None:
    schedule = Schedule(3, "paper", RestoreBound(times=None))
    for number in range(20):
        decision = schedule.decide()
        schedule.written(decision, 100 if decision.base is None else 10)
        assert decision.base == (None if number == 0 else max(0, number - 3))


@pytest.mark.parametrize("times", [2.0, 3.0, 5.0])
@pytest.mark.parametrize(("start", "slope"), [(0.5, 0.03), (0.65, 0.02), (0.2, 0.08), (0.4, 0.0)])
def test_auto_is_within_five_percent_of_the_best_fixed_interval(times: float, start: float, slope: float) -> None:
    bound = RestoreBound(times=times)
    auto, highest, _ = simulate(Schedule("auto", "anchor", bound), 200, start, slope)
    assert highest <= times * FULL * 1.05
    fixed = min(
        simulate(Schedule(interval, "anchor", bound), 200, start, slope)[0] for interval in (1, 2, 4, 8, 16, 32, 64)
    )
    assert auto <= 1.05 * fixed


def test_fulls_pay_when_deltas_do_not_shrink() -> None:
    total, _, deepest = simulate(Schedule("auto"), 30, start=0.99)
    assert deepest <= 1
    assert total <= 30 * FULL


def test_best_interval_is_the_best_of_a_brute_force() -> None:
    sizes = DeltaSizes(FULL, {gap: delta(gap) for gap in range(1, 200)})
    for times in (1.6, 2, 3, 4, 8):
        found = best_interval(sizes, times * FULL)
        means = {}
        for interval in range(1, 129):
            fits = min(50, int((times - 1) * FULL / delta(interval)))
            if fits:
                means[interval] = (FULL + fits * sum(delta(g) for g in range(1, interval + 1))) / (fits * interval + 1)
        assert means[found] <= min(means.values()) * 1.01


def test_sizes_interpolate_and_extrapolate() -> None:
    sizes = DeltaSizes(FULL, {1: 500.0, 4: 560.0})
    assert sizes.expect(2) == pytest.approx(530)
    assert sizes.expect(8) == pytest.approx(590)
    sizes.observe(4, 280.0)
    assert sizes.expect(1) < 500


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("3x", RestoreBound(3.0, None, None)),
        ("2GB", RestoreBound(None, 2 * 10**9, None)),
        ("1.5 GiB, 30s", RestoreBound(None, 3 << 29, 30.0)),
        ("none", RestoreBound(None, None, None)),
    ],
)
def test_bounds_are_parsed(text: str, bound: RestoreBound) -> None:
    assert RestoreBound.parse(text) == bound


@pytest.mark.parametrize("text", ["", "fast", "-1x", "3", "3parsecs", "infs", "nanx"])
def test_bad_bounds_say_what_is_meant(text: str) -> None:
    with pytest.raises(UsageError, match="give 3x"):
        RestoreBound.parse(text)


def test_bad_options() -> None:
    with pytest.raises(UsageError):
        Schedule(0)
    with pytest.raises(UsageError):
        Schedule(1, "spiral")  # type: ignore[arg-type]


@pytest.mark.parametrize("interval", ["auto", 1, 4])
@pytest.mark.parametrize("form", ["anchor", "paper"])
def test_deltas_are_tried_again_when_training_settles_down(interval: Any, form: Form) -> None:
    """The first steps of a run change everything; that must not mean fulls for ever."""
    schedule = Schedule(interval, form)
    wild, _, _ = simulate(schedule, 60, start=0.999)
    assert wild <= 60 * FULL
    calm = 0.0
    held: dict[int, int] = {}
    for checkpoint in range(100):
        decision = schedule.decide()
        nbytes = FULL if decision.base is None else delta(decision.gap, 0.3)
        assert decision.base is None or checkpoint < 20 or decision.base in held
        number = schedule.written(decision, int(nbytes))
        for old in decision.forget:
            held.pop(old, None)
        if decision.keep:
            held[number] = checkpoint
        calm += nbytes
    assert calm < 65 * FULL
