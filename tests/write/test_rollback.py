"""Rollback: refused if it would silently abandon steps, and done by a new term in place of the present one."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import DeltaOptions, DiffOptions
from ckptstore.log.log_reader import Patience
from ckptstore.store import Store
from tests.store.states import same
from tests.write import inside
from tests.write.held import elsewhere
from tests.write.trainer import Trainer


@pytest.fixture
def store() -> ckptstore.Store:
    return ckptstore.open(f"memory://{uuid.uuid4().hex}")


def state(step: int, branch: int = 0) -> dict[str, Any]:
    return {"w": np.full(3000, step, "<f4"), "branch": branch}


def save(writer: ckptstore.Writer, *steps: int, branch: int = 0) -> None:
    for step in steps:
        writer.save_async(state(step, branch), step)


def test_going_back_within_a_term_is_refused_with_the_remedy(store: ckptstore.Store) -> None:
    with store.writer(max_in_flight=3, poll_seconds=None) as writer:
        save(writer, 5, 6, 7)
        for step in (3, 4, 6, 7):
            with pytest.raises(ckptstore.StepOrderError, match=r"writer\.rollback\(.*parent=") as caught:
                writer.save_async(state(step), step)
            assert ("exists already" in str(caught.value)) == (step in (6, 7))
            with pytest.raises(ckptstore.StepOrderError):
                writer.save(state(step), step)
        save(writer, 8)
    assert [info.step for info in store.checkpoints()] == [5, 6, 7, 8]


def test_the_order_is_looked_at_before_the_state_and_once_more_after_it(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large state is not taken apart needlessly; while it is, another thread may give a step."""
    from ckptstore.frameworks import bridge

    with store.writer(poll_seconds=None) as writer:
        save(writer, 7)
        with pytest.raises(ckptstore.StepOrderError):
            writer.save({"w": object()}, 6)
        flattened = bridge.flattened

        def slowly(value: Any) -> Any:
            monkeypatch.setattr(bridge, "flattened", flattened)
            elsewhere(lambda: writer.save(state(9, 1), 9))
            return flattened(value)

        monkeypatch.setattr(bridge, "flattened", slowly)
        with pytest.raises(ckptstore.StepOrderError, match=r"exists already in term 1; .*to go back"):
            writer.save(state(9), 9)
        assert len(store.backend.list("seg/")) == 2, "nothing was written for it"
    assert [info.step for info in store.checkpoints()] == [7, 9]
    same(store.load(9, framework="numpy"), state(9, 1))


def test_commits_may_finish_out_of_order(store: ckptstore.Store) -> None:
    """The steps must ascend in the order in which they are given to the writer."""
    with store.writer(diffs=DiffOptions(), max_in_flight=3, poll_seconds=None) as writer:

        def overtaken(_: Any) -> Any:
            elsewhere(lambda: writer.save(state(6), 6))
            return ()

        writer.save_async(state(5), 5, updates=overtaken)
    slots = store.view().catalog.slots
    assert sorted(slots, key=slots.__getitem__) == [(1, 6), (1, 5)]
    assert store.checkpoint().step == 6


