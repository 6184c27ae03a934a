"""A pruned remote: checkpoints that it gave up are not a branch, are not uploaded again, and delay nothing here."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import CorruptionError, FencedError, RequestRefusedError
from ckptstore.backends.exclusion import exclusive_access
from ckptstore.formats.history.catalog import CatalogBuilder
from ckptstore.formats.history.records import (
    CheckpointEntry,
    CheckpointId,
    CommitRecord,
    Encoding,
    OpenRecord,
    SegmentEntry,
)
from ckptstore.tiers import remote_requests
from ckptstore.tiers.drain_selection import drainable, lag_between, remote_holds, remote_retired
from tests.tiers.conftest import Place
from tests.tiers.test_tiers import LONG, check, fill, state, steps

pytestmark = pytest.mark.filterwarnings("error::ckptstore.BranchWarning")


def segments(store: ckptstore.Store) -> set[str]:
    return set(store.backend.list("seg/"))


def test_a_remote_that_was_pruned_by_its_url(place: Place) -> None:
    fill(place.open(), 1, 6)
    theirs = place.theirs()
    theirs.prune("last:2", take_over=True)
    theirs.gc()
    kept = segments(theirs)
    store = place.open()
    for _ in range(2):
        done = store.sync()
        assert (done.branch, done.damaged, done.segments) == ((), (), 0)
    assert store.lag() == ckptstore.Lag()
    assert steps(store) == [f"{step}@1" for step in range(1, 7)], "this machine keeps longer"
    fill(store, 7, 8)
    assert steps(place.theirs()) == ["5@1", "6@1", "7@3", "8@3"]
    assert len(segments(theirs) - kept) == 2, "and of what was pruned there nothing came back"
    fill(place.open(), 9, 10, keep=["last:3"])
    assert steps(store) == ["8@3", "9@4", "10@4"], "its own rules retire what the remote gave up"
    assert steps(place.theirs()) == ["5@1", "6@1", "7@3", "8@3", "9@4", "10@4"], "which keeps longer now"
    for one in (store, place.theirs()):
        assert one.verify(deep=True).ok


def test_a_remote_is_pruned_beside_a_live_drain(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_requests, "EVERY", 0.1)
    with place.open().writer(deltas=3, poll_seconds=None) as writer:
        for step in range(1, 7):
            writer.save(state(step), step)
        writer.save_async(state(7), 7).result(tier="remote", timeout=LONG)
        theirs = place.theirs()
        assert theirs.prune("last:2", timeout=LONG).retired == ("1@1", "2@1", "3@1", "4@1", "5@1")
        writer.tag("kept", 6)
        writer.save_async(state(8), 8).result(tier="remote", timeout=LONG)
        for change in (
            lambda: theirs.tag("kept", 7, timeout=LONG),
            lambda: theirs.tag("other", 7, timeout=LONG),
            lambda: theirs.untag("kept", timeout=LONG),
        ):
            with pytest.raises(RequestRefusedError, match="tag and untag there"):
                change()
        with pytest.raises(RequestRefusedError, match="second tier"):
            theirs.keep("last:1", timeout=LONG)
        for step in range(9, 11):
            writer.save_async(state(step), step).result(tier="remote", timeout=LONG)
            assert writer.lag() == ckptstore.Lag()
    assert steps(theirs) == [f"{step}@1" for step in range(6, 11)], "nobody was fenced"
    theirs.gc()
    store = place.open()
    done = store.sync()
    assert (done.branch, done.damaged, done.checkpoints, done.segments) == ((), (), 0, 0)
    assert steps(store) == [f"{step}@1" for step in range(1, 11)]
    store.prune("last:3", take_over=True)
    assert steps(store) == ["6@1", "8@1", "9@1", "10@1"], "6 is tagged"
    for one in (store, theirs):
        assert one.verify(deep=True).ok
    check(theirs.load("tag:kept", framework="numpy"), 6)


def test_steps_that_were_rolled_back_and_pruned_there_are_no_branch(folders: Place) -> None:
    """The next term continues from below it, so only the OPEN has the last step of the earlier one."""
    with folders.open().writer(poll_seconds=None) as writer:
        for step in range(1, 7):
            writer.save(state(step), step)
        writer.rollback(3)
        writer.save(state(4), 4)
    theirs = folders.theirs()
    theirs.prune("last:1", take_over=True)
    assert steps(theirs) == ["4@2"]
    store = folders.open()
    done = store.sync()
    assert (done.branch, done.segments) == ((), 0)
    fill(store, 5, 5, keep=["last:2"])
    assert steps(store) == ["4@2", "5@4"]


def test_steps_undrained_when_the_remote_was_pruned_are_still_a_branch(folders: Place) -> None:
    fill(folders.open(), 1, 4)
    alone = ckptstore.open(folders.here, remote=False)
    fill(alone, 5, 6)  # a term of this machine's own, which the remote's take-over gets ahead of
    folders.theirs().prune("last:1", take_over=True)
    done = folders.open().sync()
    assert done.branch == ("5@2", "6@2")


def damaged(store: ckptstore.Store, ref: str) -> bytes:
    """Damage the only segment of a checkpoint -> its original bytes."""
    ((segment, _),) = store.describe(ref)
    path = Path(store.backend.url) / segment.key
    sound = path.read_bytes()
    path.write_bytes(sound[:-200] + bytes([sound[-200] ^ 1]) + sound[-199:])
    return sound


def saved_but_for_the_second(folders: Place) -> ckptstore.Store:
    """1 to 4 are saved here, and brought to the remote except 2, which is damaged, and then repaired."""
    with ckptstore.open(folders.here).writer(deltas=None, poll_seconds=None) as writer:
        for step in range(1, 5):
            writer.save(state(step), step)
    store = folders.open()
    sound = damaged(store, "2@1")
    assert store.sync().damaged == ("2@1",)
    ((segment, _),) = store.describe("2@1")
    (folders.here / segment.key).write_bytes(sound)
    assert steps(folders.theirs()) == ["1@1", "3@1", "4@1"]
    return store


@pytest.mark.parametrize("copied", [False, True])
def test_steps_left_out_of_the_remote_were_never_there(folders: Place, tmp_path: Path, copied: bool) -> None:
    store = saved_but_for_the_second(folders)
    if copied:
        place = replace(folders, remote=str(tmp_path / "copy"))
        folders.theirs().copy(place.remote)
    else:
        place = folders
    place.theirs().prune("last:1", take_over=True)
    store = place.open()
    done = store.sync()
    assert "2@1" in done.branch, "the only one there is"
    assert "2@1" in store.lag().branch
    with pytest.warns(ckptstore.BranchWarning, match="2@1"):
        fill(store, 5, 6, keep=["last:1"])
    assert "2@1" in steps(store), "no rule retires it"
    assert "1@1" not in done.branch, "that one was there"
    assert steps(store)[-1] == "6@3"


def test_left_out_steps_are_not_reported_as_present(folders: Place) -> None:
    store = folders.open()
    writer = folders.open().writer(deltas=None, poll_seconds=None)
    try:
        writer.save_async(state(1), 1).result(tier="remote", timeout=LONG)
        with exclusive_access(store.backend):  # the drain waits
            pending = writer.save_async(state(2), 2)
            pending.result()
            damaged(store, "2@1")
        with pytest.raises(CorruptionError, match="2@1"):
            pending.result(tier="remote", timeout=LONG)
        writer.save_async(state(3), 3).result(tier="remote", timeout=LONG)
        folders.theirs().prune("last:1", take_over=True)
        with pytest.raises(FencedError):
            writer.save_async(state(4), 4).result(tier="remote", timeout=LONG)
        with pytest.raises(FencedError):
            pending.result(tier="remote", timeout=LONG)
    finally:
        with contextlib.suppress(FencedError):
            writer.close()


# ------------------------------------------------------------------------------------------------ of catalogs alone


def log(*commits: CommitRecord, opened: OpenRecord | None = None) -> CatalogBuilder:
    builder = CatalogBuilder()
    builder.apply(opened or OpenRecord(1, None, "a" * 32, 0.0, {}), 0)
    for seq, commit in enumerate(commits, 1):
        builder.apply(commit, seq)
    return builder


def saved(step: int, base: int | None = None) -> CommitRecord:
    name = f"{step:032x}"
    identity = None if base is None else CheckpointId(1, base, f"{base:032x}")
    entry = CheckpointEntry(1, step, name, 0.0, 1, 8)
    edge = Encoding((1, step), "full" if base is None else "delta", identity, (name,), False, 8)
    return CommitRecord(1, segments=(SegmentEntry(name, 1, 8, 4, ""),), checkpoints=(entry,), encodings=(edge,))


def gives_up(*numbers: int) -> CommitRecord:
    return CommitRecord(1, retires=tuple((1, n) for n in numbers), drops=tuple(f"{n:032x}" for n in numbers))


def known(commits: list[CommitRecord]) -> Any:
    return log(*commits).catalog


def test_deltas_of_missing_bases_wait_for_a_full() -> None:
    history = [saved(1), saved(2, 1), saved(3, 2), saved(4)]
    here, there = known(history), known([*history[:2], gives_up(1, 2)])
    wanted, branch = drainable(here, there)
    assert branch == ()
    assert list(wanted.checkpoints) == [(1, 4)], "3 builds on 2, which gc may have deleted there"
    assert [node for node in here.checkpoints if remote_retired(here, there)(node)] == [(1, 1), (1, 2)]
    whole, _ = drainable(here, known(history[:2]))
    assert list(whole.checkpoints) == [(1, 1), (1, 2), (1, 3), (1, 4)]


def test_a_base_that_the_remote_holds_is_built_on() -> None:
    history = [saved(1), saved(2, 1), saved(3, 2)]
    there = known([*history[:2], CommitRecord(1, retires=((1, 1),))])
    wanted, branch = drainable(known(history), there)
    assert branch == ()
    assert list(wanted.checkpoints) == [(1, 2), (1, 3)]
    assert list(wanted.held) == [(1, 1)]
    assert wanted.segments.keys() - there.segments.keys() == {f"{3:032x}"}


def test_another_machines_term_of_the_same_number_was_never_ours() -> None:
    here = known([saved(1)])
    there = log(saved(1), gives_up(1), opened=OpenRecord(1, None, "b" * 32, 0.0, {})).catalog
    assert not remote_retired(here, there)((1, 1))
    assert drainable(here, there)[1] == ((1, 1),)


def test_without_the_member_nothing_is_known_to_have_been_there() -> None:
    """A term that continues from 2 does not prove that 1 was there: it may have been left out."""
    builder = log(saved(1), saved(2), gives_up(1))
    builder.apply(OpenRecord(2, CheckpointId(1, 2, f"{2:032x}"), "c" * 32, 0.0, {}), 4)
    gone = remote_retired(known([saved(1), saved(2), saved(3)]), builder.catalog)
    assert [step for step in (1, 2, 3) if gone((1, step))] == []


# ------------------------------------------------------------------------------------------------ names and copies


def test_another_checkpoint_of_the_same_name_is_not_what_is_here(folders: Place) -> None:
    """Two machines have opened a term of one number: each keeps its own, whatever the other's remote has."""
    fill(folders.open(), 1, 1)
    fill(ckptstore.open(folders.here, remote=False), 2, 4)
    fill(folders.open(folders.there), 2, 4)
    store = folders.open()
    assert set(store.sync().branch) == {"2@2", "3@2", "4@2"}
    found = store.prune("last:1", take_over=True)
    assert found.retired == ("1@1",), "nobody else has the others"
    assert steps(ckptstore.open(folders.here, remote=False)) == ["2@2", "3@2", "4@2"]


