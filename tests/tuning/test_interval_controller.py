"""The controller of the interval: in simulated time, and with a real writer."""

from __future__ import annotations

import doctest
import random
import re
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import ckptstore
from ckptstore.errors import UsageError
from ckptstore.tuning import IntervalController, Setting, Timing, interval_controller, least_interval


class Handle:
    """A save that a simulation ends."""

    def __init__(self) -> None:
        self.call: Callable[[bool], None] | None = None

    def when_done(self, call: Callable[[bool], None], /) -> None:
        self.call = call


class Run:
    """A training loop in simulated time: iterations, copies, writes that share the disk, waits for a slot."""

    def __init__(self, controller: IntervalController, in_flight: int, seed: int = 0) -> None:
        self.controller = controller
        self.in_flight = in_flight
        self.clock = 0.0
        self.step = 0
        self.random = random.Random(seed)
        self.under_way: list[tuple[float, Handle]] = []
        self.saves = 0
        self.parallel = False
        """Whether writes run at full speed beside each other, and do not share the disk."""

    def _finish(self, until: float) -> None:
        while self.under_way and self.under_way[0][0] <= until:
            at, handle = self.under_way.pop(0)
            back, self.clock = self.clock, at
            assert handle.call is not None
            handle.call(True)
            self.clock = back

    def train(
        self, steps: int, *, iteration: float, write: float, copy: float, noise: float = 0.0, beside: float = 0.0
    ) -> float:
        """Train so many steps -> the loop's slowdown over them."""
        began, pure = self.clock, 0.0
        for _ in range(steps):
            self.step += 1
            quiet = iteration * (1 + self.random.uniform(-noise, noise))
            pure += quiet
            took = quiet * (1 + (beside if self.under_way else 0.0))
            self.clock += took
            self._finish(self.clock)
            self.controller.iterated(took)
            if self.controller.due(self.step):
                self._save(write * (1 + self.random.uniform(-noise, noise)), copy)
        return (self.clock - began) / pure

    def _save(self, write: float, copy: float) -> None:
        if len(self.under_way) >= self.in_flight:  # the writer would wait for a slot, and so does the controller
            self.clock = max(self.clock, self.under_way[0][0])
            self._finish(self.clock)

        def begin() -> Handle:
            handle = Handle()
            last = self.under_way[-1][0] if self.under_way and not self.parallel else self.clock
            self.clock += copy
            self.under_way.append((max(last, self.clock) + write, handle))
            self.under_way.sort(key=lambda one: one[0])
            return handle

        self.controller.save(begin)
        self.saves += 1


def made(in_flight: int = 1, **options: float) -> Run:
    run: Run
    controller = IntervalController(in_flight=in_flight, clock=lambda: run.clock, **options)  # type: ignore[arg-type]
    run = Run(controller, in_flight)
    return run


def ideal(write: float, iteration: float, copy: float = 0.0, in_flight: int = 1) -> int:
    return least_interval(Timing(Setting(in_flight, 1, 0), write, copy), iteration, 1.05)


def test_the_documented_example() -> None:
    assert doctest.testmod(interval_controller).failed == 0


def test_nothing_is_due_before_the_pace_is_known_and_then_one_save_at_a_time() -> None:
    controller = IntervalController(first=5)
    asked = []
    for step in range(1, 21):
        controller.iterated(0.1)
        asked.append(controller.due(step))
    assert asked == [step == 5 for step in range(1, 21)]
    assert controller.interval is None
    assert controller.estimated_slowdown is None
    controller.saved(2.1)
    assert controller.interval == 20
    assert [step for step in range(21, 60) if controller.due(step)] == [25, 45]


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("write", [0.02, 0.5, 5.0])
@pytest.mark.parametrize("copy", [0.0, 0.05])
def test_it_finds_the_interval_of_the_model_and_keeps_the_bound(in_flight: int, write: float, copy: float) -> None:
    run = made(in_flight)
    run.train(500, iteration=0.1, write=write, copy=copy)
    slowed = run.train(3000, iteration=0.1, write=write, copy=copy)
    assert run.controller.interval is not None
    assert ideal(write, 0.1, copy) * 0.8 <= run.controller.interval <= 1.1 * ideal(write + copy, 0.1, copy) + 1
    assert slowed <= 1.055
    assert run.controller.estimated_slowdown is not None
    assert run.controller.estimated_slowdown <= 1.05 + 1e-6


