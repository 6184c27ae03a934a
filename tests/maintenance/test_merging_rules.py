"""Merging in a store with retention rules: the checkpoints that they keep stay, and the answer names the rule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ckptstore
from ckptstore import DeltaOptions
from ckptstore.errors import UsageError
from ckptstore.maintenance.merge import merge
from ckptstore.maintenance.merge.merge_range import Range, select_range
from tests.store.states import same


def _filled(folder: Path, keep: list[str]) -> tuple[ckptstore.Store, dict[int, object]]:
    """A full and 11 deltas; the rules are set afterwards, so that nothing is retired yet."""
    store = ckptstore.open(folder, create=True)
    weight = np.arange(5000, dtype="<f4")
    truth: dict[int, object] = {}
    with store.writer(deltas=DeltaOptions(interval=20), poll_seconds=None) as writer:
        for step in range(1, 13):
            weight[step::500] += 1
            truth[step] = {"weight": weight.copy(), "step": step}
            writer.save(truth[step], step)
    store.keep(*keep, take_over=True)
    return store, truth


def test_checkpoints_that_a_rule_keeps_stay(tmp_path: Path) -> None:
    store, truth = _filled(tmp_path / "store", ["every:3"])
    done = merge(store.journal, "2@1..11@1", take_over=True)
    assert done.answer == "accepted"
    assert done.held == {f"{step}@1": "rule every:3 keeps it" for step in (3, 6, 9)}
    assert done.retired == tuple(f"{step}@1" for step in (2, 4, 5, 7, 8, 10))
    assert [info.step for info in store.checkpoints()] == [1, 3, 6, 9, 11, 12]
    for info in store.checkpoints():
        same(truth[info.step], store.load(info.ref))
    assert store.verify(deep=True).ok


def test_where_the_rules_keep_everything_it_says_so(tmp_path: Path) -> None:
    store, _ = _filled(tmp_path / "store", ["last:100"])
    with pytest.raises(UsageError, match=r"2@1, 3@1, 4@1, 5@1 and 5 more: rule last:100 keeps it.*--keep-steps"):
        merge(store.journal, "2@1..11@1", take_over=True)
    assert len(store.checkpoints()) == 12
    assert merge(store.journal, "2@1..11@1", keep_steps=True, take_over=True).answer == "accepted"


def test_a_rule_that_is_not_known_keeps_everything(tmp_path: Path) -> None:
    store, _ = _filled(tmp_path / "store", ["every:3"])
    catalog = replace(store.view().catalog, keep=("moon:full",))
    with pytest.raises(UsageError, match="a rule of retention that this version does not know"):
        select_range(catalog, Range("2@1..11@1"))
