"""Bound the space of a store's segments: a save that would exceed it collects, waits for others, or is refused."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias

from ckptstore.backends.sharing import SaveSpace, Sharing
from ckptstore.errors import CkptError, StorageError

__all__ = ["Limit", "Reclaiming", "SpaceBound"]

Limit: TypeAlias = Callable[[int], tuple[int, str] | None]
"""Bytes of a full of the present state -> the most bytes that segments may take, and the rule that says so; None: no
rule does."""
_TRIES: Final = 8
"""Maximum number of reclaims for one save: other saves write and delete at the same time."""


class Reclaiming:
    """Deletes unneeded data, one thread at a time.

    Attributes:
        reclaim: deletes it -> its bytes; None: not set.
    """

    def __init__(self) -> None:
        self.reclaim: Callable[[], int] | None = None
        self._lock = threading.Lock()
        self._freed = 0  # number of times that something was freed
        self._here = threading.local()

    def collect(self, then: Callable[[], object] = lambda: None) -> bool:
        """Delete unneeded data -> whether some was deleted, so that the caller tries again.

        Args:
            then: called after something may have been deleted, before others may delete.
        """
        if self.reclaim is None or getattr(self._here, "reclaiming", False):
            return False
        before = self._freed
        with self._lock:
            if self._freed != before:  # another thread freed space while this one waited for the lock
                return True
            with self._within():
                try:
                    freed = self.reclaim()
                except CkptError:  # the save without space reports its own error
                    return False
            then()
            self._freed += freed > 0
        return freed > 0

    @contextmanager
    def _within(self) -> Iterator[None]:
        self._here.reclaiming = True
        try:
            yield
        finally:
            self._here.reclaiming = False


class SpaceBound:
    """The limit of one store. Thread-safe.

    Each save claims the most bytes that it can take, before it writes any. Segments and claims together never exceed
    the limit. If they would, what nothing needs is deleted. If that is not enough, the save waits for others, whose
    commits may retire checkpoints. If none is running, it is refused.

    Attributes:
        full: bytes of the largest full so far; 0: none was stored yet.
    """

    def __init__(
        self,
        limit: Limit,
        used: Callable[[], int],
        sharing: Sharing,
        collect: Callable[[], bool],
        retire: Callable[[], object],
        place: str,
    ) -> None:
        """
        Args:
            used: returns the bytes of all segments on the medium, unfinished ones too.
            sharing: the claims of the saves that are running.
            collect: deletes what nothing needs -> whether something was deleted.
            retire: retires what no rule keeps any more.
            place: the store's URL, for errors.
        """
        self.full = 0
        self._limit = limit
        self._used = used
        self._sharing = sharing
        self._collect = collect
        self._retire = retire
        self._place = place

    def begin_save(self) -> SaveSpace:
        """See `Backend.begin_save`."""
        return self._sharing.begin()

    @property
    def active(self) -> bool:
        """Whether a rule limits the space now."""
        return self._limit(self.full) is not None

    def nbytes(self) -> int | None:
        """The limit in bytes; None: there is none, or it is a number of states and no state is known."""
        found = self._limit(self.full)
        return None if found is None or not found[0] else found[0]

    def spare(self) -> int | None:
        """Bytes that neither segments nor claims take; None: there is no limit."""
        limit = self.nbytes()
        return None if limit is None else max(0, limit - self._used() - self._sharing.claimed())

    def admit(self, nbytes: int, full: int | None = None) -> None:
        """Claim `nbytes` of new segments for this thread's save.

        Args:
            full: bytes of a full of the same state; None: no more than before.

        Raises:
            StorageError: they do not fit (ENOSPC).
        """
        # The largest: the same state may take more or less, as its header has room to grow or not.
        self.full = max(self.full, full or 0) or nbytes
        found = self._limit(self.full)
        if found is None:
            return
        limit, rule = found

        def claimed() -> bool:
            return self._sharing.claim(nbytes, lambda: limit - self._used())

        def collect() -> bool:
            self._retire()
            return self._collect()

        if self._sharing.claim_patiently(claimed, collect, _TRIES):
            return
        why = (
            f"the rule {rule} allows {limit:,} bytes of checkpoints, {self._used():,} are taken, and this save needs "
            f"up to {nbytes:,}: nothing was written"
        )
        raise StorageError(errno.ENOSPC, why, self._place)
