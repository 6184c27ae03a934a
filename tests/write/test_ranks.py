"""Many ranks save one checkpoint: threads as ranks, numpy tensors. Processes, torch and kills are in other files."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import (
    CommitUnknownError,
    FailedRankError,
    MailboxError,
    MissingRankError,
    RankError,
    RankMismatchError,
    RankOptions,
    SegmentEntry,
    StorageError,
    UnsupportedStateError,
    UsageError,
)
from ckptstore.backends.memory import MemoryBackend
from ckptstore.log.journal import Journal
from ckptstore.write.ranks import rank_writer
from ckptstore.write.ranks.gathered_parts import check_seen
from ckptstore.write.ranks.messages.key_value_store import Group, LocalMailbox
from tests.write.rank_states import PATIENT, assert_same, state
from tests.write.rank_threads import Clock, as_ranks


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


def hurry(ranks: RankOptions, seconds: float) -> None:
    """Shorten the wait of a rank whose writer is already at work: this test is not about the opening of ranks."""
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
                hurry(own, 0.3)
            # If the machine stalls rank 2 may be late, too.
            with pytest.raises(MissingRankError, match=r"step 2.*rank 1(, 2)? did not .* within 0\.3 s"):
                writer.save(state(0, 2), 2)
            failed.release()

    assert as_ranks(3, work) == [None] * 3
    assert ckptstore.open(tmp_path).latest_step() == 1


def test_a_slow_rank_gets_the_error_of_the_step_and_continues(tmp_path: Path) -> None:
    failed, met = threading.Event(), threading.Barrier(2, timeout=120)

    def work(group: Group) -> None:
        own = RankOptions(timeout=120)
        with ckptstore.open(tmp_path).writer(group=group, ranks=own) as writer:
            writer.save(state(0), 1)
            if group.rank == 0:
                hurry(own, 0.3)
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


def test_ranks_that_save_other_steps_get_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, over = Clock(monkeypatch), threading.Event()
    monkeypatch.setattr("ckptstore.write.ranks.commit_coordinator._FAREWELL", 0.5)  # neither hears the other to its end

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


def test_tensors_that_change_on_one_rank_alone_are_agreed_again_at_once(tmp_path: Path) -> None:
    """Its caller waits, so the state can be asked for again. First rank 0 gets another tensor, then rank 1."""

    def work(group: Group) -> list[str]:
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT) as writer:
            writer.save(state(0), 1)
            found = []
            for step in (2, 4):
                mine = state(0, step) | ({"new": np.full(2, step)} if 2 * group.rank < step - 1 else {})
                found += [writer.save(mine, step).ref, writer.save(mine, step + 1).ref]
            return found

    assert as_ranks(2, work) == [["2@1", "3@1", "4@1", "5@1"]] * 2
    store = ckptstore.open(tmp_path)
    for step in (2, 3, 4, 5):
        assert_same(store.load(step)["new"], np.full(2, step // 2 * 2))


def test_tensors_that_change_on_one_rank_alone_cost_an_asynchronous_save(tmp_path: Path) -> None:
    def work(group: Group) -> None:
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT) as writer:
            writer.save(state(0), 1)
            for step in (2, 4):  # first rank 0 gets another tensor, then rank 1
                mine = state(0, step) | ({"new": np.ones(2)} if 2 * group.rank < step - 1 else {})
                with pytest.raises(RankMismatchError, match="other tensors than before") as caught:
                    writer.save_async(mine, step).result()
                assert caught.value.agree_anew, "on each rank"
                writer.save(mine, step + 1)

    assert as_ranks(2, work) == [None] * 2
    assert [info.step for info in ckptstore.open(tmp_path).checkpoints()] == [1, 3, 5]


def test_tensors_that_do_not_make_one_state_are_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    prepare = rank_writer.prepare

    def counted(resources: Any, *words: Any) -> Any:
        tried.append(resources.group.rank)
        return prepare(resources, *words)

    monkeypatch.setattr(rank_writer, "prepare", counted)

    def work(group: Group) -> None:
        with (
            ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT) as writer,
            pytest.raises(RankMismatchError) as caught,
        ):
            writer.save({"w": np.ones(3 + group.rank)}, 1)
        assert not caught.value.agree_anew

    assert as_ranks(2, work) == [None] * 2
    assert sorted(tried) == [0, 1]


def test_tensors_added_or_removed_on_all_ranks_are_agreed_again(tmp_path: Path) -> None:
    def work(group: Group) -> None:
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT) as writer:
            for step in range(1, 6):
                writer.save_async(state(group.rank, step) | {"moment": np.full(10 * step, step)}, step)

    assert as_ranks(3, work) == [None] * 3
    assert_same(ckptstore.open(tmp_path).load(5)["moment"], np.full(50, 5))


def test_a_new_group_of_another_size_continues_in_a_new_term(tmp_path: Path) -> None:
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


def test_a_dead_mailbox_is_reported_on_every_rank(tmp_path: Path) -> None:
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


class Recording(LocalMailbox):
    """Notes the keys that are read or deleted: each is a request to the host of the group's store."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def get(self, key: str) -> bytes | None:
        self.asked.append(key)
        return super().get(key)

    def delete(self, key: str) -> None:
        self.asked.append(key)
        super().delete(key)


