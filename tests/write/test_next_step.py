"""`save` and `save_async` without a step take the next one, for every kind of writer."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import StepOrderError, UnsupportedStateError
from ckptstore.write.ranks.messages.key_value_store import Group
from tests.write.rank_states import PATIENT, state
from tests.write.rank_threads import as_ranks

KINDS: list[dict[str, Any]] = [{}, {"deltas": 1}, {"diffs": ckptstore.DiffOptions()}, {"max_in_flight": 3}]


@pytest.fixture
def store() -> ckptstore.Store:
    return ckptstore.open(f"memory://{uuid.uuid4().hex}")


@pytest.mark.parametrize("options", KINDS)
def test_the_next_step_follows_the_highest_or_the_parent(store: ckptstore.Store, options: dict[str, Any]) -> None:
    with store.writer(**options) as writer:
        assert writer.save({"x": np.zeros(3)}).step == 1
        assert writer.save({"x": np.zeros(3)}, None).step == 2
        assert writer.save({"x": np.zeros(3)}, 10).step == 10
        pending = writer.save_async({"x": np.ones(3)}, tags="last")
        assert pending.step == 11
        assert pending.result().ref == "11@1"
    with store.writer(**options) as writer:
        assert writer.save({"x": np.zeros(3)}).ref == "12@2"
        writer.rollback("tag:last")
        assert writer.save({"x": np.zeros(3)}).ref == "12@3"


def test_the_step_after_a_parent_that_is_not_the_newest(store: ckptstore.Store) -> None:
    with store.writer() as writer:
        for step in (3, 7):
            writer.save({"x": 1}, step)
    with store.writer(parent=3) as writer:
        assert writer.save({"x": 1}).ref == "4@2"
    with store.writer(parent=None) as writer:
        assert writer.save({"x": 1}).ref == "1@3"


def test_a_refused_state_takes_no_step_and_a_later_call_takes_a_new_one(store: ckptstore.Store) -> None:
    with store.writer() as writer:
        writer.save({"x": 1})
        with pytest.raises(UnsupportedStateError):
            writer.save({"x": object()})
        assert writer.save({"x": 1}).step == 2


def test_there_is_no_step_above_the_last(store: ckptstore.Store) -> None:
    with store.writer() as writer:
        writer.save({"x": 1}, 2**53 - 1)
        with pytest.raises(StepOrderError, match="there is no step above it"):
            writer.save({"x": 1})


@pytest.mark.parametrize("options", KINDS)
def test_threads_that_save_at_the_same_time_get_different_steps(
    store: ckptstore.Store, options: dict[str, Any]
) -> None:
    found: list[int] = []
    start = threading.Barrier(4)

    def save(number: int) -> None:
        start.wait()
        for _ in range(5):
            found.append(writer.save({"x": np.full(3, number)}).step)  # `save` is what is tested
            pending = writer.save_async({"x": np.full(3, number)})
            pending.result()
            found.append(pending.step)

    with store.writer(**options) as writer:
        threads = [threading.Thread(target=save, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(found) == list(range(1, 41))
    assert [info.step for info in store.checkpoints()] == list(range(1, 41))
    assert store.verify(deep=True).ok


def test_ranks_take_the_same_steps(store: ckptstore.Store) -> None:
    def work(group: Group) -> list[int]:
        with ckptstore.open(store.url).writer(group=group, ranks=PATIENT) as writer:
            first = writer.save(state(group.rank)).step
            pending = [writer.save_async(state(group.rank, step)) for step in (2, 3)]
            return [first, *(one.result().step for one in pending)]

    assert as_ranks(2, work) == [[1, 2, 3]] * 2


def test_ranks_take_the_same_steps_after_one_that_failed_on_a_single_rank(store: ckptstore.Store) -> None:
    def work(group: Group) -> list[int]:
        with ckptstore.open(store.url).writer(group=group, ranks=PATIENT) as writer:
            first = writer.save(state(group.rank)).step
            with pytest.raises(ckptstore.CkptError):
                writer.save({"x": object()} if group.rank == 1 else state(group.rank))
            return [first, writer.save(state(group.rank)).step]

    assert as_ranks(2, work) == [[1, 3]] * 2
