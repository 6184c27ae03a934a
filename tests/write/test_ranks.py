"""Many ranks save one checkpoint: threads as ranks, numpy tensors. Processes, torch and kills are in other files."""

from __future__ import annotations

import multiprocessing
import shutil
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckptstore
from ckptstore import (
    CommitUnknownError,
    DivergedReplicasError,
    DivergedReplicasWarning,
    FailedRankError,
    MailboxError,
    MissingRankError,
    RankError,
    RankMismatchError,
    RankOptions,
    SegmentEntry,
    StepOrderError,
    StorageError,
    UnsupportedStateError,
    UsageError,
    WriterClosedError,
)
from ckptstore.formats.sources import BoxSource, NumpySource
from ckptstore.formats.state import FlatState
from ckptstore.log import requests
from ckptstore.log.change import Change
from ckptstore.write.ranks.deltas import RankDeltas
from ckptstore.write.ranks.gathering import check_seen
from ckptstore.write.ranks.mailbox import Group, LocalMailbox
from tests.write.inside import rank_bases
from tests.write.rank_threads import Clock, as_ranks

PATIENT = RankOptions(timeout=120, per_rank="rng.*")


def state(rank: int, step: int = 1) -> dict[str, Any]:
    """A replicated model, random state of the rank's own, and values that differ."""
    random = np.random.default_rng(7)
    return {
        "model": {f"w{number}": random.random((number + 1, 50)).astype(np.float32) for number in range(6)},
        "step": step,
        "rng": {"numpy": np.arange(8) + rank},
        "loader": {"position": 100 * rank},
    }


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    else:
        assert one == other


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("url", ["file", "memory"])
def test_every_rank_gets_back_what_it_saved(tmp_path: Path, size: int, url: str) -> None:
    place = tmp_path / "store" if url == "file" else f"memory://{tmp_path}"

    def work(group: Group) -> None:
        with ckptstore.open(place).writer(group=group, ranks=PATIENT) as writer:
            assert (writer.term, writer.parent, writer.rank, writer.size) == (1, None, group.rank, size)
            first = writer.save(state(group.rank), 1, metadata={"loss": 0.5}, tags="first")
            pending = [writer.save_async(state(group.rank, step), step) for step in (2, 3)]
            infos = [first, *(one.result() for one in pending)]
        assert [info.step for info in infos] == [1, 2, 3]
        assert infos[0].metadata == {"loss": 0.5}
        assert infos[0].tags == ("first",)

    assert as_ranks(size, work) == [None] * size
    store = ckptstore.open(place)
    for step in (1, 2, 3):
        for rank in range(size):
            assert_same(store.load(step, rank=rank), state(rank, step))
    assert store.checkpoint("tag:first").step == 1
    assert store.verify(deep=True).ok


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


def sharded(whole: np.ndarray[Any, Any], rows: slice, columns: slice = slice(None)) -> FlatState:
    """The state {"w": whole}, of which this rank has a box."""
    part = np.ascontiguousarray(whole[rows, columns])
    offset = (rows.start or 0, columns.start or 0)
    return FlatState({"w": {"$a": "w"}}, {"w": BoxSource(NumpySource(part), part.shape, 0, whole.shape, offset)})


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
            writer.save(sharded(whole, halves[group.rank]), 1)  # the step was not taken

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
    assert len(store.gc().segments) == 4  # what the ranks wrote of step 2 was named in a drop


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


def test_what_a_rank_has_of_its_own_is_filled_by_the_name_that_it_has_there(tmp_path: Path) -> None:
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


def hurry(ranks: RankOptions, seconds: float) -> None:
    """Have a rank whose writer is at work already wait no longer than this: how ranks open is not what is measured."""
    object.__setattr__(ranks, "timeout", seconds)


def test_a_rank_that_does_not_save_makes_the_step_fail_on_all(tmp_path: Path) -> None:
    failed = threading.Semaphore(0)

    def work(group: Group) -> None:
        own = RankOptions(timeout=120)
        with ckptstore.open(tmp_path).writer(group=group, ranks=own) as writer:
            writer.save(state(0), 1)
            if group.rank == 1:
                assert all(failed.acquire(timeout=120) for _ in range(2))
                return
            if group.rank == 0:
                hurry(own, 1)
            # Where the machine stands still rank 2 may be late, too.
            with pytest.raises(MissingRankError, match=r"step 2.*rank 1(, 2)? did not .* within 1 s"):
                writer.save(state(0, 2), 2)
            failed.release()

    assert as_ranks(3, work) == [None] * 3
    assert ckptstore.open(tmp_path).latest_step() == 1


