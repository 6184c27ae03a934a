"""Requests: how other processes change a store without fencing its live writer (formats/SPEC.md 9 and 10, REQUESTS).

A process that compacts, merges, retires or tags READs the log (term t), pins what it reads, rebuilds, verifies, writes
segments under ``seg/<t>/`` and posts a request. The writer of t polls for requests, checks each against its own
catalog, and commits it, or answers why not. Requester: `post`, then `wait`. Writer: `handle`.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol

from ckptstore.backends.base import Backend
from ckptstore.errors import (
    CkptError,
    ForeignObjectError,
    FormatError,
    KeyExistsError,
    KeyNotFoundError,
    NotFoundError,
    UsageError,
)
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.commit_checks import check_commit
from ckptstore.formats.history.record_text import MANIFEST_LIMIT, decode_request, encode_request, torn
from ckptstore.formats.history.records import CommitRecord, Request, SegmentEntry, request_of
from ckptstore.log.change import CatalogChange
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import View, read
from ckptstore.log.partial_objects import read_all_when_complete

__all__ = ["Outcome", "TermOwner", "handle", "outcome", "post", "wait"]

_LONGEST_REASON = 500
POLL: Final = 0.2
"""Seconds between the first two looks for the answer to a request."""


# ------------------------------------------------------------------------------------------------ the writer's side


class TermOwner(Protocol):
    """The owner of the term that is asked: a `Term`, or an object that commits for it."""

    @property
    def journal(self) -> Journal:
        """The store's medium and FORMAT file."""

    @property
    def number(self) -> int:
        """The term."""

    @property
    def catalog(self) -> Catalog:
        """The catalog that it has acknowledged."""

    def commit(self, record: CommitRecord) -> object:
        """COMMIT."""


def _no_objection(_request: Request) -> str | None:
    return None


def handle(
    term: TermOwner,
    prepare: Callable[[], None] = lambda: None,
    objection: Callable[[Request], str | None] = _no_objection,
) -> int:
    """Answer every waiting request to `term` -> the number of commits.

    Args:
        prepare: called before each request is compared with the catalog, so that the writer can first commit what it
            still holds back.
        objection: why a request is refused whatever the catalog says; None: it is not.

    Raises:
        FencedError, CommitUnknownError: the term ended.
        StorageError: ``req/`` could not be listed or read; nothing is lost, the next call handles the rest.
    """
    commits = 0
    backend = term.journal.backend
    waiting: dict[str, str] = {}
    for key in backend.list("req/"):
        place = request_of(key)
        if place is None or place[0] > term.number:
            continue
        number, identity = place
        if number < term.number or identity in term.catalog.requests:
            # To another term: void for ever. Answered in this term: ignored, however often it appears again.
            backend.delete(key)
            continue
        waiting[key] = identity
    # Prevents: a request that is refused because only half of it was written.
    arriving = read_all_when_complete(
        waiting, lambda key: backend.get(key, MANIFEST_LIMIT), lambda _key, data: torn(data)
    )
    for key, found in arriving:
        if isinstance(found, KeyNotFoundError | ForeignObjectError):
            continue  # the requester withdrew it, or it is not a request
        if isinstance(found, CkptError):
            raise found
        prepare()
        with backend.upkeep():
            _answer(term, key, waiting[key], found, objection)
        commits += 1
        backend.delete(key)
    return commits


def _answer(term: TermOwner, key: str, identity: str, data: bytes, objection: Callable[[Request], str | None]) -> None:
    try:
        request = decode_request(data, run=term.journal.run, what=key)
        if (request.term, request.id) != (term.number, identity):
            raise FormatError(f"{key}: holds request {request.id} to term {request.term}")
    except FormatError as error:
        term.commit(_refusal(term, identity, (), str(error)))
        return
    record = _commit_record(request)
    if reason := objection(request) or _objection(term, request, record):
        # Refused: its segments will never be committed. They are dropped by name so that gc may delete them.
        live = term.catalog.segments
        strays = tuple(segment.id for segment in request.segments if segment.id not in live)
        term.commit(_refusal(term, identity, strays, reason))
        return
    term.commit(record)


def _commit_record(request: Request) -> CommitRecord:
    change = CatalogChange(request.segments, (), request.encodings, request.drops, request.retires, request.tags)
    return replace(change, requests={request.id: None}, keep=request.keep).record(request.term)


def _refusal(term: TermOwner, identity: str, drops: tuple[str, ...], reason: str) -> CommitRecord:
    reason = reason[:_LONGEST_REASON]
    return CommitRecord(term.number, drops=drops, requests={identity: reason})


