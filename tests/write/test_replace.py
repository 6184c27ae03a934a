"""`Writer.save` with ``replace``: the newest step once more. Readers find the old checkpoint or the new, never none."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import DeltaOptions, DiffOptions, FailedRankError, RankOptions, StepOrderError
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.errors import CheckpointNotFoundError, StorageError, StoreNotFoundError, UsageError, WriterError
from ckptstore.maintenance.merge import merge
from ckptstore.store import Store
from ckptstore.write.ranks.messages.key_value_store import Group, LocalMailbox
from ckptstore.write.ranks.rank_writer import RankWriter
from tests.store.states import same
from tests.write.rank_threads import as_ranks
from tools.crash.enumerate import crash_states
from tools.crash.recording import RecordingPosix

RANKS = RankOptions(timeout=120)
FORMS: dict[str, dict[str, Any]] = {
    "fulls": {},
    "deltas": {"deltas": DeltaOptions(interval=2)},
    "diffs": {"diffs": DiffOptions(batch=3)},
}


@pytest.fixture
def store() -> ckptstore.Store:
    return ckptstore.open(f"memory://{uuid.uuid4().hex}")


def state(step: int, again: int = 0) -> dict[str, Any]:
    return {"w": np.full(3000, step + again / 8, "<f4"), "again": again}


def found(store: ckptstore.Store, ref: str | int = "latest") -> int:
    return int(store.load(ref, framework="numpy")["again"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_newest_step_is_replaced_and_nothing_is_overwritten(
    store: ckptstore.Store, form: str, asynchronous: bool
) -> None:
    with store.writer(max_in_flight=2, **FORMS[form]) as writer:

        def save(step: int, again: int) -> None:
            if asynchronous:
                writer.save_async(state(step, again), step, replace=True)
            else:
                writer.save(state(step, again), step, replace=True)

        save(4, 0)
        save(5, 0)  # above the newest: an ordinary save
        assert writer.term == 1
        for again in (1, 2):
            save(5, again)
        save(6, 2)
        assert (writer.term, writer.parent and writer.parent.ref) == (3, "5@2")
    assert [info.ref for info in store.checkpoints()] == ["4@1", "5@1", "5@2", "5@3", "6@3"]
    assert [found(store, ref) for ref in (4, 5, "5@1", "5@2", "5@3", 6, "latest")] == [0, 2, 0, 1, 2, 2, 2]
    for ref, expected in {"5@1": state(5), "5@2": state(5, 1), "5@3": state(5, 2)}.items():
        same(store.load(ref, framework="numpy"), expected)
    assert store.verify(deep=True).ok


def test_without_it_and_below_the_newest_it_is_refused_with_the_remedy(store: ckptstore.Store) -> None:
    with store.writer() as writer:
        writer.save(state(4), 4)
        writer.save(state(5), 5)
        with pytest.raises(StepOrderError, match=r"step 5 exists already.*replace=True"):
            writer.save(state(5, 1), 5)
        for step in (3, 4):
            with pytest.raises(StepOrderError, match=r"writer\.rollback") as caught:
                writer.save(state(step, 1), step, replace=True)
            assert "replace=True" not in str(caught.value)
        assert writer.term == 1, "nothing was done"
    with store.writer() as writer:
        with pytest.raises(StepOrderError, match=r"not above step 5, .* pass replace=True; to go back further"):
            writer.save(state(5, 1), 5)
        with pytest.raises(StepOrderError, match=r"step 4 is not above step 5, .*\(5@1\); to go back further"):
            writer.save(state(4, 1), 4, replace=True)
    assert [info.ref for info in store.checkpoints()] == ["4@1", "5@1"]


def test_another_process_replaces_what_it_continues_from_in_its_own_term(store: ckptstore.Store) -> None:
    with store.writer() as writer:
        writer.save(state(5), 5, tags="kept")
    with store.writer() as writer:
        assert writer.save(state(5, 1), 5, replace=True).ref == "5@2"
        assert writer.save(state(9)).step == 6
    assert (found(store, 5), found(store, "5@1"), found(store, "tag:kept")) == (1, 0, 0)


def test_what_is_replaced_has_to_be_named(store: ckptstore.Store) -> None:
    """Otherwise a script that believes it overwrites a checkpoint stores another one with each save."""
    with store.writer() as writer:
        for save in (writer.save, writer.save_async):
            with pytest.raises(UsageError, match="replace=True: say which step"):
                save(state(1), replace=True)
        assert writer.save(state(1)).ref == "1@1"


def test_until_the_new_one_is_committed_readers_find_the_old_one(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[tuple[int, str]] = set()
    create = type(store.backend).create

    def watched(backend: Any, key: str, data: bytes) -> bool:
        made = create(backend, key, data)
        for ref in ("latest", 5):
            seen.add((store.view().catalog.term, store.checkpoint(ref).ref))
        return made

    with store.writer(poll_seconds=None) as writer:
        writer.save(state(5), 5)
        monkeypatch.setattr(type(store.backend), "create", watched)
        writer.save(state(5, 1), 5, replace=True)
    assert seen == {(2, "5@1"), (2, "5@2")}


def test_a_save_that_fails_leaves_the_old_one_and_may_be_repeated(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.writer(poll_seconds=None) as writer:
        writer.save(state(5), 5)
        with monkeypatch.context() as patched:
            patched.setattr(store.backend, "open_sink", lambda *_: (_ for _ in ()).throw(StorageError("no")))
            for _ in range(2):
                with pytest.raises(StorageError):
                    writer.save(state(5, 1), 5, replace=True)
        assert (store.checkpoint().ref, found(store, 5)) == ("5@1", 0)
        with pytest.raises(ckptstore.UnsupportedStateError):
            writer.save({"w": object()}, 5, replace=True)
        assert writer.save(state(5, 2), 5, replace=True).ref == "5@2", "one term for all of them"
    assert found(store) == 2


def test_the_step_of_a_failed_save_in_flight_is_saved_in_the_same_term(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.writer(poll_seconds=None) as writer:
        writer.save(state(4), 4)
        with monkeypatch.context() as patched:
            patched.setattr(store.backend, "open_sink", lambda *_: (_ for _ in ()).throw(StorageError("no")))
            writer.save_async(state(5), 5)
            with pytest.raises(StorageError):
                writer.save(state(5, 1), 5, replace=True)
        assert writer.save(state(5, 1), 5, replace=True).ref == "5@1"


def test_retention_retires_what_was_replaced(store: ckptstore.Store) -> None:
    with store.writer(keep=["last:2"]) as writer:
        for step in (4, 5):
            writer.save(state(step), step)
        writer.save(state(5, 1), 5, replace=True)
        assert [info.ref for info in store.checkpoints()] == ["5@1", "5@2"], "both are on the line of the newest"
        writer.save(state(6), 6)
    assert [info.ref for info in store.checkpoints()] == ["5@2", "6@2"]
    with pytest.raises(CheckpointNotFoundError):
        store.load("5@1")


def test_a_replaced_checkpoint_is_the_base_of_what_was_built_on_it(store: ckptstore.Store) -> None:
    with store.writer(deltas=DeltaOptions(interval=1)) as writer:
        for step in (3, 4, 5):
            writer.save(state(step), step)
        writer.save(state(5, 1), 5, replace=True)
        writer.save(state(6, 1), 6)
    merge(store.journal, "3@1..5@1", take_over=True)
    store.gc()
    assert (found(store, "5@1"), found(store, 5), found(store)) == (0, 1, 1)
    assert store.verify(deep=True).ok


def test_a_copy_and_a_repaired_store_lead_to_the_same(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "store")
    with store.writer() as writer:
        writer.save(state(5), 5)
        writer.save(state(5, 1), 5, replace=True)
    store.copy(tmp_path / "copy")
    for one in (tmp_path / "store" / "log").iterdir():
        one.unlink()
    ckptstore.repair(tmp_path / "store", tmp_path / "repaired")
    for name in ("copy", "repaired"):
        other = ckptstore.open(tmp_path / name)
        assert [found(other, ref) for ref in ("latest", 5, "5@1", "5@2")] == [1, 1, 0, 1], name


@pytest.mark.parametrize("form", FORMS)
def test_a_power_cut_leaves_the_old_one_or_the_new(form: str) -> None:
    disk = RecordingPosix()
    store = Store(LocalBackend("/store", disk))
    with store.writer(threads=1, poll_seconds=None, staging_bytes=32 << 20, **FORMS[form]) as writer:
        writer.save(state(5), 5)
        disk.acknowledge(0)
        for again in (1, 2):
            writer.save(state(5, again), 5, replace=True)
            disk.acknowledge(again)
    outcomes: set[tuple[int, int]] = set()
    for one in crash_states(disk, limit=40):
        survivor = Store(LocalBackend("/store", one.mount()))
        promised = max(map(int, map(str, one.acknowledged)), default=None)
        try:
            newest, named = found(survivor), found(survivor, 5)
        except (CheckpointNotFoundError, StoreNotFoundError):
            assert promised is None, one.explain()
            continue
        assert newest == named, one.explain()
        if promised is not None:
            assert newest in (promised, promised + 1), one.explain()
            outcomes.add((promised, newest))
    assert outcomes == {(0, 0), (0, 1), (1, 1), (1, 2), (2, 2)}


@pytest.mark.parametrize("form", FORMS)
def test_ranks_replace_a_step_together(tmp_path: Path, form: str) -> None:
    box = LocalMailbox()

    def work(group: Group) -> list[Any]:
        with ckptstore.open(tmp_path).writer(group=group, ranks=RANKS, **FORMS[form]) as writer:
            writer.save_async(state(4), 4)
            writer.save_async(state(5), 5)
            kind = writer.save(state(5, 1), 5, replace=True).ref, writer.term
            writer.save_async(state(5, 2), 5, replace=True)
            return [*kind, writer.save(state(6, 2), 6, replace=True).ref]

    assert as_ranks(3, work, box) == [["5@2", 2, "6@3"]] * 3
    store = ckptstore.open(tmp_path)
    assert [info.ref for info in store.checkpoints()] == ["4@1", "5@1", "5@2", "5@3", "6@3"]
    assert [found(store, ref) for ref in (5, "5@1", "5@2", "5@3")] == [2, 0, 1, 2]

    def again(group: Group) -> str:
        with ckptstore.open(tmp_path).writer(group=group, ranks=RANKS) as writer:
            return writer.save(state(6, 3), 6, replace=True).ref

    assert as_ranks(2, again) == ["6@4"] * 2
    assert (found(store), store.verify(deep=True).ok) == (3, True)


def test_a_rank_without_a_state_forgoes_the_step_that_the_others_replace(tmp_path: Path) -> None:
    def work(group: Group) -> list[str]:
        with ckptstore.open(tmp_path).writer(group=group, ranks=RANKS) as writer:
            assert isinstance(writer, RankWriter)
            writer.save(state(5), 5)
            if group.rank == 1:
                writer.forgo(5, WriterError("the planner failed"), replace=True)
            else:
                with pytest.raises(FailedRankError, match="rank 1: WriterError: the planner failed"):
                    writer.save(state(5, 1), 5, replace=True)
            before = ckptstore.open(tmp_path).checkpoint().ref
            return [before, writer.save(state(5, 2), 5, replace=True).ref]

    assert as_ranks(3, work) == [["5@1", "5@2"]] * 3


@pytest.mark.parametrize("step", [3, None])
@pytest.mark.parametrize("rank", [0, 1])
def test_forgoing_fails_the_step_on_all_ranks_at_once(tmp_path: Path, step: int | None, rank: int) -> None:
    def work(group: Group) -> str:
        with ckptstore.open(tmp_path).writer(group=group, ranks=RANKS) as writer:
            assert isinstance(writer, RankWriter)
            writer.save(state(2), 2)
            if group.rank == rank:
                writer.forgo(step, WriterError("no memory"))
            else:
                with pytest.raises((FailedRankError, WriterError), match="no memory"):
                    writer.save(state(3), step)
            return writer.save(state(4), 4).ref

    assert as_ranks(2, work) == ["4@1"] * 2
    assert [info.step for info in ckptstore.open(tmp_path).checkpoints()] == [2, 4]


def test_the_drop_in_replaces_too(tmp_path: Path) -> None:
    place = tmp_path / "drop"
    assert ckptstore.save(state(5), place, step=5, replace=True) is not None
    with pytest.raises(StepOrderError, match="replace=True"):
        ckptstore.save(state(5, 1), place, step=5)
    saved = [ckptstore.save(state(5, number), place, step=5, replace=True) for number in (1, 2, 3)]
    assert [info and info.ref for info in saved] == ["5@2", "5@3", "5@4"]
    assert int(ckptstore.load(place, framework="numpy")["again"]) == 3
    assert [info.ref for info in ckptstore.open(place).checkpoints()] == ["5@3", "5@4"], "two stay"
    ckptstore.open(place).writer(reuse=True, keep=["last:2"]).close()
    file = tmp_path / "one.safetensors"
    for number in (1, 2):
        ckptstore.save({"w": np.full(3, number, "<f4")}, file, replace=True)
    assert ckptstore.load(file, framework="numpy")["w"].tolist() == [2, 2, 2]


def test_a_reader_beside_a_writer_that_replaces_again_and_again(tmp_path: Path) -> None:
    """It finds the newest state or the one before, and never none."""
    store = ckptstore.open(tmp_path / "store")
    with store.writer(poll_seconds=None) as writer:
        writer.save(state(5), 5)
        ended, wrong = threading.Event(), []

        def read() -> None:
            reader, last = ckptstore.open(tmp_path / "store"), 0
            while not ended.is_set():
                try:
                    now = found(reader, 5)
                except Exception as error:  # noqa: BLE001  # the test shows it
                    wrong.append(error)
                    return
                if now < last:
                    wrong.append(AssertionError(f"{now} after {last}"))
                last = now

        thread = threading.Thread(target=read)
        thread.start()
        for again in range(1, 15):
            writer.save(state(5, again), 5, replace=True)
        ended.set()
        thread.join()
    assert wrong == []