def test_a_slower_disk_lengthens_the_interval_within_a_few_saves() -> None:
    run = made()
    run.train(1000, iteration=0.1, write=0.2, copy=0.0)
    before = run.controller.interval
    assert before == 2
    saves = run.saves
    while run.controller.interval == before:
        run.train(1, iteration=0.1, write=2.0, copy=0.0)
    assert run.saves - saves <= 4
    run.train(200, iteration=0.1, write=2.0, copy=0.0)
    assert run.train(2000, iteration=0.1, write=2.0, copy=0.0) <= 1.055
    assert run.controller.interval in range(20, 23)  # 20 by the model, and half the hysteresis


def test_a_quicker_disk_shortens_it_again_by_half_at_most() -> None:
    run = made()
    run.train(2000, iteration=0.1, write=8.4, copy=0.0)
    seen = [run.controller.interval or 0]
    assert seen == [80]
    for _ in range(4000):
        run.train(1, iteration=0.1, write=0.84, copy=0.0)
        if run.controller.interval != seen[-1]:
            seen.append(run.controller.interval or 0)
    assert seen[-1] in (8, 9)
    assert all(after >= before / 2 for before, after in pairwise(seen))


def test_longer_iterations_shorten_it_and_shorter_ones_lengthen_it() -> None:
    run = made()
    run.train(1000, iteration=0.1, write=2.0, copy=0.0)
    assert run.controller.interval == 20
    run.train(2000, iteration=0.4, write=2.0, copy=0.0)
    assert run.controller.interval in (5, 6)
    run.train(2000, iteration=0.05, write=2.0, copy=0.0)
    assert run.controller.interval in range(39, 47)


def test_the_slowdown_of_iterations_beside_a_save_counts() -> None:
    run = made()
    run.train(500, iteration=0.1, write=1.0, copy=0.0, beside=0.4)
    slowed = run.train(5000, iteration=0.1, write=1.0, copy=0.0, beside=0.4)
    assert run.controller.interval is not None
    assert run.controller.interval >= 60  # 0.4 of a second's work in 5 % of the time; Eq. (3) alone: 10
    assert slowed <= 1.055


@pytest.mark.parametrize(("noise", "values", "within"), [(0.03, 3, (16, 23)), (0.2, 12, (12, 26))])
def test_noise_hardly_moves_it_and_does_not_break_the_bound(noise: float, values: int, within: tuple[int, int]) -> None:
    run = made(in_flight=2)
    run.train(3000, iteration=0.1, write=2.0, copy=0.01, noise=noise)
    seen = set()
    for _ in range(5000):
        run.train(1, iteration=0.1, write=2.0, copy=0.01, noise=noise)
        seen.add(run.controller.interval)
    assert len(seen) <= values
    assert all(within[0] <= (interval or 0) <= within[1] for interval in seen)
    assert run.train(3000, iteration=0.1, write=2.0, copy=0.01, noise=noise) <= 1.06


def test_it_does_not_hunt_where_saves_share_the_disk() -> None:
    # At the interval of Eq. (3) one save is in flight at a time and takes half of T_w: measured as that, it would be
    # shortened until two are in flight again, and so on (18 and 22 in turn).
    run = made(in_flight=2)
    run.train(3000, iteration=0.1, write=2.15, copy=0.0)
    seen = {run.controller.interval}
    for _ in range(6000):
        run.train(1, iteration=0.1, write=2.15, copy=0.0)
        seen.add(run.controller.interval)
    assert seen == {21}


def test_places_are_used_where_saves_do_not_disturb_each_other() -> None:
    run = made(in_flight=4)
    run.parallel = True
    run.train(4000, iteration=0.1, write=4.2, copy=0.0)
    assert run.controller.interval in range(10, 12)  # a fourth of the interval of one at a time
    assert run.train(3000, iteration=0.1, write=4.2, copy=0.0) <= 1.055


def test_bounds_are_kept() -> None:
    run = made(shortest=7, longest=9)
    run.train(500, iteration=0.1, write=0.01, copy=0.0)
    assert run.controller.interval == 7
    run.train(500, iteration=0.1, write=10.0, copy=0.0)
    assert run.controller.interval == 9


