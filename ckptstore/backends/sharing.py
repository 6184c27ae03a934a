"""Several saves of one process that share a medium which is nearly full: none takes another's space, nor fails for it.

A save that is committed may retire another checkpoint, whose space is free then. So a save that is short of space waits
while others are under way. Space is claimed before a segment is begun: else two that both find enough begin both, and
both fail.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["SaveSpace", "Sharing"]


class SaveSpace:
    """What one save has of a medium, from before its first byte until it is committed or has failed."""

    @contextmanager
    def within(self) -> Iterator[None]:
        """What this thread writes within belongs to the save."""
        yield

    def end(self) -> None:
        """It is committed, or has failed. May be repeated."""


class Sharing:
    """The saves under way in one store. Thread-safe."""

    def __init__(self) -> None:
        self._claims: dict[_Save, int] = {}
        self._waiting: Counter[_Save] = Counter()
        self._ended = 0  # how many have
        self._changed = threading.Condition()
        self._here = threading.local()

    def begin(self) -> SaveSpace:
        """A save begins."""
        with self._changed:
            save = _Save(self, self._ended)
            self._claims[save] = 0
        return save

    def here(self) -> _Save | None:
        """The save that this thread writes for; None: for none."""
        save: _Save | None = getattr(self._here, "save", None)
        return save

    def claim(self, nbytes: int, free: Callable[[], int]) -> bool:
        """Whether so many bytes are free that nobody else has claimed; then this thread's save has claimed them.

        Args:
            free: gives the bytes that are free.
        """
        here = self.here()
        with self._changed:
            claimed = sum(claim for save, claim in self._claims.items() if save is not here)
            # Prevents: two saves that both find enough space for one, and both run out of it half-way.
            if nbytes > free() - claimed:
                return False
            if here in self._claims:
                self._claims[here] = nbytes
            return True

    def allocated(self, save: _Save | None, nbytes: int) -> None:
        """So much of what a save has claimed is its own now: the medium counts it as used."""
        with self._changed:
            if save in self._claims:
                self._claims[save] = max(0, self._claims[save] - nbytes)

    def outlast(self, save: _Save | None) -> bool:
        """A save is short of space: wait until another one has ended -> whether one has, so that it may try again.

        An end since the last call counts. False if no other save is under way, or if all others wait as well: then this
        one gives way.
        """
        with self._changed:
            if save not in self._claims:
                return False
            if save.seen != self._ended:  # while it looked for space: it may not have seen what that has freed
                save.seen = self._ended
                return True
            # Prevents: saves that wait for each other for ever.
            if len({*self._waiting, save}) >= len(self._claims):
                return False
            self._waiting[save] += 1
            ended = self._ended
            try:
                self._changed.wait_for(lambda: self._ended != ended)
                save.seen = self._ended
            finally:
                self._waiting[save] -= 1
                if not self._waiting[save]:
                    del self._waiting[save]
            return True

    @contextmanager
    def _within(self, save: _Save) -> Iterator[None]:
        before, self._here.save = self.here(), save
        try:
            yield
        finally:
            self._here.save = before

    def _end(self, save: _Save) -> None:
        with self._changed:
            if self._claims.pop(save, None) is not None:
                self._ended += 1
                self._changed.notify_all()


class _Save(SaveSpace):
    def __init__(self, sharing: Sharing, seen: int) -> None:
        self._sharing = sharing
        self.seen = seen  # how many had ended when it last looked

    @contextmanager
    def within(self) -> Iterator[None]:
        with self._sharing._within(self):
            yield

    def end(self) -> None:
        self._sharing._end(self)
