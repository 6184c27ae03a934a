"""Two tiers of one run: what each acknowledgement survives, which machine may continue where, and what is restored."""

from __future__ import annotations

import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import (
    BranchWarning,
    CheckpointNotFoundError,
    CorruptionError,
    CorruptLogError,
    FallbackWarning,
    FencedError,
    ReadOnlyError,
    StorageError,
    UsageError,
    WriterClosedError,
)
from ckptstore.tiers import background_drain
from tests.tiers.conftest import Outage, Place
from tools.objects.server import Server

LONG = 120.0


def state(step: int) -> dict[str, Any]:
    weight = np.random.default_rng(step // 3).standard_normal(3000).astype(np.float32)
    weight[step % 3000] = -0.0
    return {"weight": weight, "step": step, "rate": 0.5 / (step + 1)}


def check(found: dict[str, Any], step: int) -> None:
    wanted = state(step)
    assert (found["step"], found["rate"]) == (wanted["step"], wanted["rate"])
    assert found["weight"].tobytes() == wanted["weight"].tobytes()


def steps(store: ckptstore.Store) -> list[str]:
    return [one.ref for one in store.checkpoints()]


def fill(store: ckptstore.Store, first: int, last: int, **more: Any) -> None:
    with store.writer(deltas=3, poll_seconds=None, **more) as writer:
        for step in range(first, last + 1):
            writer.save(state(step), step)


def test_restored_from_the_remote_alone_after_the_folder_is_gone(place: Place) -> None:
    with place.open().writer(deltas=3, keep=["last:20"]) as writer:
        for step in range(1, 6):
            writer.save(state(step), step)
        last = writer.save_async(state(6), 6)
        assert last.result(tier="remote", timeout=LONG).ref == "6@1"
    shutil.rmtree(place.here)

    store = place.open()
    assert steps(store) == ["6@1"]  # the newest, and what it builds on
    check(store.load(framework="numpy"), 6)
    check(store.load("2@1", framework="numpy"), 2)  # read from the remote
    with store.writer(deltas=3) as writer:
        assert (writer.term, writer.parent and writer.parent.ref) == (2, "6@1")
        writer.save(state(7), 7)
    theirs = place.theirs()
    assert steps(theirs) == [f"{step}@1" for step in range(1, 7)] + ["7@2"]
    for info in theirs.checkpoints():
        check(theirs.load(info.ref, framework="numpy"), info.step)
    assert theirs.verify(deep=True).ok
    assert store.verify(deep=True).ok
    assert store.view().catalog.keep == ("last:20",)


def test_the_store_remembers_its_remote_and_no_credential(s3: Server, tmp_path: Path) -> None:
    url = s3.url()
    fill(ckptstore.open(tmp_path / "run", remote=url, remote_options=s3.options), 1, 2)
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            assert str(s3.options["secret"]).encode() not in path.read_bytes()
    store = ckptstore.open(tmp_path / "run", remote_options=s3.options)
    assert str(s3.options["secret"]) not in repr(vars(store))
    fill(store, 3, 3)
    assert store.remote is not None
    assert steps(store.remote) == ["1@1", "2@1", "3@2"]


def test_a_url_with_a_password_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="credentials") as told:
        ckptstore.open(tmp_path / "run", remote="s3://me:hidden@bucket/run")
    assert "hidden" not in str(told.value)
    for name in (f"{tmp_path}/run", f"{tmp_path}//run/", f"file://{tmp_path}/run", f"pmem://{tmp_path}/run"):
        with pytest.raises(UsageError, match="own remote"):
            ckptstore.open(tmp_path / "run", remote=name)
    for name in ("s3://bucket/run/", "S3://bucket/run"):
        with pytest.raises(UsageError, match="own remote"):
            ckptstore.open("s3://bucket/run", remote=name)


