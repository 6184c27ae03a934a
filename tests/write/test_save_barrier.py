"""Ranks that agree after which step they fulfil a request to one of them: no rank is in step with another."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from ckptstore.errors import MissingRankError
from ckptstore.write.ranks.messages.key_value_store import Group, LocalMailbox
from ckptstore.write.ranks.save_barrier import SaveBarrier
from tests.write.rank_threads import as_ranks

STEPS = 40_000
"""Longer than any agreement takes: it takes as long as the slowest thread."""


def together(size: int, work: Callable[[Group, SaveBarrier, set[str]], Any], timeout: float = 120.0) -> list[Any]:
    """`work(group, accord, asked)` on each rank; the requests in `asked` go to the rank."""

    def one(group: Group) -> object:
        asked: set[str] = set()
        accord = SaveBarrier(group, "run/1/accord", 0, lambda: set(asked), timeout)
        accord.start()
        try:
            return work(group, accord, asked)
        finally:
            accord.leave()

    return as_ranks(size, one)


@pytest.mark.parametrize("asking", [{0: 5}, {2: 5}, {0: 3, 1: 20}, {0: 7, 1: 7, 2: 7}], ids=str)
def test_all_do_it_after_the_same_step(asking: dict[int, int]) -> None:
    def work(group: Group, accord: SaveBarrier, asked: set[str]) -> object:
        draw = random.Random(group.rank)
        for step in range(1, STEPS):
            time.sleep(draw.random() * 0.004 * (1 + group.rank))
            if asking.get(group.rank) == step:
                asked.add("stop")
            found = accord.after(step)
            if found:
                accord.done()
                return step, found
        raise AssertionError("nothing was agreed")

    found = together(3, work)
    assert len(set(found)) == 1, found
    assert found[0][1] == {"stop"}


def test_a_rank_that_waits_for_others_in_its_step_is_no_obstacle() -> None:
    barrier = threading.Barrier(2)

    def work(group: Group, accord: SaveBarrier, asked: set[str]) -> object:
        for step in range(1, STEPS):
            barrier.wait(120)  # like a collective
            if group.rank == 1 and step == 4:
                asked.add("save")
            if "save" in accord.after(step):
                return step
            time.sleep(0.002)
        raise AssertionError("nothing was agreed")

    one, other = together(2, work)
    assert one == other


def test_it_is_agreed_again_and_again_and_letters_do_not_pile_up() -> None:
    box = LocalMailbox()

    def one(group: Group) -> object:
        asked: set[str] = set()
        accord = SaveBarrier(group, "run/1/accord", 0, lambda: set(asked), 120.0)
        accord.start()
        steps = []
        for step in range(1, STEPS):
            time.sleep(0.001)
            if group.rank == len(steps) % 2:
                asked.add("save")
            if accord.after(step):
                steps.append(step)
                asked.clear()
                accord.done()
            if len(steps) == 5:
                break
        kept = len(box.keys())
        accord.leave()
        return steps, kept

    (steps, kept), (others, _) = as_ranks(2, one, box)
    assert steps == others
    assert len(steps) == 5
    assert kept < 16


def test_a_rank_that_has_left_is_not_waited_for() -> None:
    def work(group: Group, accord: SaveBarrier, asked: set[str]) -> object:
        for step in range(1, 60):
            if group.rank == 1 and step == 10:
                return None
            if group.rank == 0 and step == 20:
                asked.add("stop")
            assert not accord.after(step)
            time.sleep(0.01)
        return "to the end"

    assert together(2, work) == ["to the end", None]


def test_a_dead_rank_is_waited_for_no_longer_than_the_timeout() -> None:
    box = LocalMailbox()

    def one(group: Group) -> object:
        if group.rank == 1:
            return None  # without a message
        accord = SaveBarrier(group, "run/1/accord", 0, lambda: {"stop"}, 0.5)
        accord.start()
        for step in range(1, STEPS):
            try:
                accord.after(step)
            except MissingRankError as error:
                assert not accord.after(step + 1)
                accord.leave()
                return str(error)
            time.sleep(0.01)
        return "never"

    assert "did not agree within 0.5 s" in str(as_ranks(2, one, box)[0])


def test_a_missing_mailbox_blocks_no_rank() -> None:
    box = LocalMailbox()

    def one(group: Group) -> object:
        asked: set[str] = set()
        accord = SaveBarrier(group, "run/1/accord", 0, lambda: set(asked), 120.0)
        accord.start()
        for step in range(1, 60):
            if step == 5 and group.rank == 0:
                box.die()
            if step == 8:
                asked.add("stop")
            assert not accord.after(step)
            time.sleep(0.005)
        accord.leave()
        return "to the end"

    assert as_ranks(2, one, box) == ["to the end"] * 2
