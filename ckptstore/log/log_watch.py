"""Polls the log of a run that another process writes; each poll fetches only new records.

A poll of an unchanged log takes four small requests: for the slot that was the last one (is this still the same
history?), the next one, the one after that, and the next anchor. Every new record costs one more.
"""

from __future__ import annotations

import contextlib

from ckptstore.errors import CkptError, CorruptLogError, StoreNotFoundError, StoreReplacedError
from ckptstore.formats.history.catalog import TermEntry
from ckptstore.log.damage_warnings import share_warnings
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import View, read, same_history

__all__ = ["LogWatch"]


class LogWatch:
    """What was read so far of one run's log."""

    def __init__(self, journal: Journal) -> None:
        """Nothing is read yet. `journal` is not changed: each poll opens what is at its place now."""
        self._place = journal.backend
        self._journal: Journal | None = None
        self._run = ""
        self._view: View | None = None

    def close(self) -> None:
        """Release the handle of the store's folder."""
        if self._journal is not None and self._journal.backend is not self._place:
            with contextlib.suppress(CkptError, OSError):
                self._journal.backend.close()

    def look(self) -> tuple[Journal, View]:
        """Poll the place -> the store that is there now (valid until the next poll), and its log.

        Raises:
            StoreNotFoundError: there is no store here, or no longer.
            StoreReplacedError: another run's store is here, or another history of this run.
            CorruptLogError, FormatError, StorageError: as `read`; or records that were read before are gone.
        """
        view = self._read(self._current_journal())
        assert self._journal is not None
        self._view = view
        return self._journal, view

    def _current_journal(self) -> Journal:
        """The store that is at the place now; reads its FORMAT file again if that is cheap."""
        if self._journal is None or self._place.cheap_looks:
            self.close()  # Prevents: following a store that was moved away, through the handle of its folder.
            handle = self._place.reopened() if self._place.cheap_looks else self._place
            share_warnings(handle, self._place)
            self._journal = Journal(handle)
        journal = self._journal
        try:
            run = journal.run
        except StoreNotFoundError as error:
            if self._run:
                error.add_note(f"run {self._run} was here at the last poll: it was deleted or moved away")
            raise
        if self._run and run != self._run:
            raise StoreReplacedError(
                f"{journal.url}: the store that was watched (run {self._run}) is gone, and that of run {run} is in its "
                "place"
            )
        self._run = run
        return journal

    def _read(self, journal: Journal) -> View:
        """READ, continuing from the previous view if the log is still the same."""
        before = self._view
        if before is None:
            return read(journal)
        if (same := same_history(journal, before)) is True:
            return read(journal, before)
        self.close()
        self._journal = None  # read FORMAT again, too
        journal = self._current_journal()
        view = read(journal)
        _check_continues(journal.url, before, view, other=same is False)
        return view


def _check_continues(url: str, before: View, after: View, *, other: bool) -> None:
    """Raise if the log does not contain what was read of it before.

    Args:
        other: the slot that was the last one now holds another record, or is damaged.
    """
    if after.end < before.end:
        raise CorruptLogError(
            f"{url}: the log ends before slot {after.end}, and had {before.end} slots when it was last read: "
            "records were removed, or an older copy replaced the store"
        )
    if after.damage != before.damage:
        return  # the contents of a slot are unknown now, which is reported as damage
    now = after.catalog.terms
    gone = [term for term, opened in before.catalog.terms.items() if _nonce(now.get(term)) != _nonce(opened)]
    if other or gone:
        raise StoreReplacedError(
            f"{url}: the log that was watched is gone, and another history of this run is in its place: "
            f"{f'term {gone[0]}' if gone else f'slot {before.end - 1}'} is not the one that was read"
        )


def _nonce(entry: TermEntry | None) -> str | None:
    return None if entry is None else entry.nonce