def test_a_slow_rank_hears_that_the_step_failed_and_goes_on(tmp_path: Path) -> None:
    failed, met = threading.Event(), threading.Barrier(2, timeout=120)

    def work(group: Group) -> None:
        own = RankOptions(timeout=120)
        with ckptstore.open(tmp_path).writer(group=group, ranks=own) as writer:
            writer.save(state(0), 1)
            if group.rank == 0:
                hurry(own, 1)
            else:
                assert failed.wait(120)
            with pytest.raises(MissingRankError, match="rank 1 did not"):
                writer.save(state(0, 2), 2)
            failed.set()
            hurry(own, 120)
            met.wait()
            assert writer.save(state(0, 2), 2).step == 2

    assert as_ranks(2, work) == [None] * 2
    assert ckptstore.open(tmp_path).latest_step() == 2


def test_ranks_one_step_apart_do_not_wait_for_each_other(tmp_path: Path) -> None:
    passed = threading.Event()

    def work(group: Group) -> None:
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT, max_in_flight=3) as writer:
            writer.save(state(group.rank), 1)
            if group.rank == 1:
                assert passed.wait(120)  # rank 0 is two steps ahead
            pending = [writer.save_async(state(group.rank, step), step) for step in (2, 3)]
            if group.rank == 0:
                assert not any(one.done() for one in pending)
                passed.set()
            assert [one.result().step for one in pending] == [2, 3]

    assert as_ranks(2, work) == [None] * 2


def test_ranks_that_save_other_steps_are_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, over = Clock(monkeypatch), threading.Event()
    monkeypatch.setattr("ckptstore.write.ranks.settling._FAREWELL", 0.5)  # neither hears the other to its end

    def work(group: Group) -> None:
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT) as writer:
            writer.save(state(0), 1)
            began = clock.monotonic()
            if group.rank == 0:
                with pytest.raises(MissingRankError, match="rank 1 has saved step 3, and not this one"):
                    writer.save(state(0, 2), 2)
                assert clock.monotonic() - began < PATIENT.timeout / 2
                while not over.wait(0.05):
                    clock.put_forward()
            else:
                try:
                    with pytest.raises(RankError):
                        writer.save_async(state(0, 3), 3).result()
                finally:
                    over.set()

    found = as_ranks(2, work)
    assert found[0] is None
    assert ckptstore.open(tmp_path).latest_step() == 1


def test_a_state_that_one_rank_cannot_store_fails_at_once_on_all(tmp_path: Path) -> None:
    def work(group: Group) -> None:
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT) as writer:
            bad: Any = state(group.rank) | ({"odd": object()} if group.rank == 1 else {})
            began = time.monotonic()
            expected = UnsupportedStateError if group.rank == 1 else FailedRankError
            with pytest.raises(expected, match="odd"):
                writer.save(bad, 1)
            assert time.monotonic() - began < PATIENT.timeout / 2
            writer.save(state(group.rank), 1)

    assert as_ranks(3, work) == [None] * 3


def test_tensors_that_change_on_one_rank_alone_cost_one_step(tmp_path: Path) -> None:
    def work(group: Group) -> None:
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT) as writer:
            writer.save(state(0), 1)
            for step in (2, 4):  # first rank 0 gets another tensor, then rank 1
                mine = state(0, step) | ({"new": np.ones(2)} if 2 * group.rank < step - 1 else {})
                with pytest.raises(RankMismatchError, match="other tensors than before"):
                    writer.save(mine, step)
                writer.save(mine, step + 1)

    assert as_ranks(2, work) == [None] * 2
    assert ckptstore.open(tmp_path).latest_step() == 5


def test_tensors_that_come_and_go_on_all_ranks_are_agreed_anew(tmp_path: Path) -> None:
    def work(group: Group) -> None:
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT) as writer:
            for step in range(1, 6):
                writer.save_async(state(group.rank, step) | {"moment": np.full(10 * step, step)}, step)

    assert as_ranks(3, work) == [None] * 3
    assert_same(ckptstore.open(tmp_path).load(5)["moment"], np.full(50, 5))


