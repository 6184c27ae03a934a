"""Let several saves of one process share a nearly full medium: none takes another's space or fails because of it.

A committed save may retire another checkpoint, which frees space. So a save that is short of space waits while others
are running. Space is claimed before a segment is begun. Otherwise two saves that both find enough space for one would
both begin, and both fail.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["SaveSpace", "Sharing"]


class SaveSpace:
    """A save's share of a medium, from before its first byte until it is committed or has failed."""

    @contextmanager
    def within(self) -> Iterator[None]:
        """What this thread writes within counts for this save."""
        yield

    @contextmanager
    def committing(self) -> Iterator[None]:
        """What this thread writes within commits the save. Other saves may wait for it, so it waits for none."""
        yield

    def end(self) -> None:
        """The save is committed or has failed. May be called again."""


class Sharing:
    """The saves that are running in one store. Thread-safe."""

    def __init__(self) -> None:
        self._claims: dict[_Save, int] = {}
        self._waiting: Counter[_Save] = Counter()
        self._ended = 0  # number of saves that have ended
        self._changed = threading.Condition()
        self._here = threading.local()

    def begin(self) -> SaveSpace:
        """Begin a save."""
        with self._changed:
            save = _Save(self, self._ended)
            self._claims[save] = 0
        return save

    def here(self) -> _Save | None:
        """The save that this thread writes for; None: no save."""
        save: _Save | None = getattr(self._here, "save", None)
        return save

    def claim(self, nbytes: int, free: Callable[[], int]) -> bool:
        """Claim `nbytes` for this thread's save -> False if they are not free beside the claims of other saves.

        A commit claims nothing, and no claim counts against it.

        Args:
            free: returns the number of free bytes.
        """
        here = self.here()
        # Prevents: a commit that fails for its few KiB because other saves have claimed the rest, though it would free
        # space for them. Claims also count twice what a save is just allocating.
        if getattr(self._here, "committing", False):
            return nbytes <= free()
        with self._changed:
            claimed = sum(claim for save, claim in self._claims.items() if save is not here)
            # Prevents: two saves that both find enough space for one, and both run out of it halfway.
            if nbytes > free() - claimed:
                return False
            if here in self._claims:
                self._claims[here] = nbytes
            return True

    def claim_patiently(self, claimed: Callable[[], bool], collect: Callable[[], bool], tries: int) -> bool:
        """Claim space for this thread's save; if there is too little, free some or wait for other saves -> success.

        Args:
            claimed: tries to claim it.
            collect: deletes what nothing needs -> whether something was deleted.
            tries: how often to collect at most, until another save ends.
        """
        done = 0
        while not claimed():
            done += 1
            # Prevents: a save that fails because another save took the space that this one had freed.
            if done < tries and collect():
                continue
            # Prevents: a save that fails while another is running whose commit retires what takes the space.
            if self.outlast(self.here()):
                done = 0
                continue
            # Prevents: a save that fails because another thread reclaimed first. Claim the space that it freed.
            return claimed()
        return True

    def claimed(self) -> int:
        """The bytes that running saves have claimed and not yet allocated."""
        with self._changed:
            return sum(self._claims.values())

    def allocated(self, save: _Save | None, nbytes: int) -> None:
        """Reduce a save's claim by bytes that are now allocated: the medium itself counts them as used."""
        with self._changed:
            if save in self._claims:
                self._claims[save] = max(0, self._claims[save] - nbytes)

    def outlast(self, save: _Save | None) -> bool:
        """Wait, for a save that is short of space, until another save ends -> whether one ended, to try again.

        A save that ended since the last call counts. Returns False if no other save is running, or if all others wait
        as well: then this save fails.
        """
        with self._changed:
            if save not in self._claims:
                return False
            if save.seen != self._ended:  # one ended while this save looked for space: it may have freed more
                save.seen = self._ended
                return True
            # Prevents: saves that wait for each other forever.
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

    @contextmanager
    def _committing(self) -> Iterator[None]:
        self._here.committing = True
        try:
            yield
        finally:
            self._here.committing = False

    def _end(self, save: _Save) -> None:
        with self._changed:
            if self._claims.pop(save, None) is not None:
                self._ended += 1
                self._changed.notify_all()


class _Save(SaveSpace):
    def __init__(self, sharing: Sharing, seen: int) -> None:
        self._sharing = sharing
        self.seen = seen  # value of `_ended` when this save last looked

    @contextmanager
    def within(self) -> Iterator[None]:
        with self._sharing._within(self):
            yield

    @contextmanager
    def committing(self) -> Iterator[None]:
        with self._sharing._committing():
            yield

    def end(self) -> None:
        self._sharing._end(self)