def test_steps_of_a_killed_writer_are_drained_before_the_next_term(folders: Place) -> None:
    fill(folders.open(), 1, 2)
    fill(ckptstore.open(folders.here, remote=False), 3, 5)  # nobody drains
    assert steps(folders.theirs()) == ["1@1", "2@1"]
    store = folders.open()
    lag = store.lag()
    assert lag is not None
    assert (lag.checkpoints, lag.steps) == (3, 3)
    assert lag.nbytes > 0
    with store.writer() as writer:
        assert (writer.term, writer.parent and writer.parent.ref) == (3, "5@2")
        assert steps(folders.theirs()) == ["1@1", "2@1", "3@2", "4@2", "5@2"]


def test_another_machine_fences_and_what_was_not_drained_stays_a_branch(outage: Outage) -> None:
    store = outage.place.open()
    with store.writer(deltas=3) as writer:
        writer.save_async(state(1), 1).result(tier="remote", timeout=LONG)
        outage.begin()
        writer.save(state(2), 2)
        pending = writer.save_async(state(3), 3)
        assert pending.result().ref == "3@1"
        fill(outage.other.open(outage.other.there), 10, 11)
        outage.end()
        with pytest.raises(FencedError, match=r"continued elsewhere: term 2 .*2@1, 3@1 \(2 checkpoints\).*branch"):
            pending.result(tier="remote", timeout=LONG)
        with pytest.raises(FencedError):
            writer.save(state(4), 4)
    for step in (1, 2, 3):
        check(store.load(step, framework="numpy"), step)
    done = store.sync()
    assert (done.checkpoints, done.branch) == (0, ("2@1", "3@1"))
    assert steps(outage.other.theirs()) == ["1@1", "10@2", "11@2"]
    assert outage.other.theirs().verify(deep=True).ok


def test_terms_of_one_number_on_two_machines_are_not_mixed(folders: Place) -> None:
    fill(folders.open(), 1, 2)
    fill(ckptstore.open(folders.here, remote=False), 3, 5)
    fill(folders.open(folders.there), 10, 11)  # term 2 of the remote, and this machine's is another term 2
    old = folders.open()
    done = old.sync()
    assert done.branch == ("3@2", "4@2", "5@2")
    assert done.over is not None
    assert done.over.startswith("term 2")
    with pytest.raises(UsageError, match=r"Move the folder.*3@2.*kept in"):  # and no warning that a term continues
        old.writer()
    assert [one.term for one in folders.theirs().terms()] == [1, 2]  # and nobody was fenced
    for step in (3, 4, 5):
        check(old.load(f"{step}@2", framework="numpy"), step)
    assert folders.theirs().verify(deep=True).ok


def test_an_old_machine_comes_back_and_continues_after_the_others(folders: Place) -> None:
    fill(folders.open(), 1, 3)
    fill(folders.open(folders.there), 4, 5)
    with folders.open().writer() as writer:
        assert (writer.term, writer.parent and writer.parent.ref) == (3, "5@2")
        writer.save(state(6), 6)
    store = folders.open()
    assert steps(store) == ["1@1", "2@1", "3@1", "5@2", "6@3"]
    assert store.verify(deep=True).ok
    assert steps(folders.theirs()) == ["1@1", "2@1", "3@1", "4@2", "5@2", "6@3"]


def test_a_damaged_branch_is_never_taken_for_the_remotes_checkpoint_of_its_name(folders: Place) -> None:
    fill(folders.open(), 1, 2)
    alone = ckptstore.open(folders.here, remote=False)
    with alone.writer() as writer:
        writer.save(state(3), 3)
    with folders.open(folders.there).writer() as writer:
        writer.save(state(3) | {"rate": 7.0}, 3)
    store = ckptstore.open(folders.here)
    segments = store.view().catalog.segments
    path = folders.here / segments[store.checkpoint("3@2").segments[0]].key
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(CorruptionError) as told:
        store.load("3@2")
    assert "is another one" in "".join(told.value.__notes__)