def test_a_new_group_of_another_size_goes_on_in_a_new_term(tmp_path: Path) -> None:
    def work(group: Group) -> tuple[int, int | None]:
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT) as writer:
            parent = None if writer.parent is None else writer.parent.step
            writer.save(state(group.rank, (parent or 0) + 1), (parent or 0) + 1)
            return writer.term, parent

    assert as_ranks(3, work) == [(1, None)] * 3
    assert as_ranks(2, work) == [(2, 1)] * 2
    assert as_ranks(4, work) == [(3, 2)] * 4


def test_nothing_is_left_in_the_mailbox(tmp_path: Path) -> None:
    box = LocalMailbox()

    def work(group: Group) -> None:
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT) as writer:
            for step in range(1, 4):
                writer.save(state(group.rank, step), step)
            with pytest.raises(RankError):
                writer.save({"w": np.ones(group.rank)}, 4)

    assert as_ranks(3, work, box) == [None] * 3
    assert box.keys() == []


def test_a_mailbox_that_dies_is_said_on_every_rank(tmp_path: Path) -> None:
    box = LocalMailbox()
    met = threading.Barrier(3)

    def work(group: Group) -> None:
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT) as writer:
            writer.save(state(group.rank), 1)
            met.wait()
            box.die()
            with pytest.raises((MailboxError, RankError)):
                writer.save(state(group.rank, 2), 2)

    assert as_ranks(3, work, box) == [None] * 3
    assert ckptstore.open(tmp_path).latest_step() == 1


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


def test_a_base_that_a_rank_cannot_keep_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, short = RankDeltas.committed, [True]

    def committed(self: RankDeltas, order: Any, identity: Any, *arguments: Any) -> None:
        if identity.node[1] == 2 and threading.current_thread().name.startswith("ckptstore") and short:
            short.clear()  # one rank of the two
            raise MemoryError("no more")
        whole(self, order, identity, *arguments)

    monkeypatch.setattr(RankDeltas, "committed", committed)

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
    """Rank 0 has let go of its own when the next full comes, and cannot name it."""

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
    """Somebody asks for the base to be retired while a delta is made, and the step after that is given up meanwhile."""
    store = ckptstore.open(tmp_path)
    ordered, asked = threading.Event(), threading.Event()

    def passed(name: str) -> None:
        if name == "ranks.ordered" and store.latest_step() == 1:
            ordered.set()
            assert asked.wait(200)

    monkeypatch.setattr("ckptstore.write.ranks.ordering.crash_point", passed)

    def work(group: Group) -> str:
        patient = RankOptions(timeout=200, per_rank="rng.*")
        with ckptstore.open(tmp_path).writer(group=group, ranks=patient, deltas=4, poll_seconds=None) as writer:
            writer.save(drifting(group.rank, 1), 1)
            pending = writer.save_async(drifting(group.rank, 2), 2)
            if group.rank == 0:
                assert ordered.wait(200)
                with pytest.raises(UnsupportedStateError):
                    writer.save({"model": object()}, 3)
                change = Change(retires=((1, 1),), drops=store.checkpoint(1).segments)
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


def test_after_everything_was_retired_and_dropped_the_next_step_begins_anew(tmp_path: Path) -> None:
    """A delta against what is gone could never be committed."""

    def work(group: Group) -> list[str]:
        store = ckptstore.open(tmp_path)
        with store.writer(group=group, ranks=PATIENT, deltas=4, poll_seconds=0.05) as writer:
            kinds = [writer.save(drifting(group.rank, step), step).kind for step in (1, 2)]
            if group.rank == 0:
                change = Change(retires=((1, 1), (1, 2)), drops=tuple(store.view().catalog.segments))
                asked = requests.post(store.journal, 1, "test", change)
                assert requests.wait(store.journal, asked, timeout=120).answer == "accepted"
            kinds += [writer.save(drifting(group.rank, step), step).kind for step in (3, 4)]
        return kinds

    assert as_ranks(2, work) == [["full", "delta", "full", "delta"]] * 2
    assert_same(ckptstore.open(tmp_path).load(4, rank=1), drifting(1, 4))


def test_what_ranks_cannot_do_yet_is_said_before_a_term_is_opened(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path)
    with pytest.raises(UsageError, match=r"memory=.* cannot be combined"):
        store.writer(group=Group(0, 1, LocalMailbox()), deltas=ckptstore.DeltaOptions(memory=1))
    assert store.latest_step() is None


class Cut(LocalMailbox):
    """Rank 1 loses its connection as it hands in its part of step 2: the letter has come through."""

    def set(self, key: str, value: bytes) -> None:
        if key.endswith("/at/1") and value == b"2":
            raise MailboxError("cut")
        super().set(key, value)


