"""Compaction in a writer's idle time: the moves of `compact`, made beside the saves and never during one."""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import CompactOptions, CompactPass, DiffOptions, Store
from ckptstore.errors import UsageError
from ckptstore.maintenance.compact import move_execution
from tests.forms import long_only
from tests.maintenance.test_compaction import CHAIN, check, save, state
from tests.maintenance.test_prune_kills import killed_at
from tests.store.states import same
from tests.waiting import until, waits
from tests.write.trainer import Trainer

LONG = 120.0
RULES = ("last:2", "every:10")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return ckptstore.open(tmp_path / "store")


@pytest.fixture
def told() -> queue.Queue[CompactPass]:
    return queue.Queue()


def until_done(told: queue.Queue[CompactPass]) -> CompactPass:
    """The first pass that made a move."""
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        done = told.get(timeout=LONG)
        assert done.error is None, done.error
        if any(move.result == "done" for move in done.moves):
            return done
    raise AssertionError("no move was made")


def test_bases_go_while_the_writer_has_nothing_to_do(store: Store, told: queue.Queue[CompactPass]) -> None:
    options = CompactOptions(bandwidth=None, every=0.05, on_pass=told.put)
    with store.writer(deltas=CHAIN, keep=RULES, poll_seconds=None, compact=options) as writer:
        save(writer, range(1, 35))
        done = until_done(told)
        assert {move.result for move in done.moves} <= {"done", "refused"}
        assert done.seconds > 0
        end = time.monotonic() + LONG
        while store.view().catalog.held and time.monotonic() < end:
            time.sleep(0.05)
        assert store.view().catalog.held == {}  # of 29 that the rules let go
        save(writer, range(35, 38))  # it is the same term, and continues
        check_beside(store, [10, 20, 30, 36, 37])
    assert store.view().catalog.term == 1
    check(store, [10, 20, 30, 36, 37])


def check_beside(store: Store, steps: list[int]) -> None:
    assert [info.step for info in store.checkpoints()] == steps
    for step in steps:
        same(state(step), store.load(step, framework="numpy"))


def test_step_diffs_that_wait_for_their_batch_are_written_first(store: Store, told: queue.Queue[CompactPass]) -> None:
    trainer, states = Trainer(sizes={"wide": (60, 300), "bias": (300,)}), {}
    options = CompactOptions(bandwidth=None, every=0.05, on_pass=told.put)
    diffs = DiffOptions(full_every=6, batch=4, seconds=None)
    with store.writer(diffs=diffs, keep=["every:6"], poll_seconds=None, compact=options) as writer:
        for step in range(1, 21):
            trainer.train(None)
            states[step] = trainer.frozen()
            updates = trainer.updates(False) if step > 1 else None
            writer.save_async(trainer.state(), step, updates=updates)
        until_done(told)
    for info in store.checkpoints():
        same(states[info.step], store.load(info.ref, framework="numpy"))
    assert {6, 12, 18, 20} <= {info.step for info in store.checkpoints()}
    assert store.verify(deep=True).ok