def test_a_branch_stops_one_start_where_warnings_are_errors(outage: Outage) -> None:
    writer = outage.place.open().writer(deltas=3)
    writer.save_async(state(1), 1).result(tier="remote", timeout=LONG)
    outage.begin()
    writer.save(state(2), 2)
    with pytest.warns(UserWarning, match="lacks"):
        writer.close()
    fill(outage.other.open(outage.other.there), 5, 6)
    outage.end()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(BranchWarning, match="2@1"):
            outage.place.open().writer()
        with outage.place.open().writer() as writer:  # the start before has warned
            assert writer.parent is not None
            assert writer.parent.ref == "6@2"
            assert writer.term == 4


def test_undrained_steps_of_an_old_machine_are_reported_and_stay_readable(outage: Outage) -> None:
    writer = outage.place.open().writer(deltas=3)
    writer.save_async(state(1), 1).result(tier="remote", timeout=LONG)
    outage.begin()
    pending = writer.save_async(state(2), 2)
    pending.result()
    with pytest.warns(UserWarning, match="lacks"):
        writer.close()  # the remote is gone: the rest is reported
    with pytest.raises(WriterClosedError, match="2@1 is not in the remote, and the writer is closed"):
        pending.result(tier="remote", timeout=5)
    fill(outage.other.open(outage.other.there), 5, 6)
    outage.end()
    with pytest.warns(BranchWarning, match=r"2@1"):
        writer = outage.place.open().writer(deltas=3)
    with writer:
        assert writer.parent is not None
        assert writer.parent.ref == "6@2"
        writer.save(state(7), 7)
        lag = writer.lag()
        assert lag is not None
        assert lag.branch == ("2@1",)
    store = outage.place.open()
    check(store.load("2@1", framework="numpy"), 2)
    assert store.verify(deep=True).ok
    assert steps(outage.other.theirs()) == ["1@1", "5@2", "6@2", "7@3"]


def test_a_remote_that_is_down_stops_no_save_and_gets_everything_later(outage: Outage) -> None:
    store = outage.place.open()
    with store.writer() as writer:
        writer.save_async(state(1), 1).result(tier="remote", timeout=LONG)
        outage.begin()
        pending = [writer.save_async(state(step), step) for step in range(2, 7)]
        assert [one.result().step for one in pending] == [2, 3, 4, 5, 6]
        with pytest.raises(TimeoutError):
            pending[-1].result(tier="remote", timeout=0.3)
        lag = writer.lag()
        assert lag is not None
        assert (lag.checkpoints, lag.steps) == (5, 5)
        assert lag.nbytes > 5 * 12_000
        # The loss of a machine that burns now equals the reported lag.
        assert outage.other.open(outage.other.there).latest_step() == 6 - lag.steps
        outage.end()
        assert pending[-1].result(tier="remote", timeout=LONG).ref == "6@1"
        end = time.monotonic() + LONG
        while writer.lag() != ckptstore.Lag():  # the pass that brought it has an end
            assert time.monotonic() < end, writer.lag()
            time.sleep(0.02)
    assert outage.other.theirs().verify(deep=True).ok


def test_without_the_remote_a_term_opens_only_on_request(outage: Outage) -> None:
    fill(outage.place.open(), 1, 2)
    outage.begin()
    with pytest.raises(StorageError, match=r"no term was opened.*remote=False"):
        outage.place.open().writer()
    alone = ckptstore.open(outage.place.here, remote=False)
    assert [one.term for one in alone.terms()] == [1]
    fill(alone, 3, 3)
    outage.end()
    assert outage.place.open().sync().checkpoints == 1  # nobody came between: it is the run's term 2
    assert steps(outage.other.theirs()) == ["1@1", "2@1", "3@2"]