def test_a_part_that_may_have_come_through_is_not_said_to_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptstore.write.ranks.settling._FAREWELL", 0.5)  # rank 1 says none

    def work(group: Group) -> None:
        with ckptstore.open(tmp_path).writer(group=group, ranks=RankOptions(timeout=120, per_rank="rng")) as writer:
            writer.save(state(group.rank), 1)
            if group.rank == 0:
                writer.save(state(group.rank, 2), 2)
                return
            for step in (2, 3):  # this writer is finished
                with pytest.raises(CommitUnknownError, match="step 2 may or may not"):
                    writer.save(state(group.rank, step), step)

    assert as_ranks(2, work, Cut()) == [None] * 2
    assert_same(ckptstore.open(tmp_path).load(2, rank=1), state(1, 2))


def test_what_rank_0_does_not_see_is_not_committed(tmp_path: Path) -> None:
    journal = ckptstore.open(tmp_path, create=True).journal
    segment = SegmentEntry("ab" * 16, 1, 4096, 4096, "0" * 32)
    with pytest.raises(StorageError, match=r"rank 3 wrote seg/0000000001/abab.* which rank 0 does not see"):
        check_seen(journal, {3: [segment]})


def test_a_rank_with_another_store_is_refused(tmp_path: Path) -> None:
    def work(group: Group) -> None:
        ckptstore.open(tmp_path / str(group.rank), create=True)
        expected = FailedRankError if group.rank == 0 else RankMismatchError
        with pytest.raises(expected, match="another store"):
            ckptstore.open(tmp_path / str(group.rank)).writer(group=group, ranks=PATIENT)

    assert as_ranks(2, work) == [None] * 2


@pytest.mark.parametrize(
    ("own", "why"), [(False, "is not there"), (True, r"slot \d+ is not the one that rank 0 wrote")]
)
def test_a_rank_with_a_copy_of_the_store_is_refused(tmp_path: Path, own: bool, why: str) -> None:
    """The copy has the same run, and perhaps a term of its own where rank 0 has opened one."""
    ckptstore.open(tmp_path / "0").writer().close()
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    if own:
        ckptstore.open(tmp_path / "1").writer().close()

    def work(group: Group) -> None:
        expected = FailedRankError if group.rank == 0 else RankMismatchError
        with pytest.raises(expected, match=why):
            ckptstore.open(tmp_path / str(group.rank)).writer(group=group, ranks=PATIENT)

    assert as_ranks(2, work) == [None] * 2


def test_ranks_of_groups_of_two_sizes_are_refused(tmp_path: Path) -> None:
    def work(group: Group) -> None:
        if group.rank == 0:
            while not box.keys():  # until the other one is there
                time.sleep(0.001)
            with pytest.raises(MissingRankError, match="rank 1 of 2 did not come"):
                ckptstore.open(tmp_path).writer(group=group, ranks=RankOptions(timeout=0.2))
            return
        with pytest.raises(RankMismatchError, match="not of one group: rank 1 is of a group of 3, rank 0 of one of 2"):
            ckptstore.open(tmp_path).writer(group=Group(1, 3, group.mailbox), ranks=PATIENT)

    box = LocalMailbox()
    assert as_ranks(2, work, box) == [None] * 2
    assert ckptstore.open(tmp_path).latest_step() is None


def test_no_term_is_opened_until_every_rank_is_there(tmp_path: Path) -> None:
    ckptstore.open(tmp_path).writer().close()
    with pytest.raises(MissingRankError, match=r"rank 1 of 2 did not come within 0\.2 s"):
        ckptstore.open(tmp_path).writer(group=Group(0, 2, LocalMailbox()), ranks=RankOptions(timeout=0.2))
    with pytest.raises(MissingRankError, match="rank 0"):
        ckptstore.open(tmp_path).writer(group=Group(1, 2, LocalMailbox()), ranks=RankOptions(timeout=0.2))
    assert len(ckptstore.open(tmp_path).terms()) == 1


def test_what_rank_0_cannot_open_is_said_to_all(tmp_path: Path) -> None:
    def work(group: Group) -> None:
        expected = ckptstore.CheckpointNotFoundError if group.rank == 0 else FailedRankError
        with pytest.raises(expected, match="77"):
            ckptstore.open(tmp_path).writer(77, group=group, ranks=PATIENT)

    assert as_ranks(2, work) == [None] * 2