def _objection(term: TermOwner, request: Request, record: CommitRecord) -> str | None:
    """Why the request must be refused; None if it may be committed."""
    catalog = term.catalog
    for segment in request.drops:
        if segment not in catalog.segments:
            return f"segment {segment}, which it drops, is not live"
    try:
        # An encoding of a checkpoint no longer promised, a promised checkpoint left unreachable, a tag or step gone ...
        check_commit(catalog, record)
    except (UsageError, NotFoundError) as error:
        return str(error)
    for entry in request.segments:
        if (problem := _missing(term.journal.backend, entry)) is not None:
            return problem
    return None


def _missing(backend: Backend, entry: SegmentEntry) -> str | None:
    try:
        size = backend.size(entry.key)
    except KeyNotFoundError:
        return f"segment {entry.id}, which it adds, is not there"
    return None if size == entry.size else f"segment {entry.id} has {size} bytes, not {entry.size}"


# ------------------------------------------------------------------------------------------------ the requester's side


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a request.

    Attributes:
        answer: ``accepted``; ``refused``; ``void``: a newer term began before it was answered; ``waiting``: not yet
            answered, and it still may be.
        reason: why it was refused, or what happened; empty if accepted.
    """

    answer: Literal["accepted", "refused", "void", "waiting"]
    reason: str = ""


def post(journal: Journal, term: int, what: str, change: CatalogChange) -> Request:
    """Ask the writer of `term` for a change -> the posted request, for `wait`.

    Args:
        term: the newest term in the view on which the change was planned. A newer one voids the request.
        what: one line for people: what this is, and which process asks.
        change: its segments are durable already, and belong to `term`.

    Raises:
        UsageError: the change has checkpoints, answers or other members that only a writer's own commit may have.
            Nothing was posted.
        StorageError: it may or may not have been posted; both are harmless. Ask again under a new uuid.
    """
    if change.checkpoints or change.requests or change.extra:
        raise UsageError(f"a request to {what}: only a writer commits checkpoints, answers and notes")
    request = Request(
        id=secrets.token_hex(16),
        term=term,
        what=what,
        segments=change.segments,
        encodings=change.encodings,
        drops=change.drops,
        retires=change.retires,
        tags=change.tags,
        keep=change.keep,
    )
    data = encode_request(request, run=journal.run)
    decode_request(data, run=journal.run, what=request.key)  # checks that the writer can decode it
    with contextlib.suppress(KeyExistsError):  # a fresh uuid: the first try succeeded, and its answer was lost
        journal.backend.create(request.key, data)
    return request


def outcome(catalog: Catalog, request: Request) -> Outcome:
    """The outcome of a request according to a catalog."""
    if catalog.term == request.term:
        if request.id not in catalog.requests:
            return Outcome("waiting")
        reason = catalog.requests[request.id]
        return Outcome("accepted") if reason is None else Outcome("refused", reason)
    # The catalog keeps only the answers of the newest term. Either the change is in the catalog, or it is void.
    if _took_effect(catalog, request):
        return Outcome("accepted", f"term {catalog.term} has begun since")
    return Outcome("void", f"term {catalog.term} began before the request to term {request.term} was answered")


def _took_effect(catalog: Catalog, request: Request) -> bool:
    if request.segments:
        return all(segment.id in catalog.segments for segment in request.segments)
    return (
        not any(segment in catalog.segments for segment in request.drops)
        and not any(node in catalog.checkpoints for node in request.retires)
        and all(catalog.tags.get(name) == node for name, node in request.tags.items())
        and request.keep in (None, catalog.keep)
    )


def _log_reader(journal: Journal) -> Callable[[], Catalog]:
    view: View | None = None

    def look() -> Catalog:
        nonlocal view
        view = read(journal, view)
        return view.catalog

    return look


def wait(
    journal: Journal,
    request: Request,
    *,
    look: Callable[[], Catalog] | None = None,
    timeout: float | None = None,
    poll: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Outcome:
    """Wait until the log answers a request.

    Args:
        look: returns the current log; None: READ, each time continuing from the previous view.
        timeout: seconds; None: no limit. A timeout withdraws nothing: the answer is then ``waiting``.
        poll: seconds between two looks at the log; grows to 16 times as much. None: `POLL`.

    Raises:
        CorruptLogError, StorageError: from READ.
    """
    begun = clock()
    look = look or _log_reader(journal)
    poll = POLL if poll is None else poll
    longest = poll * 16
    while True:
        answer = outcome(look(), request)
        left = None if timeout is None else begun + timeout - clock()
        if answer.answer == "accepted":
            # Prevents: reporting a commit that a power cut takes back, because the writer was killed before it made the
            # slot durable that we have read.
            journal.backend.settle("log/")
        if answer.answer != "waiting" or (left is not None and left <= 0):
            return answer
        sleep(poll if left is None else min(poll, left))
        poll = min(poll * 1.5, longest)