def test_of_the_same_term_another_state_is_another_checkpoint() -> None:
    here = known([saved(1), saved(2)])
    changed = replace(here.checkpoints[1, 2], state="f" * 32)
    there = known([saved(1), replace(saved(2), checkpoints=(changed,))])
    holds = remote_holds(here, there)
    assert [step for step in (1, 2, 3) if holds((1, step))] == [1]
    assert not remote_holds(here, log(saved(1), opened=OpenRecord(1, None, "b" * 32, 0.0, {})).catalog)((1, 1))
    assert lag_between(here, there).checkpoints == 1


@pytest.mark.parametrize("form", ["stored", "full"])
def test_a_copy_of_a_part_never_had_the_rest(folders: Place, form: Any) -> None:
    """It becomes the remote once the next term has begun there, whose OPEN has the last step of the first one."""
    with ckptstore.open(folders.here).writer(deltas=None, poll_seconds=None) as writer:
        for step in range(1, 5):
            writer.save(state(step), step)
    ckptstore.open(folders.here).copy(folders.remote, [3], form=form)
    folders.theirs().tag("begun", 3, take_over=True)
    store = folders.open()
    assert store.sync().branch == ("1@1", "2@1", "4@1")
    with pytest.warns(ckptstore.BranchWarning, match="1@1, 2@1, 4@1"):
        fill(store, 5, 6, keep=["last:1"])
    assert {"1@1", "2@1", "4@1", "6@3"} <= set(steps(store)), "the only ones there are"
    assert "3@1" not in steps(store), "which is in the remote"
    assert steps(folders.theirs()) == ["3@1", "5@3", "6@3"]


