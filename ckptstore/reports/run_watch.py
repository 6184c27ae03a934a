"""Watches a run: looks at its log repeatedly, and fetches only new records.

A look at an idle store takes four small requests: for the last known slot (is this still the same history?), the next
one, the one after that, and the next anchor. Every new record costs one more.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from ckptstore.errors import StoreNotFoundError, UsageError
from ckptstore.log.change_committer import known_writer
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import View
from ckptstore.log.log_watch import LogWatch
from ckptstore.reports.run_status import RunPace, RunStatus, changes_between, status_of

__all__ = ["LONGEST", "SHORTEST", "watch"]

SHORTEST: Final = 0.01
LONGEST: Final = 86400.0
"""Bounds of the seconds between two looks."""


def watch(journal: Journal, every: float, metric: str, *, wait: bool, quiet: bool) -> Iterator[RunStatus]:
    """Watch a run. See `Store.watch`. Invalid arguments raise here, not in the first ``next``."""
    if isinstance(every, bool) or not isinstance(every, int | float) or not SHORTEST <= every <= LONGEST:
        raise UsageError(f"every: {every!r:.80}; pass {SHORTEST:g} to {LONGEST:g} seconds between two looks")
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
    """Everything seen of one run so far."""

    def __init__(self, journal: Journal, metric: str) -> None:
        """Start with nothing seen. `journal` is not changed."""
        self._place = journal.backend
        self._looks = LogWatch(journal)
        self._view: View | None = None
        self._pace = RunPace(metric)
        self._last: RunStatus | None = None

    def close(self) -> None:
        """Close the handle of the store's folder."""
        self._looks.close()

    def look(self) -> RunStatus:
        """Look once.

        Raises:
            StoreNotFoundError: there is no store here, or no longer.
            StoreReplacedError: the store is now another run's, or has another history of this run.
            CorruptLogError, FormatError, StorageError: as `Store.checkpoint`; or records that existed are gone.
        """
        before = None if (costs := self._place.costs) is None else costs.spent
        journal, view = self._looks.look()
        status = self._status(view, journal.run)
        requests = None if costs is None or before is None else (costs.spent - before).total
        free = journal.backend.free_bytes()
        self._view, self._last = view, replace(status, requests=requests, free=free)
        return self._last

    def _status(self, view: View, run: str) -> RunStatus:
        last, before, now = self._last, self._view, time.time()
        if last is None or before is None or view.end != before.end or view.damage != before.damage:
            self._pace.take(view.catalog)
            status = status_of(self._place.url, run, now, view, self._pace)
        else:
            writer, host, pid = known_writer(view.catalog)
            lag = None if last.saved is None else max(0.0, now - last.saved)
            status = replace(last, time=now, lag=lag, changes=(), writer=writer, host=host, pid=pid)
        if last is None or before is None:
            return status
        said = changes_between(before, view)
        if (last.writer, last.pid) == ("alive", status.pid) and status.writer == "gone":
            said.append(f"the writing process {status.pid} is gone")
        return replace(status, changes=tuple(said))
