"""A writer that has ended reports it at once: closed, fenced, forked or interrupted, it writes nothing any more."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import threading
import time
import uuid
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import DiffOptions
from ckptstore.formats.sources import NumpySource
from ckptstore.formats.states.state import FlatState
from ckptstore.host.arenas import LEAST
from ckptstore.store import Store
from ckptstore.write.stage import Stage
from tests.write import inside
from tests.write.held import hold
from tests.write.medium import Medium, weights
from tests.write.trainer import Trainer

LARGE = {"a": np.zeros(2 << 20), "b": np.zeros(2 << 20)}
"""Too large to be copied in one piece, without the pool."""


@pytest.fixture
def store() -> ckptstore.Store:
    return ckptstore.open(f"memory://{uuid.uuid4().hex}")


def begin_a_term(store: ckptstore.Store) -> None:
    Store(store.backend).writer(poll_seconds=None).close()


def fence(store: ckptstore.Store, writer: ckptstore.Writer) -> None:
    """A newer term begins, and `writer` learns of it. Waiting steps are not affected."""
    begin_a_term(store)
    with pytest.raises(ckptstore.FencedError):
        writer.tag("late", 1)


def test_after_close_nothing_is_taken(store: ckptstore.Store) -> None:
    writer = store.writer(poll_seconds=None)
    writer.save({"w": np.zeros(5)}, step=1)
    writer.close()
    for call in (
        lambda: writer.save({"w": np.ones(5)}, 2),
        lambda: writer.save_async({"w": np.ones(5)}, 2),
        lambda: writer.save({"w": object()}, 2),  # the cause is not that it could not be stored either
        lambda: writer.tag("late", 1),
        writer.wait,
    ):
        with pytest.raises(ckptstore.WriterClosedError, match="closed"):
            call()
    writer.close()


def test_nothing_is_acknowledged_in_a_store_that_cannot_be_opened_any_more(tmp_path: Path) -> None:
    format_file = tmp_path / "FORMAT"
    with ckptstore.open(tmp_path, create=True).writer(poll_seconds=None) as writer:
        writer.save({"w": np.zeros(5)}, 1)
        text = format_file.read_bytes()
        format_file.unlink()
        with pytest.raises(ckptstore.StorageError, match="lost its FORMAT file"):
            writer.save({"w": np.ones(5)}, 2)
        format_file.write_bytes(text)
        writer.save({"w": np.ones(5)}, 2)
    assert [info.step for info in ckptstore.open(tmp_path).checkpoints()] == [1, 2]


def check_bounded(held: list[int]) -> None:
    """After the first saves no more memory is added; the pool frees what was not used for a while."""
    assert held[-1] <= max(held[:4]), held


def test_the_memory_of_copied_gradients_serves_the_next_save(store: ckptstore.Store) -> None:
    trainer, held = Trainer(), []
    with store.writer(diffs=DiffOptions(), poll_seconds=None) as writer:
        for step in range(1, 13):
            trainer.train()
            writer.save_async(trainer.state(), step, updates=trainer.updates())
            writer.wait()
            held.append(inside.snapshots_held(writer))
    check_bounded(held)


def test_the_memory_of_a_save_that_failed_serves_the_next(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    medium = Medium(monkeypatch, 20, held=False)
    held = []
    with store.writer(deltas=1, poll_seconds=None) as writer:
        writer.save_async(weights(1), 1).result(60)
        medium.fails = set(range(1, 20))
        for _ in range(12):
            with pytest.raises(ckptstore.StorageError, match="no space"):
                writer.save_async(weights(2), 2).result(60)
            writer.wait()
            held.append(inside.snapshots_held(writer))
    check_bounded(held)


class Unreadable(NumpySource):
    """A tensor that cannot be copied."""

    def view(self) -> Any:
        raise ZeroDivisionError


def test_the_memory_of_a_save_whose_gradients_cannot_be_copied_serves_the_next(store: ckptstore.Store) -> None:
    trainer, held = Trainer(), []
    with store.writer(diffs=DiffOptions(), poll_seconds=None) as writer:
        for step in (1, 2):
            trainer.train()
            writer.save_async(trainer.state(), step, updates=trainer.updates())
        for _ in range(12):
            trainer.train()
            broken = {name: Unreadable(gradient.array) for name, gradient in trainer.gradients.items()}
            trainer.gradients.update(broken)
            writer.wait()
            with pytest.raises(ZeroDivisionError):
                writer.save_async(trainer.state(), 3, updates=trainer.updates())
            held.append(inside.snapshots_held(writer))
    check_bounded(held)


@pytest.mark.parametrize("options", [{}, {"deltas": 4}, {"deltas": 4, "memory": LEAST}], ids=str)
def test_nothing_that_was_passed_to_another_thread_outlives_its_save(
    store: ckptstore.Store, options: dict[str, Any]
) -> None:
    """Not even while the caller has its `PendingSave`."""
    others = [one for one in gc.get_objects() if issubclass(type(one), Stage)]  # of errors that other tests raised
    with store.writer(poll_seconds=None, **options) as writer:
        pending = [writer.save_async(weights(step), step) for step in (1, 2)]
        writer.wait()
        limit = time.monotonic() + 120
        while any(
            issubclass(type(one), Stage) and one not in others for one in gc.get_objects()
        ):  # a lane's thread may still be returning
            assert time.monotonic() < limit
            time.sleep(0.02)
    assert all(one.done() for one in pending)


@pytest.mark.parametrize("options", [{}, {"deltas": 4}], ids=["fulls", "deltas"])
def test_closed_while_the_state_is_copied(store: ckptstore.Store, options: dict[str, Any]) -> None:
    """The pool that copies ends with the writer; its own error would be meaningless to the caller."""
    writer = store.writer(poll_seconds=None, **options)

    closing = threading.Thread(target=writer.close)
    starting = threading.Lock()  # two threads cannot call `Thread.start` at once

    class Closing(NumpySource):
        def view(self) -> Any:
            with starting, contextlib.suppress(RuntimeError):  # two threads copy: one of them starts it
                closing.start()
            with contextlib.suppress(ckptstore.WriterClosedError):
                while True:
                    writer.prepare(LARGE)
                    time.sleep(0.001)
            if options:  # the thread that saves asks for this before the pool copies: the pool may be gone by then
                closing.join(60)
            return super().view()

    with pytest.raises(ckptstore.WriterClosedError, match="closed"):
        writer.save_async(FlatState(None, {name: Closing(array) for name, array in LARGE.items()}), 1)
    closing.join(60)
    assert not closing.is_alive()
    assert not store.backend.list("seg/")


@pytest.mark.parametrize("options", [{}, {"deltas": 4}], ids=["fulls", "deltas"])
def test_a_save_that_comes_while_an_earlier_one_keeps_the_writer_from_closing_is_refused(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """It would be committed after the end of the term, or never."""
    medium = Medium(monkeypatch, 2)
    writer = store.writer(max_in_flight=2, poll_seconds=None, **options)
    closing = threading.Thread(target=writer.close)

    class Closing(NumpySource):
        """A tensor whose size is asked for when the writer was found to be open."""

        closes = False

        @property
        def nbytes(self) -> int:  # type: ignore[override]
            if self.closes:
                self.closes = False
                closing.start()
                with contextlib.suppress(ckptstore.WriterClosedError):
                    while True:
                        writer.prepare({})
                        time.sleep(0.001)
            return 20

        @nbytes.setter
        def nbytes(self, _: int) -> None:
            """The constructor's."""

    late = Closing(np.ones(5, "<f4"))
    late.closes = True
    first = writer.save_async({"w": np.zeros(5, "<f4")}, 1)
    assert medium.begun[0].wait(60)
    try:
        with pytest.raises(ckptstore.WriterClosedError, match="closed"):
            writer.save_async(FlatState(None, {"w": late}), 2)
    finally:
        medium.release()
    closing.join(60)
    assert not closing.is_alive()
    assert first.result().step == 1
    assert [info.step for info in store.checkpoints()] == [1]
    assert medium.opened == 1


