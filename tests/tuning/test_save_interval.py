"""PCcheck's model of concurrent saves, against simulated runs."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import UsageError
from ckptstore.host.arenas import LEAST
from ckptstore.tuning import Limits, Setting, Timing, best_setting, least_interval, recovery_bound, slowdown
from ckptstore.tuning.save_interval import TOLERANCE, equation_3, fits, host_bytes, most_in_flight, writer_memory

SECONDS = st.floats(0.001, 100)
PLACES = st.integers(1, 6)


def timing(write: float, in_flight: int = 1, loss: float = 0.0, threads: int = 1) -> Timing:
    return Timing(Setting(in_flight, threads, 64 << 20), write, loss)


def simulated(one: Timing, interval: int, iteration: float, saves: int) -> tuple[float, float]:
    """(seconds of the loop over those without saves, iterations that a failure costs at most), event by event."""
    clock, begun, worst = 0.0, [], 0.0
    for save in range(saves):
        clock += interval * iteration
        if save >= one.setting.in_flight:
            clock = max(clock, begun[save - one.setting.in_flight] + one.write)
        begun.append(clock)
        clock += one.loss
    # Just before save k is durable, the newest checkpoint is k - 1 of step k f.
    for number, (_, start) in enumerate(pairwise(begun)):
        durable, k = start + one.write, number + 1
        done = sum(
            min(max(0.0, (durable - b - one.loss) / iteration), interval)
            for b in begun[k : k + one.setting.in_flight + 1]
        )
        worst = max(worst, interval + done)
    return clock / (saves * interval * iteration), worst


@settings(deadline=None)
@given(SECONDS, PLACES, st.floats(0.001, 10), st.integers(1, 50), st.floats(0, 1))
def test_the_slowdown_is_that_of_a_simulated_run(
    write: float, places: int, iteration: float, interval: int, share: float
) -> None:
    one = timing(write, places, loss=share * write)
    saves = 200 * places
    found, _ = simulated(one, interval, iteration, saves)
    # Begin and end: at most one write more or less in all.
    assert found == pytest.approx(
        slowdown(one, interval, iteration), abs=(write + interval * iteration) / (saves * interval * iteration) * 2
    )


@settings(deadline=None)
@given(SECONDS, PLACES, st.floats(0.001, 10), st.floats(1.001, 3), st.floats(0, 1))
def test_the_interval_is_the_least_that_keeps_the_bound(
    write: float, places: int, iteration: float, tolerated: float, share: float
) -> None:
    one = timing(write, places, loss=share * write)
    interval = least_interval(one, iteration, tolerated)
    assert interval >= 1
    assert slowdown(one, interval, iteration) <= tolerated * (1 + 1e-6)
    if interval > 1:
        assert slowdown(one, interval - 1, iteration) > tolerated * (1 - 1e-6)


@settings(deadline=None)
@given(SECONDS, PLACES, st.floats(0.001, 10), st.floats(1.001, 3))
def test_without_a_loss_it_is_equation_3(write: float, places: int, iteration: float, tolerated: float) -> None:
    one = timing(write, places)
    exact = write / (places * tolerated * iteration)
    assert least_interval(one, iteration, tolerated) == equation_3(one, iteration, tolerated)
    assert equation_3(one, iteration, tolerated) in {max(1, math.ceil(exact)), max(1, round(exact))}


def test_equation_3_by_hand() -> None:
    # 37 s for a checkpoint of OPT-1.3B (§1), iterations of 1 s, 5 %.
    assert equation_3(timing(37.0), 1.0, 1.05) == 36
    assert equation_3(timing(42.0, 2), 1.0, 1.05) == 20
    assert equation_3(timing(0.1), 1.0, 1.05) == 1
    # A ceiling of a number that only rounding puts above 20.
    assert equation_3(timing(0.1 * 3 * 7), 0.1, 1.05) == 20


@settings(deadline=None)
@given(SECONDS, PLACES, st.floats(0.001, 10), st.integers(1, 50), st.floats(0, 100))
def test_no_failure_of_a_simulated_run_costs_more_than_equation_4(
    write: float, places: int, iteration: float, interval: int, load: float
) -> None:
    one = timing(write, places)
    bound = recovery_bound(one, interval, iteration, load)
    _, worst = simulated(one, interval, iteration, 6 * places + 20)
    assert load + worst * iteration <= bound.total * (1 + 1e-9)
    # And the bound is met: it is no looser than the one iteration in progress.
    assert load + worst * iteration >= bound.total * (1 - 1e-9) - iteration


def test_saving_nothing_costs_nothing() -> None:
    assert slowdown(timing(1.0), 1000, 1.0) == 1.0
    assert least_interval(timing(1.0, loss=0.5), 1.0, 1.05) == 10


# -- choosing

ANY = Limits(1.05)
MEGABYTES = 10**6


def test_the_least_per_save_is_chosen() -> None:
    timings = [timing(10.0, 1), timing(12.0, 2), timing(30.0, 3)]
    assert best_setting(timings, 0.1, ANY, MEGABYTES).timing is timings[1]


def test_fewer_copies_of_the_state_win_a_tie() -> None:
    timings = [timing(10.0, 1), timing(20.0 * (1 - 0.9 * TOLERANCE), 2)]
    assert best_setting(timings, 0.1, ANY, MEGABYTES).timing is timings[0]
    timings = [timing(10.0, 1), timing(20.0 * (1 - 2 * TOLERANCE), 2)]
    assert best_setting(timings, 0.1, ANY, MEGABYTES).timing is timings[1]
    # Twice as fast, but every iteration can be saved either way.
    timings = [timing(0.5, 1), timing(0.5, 2)]
    chosen = best_setting(timings, 1.0, ANY, MEGABYTES)
    assert (chosen.timing, chosen.interval) == (timings[0], 1)


def test_a_setting_that_holds_the_loop_less_wins_over_a_quicker_one() -> None:
    # Eq. (3) would take the second, which may be saved half as often: its copies take longer.
    timings = [timing(4.8, 1, loss=0.7), timing(7.9, 2, loss=1.75)]
    assert best_setting(timings, 0.1, ANY, MEGABYTES).timing is timings[0]


def test_fewer_threads_win_where_more_bring_nothing() -> None:
    timings = [timing(10.0, 1, threads=3), timing(10.2, 1, threads=1), timing(10.1, 1, threads=2)]
    assert best_setting(timings, 0.1, ANY, MEGABYTES).timing is timings[1]


@settings(deadline=None)
@given(st.lists(st.tuples(SECONDS, PLACES, st.integers(1, 4)), min_size=1, max_size=12), SECONDS)
def test_the_choice_saves_nearly_as_often_as_any(made: list[tuple[float, int, int]], iteration: float) -> None:
    timings = [timing(write, places, threads=threads) for write, places, threads in made]
    chosen = best_setting(timings, iteration, ANY, MEGABYTES)
    least = min(least_interval(one, iteration, 1.05) for one in timings)
    assert chosen.interval <= math.ceil(least * (1 + TOLERANCE) ** 2)
    assert chosen.interval == least_interval(chosen.timing, iteration, 1.05)


def test_the_limits_bound_what_is_in_flight() -> None:
    setting = Setting(3, 1, 64 << 20)
    assert host_bytes(10**9, setting) == 3 * 10**9 + (64 << 20)
    assert host_bytes(10**9, setting, memory=256 << 20) == (256 << 20) + (64 << 20)
    assert host_bytes(10**9, setting, memory=9 * 10**9) == 3 * 10**9 + (64 << 20)
    assert most_in_flight(10**9, 64 << 20, Limits(1.05, memory=host_bytes(10**9, setting))) == 3
    assert most_in_flight(10**9, 64 << 20, Limits(1.05, memory=host_bytes(10**9, setting) - 1)) == 2
    assert most_in_flight(10**9, 64 << 20, Limits(1.05, space=4 * 10**9)) == 3  # N + 1 are there at times
    assert most_in_flight(10**9, 64 << 20, Limits(1.05, space=4 * 10**9 - 1)) == 2
    timings = [timing(10.0, 1), timing(10.0, 2), timing(10.0, 3)]
    assert best_setting(timings, 0.1, Limits(1.05, space=3 * 10**9), 10**9).timing is timings[1]
    with pytest.raises(UsageError, match="allow none"):
        best_setting(timings[2:], 0.1, Limits(1.05, space=3 * 10**9), 10**9)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"slowdown": 1.0}, "slowdown: 1, more than 1"),
        ({"slowdown": math.inf}, "slowdown: inf"),
        ({"memory": 0}, "memory: 0"),
        ({"space": -1}, "space: -1"),
    ],
)
def test_limits_that_nothing_could_keep(limits: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Limits(**limits)  # type: ignore[arg-type]


def test_memory_below_one_copy_allows_one_save_that_is_waited_for() -> None:
    limits, one = Limits(1.05, memory=10**9), Setting(1, 1, 64 << 20)
    assert most_in_flight(10**9, 64 << 20, limits) == 1
    assert writer_memory(10**9, one, limits) == 10**9 - (64 << 20)
    assert writer_memory(10**9 - (64 << 20), one, limits) is None  # a copy of the state, and no more
    assert host_bytes(10**9, one, writer_memory(10**9, one, limits)) == 10**9
    assert fits(one, limits, 10**9)
    assert not fits(Setting(2, 1, 64 << 20), limits, 10**9)
    assert not fits(Setting(1, 1, 10**9), limits, 10**9)  # staging takes the rest


def test_a_choice_that_cannot_fit_reports_its_needs() -> None:
    with pytest.raises(UsageError, match=f"one save of this state needs {LEAST + (64 << 20)}"):
        most_in_flight(10**9, 64 << 20, Limits(1.05, memory=LEAST + (64 << 20) - 1))
    with pytest.raises(UsageError, match="two checkpoints of this state need 2000000000"):
        most_in_flight(10**9, 64 << 20, Limits(1.05, space=10**9))
    with pytest.raises(UsageError, match="iteration: 0"):
        equation_3(timing(1.0), 0.0, 1.05)
    with pytest.raises(UsageError, match="slowdown: 1, more than 1"):
        least_interval(timing(1.0), 1.0, 1.0)
