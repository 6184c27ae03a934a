"""Folds the log: writes the catalog through one slot as a fold, so that readers need not start at slot 0.

A fold is derived and changes no history. What it replaces is deleted by three rules (formats/SPEC.md 10, ANCHORS):

- a slot: at or below the SECOND newest valid fold, no anchor, no OPEN, and the next anchor above it exists;
- a fold: when two newer valid ones exist;
- a manifest: after its slot.

Any process that may write can do this at any time, also late: the writer does it in parallel with its commits.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import Final

from ckptstore.backends.base import Backend
from ckptstore.errors import CorruptLogError, ForeignObjectError, KeyExistsError, KeyNotFoundError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.folds import FOLD_LIMIT, encode_fold, intact
from ckptstore.formats.history.records import fold_key, fold_of, manifest_key, slot_key, slot_of
from ckptstore.host import background_threads
from ckptstore.host.crash_points import crash_point
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import View, anchor_above
from ckptstore.log.partial_objects import exists
from ckptstore.log.term import Term

__all__ = ["KEEP", "FoldThread", "Trimmed", "due", "fold", "maintain", "trim"]

_PATIENCE: Final = 60.0
"""Seconds that `finish` waits for a running fold."""
_RETRY_SLOTS: Final = 64
"""Number of slots after a failed fold before another one is tried."""
_FINAL_SLOTS: Final = 8
"""Number of slots that are worth a fold when a term ends, if each slot costs a request to read."""
KEEP = 2
"""Number of newest valid folds to keep: if one is damaged, readers use the other and the slots above it."""


@dataclass(frozen=True, slots=True)
class Trimmed:
    """Numbers of slots, folds and manifests that `trim` deleted."""

    slots: int = 0
    folds: int = 0
    manifests: int = 0


def due(end: int, fold_seq: int, live: int) -> bool:
    """Whether a fold is worth its cost: to read a store is to read one fold and the slots after it.

    Args:
        end: the next slot.
        fold_seq: the last slot of the newest fold; -1: there is none.
        live: number of promised checkpoints. The cost of a fold is proportional to it, so big stores fold less often.
    """
    return end - 1 - fold_seq >= min(1024, max(64, live // 16))


def maintain(term: Term) -> bool:
    """Fold what `term` has acknowledged, and trim, if a fold is due -> whether it was.

    Raises:
        StorageError: the medium failed; the term is not affected.
    """
    if not _due(term):
        return False
    _fold_and_trim(term, term.view())
    return True


def _due(term: Term) -> bool:
    return due(term.next_seq, term.fold_seq, len(term.catalog.checkpoints))


def _fold_and_trim(term: Term, view: View) -> None:
    fold(term.journal, view)
    term.fold_seq = view.end - 1
    trim(term.journal, view)


class FoldThread:
    """Folds what a term has acknowledged in a thread, in parallel with its commits; at most one fold at a time.

    The term may be fenced, closed or dead while a fold runs. That is harmless: a fold of acknowledged records stays
    valid for ever, and the rules for deleting what it replaces hold at any later time. So only `finish` waits for it,
    and with a timeout.

    Only the committing thread calls these methods. A fork has no such thread, and never calls them.
    """

    def __init__(self, term: Term) -> None:
        self._term = term
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._not_before = 0

    def begin(self) -> Exception | None:
        """Start a fold if one is due and none is running -> the error of the previous one, returned once."""
        if self._thread is not None and self._thread.is_alive():
            return None
        self._thread, failure, self._failure = None, self._failure, None
        if failure is not None:
            self._not_before = self._term.next_seq + _RETRY_SLOTS
        if self._term.next_seq < self._not_before or not _due(self._term):
            return failure
        view = self._term.view()
        with contextlib.suppress(RuntimeError):  # no thread can start, or the interpreter is exiting: try later
            self._thread = background_threads.start(lambda: self._run(view), "fold")
        return failure

    def finish(self, seconds: float = _PATIENCE) -> Exception | None:
        """Wait for a running fold, at most `seconds` -> its error, or None.

        If every slot read costs a request, this also folds the slots that the term leaves unfolded: the next process
        that opens the store reads one object instead of hundreds.
        """
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return None
        if self._failure is None and self._should_fold_at_end():
            try:
                view = self._term.view()
                fold(self._term.journal, view)
                self._term.fold_seq = view.end - 1
            except Exception as error:  # noqa: BLE001 - any error is reported, and no save fails because of it
                self._failure = error
        failure, self._failure = self._failure, None
        return failure

    def _should_fold_at_end(self) -> bool:
        """Whether the term ends on a medium where requests cost money, and leaves enough slots without a fold."""
        term = self._term
        slots = term.next_seq - 1 - term.fold_seq
        return term.journal.backend.costs is not None and term.dead is None and slots >= _FINAL_SLOTS

    def _run(self, view: View) -> None:
        try:
            _fold_and_trim(self._term, view)
        except Exception as error:  # noqa: BLE001 - any error is reported, and no save fails because of it
            self._failure = error


def fold(journal: Journal, view: View) -> str:
    """Write the fold of a view -> its key. Does nothing if the fold exists already.

    Raises:
        CorruptLogError: a slot of the newest term is damaged. A fold would make the loss permanent. Open a term first,
            which decides where to continue.
        StorageError: the medium failed.
    """
    backend = journal.backend
    if _hides_damage(view.catalog):
        raise CorruptLogError(f"{backend.url}: log slot {view.damage[-1]} is damaged; not folded")
    data, digest = encode_fold(view.catalog, run=journal.run, forget=_unneeded_manifests(backend, view))
    key = fold_key(view.end - 1, digest)
    # Prevents: a fold that survives a power cut although one of its slots does not: a killed writer had not synced it.
    # The slot would be missing although no anchor shows that it was deleted.
    backend.settle("log/")
    crash_point("fold.before-create")
    with contextlib.suppress(KeyExistsError):  # the key contains the hash: it is the same fold
        backend.create(key, data)
    crash_point("fold.created")
    return key


def _hides_damage(catalog: Catalog) -> bool:
    opened = catalog.terms.get(catalog.term)
    return bool(catalog.damage) and (opened is None or not opened.known or catalog.damage[-1] > opened.seq)


def _unneeded_manifests(backend: Backend, view: View) -> frozenset[str]:
    """Manifests that no reader needs: their slot, at or below the fold that this view began from, is deleted."""
    return frozenset(
        name
        for name, (_, seq) in view.catalog.manifests.items()
        if seq <= view.fold_seq and not exists(backend, slot_key(seq))
    )


def trim(journal: Journal, view: View) -> Trimmed:
    """Delete what the folds replace, as far as `view` reaches: the view says which slots are OPENs.

    Raises:
        StorageError: the medium failed; the next call deletes the rest.
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
    # A power cut may keep every unlink and lose a link that was visible but not yet durable: a fold or an anchor that
    # this deletion depends on. So what was seen is made durable before anything is deleted.
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
        backend.settle("log/")  # a manifest may be missing only if its slot is
    for key in manifests:
        backend.delete(key)
    return Trimmed(len(slots), len(old), len(manifests))


def _newest_valid(backend: Backend, keys: list[str]) -> list[int]:
    """Slots of the `KEEP` newest folds whose bytes are intact, newest first; two folds of one slot count once."""
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
    """Slots up to `limit`, neither anchors nor OPENs, that have an anchor above. Damaged ones stay, as evidence."""
    backend, anchor_every = journal.backend, journal.format.anchor_every
    kept = {entry.seq for entry in catalog.terms.values() if entry.known}.union(catalog.damage)
    listed = [seq for key in backend.list("log/") if (seq := slot_of(key)) is not None and seq <= limit]
    slots = [seq for seq in listed if seq % anchor_every and seq not in kept]
    anchors = {anchor_above(seq, anchor_every) for seq in slots}
    present = {anchor for anchor in anchors if exists(backend, slot_key(anchor))}
    return [seq for seq in slots if anchor_above(seq, anchor_every) in present]
