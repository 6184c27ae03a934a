"""Ranks as threads of one process, over a `LocalMailbox`: for what needs no torch and no process of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ckptstore.write.ranks.mailbox import Group, LocalMailbox

__all__ = ["as_ranks"]


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
