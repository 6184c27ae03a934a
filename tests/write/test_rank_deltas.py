"""Deltas of ranks: each share builds on the same share of its base, and after a failure a full follows."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckptstore
from ckptstore import (
    CorruptSegmentError,
    DivergedReplicasError,
    FailedRankError,
    RankOptions,
    UnsupportedStateError,
)
from ckptstore.formats.states.state import FlatState
from ckptstore.log import requests
from ckptstore.log.change import CatalogChange
from ckptstore.write.ranks.messages.key_value_store import Group
from ckptstore.write.resident_bases import ResidentBases
from tests.write.inside import rank_base_kinds, rank_bases
from tests.write.rank_states import PATIENT, assert_same, sharded, state
from tests.write.rank_threads import as_ranks


def drifting(rank: int, step: int) -> dict[str, Any]:
    """A state of which deltas are small, with a bf16 copy of a master."""
    weights = np.random.default_rng(0).standard_normal((400, 50)).astype(np.float32) + np.float32(1e-6 * step)
    found = state(rank, step)
    found["model"] |= {"master": weights, "copy": weights.astype(ml_dtypes.bfloat16)}
    return found


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("deltas", [1, 2, "auto"])
def test_deltas_of_ranks_are_restored_bit_for_bit(tmp_path: Path, deltas: Any, asynchronous: bool) -> None:
    def work(group: Group) -> list[str]:
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT, deltas=deltas) as writer:
            if asynchronous:
                pending = [writer.save_async(drifting(group.rank, step), step) for step in range(1, 7)]
                return [one.result().kind for one in pending]
            return [writer.save(drifting(group.rank, step), step).kind for step in range(1, 7)]

    assert as_ranks(3, work) == [["full", *["delta"] * 5]] * 3
    store = ckptstore.open(tmp_path)
    for step in range(1, 7):
        for rank in range(3):
            assert_same(store.load(step, rank=rank), drifting(rank, step))
    assert store.checkpoint(2).stored < 0.7 * store.checkpoint(1).stored
    assert store.verify(deep=True).ok


def test_a_base_that_a_rank_cannot_keep_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, short = ResidentBases.settle, [True]

    def settle(self: ResidentBases, order: Any, identity: Any, *arguments: Any) -> bool:
        if identity.node[1] == 2 and threading.current_thread().name.startswith("ckptstore") and short:
            short.clear()  # one rank of the two
            raise MemoryError("no more")
        return whole(self, order, identity, *arguments)

    monkeypatch.setattr(ResidentBases, "settle", settle)

    def work(group: Group) -> list[str]:
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT, deltas=100) as writer:
            kinds = []
            for step in range(1, 6):
                try:
                    kinds.append(writer.save(drifting(group.rank, step), step).kind)
                except ckptstore.FailedRankError:
                    kinds.append("failed")
            return kinds

    with pytest.warns(
        UserWarning, match="2@1 cannot be kept as a base by rank [01], so the next save is a full: Memory"
    ):
        found = as_ranks(2, work)
    assert "full" in found[0][2:]
    assert found[0] == found[1]


def test_deltas_of_shards_build_on_the_same_shards(tmp_path: Path) -> None:
    whole = np.random.default_rng(0).standard_normal((600, 40))

    def work(group: Group, cuts: list[slice]) -> list[str]:
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT, deltas=1) as writer:
            first = 0 if writer.parent is None else writer.parent.step
            return [
                writer.save(sharded(whole + 1e-9 * step, cuts[group.rank]), step).kind
                for step in range(first + 1, first + 4)
            ]

    halves, thirds = [slice(0, 300), slice(300, 600)], [slice(0, 200), slice(200, 400), slice(400, 600)]
    assert as_ranks(2, lambda group: work(group, halves)) == [["full", "delta", "delta"]] * 2
    assert as_ranks(3, lambda group: work(group, thirds)) == [["full", "delta", "delta"]] * 3
    for step in range(1, 7):
        assert_same(ckptstore.open(tmp_path).load(step), {"w": whole + 1e-9 * step})


def test_a_copy_is_derived_from_the_same_place_of_its_master(tmp_path: Path) -> None:
    """Rank 0 has other rows of the master than of the copy, which begin with the same numbers."""
    rows = np.random.default_rng(0).standard_normal((300, 50)).astype(np.float32)
    master = np.concatenate([rows, rows + 1])
    copy = np.concatenate([rows + 1, rows]).astype(ml_dtypes.bfloat16)

    def work(group: Group) -> None:
        own, other = (
            slice(300 * group.rank, 300 * group.rank + 300),
            slice(300 - 300 * group.rank, 600 - 300 * group.rank),
        )
        flat = FlatState(
            {"copy": {"$a": "copy"}, "w": {"$a": "w"}},
            {"copy": sharded(copy, own).tensors["w"], "w": sharded(master, other).tensors["w"]},
        )
        coded = ckptstore.DeltaOptions(interval=1, compress_fulls=True)
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT, deltas=coded) as writer:
            writer.save(flat, 1)

    assert as_ranks(2, work) == [None, None]
    assert_same(ckptstore.open(tmp_path).load(1), {"copy": copy, "w": master})


def test_after_a_failed_step_and_after_a_change_of_tensors_a_full_follows(tmp_path: Path) -> None:
    def work(group: Group) -> list[str]:
        kinds = []
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT, deltas=1) as writer:
            for step in range(1, 9):
                mine = drifting(group.rank, step)
                if step >= 6:
                    mine["model"]["new"] = np.ones(9)
                if step == 3 and group.rank == 1:
                    mine["model"]["master"][0, 0] += 1
                try:
                    kinds.append(writer.save_async(mine, step).result().kind)
                except DivergedReplicasError:
                    kinds.append("diverged")
        return kinds

    expected = ["full", "delta", "diverged", "full", "delta", "full", "delta", "delta"]
    assert as_ranks(2, work) == [expected] * 2
    assert_same(ckptstore.open(tmp_path).load(5, rank=1), drifting(1, 5))


def test_a_rank_that_gave_a_step_up_lets_go_of_its_base(tmp_path: Path) -> None:
    """Rank 0 has dropped its own when the next full comes, and cannot name it."""

    def work(group: Group) -> list[str]:
        kinds = []
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT, deltas=4) as writer:
            for step in range(1, 6):
                mine = drifting(group.rank, step)
                if step == 3 and group.rank == 1:
                    mine["model"]["master"] = object()
                try:
                    kinds.append(writer.save(mine, step).kind)
                except (UnsupportedStateError, FailedRankError):
                    kinds.append("given up")
            assert [one.node for one in rank_bases(writer)] == [(1, 4)]
        return kinds

    assert as_ranks(2, work) == [["full", "delta", "given up", "full", "delta"]] * 2


def test_a_later_step_that_fails_takes_no_base_from_the_one_that_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request to retire the base comes while a delta is made, and the step after that is given up meanwhile."""
    store = ckptstore.open(tmp_path)
    ordered, asked = threading.Event(), threading.Event()

    def passed(name: str) -> None:
        if name == "ranks.ordered" and store.latest_step() == 1:
            ordered.set()
            assert asked.wait(200)

    monkeypatch.setattr("ckptstore.write.ranks.rank_orders.crash_point", passed)

    def work(group: Group) -> str:
        patient = RankOptions(timeout=200, per_rank="rng.*")
        with ckptstore.open(tmp_path).writer(group=group, ranks=patient, deltas=4, poll_seconds=None) as writer:
            writer.save(drifting(group.rank, 1), 1)
            pending = writer.save_async(drifting(group.rank, 2), 2)
            if group.rank == 0:
                assert ordered.wait(200)
                with pytest.raises(UnsupportedStateError):
                    writer.save({"model": object()}, 3)
                change = CatalogChange(retires=((1, 1),), drops=store.checkpoint(1).segments)
                request = requests.post(store.journal, 1, "test", change)
                writer.poll()
                asked.set()
            else:
                with pytest.raises(FailedRankError):
                    writer.save(drifting(1, 3), 3)
            kind = pending.result().kind
            if group.rank == 0:
                assert requests.wait(store.journal, request, timeout=200).answer == "refused"
            return kind

    assert as_ranks(2, work) == ["delta", "delta"]