def test_bases_of_a_partial_copy_were_never_promised_there(folders: Place) -> None:
    with ckptstore.open(folders.here).writer(deltas=3, poll_seconds=None) as writer:
        for step in range(1, 4):
            writer.save(state(step), step)
    store = ckptstore.open(folders.here)
    done = store.copy(folders.remote, [3])
    assert done.bases == ("1@1",)
    store = folders.open()
    found = store.sync()
    assert (found.branch, found.checkpoints) == (("1@1",), 1)
    with pytest.warns(ckptstore.BranchWarning, match="1@1"):
        fill(store, 4, 5, keep=["last:1"])
    assert {"1@1", "5@2"} <= set(steps(store)), "the only one that anybody can load"
    assert {"2@1", "3@1"}.isdisjoint(steps(store))
    assert steps(folders.theirs()) == ["2@1", "3@1", "4@2", "5@2"]
    for one in (store, folders.theirs()):
        assert one.verify(deep=True).ok


def test_a_copy_of_such_a_copy_says_so_too(folders: Place, tmp_path: Path) -> None:
    with ckptstore.open(folders.here).writer(deltas=None, poll_seconds=None) as writer:
        for step in range(1, 5):
            writer.save(state(step), step)
    ckptstore.open(folders.here).copy(tmp_path / "part", [2, 3])
    ckptstore.open(tmp_path / "part").copy(folders.remote)
    folders.theirs().tag("begun", 3, take_over=True)
    assert folders.open().sync().branch == ("1@1", "4@1")