def test_a_step_that_failed_may_be_tried_again(store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with store.writer(poll_seconds=None) as writer:
        save(writer, 1)
        writer.wait()
        with monkeypatch.context() as patched:
            patched.setattr(store.backend, "open_sink", lambda *_: (_ for _ in ()).throw(ckptstore.StorageError("no")))
            with pytest.raises(ckptstore.StorageError):
                writer.save(state(3), 3)
        writer.save(state(2), 2)  # 3 does not exist
        writer.save(state(3), 3)
    assert [info.step for info in store.checkpoints()] == [1, 2, 3]


@pytest.mark.parametrize("options", [{}, {"deltas": DeltaOptions(interval=3)}], ids=["fulls", "deltas"])
def test_rollback_begins_a_new_term_in_place(store: ckptstore.Store, options: dict[str, Any]) -> None:
    with store.writer(max_in_flight=4, **options) as writer:
        save(writer, 5, 6, 7)
        parent = writer.rollback(5)
        assert (parent.ref, writer.term, writer.parent) == ("5@1", 2, parent)
        same(store.load(parent.ref, framework="numpy"), state(5))
        assert store.checkpoint().ref == "5@1", "an empty term's newest is its parent"
        with pytest.raises(ckptstore.StepOrderError, match="not above step 5, from which term 2 continues"):
            writer.save(state(4), 4)
        save(writer, 6, 7, branch=1)
        writer.tag("again", 7)
    assert [info.ref for info in store.checkpoints()] == ["5@1", "6@1", "7@1", "6@2", "7@2"]
    assert store.checkpoint("tag:again").ref == "7@2"
    assert store.checkpoint("6@2").kind == "full", "nothing of the branch that was left is a base"
    for ref, branch in (("6@1", 0), ("7@1", 0), ("6@2", 1), ("7@2", 1)):
        same(store.load(ref, framework="numpy"), state(int(ref[0]), branch))
    assert store.checkpoint().ref == "7@2"
    assert ckptstore.verify(store).ok


def test_rollback_with_diffs_writes_what_waits_and_loses_no_step(tmp_path: Path) -> None:
    trainer, truth = Trainer(), {}
    store = ckptstore.open(tmp_path / "store", create=True)
    with store.writer(diffs=DiffOptions(batch=50, seconds=None)) as writer:

        def train(*steps: int) -> None:
            for step in steps:
                trainer.train()
                truth[f"{step}@{writer.term}"] = trainer.frozen()
                writer.save_async(trainer.state(), step, updates=trainer.updates())

        train(1, 2, 3, 4)
        assert writer.rollback("latest").ref == "4@1"  # warnings are errors: no waiting step was lost
        train(5, 6)
        assert writer.rollback("2@1").ref == "2@1"
        train(3, 4)
    assert [info.ref for info in store.checkpoints()] == ["1@1", "2@1", "3@1", "4@1", "5@2", "6@2", "3@3", "4@3"]
    assert [info.kind for info in store.checkpoints()][-4:] == ["full", "gradient"] * 2
    for ref, expected in truth.items():
        same(expected, store.load(ref))
    assert [term.parent for term in store.terms()] == [None, "4@1", "2@1"]
    with store.writer() as after:
        assert after.parent is not None
        assert after.parent.ref == "4@3"


def test_rollback_to_what_is_not_there_changes_nothing(store: ckptstore.Store) -> None:
    with store.writer(diffs=DiffOptions(batch=3), poll_seconds=None) as writer:
        save(writer, 1, 2)
        with pytest.raises(ckptstore.CheckpointNotFoundError):
            writer.rollback(9)
        assert (writer.term, writer.parent) == (1, None)
        save(writer, 3, 4)
    assert [info.ref for info in store.checkpoints()] == ["1@1", "2@1", "3@1", "4@1"]


def test_a_checkpoint_of_the_same_name_in_another_store_is_no_parent(tmp_path: Path) -> None:
    """As when a store was replaced by another one after the checkpoint was looked up."""
    infos = []
    for name in ("one", "other"):
        with ckptstore.open(tmp_path / name).writer(poll_seconds=None) as writer:
            infos.append(writer.save({"name": name}, 1))
    other = ckptstore.open(tmp_path / "other")
    with pytest.raises(ckptstore.CheckpointNotFoundError, match="another checkpoint now: the store was replaced"):
        other.writer(parent=infos[0])
    assert [one.term for one in other.terms()] == [1]  # nobody was fenced
    with other.writer(parent=infos[1], poll_seconds=None) as writer:
        with pytest.raises(ckptstore.CheckpointNotFoundError, match="another checkpoint now"):
            writer.rollback(infos[0])
        writer.save({"name": "goes on"}, 2)
    assert [one.term for one in other.terms()] == [1, 2]


def test_a_writer_that_is_over_fences_nobody_by_rolling_back(store: ckptstore.Store) -> None:
    with store.writer(poll_seconds=None) as old:
        save(old, 1, 2)
        old.wait()
        with Store(store.backend).writer(poll_seconds=None) as new:
            with pytest.raises(ckptstore.FencedError, match="term 1 is over: term 2 was opened after it"):
                old.rollback(1)
            save(new, 3)
    assert len(store.terms()) == 2
    assert store.checkpoint().ref == "3@2"


def test_rollback_says_first_what_was_not_saved(store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with store.writer(poll_seconds=None) as writer:
        save(writer, 1)
        writer.wait()
        with monkeypatch.context() as patched:
            patched.setattr(store.backend, "open_sink", lambda *_: (_ for _ in ()).throw(ckptstore.StorageError("no")))
            save(writer, 2)
            with pytest.raises(ckptstore.StorageError):
                writer.rollback(1)
        assert writer.term == 1
        assert writer.rollback(1).step == 1
        assert writer.term == 2


def test_a_save_that_rollback_overtook_is_not_saved(store: ckptstore.Store) -> None:
    """It is a step of the abandoned branch; in the new term it would look like one of the new branch."""
    with store.writer(max_in_flight=3, poll_seconds=None, diffs=DiffOptions()) as writer:
        save(writer, 1, 2)

        def overtaken(_: Any) -> Any:
            assert elsewhere(lambda: writer.rollback(1)).step == 1
            return ()

        late = writer.save_async(state(3), 3, updates=overtaken)
        with pytest.raises(ckptstore.WriterClosedError, match="term 1 is over: 1@1 was gone back to"):
            late.result(60)
        writer.save(state(3, 1), 3)
    assert [info.ref for info in store.checkpoints()] == ["1@1", "2@1", "3@2"]


def test_after_close_nothing_is_rolled_back(store: ckptstore.Store) -> None:
    writer = store.writer(poll_seconds=None)
    save(writer, 1)
    writer.close()
    with pytest.raises(ckptstore.WriterClosedError):
        writer.rollback(1)
    assert len(store.terms()) == 1


def test_an_interrupted_rollback_saves_nothing_as_what_it_is_not(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-C the writer is in one term or in the other, or an error says that there is neither."""
    with store.writer(poll_seconds=None) as writer:
        save(writer, 1, 2)
        writer.wait()
        with monkeypatch.context() as patched:
            begun = inside.interrupt_succession(writer, patched)
            with pytest.raises(KeyboardInterrupt):
                writer.rollback(1)
        assert begun.is_set()
        with pytest.raises(ckptstore.FencedError):
            writer.save(state(3), 3)
    assert [info.ref for info in store.checkpoints()] == ["1@1", "2@1"]


def test_a_writer_that_does_not_know_what_it_committed_begins_no_term(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only opening the store again shows it."""
    with store.writer(poll_seconds=None) as writer:
        save(writer, 1)
        writer.wait()

        def silent(_medium: Any, key: str, _data: bytes) -> None:
            raise ckptstore.StorageError(110, "no answer", key)

        with monkeypatch.context() as patched:
            patched.setattr(type(store.backend), "create", silent)
            patched.setattr(Patience, "pause", lambda _patience, _done: None)
            with pytest.raises(ckptstore.CommitUnknownError):
                writer.save(state(2), 2)
        with pytest.raises(ckptstore.CommitUnknownError):
            writer.rollback(1)
    assert len(store.terms()) == 1


def test_going_back_to_nothing_is_refused_before_a_term_is_opened(store: ckptstore.Store) -> None:
    """Found by an outside attacker: it opened a term from nothing, and then failed an assertion."""
    with store.writer(poll_seconds=None) as writer:
        for ref, kind in ((None, ckptstore.UsageError), ("latest", ckptstore.CheckpointNotFoundError)):
            with pytest.raises(kind):
                writer.rollback(ref)  # type: ignore[arg-type]
        save(writer, 1, 2)
        with pytest.raises(ckptstore.UsageError, match="parent=None"):
            writer.rollback(None)  # type: ignore[arg-type]
        assert [term.term for term in store.terms()] == [1]
        assert writer.rollback("latest").ref == "2@1"
        save(writer, 3)
    assert store.latest_step() == 3
