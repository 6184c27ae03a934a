"""Ranks as threads of one process, over a `LocalMailbox`: for tests that need neither torch nor processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from ckptstore.write.ranks.messages import key_value_store
from ckptstore.write.ranks.messages.key_value_store import Group, LocalMailbox

__all__ = ["Clock", "as_ranks"]


def as_ranks(size: int, work: Callable[[Group], Any], box: LocalMailbox | None = None) -> list[Any]:
    """The result of `work` on each rank, or the error that it raised there."""
    mailbox = box or LocalMailbox()
    found: list[Any] = [None] * size

    def one(rank: int) -> None:
        try:
            found[rank] = work(Group(rank, size, mailbox))
        except BaseException as error:  # noqa: BLE001  # the test looks at it
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), name=f"rank-{rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)  # the machine may be slow; a hang lasts for ever
        assert not thread.is_alive(), f"{thread.name} hangs"
    return found


class Clock:
    """The clock of ranks that wait for each other. It can be put forward, so that a timeout ends at once.

    So a test gives ranks minutes, which suffice on any slow machine, and waits for none of them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        monkeypatch.setattr(key_value_store, "time", self)

    def put_forward(self) -> None:
        """Let hours pass for every rank that waits."""
        self.ahead += 10_000

    def monotonic(self) -> float:
        """Seconds."""
        return time.monotonic() + self.ahead

    sleep = staticmethod(time.sleep)
