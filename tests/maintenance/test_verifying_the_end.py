"""`verify` checks the slot that a fold ends with: readers do without it, so nothing else would report its loss."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptstore
from ckptstore.formats.history.records import slot_key
from tools.golden.make_conformance import make_folded


def _with_file(path: Path) -> None:
    path.mkdir()
    (path / "x").write_bytes(b"x")


BECAME: dict[str, Callable[[Path], object]] = {
    "absent": lambda path: path.parent,
    "an empty folder": Path.mkdir,
    "a folder": _with_file,
    "a link": lambda path: path.symlink_to("elsewhere"),
    "a pipe": os.mkfifo,
    "long": lambda path: path.write_bytes(bytes(1 << 19)),
    "other bytes": lambda path: path.write_bytes(b"x"),
}


@pytest.fixture
def folded(tmp_path: Path) -> Path:
    make_folded(tmp_path / "store")
    return tmp_path / "store"


@pytest.mark.parametrize("became", BECAME)
def test_the_slot_that_a_fold_ends_with(folded: Path, became: str) -> None:
    store = ckptstore.open(folded)
    view = store.view()
    assert view.fold_seq == view.end - 1
    assert store.verify().damage == ()
    before = [info.ref for info in store.checkpoints()]
    path = folded / slot_key(view.fold_seq)
    path.unlink()
    BECAME[became](path)
    again = ckptstore.open(folded)
    assert [info.ref for info in again.checkpoints()] == before  # the fold has its contents
    assert again.checkpoint("latest").ref == before[-1]
    assert slot_key(view.fold_seq) in [found.key for found in again.verify().damage]


def test_a_slot_that_came_since_the_listing_is_no_loss(folded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ckptstore.open(folded)
    listed = store.backend.list("")

    def stale(prefix: str) -> list[str]:
        return listed if not prefix else type(store.backend).list(store.backend, prefix)

    with store.writer(poll_seconds=None) as writer:
        writer.save({"step": 20}, 20)
    monkeypatch.setattr(store.backend, "list", stale)
    assert store.verify().damage == ()


@pytest.mark.parametrize("which", [0, 1], ids=["older", "newest"])
@pytest.mark.parametrize("handle", ["running", "new"])
def test_a_fold_that_is_missing_where_slots_were_deleted(folded: Path, which: int, handle: str) -> None:
    """Only both folds together allow slots to be deleted: so it shows that one of them is gone."""
    store = ckptstore.open(folded)
    before = [info.ref for info in store.checkpoints()]  # decodes the newest
    folds = sorted((folded / "fold").iterdir())
    assert len(folds) == 2
    folds[which].unlink()
    again = store if handle == "running" else ckptstore.open(folded)
    report = again.verify()
    assert [found.key for found in report.damage] == ["fold/"]
    assert "a fold is missing: slots are deleted (log/" in report.damage[0].what
    assert str(int(folds[1 - which].name.partition("-")[0])) in report.damage[0].what
    assert report.lost == ()
    assert [info.ref for info in again.checkpoints()] == before


@pytest.mark.parametrize("which", [0, 1], ids=["older", "newest"])
def test_a_fold_is_read_again(folded: Path, which: int) -> None:
    """Also one that this process has decoded before it was damaged."""
    store = ckptstore.open(folded)
    before = [info.ref for info in store.checkpoints()]
    path = sorted((folded / "fold").iterdir())[which]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    for again in (store, ckptstore.open(folded)):
        assert [found.key for found in again.verify().damage] == [f"fold/{path.name}"]
        assert [info.ref for info in again.checkpoints()] == before


def test_a_writer_makes_a_fold_that_is_missing(folded: Path) -> None:
    sorted((folded / "fold").iterdir())[0].unlink()
    store = ckptstore.open(folded)
    with store.writer(poll_seconds=None) as writer:
        for step in range(100, 180):
            writer.save({"step": step}, step)
    assert store.verify().ok
