"""Who commits a change that no writer made: the live writer, who is asked, or this process, which takes over."""

from __future__ import annotations

import os
import platform
from typing import Final, Protocol

from ckptstore._version import __version__
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.records import CheckpointId
from ckptstore.host.checks import seconds
from ckptstore.host.crash_points import crash_point
from ckptstore.log import requests
from ckptstore.log.change import Change
from ckptstore.log.journal import Journal
from ckptstore.log.reading import read
from ckptstore.log.requests import Outcome
from ckptstore.log.term import open_term

__all__ = ["Author", "Requester", "Successor"]

_ACCEPTED: Final = Outcome("accepted")


class Author(Protocol):
    """Commits changes to the catalog, or has them committed.

    Attributes:
        owned: the term that this process owns; None: the newest one is somebody else's.
    """

    @property
    def owned(self) -> int | None: ...  # noqa: D102 - described above

    def commit(self, term: int, what: str, change: Change) -> Outcome:
        """Make one change in `term`, all or nothing. What a request cannot have is refused (`requests.post`)."""

    def catalog(self) -> Catalog:
        """The log as this author sees it now."""


class Requester:
    """Asks the writer of the newest term, and waits for its answer. It fences nobody."""

    owned: int | None = None

    def __init__(self, journal: Journal, timeout: float | None) -> None:
        """Ask whoever owns the newest term.

        Args:
            timeout: seconds to wait for each answer; None or infinity: as long as it takes.

        Raises:
            UsageError: `timeout` is no time.
        """
        self._journal = journal
        self._timeout = seconds("timeout", timeout)

    def commit(self, term: int, what: str, change: Change) -> Outcome:
        """Post a request -> its outcome, ``waiting`` if no answer came in time. Raises `StorageError`."""
        about = f"{what} ({platform.node()}, pid {os.getpid()})"
        request = requests.post(self._journal, term, about, change)
        crash_point("request.posted")
        return requests.wait(self._journal, request, timeout=self._timeout)

    def catalog(self) -> Catalog:
        """READ."""
        return read(self._journal).catalog


class Successor:
    """Opens a term that continues from the latest checkpoint, which fences whoever wrote before."""

    def __init__(self, journal: Journal, purpose: str) -> None:
        """Take the store over.

        Args:
            purpose: what for, in a word that the log keeps.

        Raises:
            FencedError: others opened terms first, every time.
            CorruptLogError: the log is damaged where ``latest`` would be decided.
            ReadOnlyError, StorageError, UnsupportedBackendError: the medium cannot be written, or not safely.
        """
        journal.backend.probe()
        info = {"version": __version__, "host": platform.node(), "pid": os.getpid(), "for": purpose}
        self._term = open_term(journal, _latest, info)
        self.owned: int | None = self._term.number

    def commit(self, term: int, what: str, change: Change) -> Outcome:  # noqa: ARG002  # a log needs none
        """Commit. Raises as `Term.commit`."""
        self._term.commit(change.record(term))
        return _ACCEPTED

    def catalog(self) -> Catalog:
        """What this term has acknowledged."""
        return self._term.view().catalog


def _latest(catalog: Catalog) -> CheckpointId | None:
    latest = catalog.latest()
    return None if latest is None else latest.id
