"""Folding the log: a fold is the catalog through one slot, written so that readers need not start at slot 0.

A fold is derived and changes no history. What it replaces is deleted by three rules (design: ANCHORS):

- a slot: at or below the SECOND newest valid fold, no anchor, no OPEN, and the next anchor above it exists;
- a fold: when two newer valid ones exist;
- a manifest: after its slot.

Whoever may write can do it, at any time, also late: the writer does so beside its commits.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import Final

from ckptstore.backends.base import Backend
from ckptstore.errors import CorruptLogError, ForeignObjectError, KeyExistsError, KeyNotFoundError
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.folds import FOLD_LIMIT, encode_fold, intact
from ckptstore.formats.records import fold_key, fold_of, manifest_key, slot_key, slot_of
from ckptstore.host import background_threads
from ckptstore.host.crash_points import crash_point
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import View, anchor_above
from ckptstore.log.partial_objects import exists
from ckptstore.log.term import Term

__all__ = ["KEEP", "FoldThread", "Trimmed", "due", "fold", "maintain", "trim"]

_PATIENCE: Final = 60.0
"""Seconds that closing waits for a fold under way."""
_AGAIN: Final = 64
"""Slots after a fold that failed before another is tried."""
_AT_END: Final = 8
"""Slots that are worth a fold when a term ends, where each costs a request."""
KEEP = 2
"""Newest valid folds that stay: if one is damaged, the other serves, and the slots above it are still there."""


@dataclass(frozen=True, slots=True)
class Trimmed:
    """What `trim` deleted: numbers of slots, folds and manifests."""

    slots: int = 0
    folds: int = 0
    manifests: int = 0


def due(end: int, fold_seq: int, live: int) -> bool:
    """Whether a fold pays: reading a store costs one fold and the slots since.

    Args:
        end: the next slot.
        fold_seq: the slot through which the newest fold goes; -1: none.
        live: promised checkpoints. A fold costs time in proportion to them, so big stores fold less often.
    """
    return end - 1 - fold_seq >= min(1024, max(64, live // 16))


def maintain(term: Term) -> bool:
    """Fold what `term` has acknowledged, and trim, if it is due -> whether it was.

    Raises:
        StorageError: the medium failed; the term is not affected.
    """
    if not _due(term):
        return False
    _renew(term, term.view())
    return True


def _due(term: Term) -> bool:
    return due(term.next_seq, term.fold_seq, len(term.catalog.checkpoints))


def _renew(term: Term, view: View) -> None:
    fold(term.journal, view)
    term.fold_seq = view.end - 1
    trim(term.journal, view)


class FoldThread:
    """Folds what a term has acknowledged beside its commits: in a thread of its own, at most one at a time.

    The term may be fenced, closed or dead while a fold is under way. That is harmless: a fold of what was once
    acknowledged is true for ever, and what it replaces is deleted by rules that hold at any later time. So nothing
    waits for it but closing, and that not for ever.

    All of it is called by the thread that commits. A fork has no such thread, and does not come here.
    """

    def __init__(self, term: Term) -> None:
        self._term = term
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._not_before = 0

    def begin(self) -> Exception | None:
        """Begin a fold if one is due and none is under way -> what the one before failed with, said once."""
        if self._thread is not None and self._thread.is_alive():
            return None
        self._thread, failure, self._failure = None, self._failure, None
        if failure is not None:
            self._not_before = self._term.next_seq + _AGAIN
        if self._term.next_seq < self._not_before or not _due(self._term):
            return failure
        view = self._term.view()
        with contextlib.suppress(RuntimeError):  # no thread to be had, or the interpreter is going: the next time
            self._thread = background_threads.start(lambda: self._run(view), "fold")
        return failure

    def finish(self, seconds: float = _PATIENCE) -> Exception | None:
        """Wait for a fold under way, at most so long -> what it failed with.

        Where every slot that is read costs a request, what the term leaves behind is folded then: who opens the store
        next reads one object, and not hundreds.
        """
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return None
        if self._failure is None and self._worth_it():
            try:
                view = self._term.view()
                fold(self._term.journal, view)
                self._term.fold_seq = view.end - 1
            except Exception as error:  # noqa: BLE001 - whatever it is, it is said, and fails no save
                self._failure = error
        failure, self._failure = self._failure, None
        return failure

    def _worth_it(self) -> bool:
        """Whether the term ends on a medium that charges for requests, and leaves slots that no fold covers."""
        term = self._term
        slots = term.next_seq - 1 - term.fold_seq
        return term.journal.backend.costs is not None and term.dead is None and slots >= _AT_END

    def _run(self, view: View) -> None:
        try:
            _renew(self._term, view)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is said, and fails no save
            self._failure = error


def fold(journal: Journal, view: View) -> str:
    """Write the fold of a view -> its key. If it is there already, nothing happens.

    Raises:
        CorruptLogError: a slot of the newest term is damaged. A fold would make that permanent; open a term first, by
            which someone chooses where to go on from.
        StorageError: the medium failed.
    """
    backend = journal.backend
    if _hides_damage(view.catalog):
        raise CorruptLogError(f"{backend.url}: log slot {view.damage[-1]} is damaged; not folded")
    data, digest = encode_fold(view.catalog, run=journal.run, forget=_forgettable(backend, view))
    key = fold_key(view.end - 1, digest)
    # Prevents: a fold that survives a power cut which takes back one of its slots, left unsynced by a killed writer.
    # The slot would be missing although no anchor says that it was deleted.
    backend.settle("log/")
    crash_point("fold.before-create")
    with contextlib.suppress(KeyExistsError):  # the key carries the hash: it is the same fold
        backend.create(key, data)
    crash_point("fold.created")
    return key


def _hides_damage(catalog: Catalog) -> bool:
    opened = catalog.terms.get(catalog.term)
    return bool(catalog.damage) and (opened is None or not opened.known or catalog.damage[-1] > opened.seq)


def _forgettable(backend: Backend, view: View) -> frozenset[str]:
    """Manifests that nobody reads any more: their slot, at or below the fold this view began from, is gone."""
    return frozenset(
        name
        for name, (_, seq) in view.catalog.manifests.items()
        if seq <= view.fold_seq and not exists(backend, slot_key(seq))
    )


def trim(journal: Journal, view: View) -> Trimmed:
    """Delete what the folds replace, as far as `view` reaches: it tells which slots are OPENs.

    Raises:
        StorageError: the medium failed; what is left is deleted the next time.
    """
    backend = journal.backend
    keys = [key for key in backend.list("fold/") if fold_of(key)]
    valid = _newest_valid(backend, keys)
    if len(valid) < KEEP:
        return Trimmed()
    limit = min(valid[-1], view.end - 1)
    slots = _deletable(journal, view.catalog, limit)
    old = [key for key in keys if (place := fold_of(key)) is not None and place[0] < valid[-1]]
    if not slots and not old:
        return Trimmed()
    # A power cut may keep every unlink and lose a link that was seen but is not yet durable: a fold or an anchor that
    # this rests on. So what was seen is made durable before anything goes.
    backend.settle("fold/")
    backend.settle("log/")
    crash_point("fold.before-delete")
    for key in old:
        backend.delete(key)
    for seq in slots:
        backend.delete(slot_key(seq))
    crash_point("fold.deleted")
    gone = set(slots)
    manifests = [manifest_key(term, name) for name, (term, seq) in view.catalog.manifests.items() if seq in gone]
    if manifests:
        backend.settle("log/")  # a manifest may be missing only where its slot is
    for key in manifests:
        backend.delete(key)
    return Trimmed(len(slots), len(old), len(manifests))


def _newest_valid(backend: Backend, keys: list[str]) -> list[int]:
    """Slots of the `KEEP` newest folds whose bytes are whole, newest first; two folds of one slot count once."""
    found: list[int] = []
    for key in sorted(keys, reverse=True):
        seq, digest16 = fold_of(key) or (-1, "")
        if seq in found:
            continue
        try:
            whole = intact(backend.get(key, FOLD_LIMIT), digest16)
        except (KeyNotFoundError, ForeignObjectError):
            continue
        if whole:
            found.append(seq)
        if len(found) == KEEP:
            break
    return found


def _deletable(journal: Journal, catalog: Catalog, limit: int) -> list[int]:
    """Slots up to `limit` that are no anchor, no OPEN, and have an anchor above. Damaged ones stay, as evidence."""
    backend, anchor_every = journal.backend, journal.format.anchor_every
    kept = {entry.seq for entry in catalog.terms.values() if entry.known}.union(catalog.damage)
    listed = [seq for key in backend.list("log/") if (seq := slot_of(key)) is not None and seq <= limit]
    slots = [seq for seq in listed if seq % anchor_every and seq not in kept]
    anchors = {anchor_above(seq, anchor_every) for seq in slots}
    present = {anchor for anchor in anchors if exists(backend, slot_key(anchor))}
    return [seq for seq in slots if anchor_above(seq, anchor_every) in present]
