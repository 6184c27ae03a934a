"""Batches of step diffs: when they are written, how they fail, and which steps an unclosed term may lack."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import DiffOptions
from ckptstore.log.change import CatalogChange
from tests.store.states import same
from tests.write.held import hold
from tests.write.inside import forget_open_writers
from tests.write.trainer import Trainer


def test_save_writes_what_waits(tmp_path: Path) -> None:
    trainer = Trainer()
    store = ckptstore.open(tmp_path / "store", create=True)
    with store.writer(diffs=DiffOptions(batch=100, seconds=None)) as writer:
        pending = []
        for step in range(1, 5):
            trainer.train()
            pending.append(writer.save_async(trainer.state(), step, updates=trainer.updates()))
        assert pending[0].result().kind == "full"
        assert not any(one.done() for one in pending[1:])
        assert [info.step for info in store.checkpoints()] == [1]
        trainer.train()
        info = writer.save(trainer.state(), 5, updates=trainer.updates())
        assert all(one.done() for one in pending)
        assert [one.result().segments for one in pending[1:]] == [info.segments] * 3
        assert [info.step for info in store.checkpoints()] == [1, 2, 3, 4, 5]
        trainer.train()
        last = writer.save_async(trainer.state(), 6)
        writer.wait()
        assert last.done()
        trainer.train()
        writer.save_async(trainer.state(), 7, updates=trainer.updates())
    assert len(store.checkpoints()) == 7


def test_the_result_of_a_step_does_not_wait_for_its_batch(tmp_path: Path) -> None:
    trainer = Trainer()
    store = ckptstore.open(tmp_path / "store", create=True)
    with store.writer(diffs=DiffOptions(batch=100, seconds=None), poll_seconds=None) as writer:

        def save() -> ckptstore.PendingSave:
            trainer.train()
            return writer.save_async(trainer.state(), trainer.step, updates=trainer.updates())

        first, second = save(), save()
        assert first.result(60).kind == "full"
        writer.poll()
        assert not second.done(), "only what it is asked for is written"
        third = save()
        assert second.result(60).segments == third.result(60).segments
        assert third.result(60).step == 3
        fourth = save()
        with pytest.raises(TimeoutError):
            fourth.result(0)
        assert fourth.result(60).step == 4
        fifth = save()
        writer.tag("five", 5)
        assert fifth.done()
        assert store.checkpoint("tag:five").step == 5
        sixth = save()
        writer.tag("one", 1)
        assert not sixth.done(), "the batch has nothing to do with step 1"
        assert store.checkpoint("tag:one").step == 1


@pytest.mark.parametrize("memory", [None, 128 << 20])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_step_diff_cannot_be_cancelled(tmp_path: Path, batch: int, memory: int | None) -> None:
    """The next one is compressed against it. A save that reports it was cancelled must not be stored."""
    store = ckptstore.open(tmp_path / "store", create=True)
    trainer, truth = Trainer(), {}
    with store.writer(diffs=DiffOptions(batch=batch), max_in_flight=8, memory=memory, poll_seconds=None) as writer:
        gate = hold(store, writer)
        if memory is not None:
            gate.set()  # a save returns when it is compressed
        saves = []
        for step in range(1, 6):
            trainer.train()
            truth[step] = trainer.frozen()
            saves.append(writer.save_async(trainer.state(), step, updates=trainer.updates()))
        assert [save.cancel() for save in saves] == [False] * 5
        gate.set()
        assert [save.result(60).step for save in saves] == [1, 2, 3, 4, 5]
    for step, state in truth.items():
        same(state, store.load(step))


def test_a_tag_of_a_step_whose_batch_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptstore.write.steps import batcher

    trainer = Trainer()
    store = ckptstore.open(tmp_path / "store", create=True)

    def broken(*_: Any, **__: Any) -> Any:
        raise ckptstore.StorageError("the disk is gone")

    with store.writer(diffs=DiffOptions(batch=100, seconds=None)) as writer:
        for step in (1, 2):
            trainer.train()
            writer.save_async(trainer.state(), step, updates=trainer.updates())
        monkeypatch.setattr(batcher, "write_batch", broken)
        with pytest.raises(ckptstore.StorageError, match="the disk is gone"):
            writer.tag("two", 2)
        writer.wait()  # the caller of tag got the error
        with pytest.raises(ckptstore.CheckpointNotFoundError, match="no checkpoint of step 2"):
            writer.tag("two", 2)


def test_a_batch_waits_no_longer_than_its_time(tmp_path: Path) -> None:
    trainer = Trainer()
    store = ckptstore.open(tmp_path / "store", create=True)
    with store.writer(diffs=DiffOptions(batch=100, seconds=0.2)) as writer:
        for step in range(1, 4):
            trainer.train()
            last = writer.save_async(trainer.state(), step, updates=trainer.updates())
        deadline = time.monotonic() + 60
        while not last.done() and time.monotonic() < deadline:  # waiting for the result would write it at once
            time.sleep(0.01)
        assert last.done()
        assert last.result().step == 3


def test_a_failed_batch_fails_each_of_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptstore.write.steps import batcher

    trainer, truth = Trainer(), {}
    store = ckptstore.open(tmp_path / "store", create=True)

    def broken(*_: Any, **__: Any) -> Any:
        raise ckptstore.StorageError("the disk is gone")

    with store.writer(diffs=DiffOptions(batch=100, seconds=None)) as writer:
        pending = []
        for step in range(1, 5):
            trainer.train()
            truth[step] = trainer.frozen()
            pending.append(writer.save_async(trainer.state(), step, updates=trainer.updates()))
        pending[0].result()
        with monkeypatch.context() as patched:
            patched.setattr(batcher, "write_batch", broken)
            with pytest.raises(ckptstore.StorageError, match="the disk is gone") as caught:
                writer.wait()
        assert caught.value.__notes__ == ["steps 2 to 4, which waited for their batch, were not saved"]
        writer.wait()  # does not report it again
        for one in pending[1:]:
            with pytest.raises(ckptstore.StorageError):
                one.result()
        # No step is encoded against a step that does not exist: a full follows, and the steps may be tried again.
        for step in (4, 5):
            truth[step] = trainer.frozen()
            writer.save_async(trainer.state(), step, updates=trainer.updates())
            trainer.train()
    assert [(info.step, info.kind) for info in store.checkpoints()] == [(1, "full"), (4, "full"), (5, "gradient")]
    for step in (1, 4, 5):
        same(truth[step], store.load(step))


def test_a_term_that_was_not_closed_says_what_may_be_missing(tmp_path: Path) -> None:
    trainer = Trainer()
    store = ckptstore.open(tmp_path / "store", create=True)
    first = store.writer(diffs=DiffOptions(batch=50, seconds=None))
    for step in range(1, 6):
        trainer.train()
        first.save_async(trainer.state(), step, updates=trainer.updates())
    first.wait()
    trainer.train()
    lost = first.save_async(trainer.state(), 6, updates=trainer.updates())
    with pytest.warns(ckptstore.LostStepsWarning, match=r"term 1 ended without closing: up to 50 steps after 5 .* 5@1"):
        second = store.writer(diffs=DiffOptions(batch=50))
    with pytest.raises(ckptstore.FencedError):
        first.close()
    with pytest.raises(ckptstore.FencedError):
        lost.result()
    second.save(trainer.state(), 6)
    second.close()
    with store.writer() as third:  # no warning: the second was closed
        assert third.parent is not None
        assert third.parent.step == 6


def test_going_back_on_purpose_loses_nothing(tmp_path: Path) -> None:
    """A caller that names an earlier checkpoint knows that there are later ones."""
    trainer = Trainer()
    store = ckptstore.open(tmp_path / "store", create=True)
    with store.writer(diffs=DiffOptions(batch=50, seconds=None)) as first:
        for step in range(1, 6):
            trainer.train()
            first.save_async(trainer.state(), step, updates=trainer.updates())
        first.wait()
        assert not store.view().catalog.terms[1].extra, "it was not closed"
        store.writer(parent=2).close()  # warnings are errors
        store.writer(parent="4@1").close()
        with pytest.warns(ckptstore.LostStepsWarning, match="up to 50 steps after 5 "):
            store.writer(parent="5@1").close()


@pytest.fixture
def settle() -> Iterator[Callable[[], None]]:
    """Act like a scheduler some seconds before a kill: every writer writes its waiting steps, and nothing is missing.

    Until a writer is opened afterwards, no writer handles a second signal.
    """
    settled: list[int] = []
    forget_open_writers()
    before = signal.signal(signal.SIGTERM, lambda number, _: settled.append(number))

    def send() -> None:
        settled.clear()
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 120
        while not settled:  # the writers' handler sends it again when everything is written
            assert time.monotonic() < deadline
            time.sleep(0.005)

    yield send
    signal.signal(signal.SIGTERM, before)


def test_a_settled_term_that_continues_is_not_closed(tmp_path: Path, settle: Callable[[], None]) -> None:
    trainer = Trainer()
    store = ckptstore.open(tmp_path / "store", create=True)

    def save(writer: ckptstore.Writer) -> None:
        trainer.train()
        writer.save_async(trainer.state(), trainer.step, updates=trainer.updates())

    options = DiffOptions(batch=3, seconds=None)
    first = store.writer(diffs=options)
    save(first)
    save(first)
    settle()
    second = store.writer(diffs=options)  # no warning: everything is there
    save(second)
    save(second)
    settle()
    save(second)
    save(second)
    save(second)
    second.wait()
    save(second)
    with pytest.warns(ckptstore.LostStepsWarning, match="up to 3 steps after 7"):
        third = store.writer(diffs=options)
    for writer in (first, second):
        with contextlib.suppress(ckptstore.FencedError):
            writer.close()
    third.close()


def test_requests_are_answered_with_nothing_waiting(tmp_path: Path) -> None:
    """Retiring the full on which waiting steps are built must be refused, not granted first."""
    from ckptstore.log import requests

    trainer = Trainer()
    store = ckptstore.open(tmp_path / "store", create=True)
    with store.writer(diffs=DiffOptions(batch=100, seconds=None), poll_seconds=None) as writer:
        for step in range(1, 4):
            trainer.train()
            last = writer.save_async(trainer.state(), step, updates=trainer.updates())
        writer.poll()
        catalog = store.view().catalog
        segments = catalog.encodings[1, 1][0].segments
        asked = requests.post(store.journal, 1, "test", CatalogChange(retires=((1, 1),), drops=tuple(segments)))
        writer.poll()
        assert last.done()
        found = requests.outcome(store.view().catalog, asked)
        assert found.answer == "refused"
    same(trainer.frozen(), store.load(3))


def test_a_step_that_was_retired_is_not_built_on(tmp_path: Path) -> None:
    """A request has retired and dropped everything: the next step is a full."""
    from ckptstore.log import requests

    trainer = Trainer()
    store = ckptstore.open(tmp_path / "store", create=True)
    kinds = []
    with store.writer(diffs=DiffOptions(), poll_seconds=None) as writer:
        for step in range(1, 5):
            trainer.train()
            kinds.append(writer.save(trainer.state(), step, updates=trainer.updates()).kind)
            if step == 2:
                change = CatalogChange(retires=((1, 1), (1, 2)), drops=tuple(store.view().catalog.segments))
                asked = requests.post(store.journal, 1, "test", change)
                writer.poll()
                assert requests.outcome(store.view().catalog, asked).answer == "accepted"
    assert kinds == ["full", "gradient", "full", "gradient"]
    same(trainer.frozen(), store.load(4))


def test_a_term_whose_last_batch_failed_is_not_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptstore.write.steps import batcher

    def broken(*_: Any, **__: Any) -> Any:
        raise ckptstore.StorageError("the disk is gone")

    trainer = Trainer()
    store = ckptstore.open(tmp_path / "store", create=True)
    writer = store.writer(diffs=DiffOptions(batch=9, seconds=None))
    for step in range(1, 4):
        trainer.train()
        writer.save_async(trainer.state(), step, updates=trainer.updates())
    monkeypatch.setattr(batcher, "write_batch", broken)
    with pytest.raises(ckptstore.StorageError):
        writer.close()
    with pytest.warns(ckptstore.LostStepsWarning, match="up to 9 steps after 1"):
        store.writer().close()
