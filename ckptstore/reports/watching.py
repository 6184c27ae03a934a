"""Following a run: one look after another at its log, each of which fetches only what is new.

A look at a store at rest takes four small requests: for the slot that was the last one (is this still the same
history?), the next one, the one after that, and the next anchor. Every record that came costs one more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from ckptstore.errors import (
    CkptError,
    CorruptLogError,
    KeyNotFoundError,
    StoreNotFoundError,
    StoreReplacedError,
    UsageError,
)
from ckptstore.formats.catalog import TermEntry
from ckptstore.formats.hashing import xxh3_128
from ckptstore.formats.records import slot_key
from ckptstore.formats.texts import SLOT_LIMIT
from ckptstore.log.journal import Journal
from ckptstore.log.reading import View, read
from ckptstore.reports.run_status import Pace, RunStatus, changes_between, status_of
from ckptstore.reports.runs import known_writer

__all__ = ["LONGEST", "SHORTEST", "watch"]

SHORTEST: Final = 0.01
LONGEST: Final = 86400.0
"""Seconds that can be between two looks."""


def watch(journal: Journal, every: float, metric: str, *, wait: bool, quiet: bool) -> Iterator[RunStatus]:
    """See `Store.watch`. What cannot be meant is refused now, not by the first ``next``."""
    if isinstance(every, bool) or not isinstance(every, int | float) or not SHORTEST <= every <= LONGEST:
        raise UsageError(f"every: {every!r:.80}; from {SHORTEST:g} to {LONGEST:g} seconds can be between two looks")
    if not isinstance(metric, str) or not metric:
        raise UsageError(f"metric: {metric!r:.80}; the name of a number in the metadata is needed")
    return _watched(_Watcher(journal, metric), float(every), wait=wait, quiet=quiet)


def _watched(watcher: _Watcher, pause: float, *, wait: bool, quiet: bool) -> Iterator[RunStatus]:
    first = True
    try:
        while True:
            try:
                status = watcher.look()
            except StoreNotFoundError:
                if not (wait and first):
                    raise
            else:
                if first or quiet or status.changes:
                    yield status
                first = False
            time.sleep(pause)
    finally:
        watcher.close()


class _Watcher:
    """What was seen of one run so far."""

    def __init__(self, journal: Journal, metric: str) -> None:
        """Nothing seen yet. `journal` is left as it is: each look asks what is at its place now."""
        self._place = journal.backend
        self._journal: Journal | None = None
        self._run = ""
        self._view: View | None = None
        self._pace = Pace(metric)
        self._last: RunStatus | None = None

    def close(self) -> None:
        """Give up the handle of the store's folder."""
        if self._journal is not None and self._journal.backend is not self._place:
            with contextlib.suppress(CkptError, OSError):
                self._journal.backend.close()

    def look(self) -> RunStatus:
        """Look once.

        Raises:
            StoreNotFoundError: there is no store here, or no longer.
            StoreReplacedError: there is another run's, or another history of this run.
            CorruptLogError, FormatError, StorageError: as `Store.checkpoint`; or records that were there are gone.
        """
        before = None if (costs := self._place.costs) is None else costs.spent
        view = self._read(self._here())
        status = self._told(view)
        requests = None if costs is None or before is None else (costs.spent - before).total
        free = None if self._journal is None else self._journal.backend.free_bytes()
        self._view, self._last = view, replace(status, requests=requests, free=free)
        return self._last

    def _here(self) -> Journal:
        """The store that is at the place now, with its FORMAT file read where that costs next to nothing."""
        if self._journal is None or self._place.cheap_looks:
            self.close()  # Prevents: following a store that was moved away, through the handle of its folder.
            self._journal = Journal(self._place.reopened() if self._place.cheap_looks else self._place)
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
        if (stands := _stands(journal, before)) is True:
            return read(journal, before)
        self.close()
        self._journal = None  # FORMAT is read anew, too
        journal = self._here()
        view = read(journal)
        _check_continues(journal.url, before, view, other=stands is False)
        return view

    def _told(self, view: View) -> RunStatus:
        last, before, now = self._last, self._view, time.time()
        if last is None or before is None or view.end != before.end or view.damage != before.damage:
            self._pace.take(view.catalog)
            status = status_of(self._place.url, self._run, now, view, self._pace)
        else:
            writer, host, pid = known_writer(view.catalog)
            lag = None if last.saved is None else max(0.0, now - last.saved)
            status = replace(last, time=now, lag=lag, changes=(), writer=writer, host=host, pid=pid)
        if last is None or before is None:
            return status
        said = changes_between(before, view)
        if (last.writer, last.pid) == ("alive", status.pid) and status.writer == "gone":
            said.append(f"process {status.pid}, which wrote, is gone")
        return replace(status, changes=tuple(said))


def _stands(journal: Journal, view: View) -> bool | None:
    """Whether the last slot that was read holds the same bytes; None: it is absent, perhaps because of a fold."""
    if not view.end:
        return None
    if view.end - 1 in view.damage:
        return True
    try:
        return xxh3_128(journal.backend.get(slot_key(view.end - 1), SLOT_LIMIT)) == view.catalog.last
    except KeyNotFoundError:
        return None


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
