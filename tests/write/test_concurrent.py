"""Several fulls at once, in bounded memory: they overlap, none is lost or reported twice, and none waits needlessly."""

from __future__ import annotations

import threading
import time
import uuid
import warnings
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import SaveMetrics
from ckptstore.host.arenas import LEAST
from ckptstore.log import requests
from ckptstore.log.change import CatalogChange
from ckptstore.store import Store
from ckptstore.write.saves.save_metrics import Meter, PromptFunction
from tests.write.medium import MIB, Medium, check, weights


@pytest.fixture
def store() -> ckptstore.Store:
    return ckptstore.open(f"memory://{uuid.uuid4().hex}", create=True)


class TestTogether:
    def test_so_many_are_written_at_once(self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
        medium = Medium(monkeypatch, 4)
        with store.writer(max_in_flight=3, poll_seconds=None) as writer:
            pending = []
            for step in (1, 2, 3):
                pending.append(writer.save_async(weights(step), step))
                assert medium.begun[step - 1].wait(120)  # though none before it is written
            assert not any(one.done() for one in pending)
            fourth = threading.Thread(target=writer.save_async, args=(weights(4), 4))
            fourth.start()
            assert not medium.begun[3].wait(0.1)
            medium.release()
            fourth.join(120)
        check(store, 1, 2, 3, 4)

    @pytest.mark.parametrize("options", [{"deltas": 4}, {"diffs": ckptstore.DiffOptions()}], ids=["deltas", "diffs"])
    def test_encoded_saves_are_written_in_turn(
        self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
    ) -> None:
        """Each may build on the one before."""
        medium = Medium(monkeypatch, 3)
        with store.writer(max_in_flight=3, poll_seconds=None, **options) as writer:
            for step in (1, 2, 3):
                writer.save_async(weights(step), step)
            assert medium.begun[0].wait(120)
            assert not medium.begun[1].wait(0.1)
            medium.release()
        check(store, 1, 2, 3)
        assert [info.base for info in store.checkpoints()][1:] != [None, None]

    def test_a_newer_one_does_not_wait_and_stays_the_latest(
        self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        medium = Medium(monkeypatch, 3)
        with store.writer(max_in_flight=3, poll_seconds=None) as writer:
            old = writer.save_async(weights(1), 1)
            assert medium.begun[0].wait(120)
            new = writer.save_async(weights(2), 2)
            medium.may[1].set()
            assert new.result(120).step == 2
            assert not old.done()
            assert store.latest_step() == 2
            medium.release()
            assert old.result(120).step == 1
            assert store.latest_step() == 2
            assert writer.save_async(weights(3), 3).result(120).step == 3
        check(store, 1, 2, 3)
        with store.writer() as following:
            assert following.parent is not None
            assert following.parent.step == 3

    def test_later_calls_wait_for_all_of_them(self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """A tag may name a checkpoint in flight, and a new term begins after all saves of the old one."""
        medium = Medium(monkeypatch, 9)
        with store.writer(max_in_flight=3, poll_seconds=None) as writer:
            for step in (1, 2):
                writer.save_async(weights(step), step)
            threading.Timer(0.1, medium.release).start()
            assert writer.tag("two", 2).step == 2
            pending = [writer.save_async(weights(step), step) for step in (3, 4)]
            writer.wait()
            assert all(one.done() for one in pending)
            pending = [writer.save_async(weights(step), step) for step in (5, 6)]
            writer.rollback(2)
            assert [one.result(0).ref for one in pending] == ["5@1", "6@1"]
            assert writer.save_async(weights(3), 3).result().ref == "3@2"
        assert store.checkpoint("tag:two").step == 2

    def test_one_that_fails_leaves_the_others_alone(
        self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        medium = Medium(monkeypatch, 4)
        medium.fails = {1}
        with store.writer(max_in_flight=3, poll_seconds=None) as writer:
            pending = []
            for step in (1, 2, 3):
                pending.append(writer.save_async(weights(step), step))
                assert medium.begun[step - 1].wait(120)
            medium.release()
            with pytest.raises(ckptstore.StorageError, match="no space for segment 1"):
                pending[1].result(120)
            assert [one.result(120).step for one in (pending[0], pending[2])] == [1, 3]
            writer.wait()  # the caller got an error
        check(store, 1, 3)

    def test_one_that_waits_for_its_turn_when_the_term_ends_is_not_begun(
        self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No writer may drop segments of a term that is over."""
        medium = Medium(monkeypatch, 2)
        with store.writer(max_in_flight=1, poll_seconds=None) as writer, ThreadPoolExecutor(2) as others:
            first = others.submit(writer.save, weights(1), 1)
            assert medium.begun[0].wait(120)
            second = others.submit(writer.save, weights(2), 2)
            wait([second], 0.1)  # it is waiting by then; if not it is refused, for the same reason
            Store(store.backend).writer(poll_seconds=None).close()
            medium.release()
            for one in (first, second):
                with pytest.raises(ckptstore.FencedError):
                    one.result(120)
        assert medium.opened == 1

    def test_one_that_is_being_written_when_the_term_ends_is_given_up(
        self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        medium = Medium(monkeypatch, 2)
        with (
            store.writer(max_in_flight=2, memory=LEAST, poll_seconds=None) as writer,
            ThreadPoolExecutor(1) as other,
        ):
            first = writer.save_async(weights(1), 1)
            assert medium.begun[0].wait(120)
            second = other.submit(writer.save_async, weights(2, 5), 2)  # waits for memory, when some of it is copied
            assert medium.begun[1].wait(120)
            Store(store.backend).writer(poll_seconds=None).close()
            medium.may[0].set()
            with pytest.raises(ckptstore.FencedError):
                first.result(120)
            medium.release()
            with pytest.raises(ckptstore.FencedError):
                second.result(120).result(120)
        assert len(store.backend.list("seg/")) == 1

    def test_requests_are_answered_after_each(self, store: ckptstore.Store) -> None:
        with store.writer(max_in_flight=2, poll_seconds=None) as writer:
            first = writer.save(weights(1), 1)
            writer.wait()
            for step, save in ((2, writer.save), (3, writer.save_async)):
                asked = requests.post(
                    store.journal, writer.term, "tag", CatalogChange(tags={f"t{step}": (first.term, 1)})
                )
                save(weights(step), step)
                writer.wait()
                assert requests.outcome(store.view().catalog, asked).answer == "accepted"
        assert store.checkpoint(1).tags == ("t2", "t3")

    def test_saves_of_both_kinds_from_many_threads(self, store: ckptstore.Store) -> None:
        """Steps come in order, everything else in any order. Memory is short for all of them."""
        with store.writer(max_in_flight=3, memory=LEAST, poll_seconds=None, threads=1) as writer:
            lock, steps = threading.Lock(), iter(range(1, 9))

            def run(kind: int) -> None:
                for _ in range(2):
                    # Only one thread may give a step; the writer's threads do the rest.
                    with lock:
                        step = next(steps)
                        state = weights(step, 3)
                        (writer.save if (step + kind) % 4 == 0 else writer.save_async)(state, step)
                        for array in state.values():
                            array[:] = -1

            threads = [threading.Thread(target=run, args=(kind,)) for kind in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive()
        check(store, *range(1, 9), units=3)


def test_a_step_that_could_not_be_begun_may_be_given_again(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not counted as given, and takes no slot."""

    def none(*_: object) -> None:
        raise MemoryError("no memory")

    with store.writer(max_in_flight=1, poll_seconds=None) as writer:
        with monkeypatch.context() as patched:
            patched.setattr("ckptstore.write.capture.unit_copy.plan_units", none)
            with pytest.raises(MemoryError):
                writer.save_async(weights(1), 1)
        writer.save(weights(1), 1)
    check(store, 1)


def test_segments_of_a_failed_save_are_named_to_gc(store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next commit: its leftovers on the medium need not wait for another term."""
    medium = Medium(monkeypatch, 9, held=False)
    medium.fails = {1}
    with store.writer(max_in_flight=1, poll_seconds=None) as writer:
        writer.save(weights(1), 1)
        with pytest.raises(ckptstore.StorageError):
            writer.save(weights(2), 2)
        assert len(store.view().catalog.dropped) == 0
        writer.save(weights(3), 3)
        assert len(store.view().catalog.dropped) == 1
    check(store, 1, 3)


class TestMetrics:
    def test_their_reports(self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
        medium = Medium(monkeypatch, 3)
        told: list[SaveMetrics] = []
        with store.writer(max_in_flight=2, poll_seconds=None, on_metrics=told.append) as writer:
            first = writer.save_async(weights(1), 1)
            assert medium.begun[0].wait(120)
            second = writer.save_async(weights(5), 5)
            time.sleep(0.05)
            medium.release()
            infos = {1: first.result(120), 5: second.result(120)}
            writer.save(weights(7), 7)
        assert sorted(one.step for one in told) == [1, 5, 7]
        by = {one.step: one for one in told}
        assert (by[1].in_flight, by[5].in_flight, by[7].in_flight) == (1, 2, by[7].in_flight)
        assert (by[1].lag, by[5].lag) == (4, 0)
        assert {one.kind for one in told} == {"full"}
        assert (by[1].nbytes, by[1].stored) == (4000, infos[1].stored)
        assert by[1].durable >= 0.05
        assert by[1].waited < by[1].durable
        assert by[7].stall >= by[7].durable > 0
        assert by[7].rate == 4000 / by[7].durable
        assert {one.error for one in told} == {None}

    @pytest.mark.parametrize("options", [{"deltas": 4}, {"diffs": ckptstore.DiffOptions()}], ids=["deltas", "diffs"])
    def test_encoded_saves(self, store: ckptstore.Store, options: dict[str, Any]) -> None:
        told: list[SaveMetrics] = []
        with store.writer(poll_seconds=None, on_metrics=told.append, **options) as writer:
            for step in (1, 2):
                writer.save_async(weights(step), step)
            writer.save(weights(3), 3)
        assert [one.step for one in told] == [1, 2, 3]
        assert [one.kind for one in told] == [info.kind for info in store.checkpoints()]
        assert told[1].kind != "full"

    def test_of_a_failure(self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
        medium = Medium(monkeypatch, 2, held=False)
        medium.fails = {0, 1}
        told: list[SaveMetrics] = []
        with store.writer(poll_seconds=None, on_metrics=told.append) as writer:
            error = writer.save_async(weights(1), 1).exception(20)
            with pytest.raises(ckptstore.StorageError) as caught:
                writer.save(weights(2), 2)
            with pytest.raises(ckptstore.StepOrderError):
                writer.save(weights(2), -1)  # refused: that was not a save
        assert [(one.step, one.kind, one.stored, one.error) for one in told] == [
            (1, None, 0, error),
            (2, None, 0, caught.value),
        ]

    def test_errors_of_the_callback_harm_nothing(self, store: ckptstore.Store) -> None:
        def bad(_: SaveMetrics) -> None:
            raise ZeroDivisionError("oh")

        writer = store.writer(poll_seconds=None, on_metrics=bad)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in (1, 2, 3):
                writer.save_async(weights(step), step)
            writer.close()
        assert len([one for one in caught if "on_metrics" in str(one.message)]) == 1
        check(store, 1, 2, 3)

    def test_the_callback_may_use_the_writer(self, store: ckptstore.Store) -> None:
        waited = []

        def told(metrics: SaveMetrics) -> None:
            if metrics.step == 1:
                writer.wait()
                waited.append(writer.tag("first", 1).step)

        with store.writer(poll_seconds=None, on_metrics=told) as writer:
            writer.save_async(weights(1), 1)
            writer.save_async(weights(2), 2)
            while not waited:
                time.sleep(0.01)
        check(store, 1, 2)


def test_a_large_state_divided_over_segments(store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short memory, units that share pages, several segments: the bits are those of training."""
    monkeypatch.setattr("ckptstore.backends.base.Backend.segment_bytes", 40 * MIB)
    rng = np.random.default_rng(0)
    state = {f"w{number}": rng.integers(0, 256, 5_000_001 + 997 * number, np.uint8) for number in range(24)}
    expected = {name: array.copy() for name, array in state.items()}
    with store.writer(memory=LEAST, poll_seconds=None) as writer:
        pending = writer.save_async(state, 1)
        for array in state.values():
            array[:] = 0
        assert len(pending.result().segments) > 2
    loaded = store.load(1, framework="numpy")
    assert all(np.array_equal(loaded[name], array) for name, array in expected.items())
    assert ckptstore.verify(store).ok


@pytest.mark.parametrize(
    ("how", "most"),
    [({}, 3), ({"deltas": ckptstore.DeltaOptions()}, 1), ({"diffs": ckptstore.DiffOptions()}, 1)],
    ids=["fulls", "deltas", "diffs"],
)
def test_a_small_state_needs_few_threads_and_a_large_one_gets_them(
    store: ckptstore.Store, how: dict[str, Any], most: int
) -> None:
    """Fulls: one thread commits, and one for each save in flight writes. One thread alone does compression."""
    before = set(threading.enumerate())

    def begun() -> int:
        return len(set(threading.enumerate()) - before)  # those of other tests may end meanwhile

    with store.writer(max_in_flight=2, poll_seconds=None, **how) as writer:
        for step in range(1, 5):
            writer.save_async({"w": np.full(4096, step, np.float32)}, step)
        writer.wait()
        assert begun() <= most
        writer.save_async({"w": np.zeros(1 << 19, np.float32)}, 5)
        writer.wait()
        assert begun() > most
    for step in range(1, 5):
        assert (store.load(step, framework="numpy")["w"] == step).all()


def test_a_prompt_function_is_called_for_one_save_after_the_other(store: ckptstore.Store) -> None:
    told: list[int] = []
    running: list[int] = []

    def observe(metrics: ckptstore.SaveMetrics) -> None:
        running.append(metrics.step)
        assert len(running) == 1
        time.sleep(0.001)
        told.append(metrics.step)
        running.pop()

    with store.writer(max_in_flight=4, poll_seconds=None, on_metrics=PromptFunction(observe)) as writer:
        for step in range(1, 40):
            writer.save_async({"w": np.full(16, step)}, step)
    assert sorted(told) == list(range(1, 40))


def test_a_save_that_ends_inside_a_prompt_function_waits_for_nobody() -> None:
    """A signal handler saves, and interrupts the thread that reports."""
    told: list[int] = []

    def observe(metrics: SaveMetrics) -> None:
        if metrics.step == 1:
            meter.tell(replace(metrics, step=2))
            assert told == []
        told.append(metrics.step)

    meter = Meter(PromptFunction(observe))
    thread = threading.Thread(target=meter.tell, args=[SaveMetrics(1, "full", 8, 8, 0.0, 0.0, 0.0, 1, 0)], daemon=True)
    thread.start()
    thread.join(10)
    assert told == [1, 2]