def test_a_base_that_was_retired_is_built_on_no_more(tmp_path: Path) -> None:
    def work(group: Group) -> list[str]:
        store = ckptstore.open(tmp_path)
        with store.writer(group=group, ranks=PATIENT, deltas=4, poll_seconds=0.05) as writer:
            kinds = [writer.save(drifting(group.rank, step), step).kind for step in (1, 2)]
            if group.rank == 0:
                store.retire(1)  # 2 builds on it: it stays stored, as a base
            kinds.append(writer.save(drifting(group.rank, 3), 3).kind)
        return kinds

    assert as_ranks(2, work) == [["full", "delta", "delta"]] * 2
    assert_same(ckptstore.open(tmp_path).load(3, rank=1), drifting(1, 3))


def test_after_everything_was_retired_and_dropped_the_next_step_is_a_full(tmp_path: Path) -> None:
    """A delta against a missing base could never be committed."""

    def work(group: Group) -> list[str]:
        store = ckptstore.open(tmp_path)
        with store.writer(group=group, ranks=PATIENT, deltas=4, poll_seconds=0.05) as writer:
            kinds = [writer.save(drifting(group.rank, step), step).kind for step in (1, 2)]
            if group.rank == 0:
                change = CatalogChange(retires=((1, 1), (1, 2)), drops=tuple(store.view().catalog.segments))
                asked = requests.post(store.journal, 1, "test", change)
                assert requests.wait(store.journal, asked, timeout=120).answer == "accepted"
            kinds += [writer.save(drifting(group.rank, step), step).kind for step in (3, 4)]
        return kinds

    assert as_ranks(2, work) == [["full", "delta", "full", "delta"]] * 2
    assert_same(ckptstore.open(tmp_path).load(4, rank=1), drifting(1, 4))


