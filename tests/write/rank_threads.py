"""Ranks as threads of one process, over a `LocalMailbox`: for what needs no torch and no process of its own."""

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
    """What `work` returns on each rank, or the error that it raised there."""
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
        thread.join(240)  # a machine may be slow; who hangs does so for ever
        assert not thread.is_alive(), f"{thread.name} hangs"
    return found


class Clock:
    """That by which ranks wait for each other. It can be put forward: who shall wait in vain does so at once.

    So a test gives ranks minutes, which nobody needs on a machine that is slow, and waits for none of them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        monkeypatch.setattr(key_value_store, "time", self)

    def put_forward(self) -> None:
        """Hours pass for everybody who waits."""
        self.ahead += 10_000

    def monotonic(self) -> float:
        """Seconds."""
        return time.monotonic() + self.ahead

    sleep = staticmethod(time.sleep)