def test_steps_ascend_and_what_cannot_be_combined_is_refused(tmp_path: Path) -> None:
    def work(group: Group) -> None:
        store = ckptstore.open(tmp_path)
        with store.writer(group=group, ranks=PATIENT) as writer:
            writer.save(state(group.rank, 2), 2)
            with pytest.raises(StepOrderError):
                writer.save(state(group.rank, 1), 1)
            if group.rank:
                with pytest.raises(UsageError, match="only rank 0"):
                    writer.tag("mine")
            else:
                assert writer.tag("mine").tags == ("mine",)
                writer.untag("mine")

    assert as_ranks(2, work) == [None] * 2
    with pytest.raises(UsageError, match="give group="):
        ckptstore.open(tmp_path).writer(ranks=PATIENT)
    with pytest.raises(UsageError, match="process group"):
        ckptstore.open(tmp_path).writer(group="all")  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="timeout"):
        RankOptions(timeout=0)
    with pytest.raises(UsageError, match="diverged"):
        RankOptions(diverged="maybe")  # type: ignore[arg-type]


def test_values_that_are_too_much_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptstore.formats.state.TREE_LIMIT", 1500)  # two ranks' texts are longer, one is not

    def work(group: Group) -> None:
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT) as writer:
            with pytest.raises((RankError, UnsupportedStateError), match="as text"):
                writer.save({"w": np.ones(3), "said": str(group.rank) * 1000}, 1)
            writer.save({"w": np.ones(3), "said": str(group.rank)}, 2)

    assert as_ranks(2, work) == [None] * 2
    assert [info.step for info in ckptstore.open(tmp_path).checkpoints()] == [2]


def everything(writer: Any) -> list[Any]:
    """What only a writer that is open does."""
    return [
        lambda: writer.save(state(0), 2),
        lambda: writer.save_async(state(0), 2),
        writer.wait,
        lambda: writer.tag("late", 1),
        lambda: writer.untag("late"),
        lambda: writer.rollback(1),
    ]


def test_a_writer_that_is_closed_takes_nothing(tmp_path: Path) -> None:
    def work(group: Group) -> None:
        writer = ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT)
        writer.save(state(group.rank), 1)
        writer.close()
        for call in everything(writer):
            with pytest.raises(WriterClosedError, match="is closed"):
                call()

    assert as_ranks(2, work) == [None] * 2
    assert [info.ref for info in ckptstore.open(tmp_path).checkpoints()] == ["1@1"]


def _misuse(writer: Any) -> None:
    for call in everything(writer):
        with pytest.raises(WriterClosedError, match="not to its fork"):
            call()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_does_not_wait_for_threads_that_it_does_not_have(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path).writer(group=Group(0, 1, LocalMailbox()), ranks=PATIENT) as writer:
        writer.save(state(0), 1)
        child = multiprocessing.get_context("fork").Process(target=_misuse, args=(writer,), daemon=True)
        child.start()
        child.join(120)
        if child.exitcode is None:
            child.kill()
        assert child.exitcode == 0


def test_a_tied_tensor_is_filled_whatever_its_first_key_is(tmp_path: Path) -> None:
    """Ranks name it after the key that sorts first, a process by itself after the first one that it meets."""

    def tied(rank: int) -> dict[str, Any]:
        table = np.arange(12, dtype=np.float32)
        own = np.arange(3) + rank
        return {"wte": table, "lm_head": table, "rng": {"b": own, "a": own}}

    def work(group: Group) -> None:
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT) as writer:
            writer.save(tied(group.rank), 1)

    as_ranks(2, work)
    store = ckptstore.open(tmp_path)
    assert "lm_head" in store.tensors(1)
    for rank in (None, 0, 1, 2):
        mine = tied(5)
        mine["wte"][:] = 0
        found = store.load(1, into=mine, rank=rank)
        for got in (found, mine):
            assert_same(got, tied((rank or 0) % 2))
        assert found["wte"] is found["lm_head"]
    untied = {**tied(0), "wte": np.zeros(12, np.float32)}
    with pytest.raises(UsageError, match="into= has a tensor 'wte' that is not in the checkpoint"):
        store.load(1, into=untied, rank=0)
    apart = {**tied(0), "rng": {"b": np.zeros(3, int), "a": np.zeros(3, int)}}
    with pytest.raises(UsageError, match="into= has no tensor"):
        store.load(1, into=apart, rank=0)