def test_a_fenced_writer_refuses_at_once(store: ckptstore.Store) -> None:
    writer = store.writer(poll_seconds=None)
    writer.save({"w": np.zeros(5)}, step=1)
    fence(store, writer)
    for call in (
        lambda: writer.save({"w": np.ones(5)}, 2),
        lambda: writer.save_async({"w": np.ones(5)}, 2),  # not only its result
        lambda: writer.tag("late", 1),
    ):
        with pytest.raises(ckptstore.FencedError):
            call()
    writer.close()


def test_a_writer_that_is_fenced_as_it_answers_a_request_writes_nothing_more(store: ckptstore.Store) -> None:
    writer = store.writer(poll_seconds=None)
    writer.save({"w": np.zeros(5)}, step=1)
    writer.poll()  # else the upkeep that follows the save may answer the request before the new term begins
    with pytest.raises(ckptstore.RequestTimeoutError):
        store.tag("late", 1, timeout=0.0)
    begin_a_term(store)
    with contextlib.suppress(ckptstore.FencedError):
        writer.poll()
    for call in (lambda: writer.save({"w": np.ones(5)}, 2), lambda: writer.save_async({"w": np.ones(5)}, 2)):
        with pytest.raises(ckptstore.FencedError):
            call()
    writer.close()
    assert len(store.backend.list("seg/")) == 1