def test_it_pauses_while_a_save_is_in_flight(
    store: Store, told: queue.Queue[CompactPass], monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.writer(deltas=CHAIN, keep=RULES, poll_seconds=None) as writer:
        save(writer, range(1, 25))
    on_its_way = threading.Event()  # all three moves would be made before it if the machine stalled
    monkeypatch.setattr(move_execution, "crash_point", lambda _name: on_its_way.wait(LONG))
    metrics: queue.Queue[ckptstore.SaveMetrics] = queue.Queue()
    options = CompactOptions(bandwidth=None, every=0.02, on_pass=told.put)
    changing = {"w": np.zeros(1000, np.float32), "step": 25}
    with store.writer(poll_seconds=None, compact=options, on_metrics=metrics.put) as writer:
        begun = writer.begin(changing, 25, {"all": ["w"]})  # a snapshot that is not filled yet
        on_its_way.set()
        until(lambda: any(waits(one, "_IdleCompactor._wait_for_saves") for one in threading.enumerate()))
        time.sleep(0.3)
        assert store.view().catalog.held  # three moves would free all
        before = store.view().end
        begun.ready("all")
        begun.finish(changing).result()
        assert until_done(told).stood_still > 0.2
        assert store.view().end > before + 1
        assert metrics.get(timeout=LONG).step == 25
    assert store.verify().ok


def test_a_save_says_that_compaction_was_at_work(store: Store, told: queue.Queue[CompactPass]) -> None:
    with store.writer(deltas=CHAIN, keep=RULES, poll_seconds=None) as writer:
        save(writer, range(1, 25))
    metrics: queue.Queue[ckptstore.SaveMetrics] = queue.Queue()
    options = CompactOptions(bandwidth=50_000, every=0.02, on_pass=told.put)  # a move takes seconds
    with store.writer(deltas=CHAIN, poll_seconds=None, compact=options, on_metrics=metrics.put) as writer:
        found, step = False, 24
        end = time.monotonic() + LONG
        while not found and time.monotonic() < end:
            step += 1
            save(writer, [step])
            found = metrics.get(timeout=LONG).compacting
            time.sleep(0.05)
        assert found
        began = time.monotonic()
    assert time.monotonic() - began < LONG  # closing does not wait for a move to end
    assert store.load(step, framework="numpy")["step"] == step
    assert store.verify(deep=True).ok
    store.gc()


def test_a_move_for_an_abandoned_term_is_made_again(
    store: Store, told: queue.Queue[CompactPass], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer goes back at the moment at which a move is ready: it was planned for a term that is over."""
    with store.writer(deltas=CHAIN, keep=RULES, poll_seconds=None) as writer:
        save(writer, range(1, 25))
    went = threading.Event()
    at_work: queue.Queue[ckptstore.Writer] = queue.Queue()

    def passed(name: str) -> None:
        if name == "compact.verified" and not went.is_set():
            went.set()
            at_work.get(timeout=LONG).rollback("24@1")

    monkeypatch.setattr(move_execution, "crash_point", passed)
    options = CompactOptions(bandwidth=None, every=0.05, on_pass=told.put)
    with store.writer(deltas=CHAIN, poll_seconds=None, compact=options) as writer:
        at_work.put(writer)
        first = until_done(told).moves[0]
        assert (first.result, writer.term) == ("done", 3), first.reason
        save(writer, [25, 26])
    check(store, [10, 20, 25, 26])


def test_closing_gives_up_what_is_half_done(store: Store) -> None:
    with store.writer(deltas=CHAIN, keep=RULES, poll_seconds=None) as writer:
        save(writer, range(1, 25))
    options = CompactOptions(bandwidth=100, every=0.01)  # one chunk takes a quarter of an hour
    writer = store.writer(deltas=CHAIN, poll_seconds=None, compact=options)
    end = time.monotonic() + LONG
    while not store.backend.list("pins/") and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.2)
    began = time.monotonic()
    writer.close()
    assert time.monotonic() - began < LONG
    assert store.backend.list("pins/") == []
    assert not [one for one in threading.enumerate() if one.name == "ckptstore-compact"]
    check(store, [10, 20, 23, 24])
    named = {f"{one}.safetensors" for one in store.view().catalog.segments}
    assert {key.rpartition("/")[2] for key in store.backend.list("seg/")} == named


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("compact.rewritten", marks=long_only),
        pytest.param("compact.verified", marks=long_only),
        "compact.committed",
    ],
)
def test_killed_at_any_step_of_a_move(store: Store, point: str) -> None:
    options = CompactOptions(bandwidth=None, every=0.05)

    def train() -> None:
        own = ckptstore.open(store.url)
        with own.writer(deltas=CHAIN, keep=RULES, poll_seconds=None, compact=options) as writer:
            save(writer, range(1, 35))
            time.sleep(LONG)

    assert killed_at(point, 1, train)
    for pin in store.backend.list("pins/"):
        store.backend.delete(pin)
    kept = [info.step for info in store.checkpoints()]
    assert {10, 20, 30} <= {*kept, *range(kept[-1], 31)}
    store.compact(take_over=True)
    check(store, kept)
    named = {f"{one}.safetensors" for one in store.view().catalog.segments}
    assert {key.rpartition("/")[2] for key in store.backend.list("seg/")} == named


@pytest.mark.parametrize("wrong", [{"bandwidth": 0}, {"every": 0}, {"every": None}, {"max_depth": -1}, {"on_pass": 3}])
def test_mistakes(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        CompactOptions(**wrong)
