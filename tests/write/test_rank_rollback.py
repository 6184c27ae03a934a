"""Rollbacks of ranks: all of them, or none. And the metrics of each rank."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import DiffOptions, FailedRankError, MissingRankError, RankMismatchError, RankOptions, SaveMetrics
from ckptstore.errors import CheckpointNotFoundError, FencedError, UnsupportedStateError, UsageError
from ckptstore.write.ranks.messages.key_value_store import Group, LocalMailbox
from tests.store.states import same
from tests.write.rank_threads import Clock, as_ranks

OPTIONS = RankOptions(timeout=120)


def state(step: int, branch: int = 0) -> dict[str, Any]:
    return {f"w{number}": np.full(3000, step + 10 * branch, "<f4") for number in range(5)} | {"branch": branch}


@pytest.mark.parametrize("how", [{}, {"deltas": 1}, {"diffs": DiffOptions(batch=3)}], ids=["fulls", "deltas", "diffs"])
def test_all_ranks_go_back_and_continue(tmp_path: Path, how: dict[str, Any]) -> None:
    box = LocalMailbox()

    def work(group: Group) -> list[Any]:
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS, **how) as writer:
            for step in range(1, 6):
                writer.save_async(state(step), step)
            parent = writer.rollback(3)
            assert (parent.ref, writer.parent, writer.term) == ("3@1", parent, 2)
            pending = [writer.save_async(state(step, 1), step) for step in range(4, 7)]
            kinds = [one.result().kind for one in pending]
            writer.rollback(f"{4}@2")
            writer.save(state(5, 2), 5)
            return kinds

    later = {(): "full", ("deltas",): "delta", ("diffs",): "gradient"}[tuple(how)]
    assert as_ranks(3, work, box) == [["full", later, later]] * 3
    assert box.keys() == []
    store = ckptstore.open(tmp_path)
    assert [info.ref for info in store.checkpoints()] == [
        *(f"{step}@1" for step in range(1, 6)),
        *(f"{step}@2" for step in range(4, 7)),
        "5@3",
    ]
    for ref, expected in {"5@1": state(5), "5@2": state(5, 1), "5@3": state(5, 2)}.items():
        same(store.load(ref), expected)
    assert store.verify(deep=True).ok


def test_ranks_that_name_different_checkpoints_all_stay(tmp_path: Path) -> None:
    def work(group: Group) -> None:
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS) as writer:
            for step in (1, 2, 3):
                writer.save(state(step), step)
            expected = RankMismatchError if group.rank == 0 else FailedRankError
            with pytest.raises(expected, match="rank 1 goes back to '2', rank 0 to '1'"):
                writer.rollback(2 if group.rank == 1 else 1)
            with pytest.raises(CheckpointNotFoundError if group.rank == 0 else FailedRankError, match="77"):
                writer.rollback(77)
            with pytest.raises(UsageError):
                writer.rollback(None)  # type: ignore[arg-type]
            assert writer.save(state(4), 4).term == 1

    assert as_ranks(3, work) == [None] * 3
    assert len(ckptstore.open(tmp_path).terms()) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_an_unreported_failure_stops_all(tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(group: Group) -> None:
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS) as writer:
            writer.save(state(1), 1)
            wrong = state(2) if group.rank != rank else state(2) | {"new": np.ones(3)}
            pending = None
            try:
                pending = writer.save_async(wrong, 2)
            except ckptstore.RankError:
                assert group.rank == rank
            if pending is not None and group.rank != 2:
                pending.exception()
            expected = RankMismatchError if group.rank == 2 else FailedRankError
            with pytest.raises(expected, match="step 2 was not saved"):
                writer.rollback(1)
            assert writer.save(state(2), 2).term == 1

    assert as_ranks(3, work) == [None] * 3


def test_a_rank_that_does_not_come_stops_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stopped = Clock(monkeypatch), threading.Semaphore(0)
    monkeypatch.setattr("ckptstore.write.ranks.commit_coordinator._FAREWELL", 0.5)

    def work(group: Group) -> None:
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS) as writer:
            writer.save(state(1), 1)
            if group.rank == 1:
                for _ in range(2):
                    while not stopped.acquire(timeout=0.05):
                        clock.put_forward()
                return
            try:
                with pytest.raises(MissingRankError):
                    writer.rollback(1)
            finally:
                stopped.release()

    assert as_ranks(3, work) == [None] * 3
    assert len(ckptstore.open(tmp_path).terms()) == 1


def test_a_fenced_writer_does_not_roll_back(tmp_path: Path) -> None:
    def work(group: Group) -> None:
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS) as writer:
            writer.save(state(1), 1)
            if group.rank == 0:
                ckptstore.open(tmp_path).writer().close()
            with pytest.raises(FencedError if group.rank == 0 else FailedRankError, match="term 1 is over"):
                writer.rollback(1)

    assert as_ranks(2, work) == [None] * 2


@pytest.mark.parametrize("how", [{}, {"diffs": DiffOptions(batch=2)}], ids=["fulls", "diffs"])
def test_every_rank_gets_the_costs_of_its_saves(tmp_path: Path, how: dict[str, Any]) -> None:
    told: dict[int, list[SaveMetrics]] = {0: [], 1: []}

    def work(group: Group) -> None:
        store = ckptstore.open(tmp_path)
        own = told[group.rank].append
        with store.writer(group=group, ranks=OPTIONS, on_metrics=own, max_in_flight=2, **how) as writer:
            writer.save(state(1), 1)
            pending = [writer.save_async(state(step), step) for step in (2, 3)]
            assert [one.result().step for one in pending] == [2, 3]
            bad: Any = state(4) | ({"odd": object()} if group.rank == 1 else {})
            with pytest.raises(UnsupportedStateError if group.rank == 1 else FailedRankError):
                writer.save(bad, 4)

    assert as_ranks(2, work) == [None] * 2
    store = ckptstore.open(tmp_path)
    for rank, found in told.items():
        assert [one.step for one in found] == [1, 2, 3, 4]
        assert [one.error is None for one in found] == [True, True, True, False]
        assert [one.kind for one in found] == [*(info.kind for info in store.checkpoints()), None]
        assert all(0 <= one.waited <= one.stall for one in found)
        assert all(one.durable > 0 and one.rate >= 0 for one in found)
        assert found[2].in_flight >= 1
        assert isinstance(found[3].error, UnsupportedStateError if rank == 1 else FailedRankError)
    for step in (1, 2, 3):
        assert sum(told[rank][step - 1].nbytes for rank in told) == 5 * 12000  # each its share
        stored = sum(told[rank][step - 1].stored for rank in told)
        assert 0 < stored < store.checkpoint(step).stored  # which also has the tree