def test_no_letters_are_asked_for_that_plain_saves_do_not_send(tmp_path: Path) -> None:
    box = Recording()

    def work(group: Group) -> None:
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT, poll_seconds=None) as writer:
            for step in range(1, 4):
                writer.save(state(group.rank), step)

    as_ranks(2, work, box)
    assert box.keys() == []
    assert [one for one in box.asked if "/part/" in one], "nothing was noted"
    assert not [one for one in box.asked if re.search("/(share|order|batch|states|hurry)", one)]


class Cut(LocalMailbox):
    """Rank 1 loses its connection as it sends its part of step 2: the message has arrived."""

    def set(self, key: str, value: bytes) -> None:
        if key.endswith("/at/1") and value == b"2":
            raise MailboxError("cut")
        super().set(key, value)


def test_a_part_that_may_have_arrived_is_not_reported_as_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptstore.write.ranks.commit_coordinator._FAREWELL", 0.5)  # rank 1 reports none

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


def test_shares_that_rank_0_does_not_see_are_not_committed(tmp_path: Path) -> None:
    journal = ckptstore.open(tmp_path, create=True).journal
    segment = SegmentEntry("ab" * 16, 1, 4096, 4096, "0" * 32)
    with pytest.raises(StorageError, match=r"rank 3 wrote seg/0000000001/abab.* which rank 0 does not see"):
        check_seen(journal, {3: [segment]})


def test_many_shares_are_looked_for_in_a_listing_and_one_that_it_lacks_by_its_name() -> None:
    store = ckptstore.open("memory://many-shares", create=True)
    asked: list[str] = []

    class Late(MemoryBackend):
        """Its listings lack rank 7's segment."""

        def sizes(self, prefix: str) -> dict[str, int]:
            asked.append(prefix)
            return {key: size for key, size in super().sizes(prefix).items() if key != own[7].key}

        def size(self, key: str) -> int:
            asked.append(key)
            return super().size(key)

    backend = Late("many-shares")
    own = {rank: SegmentEntry(f"{rank:032x}", 1, 10, 8, "0" * 32) for rank in range(40)}
    for one in own.values():
        backend.create(one.key, bytes(10))
    journal = Journal(backend, store.journal.format)
    check_seen(journal, {rank: [one] for rank, one in own.items()})
    assert asked == ["seg/0000000001/", own[7].key]
    backend.delete(own[7].key)
    with pytest.raises(StorageError, match=r"rank 7 wrote .* which rank 0 does not see"):
        check_seen(journal, {rank: [one] for rank, one in own.items()})
    with pytest.raises(StorageError, match="has 10 bytes; rank 9 wrote 11"):
        check_seen(journal, {rank: [replace(one, size=10 + (rank == 9))] for rank, one in own.items() if rank != 7})
    MemoryBackend.forget("many-shares")


def test_a_tied_tensor_is_filled_whatever_its_first_key_is(tmp_path: Path) -> None:
    """Ranks name it after the key that sorts first, a single process after the first one that it meets."""

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
