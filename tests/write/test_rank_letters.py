"""A message that arrives between two looks at the mailbox: it is not mistaken for the earlier one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import DiffOptions, RankOptions
from ckptstore.errors import (
    CommitUnknownError,
    FailedRankError,
    MailboxError,
    MissingRankError,
    RankMismatchError,
    StorageError,
)
from ckptstore.formats.states.state import FlatState
from ckptstore.write.ranks.messages.key_value_store import Group, LocalMailbox, fetch, post
from ckptstore.write.ranks.messages.rank_messages import RankPart
from ckptstore.write.steps import resident_step
from tests.write.rank_states import PATIENT, assert_same, state
from tests.write.rank_threads import Clock, as_ranks
from tests.write.test_rank_diffs import OPTIONS, trainer

BATCH = DiffOptions(batch=2, seconds=None)


class Crossing(LocalMailbox):
    """The receiver gets the message `first` just before `second` arrives: as on a slow network, but reliably."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.got = threading.Event()

    def get(self, key: str) -> bytes | None:
        value = super().get(key)
        if value is not None and key.endswith(self.first) and not self.got.is_set():
            self.got.set()
            self.wait_for(self.second)
        return value

    def set(self, key: str, value: bytes) -> None:
        if key.endswith(self.second):
            self.got.wait(120)  # no assertion: it would end a thread of the writer's, and hang the test
        super().set(key, value)

    def wait_for(self, end: str) -> None:
        until = time.monotonic() + 120
        while time.monotonic() < until and not any(key.endswith(end) for key in self.keys()):
            time.sleep(0.001)


def test_a_batch_that_rank_0_cannot_write_once_its_states_are_known(tmp_path: Path) -> None:
    def work(group: Group) -> list[str]:
        model, store = trainer(), ckptstore.open(tmp_path)
        told: list[str] = []
        # Three in flight: otherwise no save waits for the next one, and each batch has one step.
        with store.writer(group=group, ranks=OPTIONS, diffs=BATCH, max_in_flight=3, poll_seconds=None) as writer:
            pending: list[Any] = []
            for step in (1, 2, 3):
                model.train()
                if step == 3 and group.rank == 0:
                    pending[0].result()
                    medium: Any = store.backend
                    medium.open_sink = lambda *_: (_ for _ in ()).throw(StorageError("it is full"))
                pending.append(writer.save_async(model.state(), step, updates=model.updates()))
            for one in pending:
                error = one.exception()
                told.append(one.result().kind if error is None else f"{type(error).__name__}: {error}")
        return told

    box = Crossing("/3.0/states", "/3.0/verdict")
    of_rank_0, of_rank_1 = as_ranks(2, work, box)
    assert box.got.is_set(), "the letters did not cross"
    assert of_rank_0 == ["full", *["StorageError: it is full"] * 2]
    assert of_rank_1 == ["full", *["StorageError: rank 0: it is full"] * 2]


def test_a_batch_that_rank_0_gives_up_while_others_wait_to_hear_how_the_next_step_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Crossing("/2.0/batch", "/4.0/order")
    coded = resident_step.encode_step

    def encode(flat: FlatState, updates: Any, base: Any, step: int, **how: Any) -> Any:
        if step == 3 and flat.tree["step"] == 100:
            box.wait_for("/4.0/items/1")
            raise MemoryError("no memory")
        return coded(flat, updates, base, step, **how)

    monkeypatch.setattr(resident_step, "encode_step", encode)
    options = DiffOptions(batch=9, seconds=None)

    def work(group: Group) -> list[str]:
        model = trainer()
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS, diffs=options, max_in_flight=2) as writer:
            pending: list[Any] = []
            for step in (1, 2, 3, 4):
                model.train()
                own = model.state() | {"step": 100 + group.rank}
                if step == 4 and group.rank == 0:
                    for one in pending:
                        one.exception()  # otherwise the next call raises it
                pending.append(writer.save_async(own, step, updates=model.updates()))
            return ["lost" if one.exception() is not None else one.result().kind for one in pending]

    assert as_ranks(2, work, box) == [["full", "lost", "lost", "full"]] * 2
    assert box.got.is_set(), "the letters did not cross"


