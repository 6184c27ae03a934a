"""What others ask of the remote: its newest term is written by the drain, so the drain answers (design: REQUESTS).

``ckpt prune REMOTE`` beside a run is such a request. Nobody is fenced by it.
"""

from __future__ import annotations

import time
from typing import Final

from ckptstore.errors import KeyNotFoundError, StorageError
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.records import CommitRecord, Request, request_of
from ckptstore.log.journal import Journal
from ckptstore.log.log_copy import Replica
from ckptstore.log.requests import handle

__all__ = ["Answers"]

EVERY: Final = 5.0
"""Seconds between two looks for requests, each of which is a listing."""


class Answers:
    """Looks for requests now and then. One thread at a time uses it."""

    def __init__(self, remote: Journal) -> None:
        """Look for nothing yet."""
        self._remote = remote
        self._looked: float | None = None

    @property
    def due(self) -> bool:
        """Whether it is time to look."""
        return self._looked is None or time.monotonic() - self._looked >= EVERY

    def asked(self) -> bool:
        """Whether it is time to look, and something is there. What the remote fails with is for the next pass."""
        if not self.due:
            return False
        try:
            found = any(request_of(key) is not None for key in self._remote.backend.list("req/"))
        except (KeyNotFoundError, StorageError):
            found = False
        if not found:
            self._looked = time.monotonic()
        return found

    def give(self, replica: Replica, journal: Journal) -> None:
        """Answer what waits, if it is time to look. The remote's newest term is the store's.

        Raises:
            UsageError: another process writes there.
            StorageError: the remote failed; nothing is lost, the next look sees the rest.
        """
        if self.due:
            handle(_Owner(replica, journal), objection=_objection)
            self._looked = time.monotonic()


class _Owner:
    """The remote's newest term, as who answers requests knows it."""

    def __init__(self, replica: Replica, journal: Journal) -> None:
        self.journal = journal
        self._replica = replica

    @property
    def number(self) -> int:
        return self._replica.catalog.term

    @property
    def catalog(self) -> Catalog:
        return self._replica.catalog

    def commit(self, record: CommitRecord) -> None:
        self._replica.commit(record)


def _objection(request: Request) -> str | None:
    if request.segments or request.encodings:
        return "this is a second tier, which gets its segments from the store: merge and compact there"
    if request.keep is not None:
        return "this is a second tier, which has the rules of the store: give them there, and prune here with --keep"
    if request.tags:
        # Accepted, it would last until the next pass, which sends each tag as the store has it.
        return "this is a second tier, which gets its tags from the store: tag and untag there"
    return None
