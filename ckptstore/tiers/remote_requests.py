"""Answers requests to the remote: the drain writes its newest term (formats/SPEC.md 10, REQUESTS, TIERS).

``ckpt prune REMOTE`` while a run is active is such a request. It fences no writer.
"""

from __future__ import annotations

import time
from typing import Final

from ckptstore.errors import KeyNotFoundError, StorageError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import CommitRecord, Request, request_of
from ckptstore.log.journal import Journal
from ckptstore.log.log_copy import LogCopy
from ckptstore.log.requests import handle

__all__ = ["RequestAnswers"]

EVERY: Final = 5.0
"""Seconds between two polls for requests; each is a listing."""


class RequestAnswers:
    """Polls for requests now and then. One thread at a time uses it."""

    def __init__(self, remote: Journal) -> None:
        """Poll for nothing yet."""
        self._remote = remote
        self._looked: float | None = None

    @property
    def due(self) -> bool:
        """Whether it is time to poll."""
        return self._looked is None or time.monotonic() - self._looked >= EVERY

    def asked(self) -> bool:
        """Whether it is time to poll, and a request is there. Errors of the remote are left to the next pass."""
        if not self.due:
            return False
        try:
            found = any(request_of(key) is not None for key in self._remote.backend.list("req/"))
        except (KeyNotFoundError, StorageError):
            found = False
        if not found:
            self._looked = time.monotonic()
        return found

    def give(self, replica: LogCopy, journal: Journal) -> None:
        """Answer the waiting requests, if it is time to poll. The remote's newest term is the store's.

        Raises:
            UsageError: another process writes there.
            StorageError: the remote failed; nothing is lost, the next poll handles the rest.
        """
        if self.due:
            handle(_Owner(replica, journal), objection=_objection)
            self._looked = time.monotonic()


class _Owner:
    """The remote's newest term, in the form that answering requests needs."""

    def __init__(self, replica: LogCopy, journal: Journal) -> None:
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
        # An accepted tag would last only until the next pass, which sends every tag as the store has it.
        return "this is a second tier, which gets its tags from the store: tag and untag there"
    return None
