"""Merging ranges of fulls, and of fulls and diffs: only the last stays, or (compaction of a range) every one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore.errors import UsageError
from ckptstore.log.journal import Journal
from ckptstore.maintenance.merge import Merged, Range, merge
from ckptstore.store import Store
from ckptstore.write.policy.delta_interval import RestoreBound
from ckptstore.write.policy.delta_options import DeltaOptions
from tests.maintenance.test_diff_merge import check, fill, refs
from tests.write.test_deltas import trajectory

EVERY_FOURTH = DeltaOptions(interval=1, bound=RestoreBound(times=None, depth=3))
"""A full, and three deltas, each against the one before."""


@pytest.fixture(scope="module")
def states() -> list[dict[str, Any]]:
    return trajectory(8)


@pytest.fixture
def fulls(tmp_path: Path, states: list[dict[str, Any]]) -> Store:
    store = ckptstore.open(tmp_path / "fulls")
    fill(store, states, None)
    return store


@pytest.fixture
def mixed(tmp_path: Path, states: list[dict[str, Any]]) -> Store:
    """Fulls 1 and 5, deltas between."""
    store = ckptstore.open(tmp_path / "mixed")
    fill(store, states, EVERY_FOURTH)
    assert [info.step for info in store.checkpoints() if info.kind == "full"] == [1, 5]
    return store


def squash(store: Store, text: str, **options: Any) -> Merged:
    return merge(store.journal, Range(text, fulls=True), take_over=True, **options)


def test_of_fulls_the_last_stays_as_it_is(fulls: Store, states: list[dict[str, Any]]) -> None:
    done = squash(fulls, "2..6")
    assert (done.answer, done.method, done.merged, done.written) == ("accepted", "kept", (), ())
    assert done.retired == ("2@1", "3@1", "4@1", "5@1")
    assert done.fulls == ("6@1",)
    assert len(done.dropped) == 4
    check(fulls, states, 1, 6, 7, 8)


def test_a_chain_with_its_full_becomes_a_full(mixed: Store, states: list[dict[str, Any]]) -> None:
    done = squash(mixed, "1..4")
    assert (done.answer, done.method) == ("accepted", "materialized")
    assert done.retired == ("1@1", "2@1", "3@1")
    assert done.after.links < done.before.links
    info = mixed.checkpoint("4@1")
    assert (info.kind, info.base) == ("full", None)
    check(mixed, states, 4, 5, 6, 7, 8)
    assert mixed.view().catalog.held == {}


def test_checkpoints_built_on_a_dropped_full_stay_restorable(mixed: Store, states: list[dict[str, Any]]) -> None:
    done = squash(mixed, "1..6")  # 7 is a delta on 6, which stays; 6 was one on 5, which goes
    assert done.retired == ("1@1", "2@1", "3@1", "4@1", "5@1")
    check(mixed, states, 6, 7, 8)
    assert mixed.view().catalog.held == {}


def test_a_full_that_others_build_on_stays_stored(mixed: Store, states: list[dict[str, Any]]) -> None:
    squash(mixed, "1..5")
    check(mixed, states, 5, 6, 7, 8)
    mixed.tag("mine", "6", take_over=True)
    again = squash(mixed, "5..7")  # 6 stays, and is a delta on 5, which is no longer promised
    assert again.retired == ("5@1",)
    assert again.held == {"6@1": "tag 'mine' names it"}
    check(mixed, states, 6, 7, 8)
    assert list(mixed.view().catalog.held) == [(1, 5)]


def test_a_full_that_is_needed_outside_is_not_stored_twice(tmp_path: Path, states: list[dict[str, Any]]) -> None:
    store = ckptstore.open(tmp_path / "store")
    fill(store, states[:5], DeltaOptions(interval=5, form="paper", bound=RestoreBound(times=None, depth=100)))
    assert {info.base for info in store.checkpoints()} == {None, "1@1"}
    before = set(store.backend.list("seg/"))
    done = squash(store, "1..3")  # 3 is a delta on 1, and so are 4 and 5, which stay
    assert (done.method, done.retired, done.written) == ("kept", ("1@1", "2@1"), ())
    assert set(store.backend.list("seg/")) == before
    check(store, states, 3, 4, 5)


def test_beside_a_live_writer(tmp_path: Path, states: list[dict[str, Any]]) -> None:
    store = ckptstore.open(tmp_path / "store")
    with store.writer(deltas=EVERY_FOURTH, poll_seconds=0.02) as writer:
        for step, state in enumerate(states[:6], 1):
            writer.save(state, step)
        done = merge(Journal(store.backend), Range("1..latest", fulls=True), timeout=60)
        assert (done.answer, done.retired) == ("accepted", ("1@1", "2@1", "3@1", "4@1", "5@1"))
        for step, state in enumerate(states[6:], 7):
            writer.save(state, step)
    check(store, states, 6, 7, 8)


def test_losses_are_reported_first_and_a_dry_run_writes_nothing(fulls: Store, states: list[dict[str, Any]]) -> None:
    told: list[tuple[str, ...]] = []
    planned = squash(fulls, "1..3", dry_run=True, on_loss=told.append)
    assert (planned.answer, planned.retired) == ("planned", ("1@1", "2@1"))
    assert told == [("1@1", "2@1")]
    check(fulls, states, *range(1, 9))


def test_fulls_are_dropped_only_with_the_option(fulls: Store, mixed: Store) -> None:
    said = r"holds 8 checkpoints, none of them a diff\. Fulls are merged only on request .*--fulls"
    with pytest.raises(UsageError, match=said):
        fulls.merge("1..8", take_over=True)
    with pytest.raises(UsageError, match=r"5@1 is a full: .*--fulls"):
        mixed.merge("1..5", take_over=True)
    with pytest.raises(UsageError, match=r"ckpt compact --only"):
        fulls.merge("1..8", keep_steps=True, fulls=True, take_over=True)
    with pytest.raises(UsageError, match=r"holds 1 checkpoint, none"):
        fulls.merge("3..3", fulls=True, take_over=True)
    assert refs(fulls) == [f"{step}@1" for step in range(1, 9)]
    assert fulls.view().catalog.term == 1


class TestEveryOneOfARange:
    """``compact(only=)``."""

    @pytest.fixture
    def alike(self, tmp_path: Path) -> tuple[Store, list[dict[str, Any]]]:
        weights = np.random.default_rng(3).normal(size=50_000).astype(np.float32)
        states: list[dict[str, Any]] = []
        for step in range(1, 9):
            weights[step::400] += np.float32(0.5)
            states.append({"w": weights.copy(), "step": step})
        store = ckptstore.open(tmp_path / "alike")
        fill(store, states, None)
        return store, states

    def test_its_fulls_become_deltas_and_no_others(self, alike: tuple[Store, list[dict[str, Any]]]) -> None:
        store, states = alike
        report = store.compact(only="3..6", take_over=True)
        assert report.complete
        stored = {ref: base for move in report.moves for ref, base in move.stored.items()}
        assert stored.keys() <= {f"{step}@1" for step in range(3, 7)}
        kinds = {info.step: info.kind for info in store.checkpoints()}
        assert {step for step, kind in kinds.items() if kind == "delta"} == {4, 5, 6}
        assert all(base in {"", "3@1"} for base in stored.values())
        check(store, states, *range(1, 9))

    def test_an_end_that_is_not_there(self, alike: tuple[Store, list[dict[str, Any]]]) -> None:
        store, _ = alike
        with pytest.raises(ckptstore.CheckpointNotFoundError):
            store.compact(only="3..77", take_over=True)
        with pytest.raises(UsageError, match="is not a range"):
            store.compact(only="3", take_over=True)
        assert store.view().catalog.term == 1