@pytest.mark.parametrize("interval", [1, 2])
def test_bases_of_ranks_that_do_not_fit_are_read_back_from_the_store(tmp_path: Path, interval: int) -> None:
    """One rank has no memory for bases, the other for one of them: each reads its own share of the others back."""
    resident: list[list[str]] = [[], []]

    def work(group: Group) -> list[str]:
        memory = 0 if group.rank else 100 << 10
        options = ckptstore.DeltaOptions(interval=interval, form="paper", memory=memory)
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT, deltas=options) as writer:
            kinds = []
            for step in range(1, 8):
                kinds.append(writer.save_async(drifting(group.rank, step), step).result().kind)
                writer.wait()
                resident[group.rank] += rank_base_kinds(writer)
        return kinds

    assert as_ranks(2, work) == [["full", *["delta"] * 6]] * 2
    assert set(resident[1]) == {"StoredBase"}
    assert "MemoryBase" in resident[0]
    store = ckptstore.open(tmp_path)
    for step in range(1, 8):
        for rank in range(2):
            assert_same(store.load(step, rank=rank), drifting(rank, step))
    assert store.checkpoint(2).stored < 0.7 * store.checkpoint(1).stored
    assert store.verify(deep=True).ok


def test_shards_build_on_the_same_shards_in_the_store(tmp_path: Path) -> None:
    whole, cuts = np.random.default_rng(0).standard_normal((600, 40)), [slice(0, 200), slice(200, 600)]

    def work(group: Group) -> list[str]:
        options = ckptstore.DeltaOptions(memory=0)
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT, deltas=options) as writer:
            kinds = [writer.save(sharded(whole + 1e-9 * step, cuts[group.rank]), step).kind for step in range(1, 4)]
            assert set(rank_base_kinds(writer)) == {"StoredBase"}
            return kinds

    assert as_ranks(2, work) == [["full", "delta", "delta"]] * 2
    store = ckptstore.open(tmp_path)
    for step in range(1, 4):
        assert_same(store.load(step), {"w": whole + 1e-9 * step})
    assert store.checkpoint(3).stored < 0.7 * store.checkpoint(1).stored


def test_a_damaged_base_of_a_rank_fails_one_step_on_all_ranks(tmp_path: Path) -> None:
    """The step cannot become a full because the other ranks have written deltas; the next one is a full."""

    def work(group: Group) -> list[str]:
        options = ckptstore.DeltaOptions(memory=0 if group.rank else None)
        store = ckptstore.open(tmp_path)
        kinds = []
        with store.writer(group=group, ranks=PATIENT, deltas=options) as writer:
            for step in range(1, 5):
                if step == 2 and group.rank:
                    for segment in store.view().catalog.segments.values():
                        if segment.size > 4096:
                            path = tmp_path / segment.key
                            data = bytearray(path.read_bytes())
                            data[-200:] = bytes(200)
                            path.write_bytes(data)
                try:
                    kinds.append(writer.save(drifting(group.rank, step), step).kind)
                except CorruptSegmentError as error:
                    kinds.append(type(error).__name__)
                except FailedRankError as error:
                    kinds.append("rank 1" if "rank 1" in str(error) else str(error))
        return kinds

    assert as_ranks(2, work) == [["full", "rank 1", "full", "delta"], ["full", "CorruptSegmentError", "full", "delta"]]
    assert_same(ckptstore.open(tmp_path).load(4, rank=1), drifting(1, 4))
