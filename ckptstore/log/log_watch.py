"""One look after another at the log of a run that somebody writes, each of which fetches only what is new.

A look at a log at rest takes four small requests: for the slot that was the last one (is this still the same history?),
the next one, the one after that, and the next anchor. Every record that came costs one more.
"""

from __future__ import annotations

import contextlib

from ckptstore.errors import CkptError, CorruptLogError, StoreNotFoundError, StoreReplacedError
from ckptstore.formats.catalog import TermEntry
from ckptstore.log.damage_warnings import same_handle
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import View, read, same_history

__all__ = ["Looks"]


class Looks:
    """What was seen of one run's log so far."""

    def __init__(self, journal: Journal) -> None:
        """Nothing seen yet. `journal` is left as it is: each look asks what is at its place now."""
        self._place = journal.backend
        self._journal: Journal | None = None
        self._run = ""
        self._view: View | None = None

    def close(self) -> None:
        """Give up the handle of the store's folder."""
        if self._journal is not None and self._journal.backend is not self._place:
            with contextlib.suppress(CkptError, OSError):
                self._journal.backend.close()

    def look(self) -> tuple[Journal, View]:
        """The store that is at the place now, until the next look, and its log.

        Raises:
            StoreNotFoundError: there is no store here, or no longer.
            StoreReplacedError: there is another run's, or another history of this run.
            CorruptLogError, FormatError, StorageError: as `read`; or records that were there are gone.
        """
        view = self._read(self._here())
        assert self._journal is not None
        self._view = view
        return self._journal, view

    def _here(self) -> Journal:
        """The store that is at the place now, with its FORMAT file read where that costs next to nothing."""
        if self._journal is None or self._place.cheap_looks:
            self.close()  # Prevents: following a store that was moved away, through the handle of its folder.
            handle = self._place.reopened() if self._place.cheap_looks else self._place
            same_handle(handle, self._place)
            self._journal = Journal(handle)
        journal = self._journal
        try:
            run = journal.run
        except StoreNotFoundError as error:
            if self._run:
                error.add_note(f"run {self._run} was here when it was looked at before: it was deleted or moved away")
            raise
        if self._run and run != self._run:
            raise StoreReplacedError(
                f"{journal.url}: the store that was watched (run {self._run}) is gone, and that of run {run} is in its "
                "place"
            )
        self._run = run
        return journal

    def _read(self, journal: Journal) -> View:
        """READ, from the view before if the log is still the one that this was taken of."""
        before = self._view
        if before is None:
            return read(journal)
        if (same := same_history(journal, before)) is True:
            return read(journal, before)
        self.close()
        self._journal = None  # FORMAT is read anew, too
        journal = self._here()
        view = read(journal)
        _check_continues(journal.url, before, view, other=same is False)
        return view


def _check_continues(url: str, before: View, after: View, *, other: bool) -> None:
    """Raise if the log does not contain what was read of it before.

    Args:
        other: where the last slot was is another record, or a damaged one.
    """
    if after.end < before.end:
        raise CorruptLogError(
            f"{url}: the log ends before slot {after.end}, and had {before.end} slots when it was looked at before: "
            "records were removed, or an older copy was put in the place of the store"
        )
    if after.damage != before.damage:
        return  # what was in a slot is not known any more, which is told as damage
    now = after.catalog.terms
    gone = [term for term, opened in before.catalog.terms.items() if _nonce(now.get(term)) != _nonce(opened)]
    if other or gone:
        raise StoreReplacedError(
            f"{url}: the log that was watched is gone, and another history of this run is in its place: "
            f"{f'term {gone[0]}' if gone else f'slot {before.end - 1}'} is not the one that was seen"
        )


def _nonce(entry: TermEntry | None) -> str | None:
    return None if entry is None else entry.nonce
