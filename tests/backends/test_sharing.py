"""Saves that share a nearly full medium: they claim its space, and wait for each other."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

from ckptstore.backends.sharing import Sharing


def test_two_saves_do_not_claim_the_same_space() -> None:
    sharing = Sharing()
    first, second = sharing.begin(), sharing.begin()
    assert sharing.claim(10, lambda: 10), "who has only begun has claimed nothing"
    with first.within():
        assert sharing.claim(6, lambda: 10)
    with second.within():
        assert not sharing.claim(6, lambda: 10)
        sharing.allocated(first, 6)  # type: ignore[arg-type]
        assert sharing.claim(4, lambda: 4)
    assert sharing.claim(0, lambda: 4), "a thread without a save claims nothing"
    assert not sharing.claim(1, lambda: 4)
    second.end()
    assert sharing.claim(1, lambda: 4)


def test_a_commit_needs_space_beside_no_claim() -> None:
    sharing = Sharing()
    first, second = sharing.begin(), sharing.begin()
    with first.within():
        assert sharing.claim(6, lambda: 10)
    with second.committing():
        assert sharing.claim(5, lambda: 5)
        assert not sharing.claim(6, lambda: 5)
    assert not sharing.claim(5, lambda: 10), "afterwards claims count again"


def test_a_save_that_is_short_of_space_waits_for_another_to_end() -> None:
    sharing = Sharing()
    found: SimpleQueue[tuple[Any, bool]] = SimpleQueue()
    for save in (sharing.begin(), sharing.begin()):
        threading.Thread(target=lambda save=save: found.put((save, sharing.outlast(save))), daemon=True).start()
    first, waited = found.get(timeout=60)
    assert not waited, "all others wait: this one gives way"
    first.end()
    second, waited = found.get(timeout=60)
    assert waited
    assert not sharing.outlast(second), "nobody else is under way"
    third = sharing.begin()
    third.end()
    assert sharing.outlast(second), "one ended since it looked"
    assert not sharing.outlast(second), "which counts once"
    third.end()
    assert not sharing.outlast(second), "and so does an end that is said twice"
    assert not sharing.outlast(None)


def test_a_save_that_has_waited_waits_no_more() -> None:
    """Others do not give way to it: the next one that lacks space waits for it."""
    sharing = Sharing()
    first, second, third = sharing.begin(), sharing.begin(), sharing.begin()
    found: list[bool] = []

    def waiting(save: Any) -> threading.Thread:
        thread = threading.Thread(target=lambda: found.append(sharing.outlast(save)))
        thread.start()
        return thread

    one = waiting(second)
    third.end()  # before or after that waits
    one.join(60)
    assert found == [True]
    one = waiting(first)  # has not checked since `third` ended
    one.join(60)
    one = waiting(first)
    one.join(0.1)
    assert one.is_alive(), "second is under way, and does not wait"
    second.end()
    one.join(60)
    assert found == [True, True, True]