def test_saves_in_flight_when_the_term_ended_are_not_written(store: ckptstore.Store) -> None:
    """No writer may drop segments of a term that is over: so none is written any more."""
    with store.writer(poll_seconds=None) as writer, ThreadPoolExecutor(1) as other:
        reached, goes_on = threading.Event(), threading.Event()

        def waits(_done: int, _total: int) -> None:
            reached.set()
            assert goes_on.wait(60)

        first = other.submit(writer.save, {"w": np.zeros(5)}, 1, progress=waits)
        assert reached.wait(60)
        second = writer.save_async({"w": np.ones(5)}, 2)
        begin_a_term(store)
        goes_on.set()
        for one in (first, second):
            with pytest.raises(ckptstore.FencedError):
                one.result(60)
    assert len(store.backend.list("seg/")) == 1


LOST = pytest.mark.filterwarnings("ignore:term 1 ended without closing:ckptstore.LostStepsWarning")


@pytest.fixture
def trainer(store: ckptstore.Store) -> Any:
    """A writer of diffs, and its input: step 1 is a full, step 2 waits for its batch."""
    trainer = Trainer()
    writer = store.writer(diffs=DiffOptions(batch=9, seconds=None), poll_seconds=None)
    pending = []
    for step in (1, 2):
        trainer.train()
        pending.append(writer.save_async(trainer.state(), step, updates=trainer.updates()))
    pending[0].result(60)
    return trainer, writer, pending[1]


@LOST
def test_steps_that_wait_are_not_written_once_the_term_is_over(store: ckptstore.Store, trainer: Any) -> None:
    _, writer, waiting = trainer
    before = store.backend.list("seg/")
    fence(store, writer)
    with pytest.raises(ckptstore.FencedError):
        writer.wait()
    with pytest.raises(ckptstore.FencedError):
        waiting.result(60)
    writer.close()
    assert store.backend.list("seg/") == before


@LOST
def test_no_step_waits_for_a_batch_that_cannot_be_written(store: ckptstore.Store, trainer: Any) -> None:
    """The term ends after the step was accepted: its error comes with it, not with the end of the batch."""
    training, writer, waiting = trainer
    training.train()

    def updates(_flat: FlatState) -> Any:
        fence(store, writer)
        return training.updates()

    late = writer.save_async(training.state(), 3, updates=updates)
    with pytest.raises(ckptstore.FencedError):
        late.result(60)
    assert not waiting.done()
    with pytest.raises(ckptstore.FencedError):
        writer.close()
    with pytest.raises(ckptstore.FencedError):
        waiting.result(60)


