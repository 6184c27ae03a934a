"""A store's handle reads and decodes a fold once, not once for each operation."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptstore
from ckptstore.log import fold_writer, log_reader
from tools.golden.make_conformance import make_folded


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The decoded folds, one after the other."""
    found: list[str] = []
    decode = log_reader.decode_fold

    def counted(data: bytes, **of: object) -> object:
        found.append(str(of["what"]))
        return decode(data, **of)  # type: ignore[arg-type]

    monkeypatch.setattr(log_reader, "decode_fold", counted)
    return found


def test_a_fold_is_read_once(tmp_path: Path, decoded: list[str]) -> None:
    make_folded(tmp_path / "store")
    decoded.clear()
    store = ckptstore.open(tmp_path / "store")
    first = store.view()
    assert [info.ref for info in store.checkpoints()] == [info.ref for info in store.checkpoints()]
    store.load("latest")
    assert store.view().catalog == first.catalog
    assert len(decoded) == 1
    with store.writer(poll_seconds=None) as writer:
        writer.save({"step": 10}, 10)
    assert len(decoded) == 1
    assert store.checkpoint("latest").step == 10
    assert first.catalog.latest().step == 9  # type: ignore[union-attr] # a view stays as it is
    fold_writer.fold(store.journal, store.view())
    again = store.view()
    assert len(set(decoded)) == len(decoded) == 2
    assert again.fold_seq > first.fold_seq


def test_damage_behind_a_fold_stays_with_the_view_that_met_it(tmp_path: Path, decoded: list[str]) -> None:
    """A reading's additions to a fold's catalog are its own."""
    make_folded(tmp_path / "store")
    store = ckptstore.open(tmp_path / "store")
    whole = store.view()
    path = tmp_path / "store" / "log" / f"{whole.end:020d}"
    path.write_bytes(b"damaged")
    assert store.view().damage == (whole.end,)
    path.unlink()
    assert store.view().damage == ()
    assert store.view().catalog == whole.catalog