class Mute(LocalMailbox):
    """Rank 0 loses its connection as it reports that step 2 is committed; then hours pass."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def set(self, key: str, value: bytes) -> None:
        if key.endswith("/2.0/verdict"):
            self.clock.put_forward()
            raise MailboxError("cut")
        super().set(key, value)


def test_a_rank_that_does_not_hear_what_became_of_its_step_drops_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was committed: naming its segments in a later drop would delete them."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr("ckptstore.write.ranks.commit_coordinator._FAREWELL", 0.5)  # rank 1 reports none
    given_up = threading.Event()

    def work(group: Group) -> None:
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT, poll_seconds=None) as writer:
            writer.save(state(group.rank), 1)
            if group.rank == 0:
                writer.save(state(group.rank, 2), 2)
                with pytest.raises(MissingRankError):
                    writer.save(state(group.rank, 3), 3)
                given_up.set()
                return
            for step in (2, 3):  # this writer is finished
                with pytest.raises(CommitUnknownError, match="step 2 may or may not"):
                    writer.save(state(group.rank, step), step)
            while not given_up.wait(0.05):
                clock.put_forward()

    assert as_ranks(2, work, Mute(clock)) == [None] * 2
    assert_same(ckptstore.open(tmp_path).load(2, rank=1), state(1, 2))


class Forged(LocalMailbox):
    """Rank 1's message about step 1 is replaced on arrival."""

    def __init__(self, change: Callable[[RankPart], RankPart]) -> None:
        super().__init__()
        self.change = change

    def set(self, key: str, value: bytes) -> None:
        if key.endswith("/1.0/part/1"):
            other = LocalMailbox()
            other.set(key, value)
            post(other, key, self.change(RankPart.unpacked(fetch(other, key) or b"", key)).packed())
            value = other.get(key) or b""
        super().set(key, value)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda part: replace(part, agreement="0" * 32), "rank 1 has other tensors than when the ranks agreed"),
        (lambda part: replace(part, entries=part.entries[:-1]), "rank 1 did not write its share of tensor"),
        (
            lambda part: replace(part, entries=(*part.entries[:-1], replace(part.entries[-1], dtype="I32"))),
            "rank 1 did not write its share of tensor",
        ),
        (
            lambda part: replace(part, entries=(*part.entries, replace(part.entries[0], name="another"))),
            "rank 1 wrote tensor 'another', which is not its to write",
        ),
        (
            lambda part: replace(part, tree=part.tree | {"lost": {"$t": "lost"}}),
            "tensor 'lost' was written by no rank",
        ),
    ],
    ids=["agreement", "nothing", "type", "more", "lost"],
)
def test_a_part_that_is_not_what_was_agreed_is_not_committed(
    tmp_path: Path, change: Callable[[RankPart], RankPart], why: str
) -> None:
    def work(group: Group) -> None:
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT, poll_seconds=None) as writer:
            with pytest.raises(RankMismatchError, match=why):
                writer.save(state(group.rank), 1)
            writer.save(state(group.rank, 2), 2)

    assert as_ranks(2, work, Forged(change)) == [None] * 2
    store = ckptstore.open(tmp_path)
    assert [one.step for one in store.checkpoints()] == [2]
    assert_same(store.load(2, rank=1), state(1, 2))


class Short(LocalMailbox):
    """Rank 1's message about a batch lacks the last step on arrival."""

    def set(self, key: str, value: bytes) -> None:
        if key.endswith("/3.0/share/1"):
            other = LocalMailbox()
            other.set(key, value)
            parts = RankPart.unpacked_all(fetch(other, key) or b"", key)
            assert len(parts) == 2
            post(other, key, RankPart.packed_all(parts[:-1]))
            value = other.get(key) or b""
        super().set(key, value)


def test_a_rank_that_has_fewer_steps_of_a_batch_is_named_and_nothing_of_it_is_committed(tmp_path: Path) -> None:
    def work(group: Group) -> list[str]:
        model = trainer()
        with ckptstore.open(tmp_path).writer(
            group=group, ranks=OPTIONS, diffs=BATCH, max_in_flight=3, poll_seconds=None
        ) as writer:
            pending: list[Any] = []
            for step in (1, 2, 3):
                model.train()
                pending.append(writer.save_async(model.state(), step, updates=model.updates()))
            return [str(one.exception()) for one in pending]

    for told in as_ranks(2, work, Short()):
        assert told[0] == "None"
        assert all("rank 1 has 1 steps for a batch, rank 0 2" in one for one in told[1:]), told
    assert [one.step for one in ckptstore.open(tmp_path).checkpoints()] == [1]


def test_a_step_that_one_rank_could_not_write_may_be_given_again(tmp_path: Path) -> None:
    """Its messages are not mistaken for those of the first attempt, and no save builds on steps that only some ranks
    have."""
    ranks = RankOptions(timeout=120, per_rank="rng")

    def work(group: Group) -> list[str]:
        store = ckptstore.open(tmp_path)
        with store.writer(group=group, ranks=ranks, deltas=1, poll_seconds=None) as writer:
            kinds = [writer.save(state(group.rank), 1).kind]
            medium: Any = store.backend
            if group.rank == 1:
                medium.open_sink = lambda *_: (_ for _ in ()).throw(StorageError("it is full"))
            with pytest.raises(StorageError if group.rank else FailedRankError, match="it is full"):
                writer.save(state(group.rank, 2), 2)
            if group.rank == 1:
                del medium.open_sink
            return kinds + [writer.save(state(group.rank, step), step).kind for step in (2, 3)]

    assert as_ranks(2, work) == [["full", "full", "delta"]] * 2
    store = ckptstore.open(tmp_path)
    for step in (2, 3):
        assert_same(store.load(step, rank=1), state(1, step))
    log = [store.backend.get(key) for key in store.backend.list("log/")]
    assert store.view().catalog.dropped
    for gone in store.view().catalog.dropped:
        assert sum(gone.encode() in slot for slot in log) == 1, "the segment of the failed attempt is dropped, once"