def test_a_failed_save_says_nothing_and_the_first_one_is_tried_again() -> None:
    controller = IntervalController(first=2)
    handles = []

    def begin() -> Handle:
        handles.append(Handle())
        return handles[-1]

    for step in range(1, 5):
        controller.iterated(0.1)
        if controller.due(step):
            controller.save(begin)
            assert handles[-1].call is not None
            handles[-1].call(False)
    assert len(handles) == 2
    assert controller.interval is None

    def broken() -> Handle:
        raise OSError("no")

    assert controller.due(5) is False
    assert controller.due(6) is True
    with pytest.raises(OSError, match="no"):
        controller.save(broken)
    assert [controller.due(step) for step in (7, 8)] == [False, True]


def test_steps_that_go_back_restart_the_measurement() -> None:
    controller = IntervalController(first=1)
    controller.iterated(0.1)
    assert controller.due(100)
    controller.saved(0.42)  # 4 iterations
    assert [controller.due(step) for step in (101, 102, 103, 104)] == [False, False, False, True]
    assert [controller.due(step) for step in (50, 51, 52, 53)] == [False, False, False, True]


@pytest.mark.parametrize(
    "options",
    [
        {"slowdown": 1.0},
        {"in_flight": 0},
        {"first": 0},
        {"memory": 3},
        {"shortest": 0},
        {"shortest": 5, "longest": 4},
        {"hysteresis": 1.0},
    ],
)
def test_arguments_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        IntervalController(**options)  # type: ignore[arg-type]


def test_times_out_of_range() -> None:
    controller = IntervalController()
    with pytest.raises(UsageError, match="an iteration of 0 s"):
        controller.iterated(0)
    with pytest.raises(UsageError, match="a save of 0 s"):
        controller.saved(0)
    with pytest.raises(UsageError, match="a save of 1 s with -1 s in its call"):
        controller.saved(1, -1)
    with pytest.raises(UsageError, match=r"a crowd of 0\.5"):
        controller.saved(1, 0, 0.5)


def test_a_real_loop_saves_at_the_interval_that_it_finds(tmp_path: Path) -> None:
    state = {"weight": np.zeros(1 << 20, np.float32)}
    controller = IntervalController(in_flight=2, first=3)
    saved = []
    with ckptstore.open(tmp_path / "run", create=True).writer(max_in_flight=2, poll_seconds=None) as writer:
        for step in range(1, 20_000):  # it ends long before that
            began = time.perf_counter()
            time.sleep(0.002)
            state["weight"] += 1
            controller.iterated(time.perf_counter() - began)
            if controller.due(step):
                controller.save(partial(writer.save_async, state, step))
                saved.append(step)
            if len(saved) >= 5 and controller.interval is not None:
                break
    assert saved[0] == 3
    assert controller.interval is not None
    store = ckptstore.open(tmp_path / "run")
    assert [info.step for info in store.checkpoints()] == saved
    for step in saved:
        assert (store.load(step, framework="numpy")["weight"] == step).all()


def test_a_save_tells_when_it_is_durable_and_when_it_failed(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run", create=True)
    told: list[tuple[bool, int | None]] = []
    with store.writer(poll_seconds=None) as writer:
        pending = writer.save_async({"x": np.ones(3)}, 1)
        pending.when_done(lambda durable: told.append((durable, store.latest_step())))
        pending.result()
        while not told:
            time.sleep(0.001)
        pending.when_done(lambda durable: told.append((durable, None)))  # at once
        assert told == [(True, 1), (True, None)]
        store.writer(poll_seconds=None).close()  # a newer term: this one is fenced
        failing = writer.save_async({"x": np.ones(3)}, 2)
        failing.when_done(lambda durable: told.append((durable, None)))
        while len(told) < 3:
            time.sleep(0.001)
        assert told[2] == (False, None)
        # A report of it is not the same as noticing it: the writer raises it all the same.
        with pytest.raises(ckptstore.FencedError):
            writer.wait()


def test_the_example_of_the_documentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text()
    code = re.search(r"## The controller of the interval\n.*?```python\n(.*?)```", text, re.S)
    assert code is not None
    monkeypatch.chdir(tmp_path)
    exec(compile(code[1], "tuning.md", "exec"), {})  # noqa: S102  # the documentation's own example
    assert re.fullmatch(r"every \d+ iterations, slowdown about [1-9]\d*\.\d{3}\n", capsys.readouterr().out)
    assert ckptstore.open("runs/adapted").checkpoints()
