"""Replicas and shards of ranks: divided by bytes, put together, compared."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import (
    DivergedReplicasError,
    DivergedReplicasWarning,
    RankMismatchError,
    RankOptions,
    UsageError,
)
from ckptstore.write.ranks.messages.key_value_store import Group
from tests.write.rank_states import PATIENT, assert_same, sharded, state
from tests.write.rank_threads import as_ranks


def test_replicas_are_divided_by_bytes_and_stored_once(tmp_path: Path) -> None:
    size = 4

    def work(group: Group) -> Any:
        with ckptstore.open(tmp_path).writer(group=group) as writer:
            return writer.save({f"w{number}": np.full(1000, number) for number in range(16)}, 1)

    info = as_ranks(size, work)[0]
    assert info.nbytes == 16 * 8000
    assert info.tensors == 16
    segments = [doc for _, doc in ckptstore.open(tmp_path).describe(1)]
    assert sorted(len(doc.tensors[1]) for doc in segments) == [0, 4, 4, 4, 4]
    assert len({name for doc in segments for name in doc.tensors[1]}) == 16


def test_a_huge_replica_is_cut_and_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptstore.write.ranks.division.CUT_FROM", 4096)
    big = np.random.default_rng(0).random((1001, 17))

    def work(group: Group) -> Any:
        with ckptstore.open(tmp_path).writer(group=group) as writer:
            writer.save({"big": big, "small": np.ones(3)}, 1)
            return writer.save_async({"big": big + 1, "small": np.ones(3)}, 2).result()

    assert as_ranks(3, work)[0].step == 2
    segments = [doc.tensors[2] for _, doc in ckptstore.open(tmp_path).describe(2)]
    assert sum("big" in tensors for tensors in segments) == 3
    assert_same(ckptstore.open(tmp_path).load(1), {"big": big, "small": np.ones(3)})
    assert_same(ckptstore.open(tmp_path).load(2), {"big": big + 1, "small": np.ones(3)})


CUTS = {
    "rows": [(slice(0, 3), slice(None)), (slice(3, 6), slice(None)), (slice(6, 7), slice(None))],
    "uneven, one empty": [(slice(0, 5), slice(None)), (slice(5, 7), slice(None)), (slice(7, 7), slice(None))],
    "a grid": [(slice(0, 4), slice(0, 6)), (slice(0, 4), slice(6, 10)), (slice(4, 7), slice(None))],
    "replicated over one dimension of the mesh": [
        (slice(0, 4), slice(None)),
        (slice(4, 7), slice(None)),
        (slice(0, 4), slice(None)),
        (slice(4, 7), slice(None)),
    ],
}


@pytest.mark.parametrize("cut", CUTS)
def test_shards_make_up_the_whole(tmp_path: Path, cut: str) -> None:
    whole, boxes = np.arange(70.0).reshape(7, 10), CUTS[cut]

    def work(group: Group) -> Any:
        with ckptstore.open(tmp_path).writer(group=group) as writer:
            writer.save(sharded(whole, *boxes[group.rank]), 1)
            return writer.save_async(sharded(whole + 1, *boxes[group.rank]), 2).result().nbytes

    assert as_ranks(len(boxes), work) == [560] * len(boxes)
    for step in (1, 2):
        assert_same(ckptstore.open(tmp_path).load(step), {"w": whole + step - 1})
    assert ckptstore.open(tmp_path).verify(deep=True).ok


@pytest.mark.parametrize(
    ("boxes", "why"),
    [
        ([slice(0, 3), slice(4, 7)], r"elements \[3:4, 0:10\] of \[7, 10\] are on no rank"),
        ([slice(0, 4), slice(3, 7)], "overlap"),
        ([slice(0, 7), slice(0, 3)], "overlap"),
    ],
)
def test_shards_with_holes_and_overlaps_are_refused_on_every_rank(tmp_path: Path, boxes: list[slice], why: str) -> None:
    whole = np.arange(70.0).reshape(7, 10)

    def work(group: Group) -> None:
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT) as writer:
            with pytest.raises(RankMismatchError, match=why):
                writer.save(sharded(whole, boxes[group.rank]), 1)
            halves = [slice(0, 3), slice(3, 7)]
            writer.save(sharded(whole, halves[group.rank]), 1)  # the step was not accepted

    assert as_ranks(2, work) == [None, None]
    assert_same(ckptstore.open(tmp_path).load(1), {"w": whole})


def test_tensors_of_one_name_have_one_shape(tmp_path: Path) -> None:
    def work(group: Group) -> None:
        with (
            ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT) as writer,
            pytest.raises(RankMismatchError, match=r"'w' is F64 \[3\] on rank 0, F64 \[4\] on rank 1.*per_rank"),
        ):
            writer.save({"w": np.ones(3 + group.rank)}, 1)

    assert as_ranks(2, work) == [None, None]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_replica_that_diverged_is_found_with_tensor_and_rank(tmp_path: Path, asynchronous: bool) -> None:
    def work(group: Group) -> tuple[str, int, int]:
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT) as writer:
            writer.save(state(group.rank), 1)
            wrong = state(group.rank, 2)
            if group.rank == 2:
                for name in ("w3", "w4"):
                    wrong["model"][name].view(np.uint32)[1, 7] ^= 1  # one bit
            save = (lambda: writer.save_async(wrong, 2).result()) if asynchronous else (lambda: writer.save(wrong, 2))
            with pytest.raises(
                DivergedReplicasError, match=r"'model.w3'.*rank 2 against ranks 0, 1, 3; so do 1 more"
            ) as met:
                save()
            writer.save(state(group.rank, 3), 3)
            return met.value.tensor, met.value.rank, met.value.step

    assert as_ranks(4, work) == [("model.w3", 2, 2)] * 4
    store = ckptstore.open(tmp_path)
    assert [info.step for info in store.checkpoints()] == [1, 3]
    assert len(store.gc().segments) == 4  # the segments of step 2 on all ranks were named in a drop


def test_diverged_replicas_are_saved_of_one_rank_if_that_is_wanted(tmp_path: Path) -> None:
    options = RankOptions(timeout=120, diverged="warn", per_rank=["rng"])

    def work(group: Group) -> None:
        with ckptstore.open(tmp_path).writer(group=group, ranks=options) as writer:
            mine = state(group.rank)
            for name in mine["model"]:
                mine["model"][name] += group.rank
            writer.save(mine, 1)

    with warnings.catch_warnings(record=True) as met:
        warnings.simplefilter("always")
        assert as_ranks(3, work) == [None] * 3
    assert [one.category for one in met] == [DivergedReplicasWarning]
    assert_same(ckptstore.open(tmp_path).load(1, rank=0), state(0))


def test_a_ranks_own_tensors_are_filled_by_their_names_there(tmp_path: Path) -> None:
    def work(group: Group) -> None:
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT) as writer:
            writer.save(state(group.rank), 1)

    as_ranks(2, work)
    store = ckptstore.open(tmp_path)
    for rank in range(3):
        mine = state(7)
        assert_same(store.load(1, into=mine, rank=rank), state(rank % 2))
        assert_same(mine["rng"], state(rank % 2)["rng"])
    for name in ("rng", "model"):
        left = {key: value for key, value in state(0).items() if key != name}
        with pytest.raises(UsageError, match=f"into= has no tensor '{name}"):
            store.load(1, into=left, rank=0)


def test_nothing_is_compared_if_that_is_wanted(tmp_path: Path) -> None:
    def work(group: Group) -> int:
        with ckptstore.open(tmp_path).writer(group=group, ranks=RankOptions(diverged="ignore")) as writer:
            return writer.save({"w": np.full(3, group.rank)}, 1).step

    assert as_ranks(2, work) == [1, 1]


def test_ranks_of_a_pipeline_have_different_tensors(tmp_path: Path) -> None:
    def work(group: Group) -> None:
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT) as writer:
            writer.save({"layers": {f"layer{group.rank}": np.full(4, group.rank)}, "shared": np.zeros(2)}, 1)

    assert as_ranks(3, work) == [None] * 3
    store = ckptstore.open(tmp_path)
    assert list(store.load(1)["layers"]) == ["layer0", "layer1", "layer2"]
    assert list(store.load(1, rank=1)["layers"]) == ["layer1"]