def test_segments_that_are_gone_or_damaged_come_back_from_the_remote(folders: Place) -> None:
    fill(folders.open(), 1, 4)
    store = ckptstore.open(folders.here)  # which remembers where the remote is
    gone, damaged = (
        folders.here / store.view().catalog.segments[store.checkpoint(step).segments[0]].key for step in (1, 2)
    )
    gone.unlink()
    data = bytearray(damaged.read_bytes())
    data[-5] ^= 1
    damaged.write_bytes(data)
    assert not store.verify().ok
    for step in (1, 2):
        with pytest.warns(FallbackWarning, match="brought back"):
            check(store.load(step, framework="numpy"), step)
    assert store.verify(deep=True).ok
    check(store.load(4, framework="numpy"), 4)


def test_retention_here_leaves_what_is_not_drained_and_the_remote_keeps_all(folders: Place) -> None:
    fill(folders.open(), 1, 6, keep=["last:2"])
    store = folders.open()
    fill(store, 7, 8)
    store.gc()
    assert len(steps(store)) < 8
    there = folders.theirs()
    assert [one.step for one in there.checkpoints()] == list(range(1, 9))
    for info in there.checkpoints():
        check(there.load(info.ref, framework="numpy"), info.step)
    check(store.load("1@1", framework="numpy"), 1)


def test_retention_waits_for_the_drain(outage: Outage) -> None:
    with outage.place.open().writer(keep=["last:1"]) as writer:
        writer.save_async(state(1), 1).result(tier="remote", timeout=LONG)
        outage.begin()
        for step in range(2, 6):
            writer.save(state(step), step)
        assert set(steps(outage.place.open())) >= {f"{step}@1" for step in range(2, 6)}
        outage.end()
    assert [one.step for one in outage.other.theirs().checkpoints()] == [1, 2, 3, 4, 5]


def test_prune_drains_first(folders: Place) -> None:
    fill(folders.open(), 1, 2)
    fill(ckptstore.open(folders.here, remote=False), 3, 8)
    store = ckptstore.open(folders.here)
    before = folders.theirs().checkpoints()
    planned = store.prune("last:1", dry_run=True)
    assert (planned.checkpoints, planned.retired) == (1, tuple(steps(store)[:-1]))
    assert folders.theirs().checkpoints() == before
    assert store.prune("last:1", take_over=True).checkpoints == 1
    store.gc()
    assert [one.step for one in folders.theirs().checkpoints()] == list(range(1, 9))
    check(store.load(4, framework="numpy"), 4)


def test_prune_leaves_what_the_remote_never_gets(folders: Place) -> None:
    fill(folders.open(), 1, 2)
    fill(ckptstore.open(folders.here, remote=False), 3, 5)
    # The run continues elsewhere: checkpoints that only this machine has are a branch.
    fill(folders.open(folders.there), 8, 9)
    store = ckptstore.open(folders.here)
    planned = store.prune("last:1", dry_run=True)
    assert (planned.retired, planned.kept["undrained"]) == (("1@1", "2@1"), ("3@2", "4@2"))
    done = store.prune("last:1", take_over=True)
    assert (done.retired, done.kept, done.checkpoints) == (planned.retired, planned.kept, planned.checkpoints)
    assert steps(store) == ["3@2", "4@2", "5@2"]
    store.gc()
    for step in (3, 4, 5):
        check(store.load(f"{step}@2", framework="numpy"), step)


def test_a_dry_run_of_prune_rests_on_the_remote_as_prune_does(folders: Place) -> None:
    fill(folders.open(), 1, 3)
    store = ckptstore.open(folders.here)
    Path(folders.remote).rename(f"{folders.remote}-unmounted")
    for dry_run in (True, False):
        with pytest.raises(StorageError, match="no store is there any more"):
            store.prune("last:1", dry_run=dry_run, take_over=not dry_run)
    assert steps(store) == ["1@1", "2@1", "3@1"]
    Path(f"{folders.remote}-unmounted").rename(folders.remote)
    assert store.prune("last:1", dry_run=True).retired == ("1@1", "2@1")
    new = ckptstore.open(folders.here, remote=f"{folders.remote}-new")  # the next pass makes it, and brings all
    assert new.prune("last:1", dry_run=True).retired == ("1@1", "2@1")
    assert not Path(f"{folders.remote}-new").exists()


