"""The turn to commit: one thread at a time, and a thread that has it may go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ckptstore.write.commit_turn import CommitTurn


@pytest.fixture
def turn() -> Iterator[CommitTurn]:
    made = CommitTurn()
    yield made
    made.shutdown()


def test_work_runs_in_the_thread_that_has_it_and_never_beside_other_work(turn: CommitTurn) -> None:
    inside, beside = [0], []

    def work() -> int:
        inside[0] += 1
        threading.Event().wait(0.001)
        beside.append(inside[0])
        inside[0] -= 1
        return threading.get_ident()

    mine: list[bool] = []
    lanes = [threading.Thread(target=lambda: mine.append(turn.run(work) == threading.get_ident())) for _ in range(4)]
    for lane in lanes:
        lane.start()
    other = turn.submit(work).result()
    for lane in lanes:
        lane.join()
    assert beside == [1] * 5
    assert mine == [True] * 4
    assert other != threading.get_ident()


def test_a_thread_that_has_the_turn_keeps_it_for_work_within(turn: CommitTurn) -> None:
    assert not turn.mine
    assert turn.run(lambda: (turn.mine, turn.run(lambda: turn.mine), turn.mine)) == (True, True, True)
    assert not turn.mine


def test_the_turn_passes_on_after_an_error(turn: CommitTurn) -> None:
    with pytest.raises(ValueError, match="once"):
        turn.run(lambda: _fail("once"))
    with pytest.raises(ValueError, match="twice"):
        turn.submit(lambda: _fail("twice")).result()
    assert turn.submit(lambda: turn.mine).result()
    assert not turn.mine


def _fail(text: str) -> None:
    raise ValueError(text)
