"""Restoring a store from its remote: checkpoints that only this machine has are never lost."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pytest

import ckptstore
from ckptstore import CheckpointNotFoundError, CorruptionError, FencedError, UsageError
from ckptstore.log.pins import Pin
from tests.maintenance.stores import flip, late
from tests.tiers.conftest import Place
from tests.tiers.test_tiers import check, fill, state, steps

RESTORE = "print(ckptstore.open(sys.argv[1], remote=sys.argv[2]).latest_step(), flush=True)"


def objects(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("run", ["another", "the same"])
def test_an_unfinished_copy_of_something_else_is_left_alone(folders: Place, tmp_path: Path, run: str) -> None:
    fill(folders.open(), 1, 3)
    source = ckptstore.open(folders.here, remote=False)
    if run == "another":
        source = ckptstore.open(tmp_path / "another")
        fill(source, 1, 3)
    root = Path(source.backend.url)
    segment, doc = source.describe(3)[-1]
    flip(root / segment.key, doc.tensors[3]["weight"].chunks[0].offset)
    with pytest.raises(CorruptionError):
        source.copy(folders.there)
    before = objects(folders.there)
    assert {name.partition("/")[0] for name in before} >= {"COPYING", "log"}
    with pytest.raises(UsageError, match="unfinished copy of something else"):
        folders.open(folders.there)
    assert objects(folders.there) == before


def test_a_segment_that_is_damaged_in_both_tiers_keeps_here_what_is_intact(folders: Place) -> None:
    with folders.open().writer(poll_seconds=None) as writer:
        writer.save({name: np.arange(3000, dtype="<i4") for name in ("one", "other")}, 1)
    store = ckptstore.open(folders.here)
    segment, doc = store.describe(1)[0]
    flip(folders.here / segment.key, doc.tensors[1]["one"].chunks[0].offset)
    flip(Path(folders.remote) / segment.key, doc.tensors[1]["other"].chunks[0].offset)
    with pytest.raises(CorruptionError, match="'one'"):
        store.load(1, framework="numpy")
    assert store.read_tensor(1, "other").tobytes() == np.arange(3000, dtype="<i4").tobytes()


def test_two_processes_that_restore_at_once_cost_nothing_that_one_of_them_saves_then(folders: Place) -> None:
    """The slower one deletes segments that no slot of its view names: the other may have continued by then."""
    fill(folders.open(), 1, 2)

    def go_on() -> str:
        with folders.open(folders.there).writer(poll_seconds=None) as writer:
            return writer.save(state(3), 3).ref

    slow = late(RESTORE, folders.there, folders.remote)
    try:
        with ThreadPoolExecutor(1) as other:
            going_on = other.submit(go_on)
            assert not wait([going_on], 1.0).done, "it waits for the slow one"
            told, _ = slow.communicate("\n", timeout=120)
            assert going_on.result(60) == "3@2"
        assert told in ("2\n", "3\n")
        assert slow.returncode == 0
    finally:
        slow.kill()
        slow.communicate()
    store = ckptstore.open(folders.there, remote=False)
    check(store.load(3, framework="numpy"), 3)
    assert store.verify(deep=True).ok


def test_a_term_of_the_same_number_is_noticed_though_the_run_has_left_it(folders: Place) -> None:
    """The line of the newest checkpoint passes it by: that line alone would show no error."""
    fill(folders.open(), 1, 1)
    fill(ckptstore.open(folders.here, remote=False), 2, 2)
    elsewhere = folders.open(folders.there)
    fill(elsewhere, 2, 2)
    fill(elsewhere, 5, 5, parent="1@1")
    with pytest.raises(UsageError, match="a writer continued it separately in term 2"):
        folders.open().writer()
    assert [one.term for one in folders.theirs().terms()] == [1, 2, 3]  # and nobody was fenced
    check(ckptstore.open(folders.here, remote=False).load("2@2", framework="numpy"), 2)


def test_a_term_continues_from_another_machines_concurrent_save(
    folders: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(folders.open(), 1, 2)

    def passed(name: str) -> None:
        if name == "tiers.drained":
            monkeypatch.undo()
            fill(folders.open(folders.there), 3, 3)

    monkeypatch.setattr("ckptstore.tiers.tiered_term.crash_point", passed)
    with folders.open().writer(poll_seconds=None) as writer:
        assert (writer.term, writer.parent and writer.parent.ref) == (3, "3@2")
    check(ckptstore.open(folders.here, remote=False).load("3@2", framework="numpy"), 3)


def test_segments_being_drained_are_not_collected(folders: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ckptstore.open(folders.here)
    with store.writer(poll_seconds=None) as writer:
        for step in (1, 2):
            writer.save(state(step), step)

    def passed(name: str) -> None:
        if name == "drain.read":
            monkeypatch.undo()
            store.retire("1@1", take_over=True)
            assert len(store.gc().segments) == 0
            assert len(store.backend.list("seg/")) == 2

    monkeypatch.setattr("ckptstore.tiers.drain.crash_point", passed)
    assert store.sync(folders.remote).checkpoints == 2
    check(folders.theirs().load(1, framework="numpy"), 1)
    assert len(store.gc().segments) == 1


def test_a_checkpoint_retired_at_this_moment_is_not_drained(folders: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the log and the pin: it is gone, which is not damage."""
    store = ckptstore.open(folders.here)
    with store.writer(poll_seconds=None) as writer:
        for step in (1, 2):
            writer.save(state(step), step)

    class Late(Pin):
        def __enter__(self) -> Late:
            monkeypatch.undo()
            store.retire("1@1", take_over=True)
            assert len(store.gc().segments) == 1
            return super().__enter__()

    monkeypatch.setattr("ckptstore.tiers.drain.Pin", Late)
    done = store.sync(folders.remote)
    assert (done.checkpoints, done.damaged, done.branch) == (1, (), ())
    assert steps(folders.theirs()) == ["2@1"]