def test_the_remote_does_not_name_itself(folders: Place) -> None:
    """Its URL was copied into its own log: users that had it mounted under another path were sent to this machine's."""
    fill(folders.open(), 1, 2)
    fill(ckptstore.open(folders.here, remote=False), 3, 4)  # a term that is opened here alone, and drained later
    store = ckptstore.open(folders.here)
    store.sync()
    assert [opened.extra.get("remote") for opened in store.view().catalog.terms.values()] == [folders.remote] * 2
    assert [opened.extra.get("remote") for opened in folders.theirs().view().catalog.terms.values()] == [None] * 2
    elsewhere = f"{folders.remote}-elsewhere"
    Path(folders.remote).rename(elsewhere)
    there = ckptstore.open(elsewhere)
    assert there.remote is None
    fill(there, 5, 6)  # it was: no store is there any more


def test_a_machine_killed_while_it_catches_up_remembers_its_remote(
    folders: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(folders.open(), 1, 2)
    fill(folders.open(folders.there), 3, 4)

    def killed(point: str) -> None:
        if point == "tiers.filled":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("ckptstore.tiers.tiered_term.crash_point", killed)
        with pytest.raises(KeyboardInterrupt):
            folders.open().writer()
    store = ckptstore.open(folders.here)
    assert [opened.extra.get("remote") for opened in store.view().catalog.terms.values()] == [folders.remote] * 2
    assert store.remote is not None
    assert store.remote.url == folders.remote


def test_bandwidth_holds_the_drain_back(folders: Place) -> None:
    store = folders.open(bandwidth=600_000)
    began = time.monotonic()
    with store.writer() as writer:
        pending = [writer.save_async({"weight": np.zeros(25_000, np.float32)}, step) for step in range(1, 6)]
        pending[-1].result(tier="remote", timeout=LONG)
    assert time.monotonic() - began > 0.5  # 500 kB; the first block is free


def test_rollback_opens_the_term_in_both(folders: Place) -> None:
    store = folders.open()
    with store.writer() as writer:
        for step in range(1, 4):
            writer.save(state(step), step)
        writer.rollback("2@1")
        writer.save(state(3) | {"rate": 9.0}, 3)
    assert steps(folders.theirs()) == ["1@1", "2@1", "3@1", "3@2"]
    assert folders.theirs().load("3@2")["rate"] == 9.0


def test_nobody_waits_for_a_tier_that_is_not_there(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "run").writer() as writer:
        pending = writer.save_async(state(1), 1)
        with pytest.raises(UsageError, match="no second tier"):
            pending.result(tier="remote")
        assert pending.result().step == 1
        assert writer.lag() is None
    with pytest.raises(UsageError, match="has no remote"):
        ckptstore.open(tmp_path / "run").sync()


def test_another_run_in_the_remote_is_refused(folders: Place) -> None:
    fill(ckptstore.open(folders.remote), 1, 1)
    fill(ckptstore.open(folders.here), 1, 1)
    with pytest.raises(UsageError, match="another run"):
        folders.open().writer()
    with pytest.raises(CheckpointNotFoundError):
        folders.open().load("9@9")


def test_a_remote_that_is_not_there_is_no_new_one(folders: Place) -> None:
    """An unmounted disk is an empty folder; only its contents tell which machine has continued the run."""
    fill(folders.open(), 1, 2)
    fill(folders.open(folders.there), 3, 4)
    remote = Path(folders.remote)
    remote.rename(remote.parent / "away")
    for empty in (False, True):
        if empty:
            remote.mkdir()
        with pytest.raises(StorageError, match="no store is there any more"):
            folders.open().writer()
        with pytest.raises(StorageError, match="no store is there any more"):
            ckptstore.open(folders.here).sync()
        with pytest.raises(StorageError, match="no store is there any more"):
            ckptstore.open(folders.here).sync_forever()
        with pytest.raises(StorageError, match="no store is there any more"):
            ckptstore.open(folders.here, remote=False).sync(folders.remote)  # by its name, as in a cron job
        with pytest.raises(StorageError, match="no store is there any more"):
            ckptstore.open(folders.here, remote=False).sync_forever(folders.remote)
        with pytest.raises(StorageError, match="no store is there any more"):
            ckptstore.open(folders.here).prune("last:1", take_over=True)
        assert steps(ckptstore.open(folders.here)) == ["1@1", "2@1"]
    assert not list(remote.iterdir())
    assert folders.open().sync(folders.remote, anew=True).checkpoints == 2
    shutil.rmtree(remote)
    (remote.parent / "away").rename(remote)
    assert steps(folders.theirs()) == ["1@1", "2@1", "3@2", "4@2"]


def test_a_restored_store_knows_its_remote(folders: Place) -> None:
    fill(folders.open(), 1, 3)
    shutil.rmtree(folders.here)
    assert folders.open().latest_step() == 3
    store = ckptstore.open(folders.here)
    assert store.lag() == ckptstore.Lag()
    check(store.load(1, framework="numpy"), 1)
    fill(store, 4, 5)
    assert steps(folders.theirs()) == ["1@1", "2@1", "3@1", "4@2", "5@2"]


def test_lag_tells_of_another_run_and_of_a_remote_that_is_ahead(folders: Place) -> None:
    fill(folders.open(), 1, 2)
    shutil.copytree(folders.here, folders.there)
    fill(folders.open(), 3, 4)
    lag = ckptstore.open(folders.there).lag()
    assert lag is not None
    assert "is ahead: it has 4@2, this store 2@1" in (lag.error or "")
    shutil.rmtree(folders.remote)
    fill(ckptstore.open(folders.remote), 1, 1)
    lag = ckptstore.open(folders.here).lag()
    assert lag is not None
    assert lag.checkpoints == 4
    assert "the store of another run" in (lag.error or "")


@pytest.mark.parametrize("chained", [False, True])
def test_local_damage_keeps_nothing_else_from_the_remote(folders: Place, chained: bool) -> None:
    fill(folders.open(), 1, 2)
    with ckptstore.open(folders.here, remote=False).writer(deltas=1 if chained else None, poll_seconds=None) as writer:
        for step in range(3, 7):
            writer.save(state(step), step)
    before, broken_one = (
        {segment.key for segment, _ in ckptstore.open(folders.here).describe(ref)} for ref in ("3@2", "4@2")
    )
    (broken,) = broken_one - before
    path = folders.here / broken
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(data)
    lost = ("4@2", "5@2", "6@2") if chained else ("4@2",)
    done = ckptstore.open(folders.here).sync()
    assert done.damaged == lost
    assert broken in (done.damage or "")
    assert steps(folders.theirs()) == [ref for ref in ("1@1", "2@1", "3@2", "4@2", "5@2", "6@2") if ref not in lost]
    assert folders.theirs().verify(deep=True).ok
    with pytest.warns(FallbackWarning, match="4@2"):
        writer = folders.open().writer()
    with writer:
        assert writer.parent is not None
        assert writer.parent.ref == ("3@2" if chained else "6@2")
        writer.save(state(7), 7)
    assert steps(folders.theirs())[-1] == "7@3"


@pytest.mark.filterwarnings("ignore::ckptstore.DamagedLogWarning")
def test_a_damaged_log_is_not_drained(folders: Place) -> None:
    """The hidden records may retire a checkpoint, or show that the run continued elsewhere."""
    fill(ckptstore.open(folders.here), 1, 4)
    slot = folders.here / "log" / f"{2:020d}"
    slot.write_bytes(slot.read_bytes()[:-1])
    with pytest.raises(CorruptLogError, match="it is unknown what must be drained"):
        ckptstore.open(folders.here).sync(folders.remote)
    assert not Path(folders.remote, "FORMAT").exists()


@pytest.mark.parametrize("name", ["ro-compat", "features-write", "unknown-members"])
def test_a_newer_versions_data_is_left_to_it(folders: Place, name: str) -> None:
    shutil.copytree(Path(__file__).resolve().parents[1] / "golden" / "conformance" / name, folders.here)
    with pytest.raises(ReadOnlyError, match="only a newer version knows"):
        ckptstore.open(folders.here).sync(folders.remote)
    assert not Path(folders.remote, "FORMAT").exists()


@pytest.mark.parametrize("options", [{"remote": 5}, {"bandwidth": True}, {"bandwidth": 0}, {"bandwidth": "fast"}])
def test_an_invalid_remote_or_bandwidth_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        ckptstore.open(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_checkpoints_only_in_the_remote_are_exported_and_read_from_there(folders: Place, tmp_path: Path) -> None:
    fill(folders.open(), 1, 4)
    shutil.rmtree(folders.here)
    store = folders.open()
    assert steps(store) == ["4@1"]
    store.export(2, tmp_path / "two.safetensors")
    again = ckptstore.open(tmp_path / "again")
    again.import_files([tmp_path / "two.safetensors"], 2)
    check(again.load(2, framework="numpy"), 2)
    assert store.read_tensor(2, "weight").tobytes() == state(2)["weight"].tobytes()
    assert store.tensors(2).keys() == store.tensors(4).keys()
    assert store.describe("1@1")
    with pytest.raises(CheckpointNotFoundError, match=r"2.*; .* has it: verify that store") as told:
        store.verify(2)
    assert str(folders.remote) in str(told.value)
    for call in (lambda: store.verify(9), lambda: store.export(9, tmp_path / "nine.safetensors")):
        with pytest.raises(CheckpointNotFoundError) as nothing:
            call()
        assert "has it" not in str(nothing.value)
    assert not (tmp_path / "nine.safetensors").exists()


def test_a_save_waits_while_too_much_is_on_this_machine_alone(folders: Place) -> None:
    each = state(1)["weight"].nbytes
    with folders.open(bandwidth=10 * each, lag_bytes=2 * each).writer(poll_seconds=None) as writer:
        most = 0
        for step in range(1, 9):
            writer.save(state(step), step)
            most = max(most, writer.lag().nbytes)
    assert 0 < most < 5 * each  # the allowance, the save that was admitted, headers; a slow machine has less in flight
    assert steps(folders.theirs()) == [f"{step}@1" for step in range(1, 9)]


def test_a_save_is_refused_while_the_remote_fails_and_works_when_it_is_back(
    outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_drain, "PATIENCE", 0.5)
    store = outage.place.open(lag_bytes=0)
    with store.writer(poll_seconds=None) as writer:
        writer.save_async(state(1), 1).result(tier="remote", timeout=LONG)
        outage.begin()
        writer.save(state(2), 2)
        with pytest.raises(StorageError, match=r"only on this machine, the limit is 0 .*the remote has been failing"):
            writer.save(state(3), 3)
        outage.end()
        end = time.monotonic() + LONG
        while writer.lag().error is not None:  # it is tried again after a pause
            assert time.monotonic() < end
            time.sleep(0.1)
        writer.save(state(4), 4)
    assert steps(store) == ["1@1", "2@1", "4@1"]


def test_values_of_lag_bytes(folders: Place) -> None:
    for wrong in (-1, 1.5, True, "1GB"):
        with pytest.raises(UsageError, match="lag_bytes"):
            folders.open(lag_bytes=wrong)
