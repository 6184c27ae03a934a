"""The explained plan is the plan: what it says is read is what is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore.reports.explaining import explain
from tests.write.test_deltas import fill, trajectory


def test_a_chain_is_explained_with_its_costs(tmp_path: Path) -> None:
    store = fill(tmp_path / "store", trajectory(4), 1)
    plan = explain(store.journal, 4)
    assert [(step.ref, step.kind, step.base) for step in plan.steps] == [
        ("1@1", "full", None),
        ("2@1", "delta", "1@1"),
        ("3@1", "delta", "2@1"),
        ("4@1", "delta", "3@1"),
    ]
    infos = {info.ref: info for info in store.checkpoints()}
    assert all(0 < step.bytes_read <= infos[step.ref].stored for step in plan.steps)
    assert plan.nbytes == infos["4@1"].nbytes
    assert plan.steps[0].bytes_decoded == 0  # an uncompressed full
    assert plan.seconds > 0


def test_a_selection_reads_its_own_chains_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptstore.backends import directio

    store = fill(tmp_path / "store", trajectory(4), 1)
    name = "optimizer.master.layer1.weight"
    plan = explain(store.journal, 4, name)
    assert plan.bytes_read < explain(store.journal, 4).bytes_read / 4
    asked: list[int] = []
    original = directio.FileSource.read_into

    def counting(self: Any, offset: int, out: memoryview) -> None:
        asked.append(out.nbytes)
        original(self, offset, out)

    headers = sum(entry.header for entry, _ in store.describe(4))
    monkeypatch.setattr(directio.FileSource, "read_into", counting)
    store.load(4, select=name)
    assert plan.bytes_read <= sum(asked) < plan.bytes_read + headers + 40_000  # indexes and log records


def test_a_derived_copy_counts_its_master(tmp_path: Path) -> None:
    store = fill(tmp_path / "store", trajectory(2), 1)
    assert explain(store.journal, 2, "model.*").bytes_read > 0
    with pytest.raises(ckptstore.TensorNotFoundError):
        explain(store.journal, 2, "nothing")
