"""Saves that share a medium which is nearly full: claims of its space, and who waits for whom."""

from __future__ import annotations

import threading
import time
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
    assert sharing.claim(0, lambda: 4), "somebody who is no save claims nothing"
    assert not sharing.claim(1, lambda: 4)
    second.end()
    assert sharing.claim(1, lambda: 4)


def test_a_save_that_is_short_of_space_waits_for_another_to_end() -> None:
    sharing = Sharing()
    first, second = sharing.begin(), sharing.begin()
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(sharing.outlast(second)))  # type: ignore[arg-type]
    waiting.start()
    time.sleep(0.1)
    assert not found
    assert not sharing.outlast(first), "all others wait: this one gives way"  # type: ignore[arg-type]
    first.end()
    waiting.join(60)
    assert found == [True]
    assert not sharing.outlast(second), "nobody else is under way"  # type: ignore[arg-type]
    third = sharing.begin()
    third.end()
    assert sharing.outlast(second), "one ended since it looked"  # type: ignore[arg-type]
    assert not sharing.outlast(second), "which counts once"  # type: ignore[arg-type]
    third.end()
    assert not sharing.outlast(second), "and so does an end that is said twice"  # type: ignore[arg-type]
    assert not sharing.outlast(None)


def test_a_save_that_has_waited_waits_no_more() -> None:
    """Nobody gives way for it: the next one that is short of space waits for it."""
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
    one = waiting(first)  # has not looked since `third` ended
    one.join(60)
    one = waiting(first)
    one.join(0.1)
    assert one.is_alive(), "second is under way, and does not wait"
    second.end()
    one.join(60)
    assert found == [True, True, True]