@pytest.mark.parametrize("diffs", [None, DiffOptions(batch=1)], ids=["full", "diffs"])
def test_an_interrupted_save_is_not_committed(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch, diffs: DiffOptions | None
) -> None:
    """The caller may change the state after the interrupt: bytes written by then are not the saved ones."""
    with store.writer(diffs=diffs, poll_seconds=None) as writer:
        known = threading.Event()

        def wait() -> None:
            assert known.wait(60)

        with monkeypatch.context() as patched:
            inside.interrupt_waits_of_save(patched, known)
            inside.copies_late(writer, patched, wait, writes=True)
            with pytest.raises(KeyboardInterrupt):
                writer.save({"w": np.zeros(5)}, 1)
        assert store.checkpoints() == []
        writer.save({"w": np.ones(5)}, 1)
    assert store.load(1, framework="numpy")["w"].tolist() == [1] * 5


def test_a_fork_is_refused_before_it_waits_for_threads_that_it_does_not_have(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store").writer(poll_seconds=None, threads=1) as writer:
        writer.save_async(LARGE, step=1).result(60)  # its pool has a thread
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, about forks and threads
            child = multiprocessing.get_context("fork").Process(target=_misuse, args=(writer,), daemon=True)
            child.start()
        child.join(120)
        if child.exitcode is None:
            child.kill()
        assert child.exitcode == 0


def test_a_fork_does_not_wait_for_what_its_parent_saves(tmp_path: Path) -> None:
    """It would never learn of it. It may ask for known results."""
    store = ckptstore.open(tmp_path / "store")
    with store.writer(poll_seconds=None, max_in_flight=2) as writer:
        done = writer.save_async({"w": np.zeros(5)}, 1)
        done.result(60)
        gate = hold(store, writer)
        pending = writer.save_async({"w": np.ones(5)}, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, about forks and threads
            child = multiprocessing.get_context("fork").Process(target=_ask, args=(done, pending), daemon=True)
            child.start()
        child.join(120)
        if child.exitcode is None:
            child.kill()
        gate.set()
        assert child.exitcode == 0
        assert pending.result(60).step == 2


def _ask(done: ckptstore.PendingSave, pending: ckptstore.PendingSave) -> None:
    assert done.result().step == 1
    for timeout in (None, 60):
        with pytest.raises(ckptstore.WriterClosedError, match=r"step 2 is saved by process \d+, not by its fork"):
            pending.result(timeout)


def test_an_interrupted_save_async_commits_nothing_of_another_step(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job is queued when Ctrl-C comes, and its memory has the next save's copy by then."""
    with store.writer(poll_seconds=None) as writer:
        gate = hold(store, writer)
        with monkeypatch.context() as patched:
            inside.interrupt_last_line_of_save_async(writer, patched)
            with pytest.raises(KeyboardInterrupt):
                writer.save_async({"w": np.full(5, 1.0)}, 1)
        second = writer.save_async({"w": np.full(5, 2.0)}, 2)
        gate.set()
        assert second.result(60).step == 2
    assert [info.step for info in store.checkpoints()] == [2]
    assert store.load(2, framework="numpy")["w"].tolist() == [2] * 5


def test_payloads_under_way_take_no_more_memory_than_staging_has_blocks(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every compressing thread has a chunk of 16 MiB in memory, and one chunk waits to be written."""
    from ckptstore.write import delta_encoding, writer_runtime

    lock, met, under_way, most = threading.Lock(), threading.Event(), [0], [0]
    code = delta_encoding.code_group

    def counted(*arguments: Any) -> Any:
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
            if most[0] == 2:
                met.set()
        met.wait(60)
        time.sleep(0.1)  # so that as many as possible arrive
        try:
            return code(*arguments)
        finally:
            with lock:
                under_way[0] -= 1

    monkeypatch.setattr(delta_encoding, "code_group", counted)
    monkeypatch.setattr(writer_runtime.os, "cpu_count", lambda: 64)
    state = {str(number): np.zeros(1 << 20, np.uint8) for number in range(12)}
    options = ckptstore.DeltaOptions(interval=1, compress_fulls=True)
    with store.writer(staging_bytes=3 * (16 << 20), deltas=options, poll_seconds=None) as saving:
        saving.save(state, 1)
    assert most == [2]


@pytest.mark.parametrize("how", ["full", "packed", "diffs"])
def test_progress_counts_up_to_the_states_bytes(store: ckptstore.Store, how: str) -> None:
    state = {"a": np.zeros(3 << 20), "b": {"c": np.arange(5, dtype="<i2"), "none": np.zeros((0, 4))}}
    packed = ckptstore.DeltaOptions(interval=1, compress_fulls=True) if how == "packed" else None
    diffs = DiffOptions(batch=2) if how == "diffs" else None
    told: list[tuple[int, int]] = []
    with store.writer(deltas=packed, diffs=diffs, poll_seconds=None) as writer:
        writer.save(state, 1, progress=lambda done, total: told.append((done, total)))
    total = (24 << 20) + 10
    assert {said for _, said in told} == {total}
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert told[-1][0] == total


def _misuse(writer: ckptstore.Writer) -> None:
    for call in (
        lambda: writer.save({"w": np.ones(4)}, 2),
        lambda: writer.save_async(LARGE, 2),
        lambda: writer.tag("late", 1),
        writer.wait,
    ):
        with pytest.raises(ckptstore.WriterClosedError, match="fork"):
            call()


class TestWaiting:
    def test_everything_given_is_durable(self, store: ckptstore.Store) -> None:
        with store.writer(poll_seconds=None, max_in_flight=3) as writer:
            pending = [writer.save_async({"w": np.full(5, float(step))}, step) for step in (1, 2, 3)]
            writer.wait()
            assert all(one.done() for one in pending)
            assert [info.step for info in store.checkpoints()] == [1, 2, 3]

    def test_the_exception_can_be_queried(self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: Any) -> Any:
            raise ckptstore.StorageError("the disk is full")

        with store.writer(poll_seconds=None) as writer:
            assert writer.save_async({"w": np.ones(5)}, 1).exception() is None
            gate = hold(store, writer)
            with monkeypatch.context() as patched:
                patched.setattr(type(store.backend), "open_sink", full)
                failed = writer.save_async({"w": np.ones(5)}, 2)
                for ask in (failed.result, failed.exception):
                    with pytest.raises(TimeoutError, match="step 2 is not durable after 0"):
                        ask(0.01)
                gate.set()
                error = failed.exception(60)
            assert isinstance(error, ckptstore.StorageError)
            assert failed.exception() is error
            with pytest.raises(ckptstore.StorageError, match="the disk is full"):
                failed.result()
            writer.wait()  # the caller got an error


def test_steps_and_refs_may_be_numpy_integers(store: ckptstore.Store) -> None:
    with store.writer() as writer:
        assert writer.save({"w": np.ones(5)}, np.int64(1)).step == 1
        pending = writer.save_async({"w": np.ones(5)}, np.uint8(2))
        assert (pending.step, type(pending.step)) == (2, int)
        writer.wait()
        writer.tag("two", np.int32(2))
        assert writer.rollback(np.int64(1)).ref == "1@1"
        with pytest.raises(ckptstore.StepOrderError, match="a whole number"):
            writer.save({"w": np.ones(5)}, np.float64(2))
    assert store.checkpoint("tag:two").step == store.checkpoint(np.int64(2)).step == 2
    with store.writer(parent=np.int64(2)) as writer:
        assert writer.parent is not None
        assert writer.parent.ref == "2@1"
