"""Verifying one checkpoint: everything that it may be restored from is checked, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import DeltaOptions, RestoreBound
from tests.write.test_deltas import trajectory

CHAIN = DeltaOptions(interval=1, bound=RestoreBound(times=None, depth=100))


@pytest.fixture
def store(tmp_path: Path) -> ckptstore.Store:
    """Term 1: a full and a chain of three deltas; term 2 from nothing: a full, step 9."""
    store = ckptstore.open(tmp_path / "store")
    states = trajectory(5)
    with store.writer(deltas=CHAIN, poll_seconds=None) as writer:
        for step, state in enumerate(states[:4], 1):
            writer.save(state, step)
    with store.writer(parent=None, poll_seconds=None) as writer:
        writer.save(states[4], 9)
    return store


def flip(store: ckptstore.Store, ref: str) -> str:
    """One bit of the last byte of a checkpoint's own segment -> its key."""
    info = store.checkpoint(ref)
    path = Path(store.url, "seg", f"{info.term:010d}", f"{info.segments[0]}.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return str(path.relative_to(store.url))


@pytest.mark.parametrize("deep", [False, True])
def test_it_checks_what_a_restore_needs_and_nothing_else(store: ckptstore.Store, deep: bool) -> None:
    whole = store.verify(deep=deep)
    assert whole.ref is None
    for ref, segments in (("3@1", 3), (1, 1), ("latest", 1)):
        report = store.verify(ref, deep=deep)
        assert report.ok
        assert (report.ref, report.deep) == (store.checkpoint(ref).ref, deep)
        assert report.restorable == (report.ref,)
        assert report.latest == store.checkpoint(ref)
        assert (report.orphans, report.strangers, report.lost) == ((), (), ())
        assert report.objects == whole.objects - 5 + segments
        assert report.nbytes < whole.nbytes
    assert ckptstore.verify(store.url, 1).ref == "1@1"


@pytest.mark.parametrize("deep", [False, True])
def test_damage_counts_where_it_matters(store: ckptstore.Store, deep: bool) -> None:
    key = flip(store, "3@1")
    for ref in (1, 2, 9):
        assert store.verify(ref, deep=deep).ok
    for ref in ("3@1", "4@1"):
        report = store.verify(ref, deep=deep)
        assert [damage.key for damage in report.damage] == [key]
        assert (report.restorable, report.lost, report.latest) == ((), (ref,), None)
        assert report.damage[0].checkpoints == (ref,)


def test_deep_decodes_it(store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored bytes may be unchanged and still not restore the state."""

    def differs(*_: Any, **__: Any) -> None:
        raise ckptstore.CorruptSegmentError("it decodes to something else")

    monkeypatch.setattr("ckptstore.maintenance.verify.deep_verify.check_decoded", differs)
    monkeypatch.setattr("ckptstore.restore.chains.chain.check_decoded", differs)
    report = store.verify("4@1", deep=True)
    assert "decodes to something else" in report.damage[0].what
    assert report.lost == ("4@1",)
    assert store.verify("4@1").ok


def test_another_way_counts(tmp_path: Path, store: ckptstore.Store) -> None:
    store.merge("2..4", keep_steps=True, take_over=True)
    assert store.verify("4@1", deep=True).ok
    assert store.verify("4@1").restorable == ("4@1",)


def test_missing_checkpoints(store: ckptstore.Store) -> None:
    with pytest.raises(ckptstore.CheckpointNotFoundError, match="no checkpoint of step 7"):
        store.verify(7)
    with pytest.raises(ckptstore.StoreNotFoundError):
        ckptstore.verify("memory://none", 7)


def test_orphans_are_those_of_the_store(store: ckptstore.Store) -> None:
    stray = f"seg/0000000001/{'0' * 32}.safetensors"
    Path(store.url, stray).write_bytes(b"torn")
    assert store.verify(1).orphans == store.verify().orphans == (stray,)