def test_nothing_is_read_from_the_store_of_another_run(folders: Place) -> None:
    fill(folders.open(), 1, 2)
    shutil.rmtree(folders.remote)
    fill(ckptstore.open(folders.remote), 1, 7)
    store = folders.open()
    with pytest.raises(CheckpointNotFoundError) as told:
        store.load(7)
    assert "another run" in "".join(told.value.__notes__)
    segment, doc = store.describe(2)[-1]
    flip(folders.here / segment.key, doc.tensors[2]["weight"].chunks[0].offset)
    with pytest.raises(CorruptionError) as told_of_damage:
        store.load(2)
    assert "another run" in "".join(told_of_damage.value.__notes__)


def test_a_remote_that_is_new_to_a_store_and_one_that_is_opened_by_its_own_name(folders: Place) -> None:
    fill(ckptstore.open(folders.here), 1, 2)
    fill(folders.open(), 3, 3)
    fill(ckptstore.open(folders.here, remote=False), 4, 4)  # which remembers the remote, and brings it there:
    ckptstore.open(folders.here).sync()
    theirs = folders.theirs()
    fill(theirs, 5, 5)
    assert steps(theirs) == ["1@1", "2@1", "3@2", "4@3", "5@4"]
    assert theirs.lag() is None
    for remote, why in ((folders.here, "a store is not its own remote"), (folders.here / "seg", "outside of")):
        with pytest.raises(UsageError, match=why):
            ckptstore.open(folders.here, remote=str(remote)).writer()
    assert [one.term for one in ckptstore.open(folders.here, remote=False).terms()] == [1, 2, 3]


def test_a_store_that_was_opened_by_a_relative_path_keeps_its_remote_in_another_folder(
    folders: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path is that of the folder in which the store was opened: another one may hold the remote under that name."""
    fill(folders.open(), 1, 1)
    monkeypatch.chdir(folders.here.parent)
    store = ckptstore.open(folders.here.name)
    elsewhere = folders.there.parent / "elsewhere"
    elsewhere.mkdir(parents=True)
    (elsewhere / folders.here.name).symlink_to(folders.remote)
    monkeypatch.chdir(elsewhere)
    fill(store, 2, 2)
    assert steps(folders.theirs()) == ["1@1", "2@2"]


def test_a_term_that_is_opened_here_alone_at_this_moment_fences_the_one_of_both(
    folders: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two terms of one number in one log would be invalid."""
    fill(folders.open(), 1, 2)

    def passed(name: str) -> None:
        if name == "tiers.filled":
            monkeypatch.undo()
            fill(ckptstore.open(folders.here, remote=False), 3, 3)

    monkeypatch.setattr("ckptstore.tiers.tiered_term.crash_point", passed)
    with pytest.raises(FencedError, match="this one has term 2 already"):
        folders.open().writer()
    store = ckptstore.open(folders.here, remote=False)
    check(store.load("3@2", framework="numpy"), 3)
    assert store.verify().ok
