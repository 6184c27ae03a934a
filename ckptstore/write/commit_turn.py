"""The turn to commit: one thread at a time commits in a writer's term, since the log of a term has one author."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ckptstore.host.threads import started_pool

__all__ = ["CommitTurn"]

_T = TypeVar("_T")


class CommitTurn:
    """The turn of one writer, and the committer's thread, for work that no thread of the writer does itself.

    A thread that has made a segment durable commits it in its own turn: to wake another thread for it, and to be woken
    when that is done, takes as much processor time as the commit of a small state. The thread of the caller never does:
    Ctrl-C would interrupt a commit.
    """

    def __init__(self) -> None:
        """Raises `RuntimeError`: the thread cannot be started."""
        self._thread = started_pool(1, "ckptstore-commit")
        self._lock = threading.Lock()
        self._owner = 0

    @property
    def mine(self) -> bool:
        """Whether this thread has the turn."""
        return self._owner == threading.get_ident()

    def run(self, work: Callable[[], _T]) -> _T:
        """Run `work` in this thread, when no other thread has the turn -> its result."""
        if self.mine:
            return work()
        with self._lock:
            self._owner = threading.get_ident()
            try:
                return work()
            finally:
                self._owner = 0

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        """Run `work` in the committer's thread, after all work submitted before. `RuntimeError`: it is shut down."""
        return self._thread.submit(self.run, work)

    def shutdown(self) -> None:
        """Wait for all submitted work. May be called repeatedly."""
        self._thread.shutdown()
