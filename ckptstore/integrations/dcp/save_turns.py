"""The order of asynchronous saves: each is run by a thread of its own, and a store takes steps in ascending order.

The memory for the copies of their states goes from one to the next.
"""

from __future__ import annotations

import contextlib
import os
import threading
from types import TracebackType
from typing import Final

from ckptstore.integrations.dcp.host_copy import HostCopy
from ckptstore.integrations.dcp.staged_updates import StagedUpdates

__all__ = ["SaveTurn", "SaveTurns", "turns_of"]

_PATIENCE: Final = 10.0
"""Seconds to wait for an earlier save that has neither ended nor been given up."""
_IDLE_COPIES: Final = 2
"""The most copies of a state whose memory waits for the next save: as many as two saves in flight need."""


class SaveTurns:
    """Gives the turns of one store. Any thread may call it."""

    def __init__(self, patience: float) -> None:
        """
        Args:
            patience: seconds to wait for an earlier turn.
        """
        self._patience = patience
        self._waiting: list[int] = []
        self._last = 0
        self._changed = threading.Condition(threading.RLock())  # a turn may be collected while this thread holds it
        self._idle: list[HostCopy] = []

    def take(self) -> SaveTurn:
        """The next turn."""
        with self._changed:
            self._last += 1
            self._waiting.append(self._last)
            return SaveTurn(self, self._last)

    def begin(self, number: int) -> None:
        """Wait until all earlier turns are over. Turns that do not end in time are given up."""
        with self._changed:
            self._changed.wait_for(lambda: number not in self._waiting or self._waiting[0] == number, self._patience)
            if number in self._waiting:
                del self._waiting[: self._waiting.index(number)]

    def end(self, number: int) -> None:
        """A turn is over. May be repeated."""
        with self._changed:
            if number in self._waiting:
                self._waiting.remove(number)
            self._changed.notify_all()

    def idle_copy(self) -> HostCopy:
        """Memory for a copy of a state: that of an earlier save, if one has given it back, else new."""
        with self._changed:
            return self._idle.pop() if self._idle else HostCopy()

    def give_back(self, copy: HostCopy) -> None:
        """Keep memory for a later save. Nothing may use the copy in it any more."""
        with self._changed:
            if len(self._idle) < _IDLE_COPIES:
                self._idle.append(copy)

    def over(self, number: int) -> bool:
        """Whether a turn is over, or was given up."""
        with self._changed:
            return number not in self._waiting


class SaveTurn:
    """The turn of one save: its ``with`` begins after those of earlier turns have ended.

    A turn that nobody refers to any more is over: the save failed before it wrote.

    Attributes:
        copy: the memory of its state, which goes back when the ``with`` ends without an error; None: it is not kept.
        updates: the optimizers' updates of the copied state, if the save was given any.
    """

    def __init__(self, turns: SaveTurns, number: int) -> None:
        """Use `SaveTurns.take`."""
        self._turns = turns
        self._number = number
        self.copy: HostCopy | None = None
        self.updates: StagedUpdates | None = None

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._turns.over(self._number)

    def end(self) -> None:
        """End it. May be repeated."""
        self._turns.end(self._number)

    def __enter__(self) -> None:
        self._turns.begin(self._number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        copy, self.copy = self.copy, None
        if copy is not None and kind is None:
            self._turns.give_back(copy)
        self.end()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the interpreter is ending
            self.end()


_guard = threading.Lock()
_stores: Final[dict[str, SaveTurns]] = {}


def turns_of(address: str) -> SaveTurns:
    """The turns of a store in this process.

    Args:
        address: names the store.
    """
    with _guard:
        return _stores.setdefault(address, SaveTurns(_PATIENCE))


def _forget_all() -> None:
    """A fork has none of the threads that hold turns, and perhaps copies of locked locks."""
    global _guard
    _guard = threading.Lock()
    _stores.clear()


os.register_at_fork(after_in_child=_forget_all)
