"""The order of asynchronous saves: each is run by a thread of its own, and a store takes steps in ascending order."""

from __future__ import annotations

import threading
from types import TracebackType

__all__ = ["SaveTurn", "SaveTurns"]


class SaveTurns:
    """Gives turns. Any thread may call it."""

    def __init__(self, patience: float) -> None:
        """
        Args:
            patience: seconds to wait for an earlier turn, which may have failed before it began.
        """
        self._patience = patience
        self._waiting: list[SaveTurn] = []
        self._changed = threading.Condition()

    def take(self) -> SaveTurn:
        """The next turn."""
        turn = SaveTurn(self)
        with self._changed:
            self._waiting.append(turn)
        return turn

    def begin(self, turn: SaveTurn) -> None:
        """Wait until all earlier turns are over. Turns that do not end in time are given up."""
        with self._changed:
            self._changed.wait_for(lambda: turn not in self._waiting or self._waiting[0] is turn, self._patience)
            if turn in self._waiting:
                del self._waiting[: self._waiting.index(turn)]

    def end(self, turn: SaveTurn) -> None:
        """A turn is over."""
        with self._changed:
            if turn in self._waiting:
                self._waiting.remove(turn)
            self._changed.notify_all()

    def __reduce__(self) -> tuple[type[SaveTurns], tuple[float]]:
        return SaveTurns, (self._patience,)


class SaveTurn:
    """The turn of one save: its ``with`` begins after those of earlier turns have ended."""

    def __init__(self, turns: SaveTurns) -> None:
        """Use `SaveTurns.take`."""
        self._turns = turns

    def __enter__(self) -> None:
        self._turns.begin(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._turns.end(self)

    def __reduce__(self) -> tuple[type[SaveTurn], tuple[SaveTurns]]:
        """In another process there is no other save: a turn of its own."""
        return SaveTurn, (self._turns,)
