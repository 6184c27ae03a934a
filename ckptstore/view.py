"""READ: the log as it was at one instant, whatever is written, folded and deleted meanwhile.

Slots are created once, in order, and never changed. Two facts carry every decision here:

- A slot whose seq is a multiple of K (an *anchor*) and a slot with an OPEN are never deleted, and another slot only
  when the next anchor above it exists. So "no anchor above s" proves that slot s was never deleted: if it is absent, it
  was never written.
- A record whose term cannot follow is a stray: a late create that landed where a folded slot had been deleted. Or it
  follows a stray that was taken for history, which it thereby uncovers.

``tools/protocol`` explores these rules; change them only together.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ckptstore.backends.base import Backend
from ckptstore.formats.catalog import Catalog, CatalogBuilder
from ckptstore.formats.errors import CorruptLogError, FormatError, IncompatibleFormatError, KeyNotFoundError
from ckptstore.formats.folds import FOLD_LIMIT, decode_fold
from ckptstore.formats.records import FormatFile, OpenRecord, Record, fold_of, slot_key
from ckptstore.formats.texts import SLOT_LIMIT, decode_record

__all__ = ["PATIENT", "Patience", "View", "anchor_above", "exists", "never_deleted", "read"]


@dataclass(frozen=True, slots=True)
class Patience:
    """How often something is tried again, and the jittered, growing pauses between. It decides only when to give up.

    Attributes:
        tries: at most this many further tries.
        first: seconds of the first pause.
        longest: seconds of the longest.
        sleep: called with seconds.
    """

    tries: int = 6
    first: float = 0.05
    longest: float = 2.0
    sleep: Callable[[float], None] = time.sleep

    def pause(self, done: int) -> None:
        """Wait after `done` tries before the next. Jitter keeps two processes from meeting again and again."""
        self.sleep(min(self.longest, self.first * 2**done) * random.uniform(0.5, 1.0))


PATIENT: Final = Patience()


@dataclass(frozen=True, slots=True)
class View:
    """The log as it was at one instant while it was read.

    Attributes:
        catalog: every record before `end`, applied. Read only.
        end: the next slot, absent at that instant.
        fold_seq: the slot that the fold it began from goes through; -1: none.
        reads: objects fetched.
        bad_folds: keys of folds that are damaged.
    """

    catalog: Catalog
    end: int
    fold_seq: int = -1
    reads: int = 0
    bad_folds: tuple[str, ...] = ()

    @property
    def damage(self) -> tuple[int, ...]:
        """Slots that are damaged or missing."""
        return self.catalog.damage


def anchor_above(seq: int, every: int) -> int:
    """The first anchor above slot `seq`."""
    return (seq // every + 1) * every


def exists(backend: Backend, key: str) -> bool:
    """Whether an object is there, by asking for it: no decision rests on a listing."""
    try:
        backend.size(key)
    except KeyNotFoundError:
        return False
    return True


def never_deleted(backend: Backend, fmt: FormatFile, seq: int) -> bool:
    """Whether slot `seq` was certainly never deleted: it is an anchor, or no anchor exists above it."""
    return seq % fmt.anchor_every == 0 or not exists(backend, slot_key(anchor_above(seq, fmt.anchor_every)))


def read(backend: Backend, fmt: FormatFile, since: View | None = None, patience: Patience = PATIENT) -> View:
    """READ: the history at one instant between call and return.

    Args:
        since: an earlier view: only what came after it is fetched.

    Raises:
        CorruptLogError: the log cannot be read from any fold; names the slot.
        IncompatibleFormatError: a record or fold needs a feature this version does not know.
        StorageError: the medium failed.

    A damaged slot does not stop it: the slot is listed in the catalog's `damage`, and reading goes on after it.
    """
    reading = _Reading(backend, fmt)
    for done in range(patience.tries + 1):
        if (view := reading.run(since)) is not None:
            return view
        since = None
        if done < patience.tries:
            patience.pause(done)
    raise CorruptLogError(
        f"{backend.url}: slot {reading.seq} is absent or stray although later slots exist, and no fold replaces it"
        + (f"; damaged folds: {', '.join(reading.bad_folds)}" if reading.bad_folds else "")
    )


class _StaleError(Exception):
    """Slots that were to be read have been folded and deleted: start over from a newer fold. Stays in this module."""


class _Reading:
    """One READ: what it has fetched so far."""

    def __init__(self, backend: Backend, fmt: FormatFile) -> None:
        self.backend = backend
        self.fmt = fmt
        self.seq = 0
        self.reads = 0
        self.bad_folds: tuple[str, ...] = ()
        self.fold_seq = -1
        self.builder = CatalogBuilder()

    def run(self, since: View | None) -> View | None:
        """Steps 1 to 3 once; None: stale, start over."""
        # 1. List fold/, take the newest valid one (none: start at slot 0). An earlier view does as well as a fold.
        if since is not None:
            self.builder, self.fold_seq = CatalogBuilder(since.catalog), since.fold_seq
        else:
            self._start_from_newest_fold()
        self.seq = self.builder.catalog.next_seq
        try:
            # 2. GET contiguous slots until one, e, is absent.
            while self._take_slot():
                self.seq += 1
            # 3. Unless e is an anchor, GET the anchor above e: present: stale, start over.
            if not never_deleted(self.backend, self.fmt, self.seq):
                return None
        except _StaleError:
            return None
        return View(self.builder.catalog, self.seq, self.fold_seq, self.reads, self.bad_folds)

    def _start_from_newest_fold(self) -> None:
        self.builder, self.fold_seq, self.bad_folds = CatalogBuilder(), -1, ()
        found = sorted(((place, key) for key in self.backend.list("fold/") if (place := fold_of(key))), reverse=True)
        for (seq, digest16), key in found:
            try:
                data = self.backend.get(key, FOLD_LIMIT)
                self.reads += 1
                catalog = decode_fold(data, seq=seq, run=self.fmt.run, digest16=digest16, what=key)
            except KeyNotFoundError:  # deleted since the listing: two newer ones exist
                continue
            except IncompatibleFormatError:
                raise
            except FormatError:
                self.bad_folds += (key,)
                continue
            self.builder, self.fold_seq = CatalogBuilder(catalog, adopt=True), seq
            return

    def _take_slot(self) -> bool:
        """Apply slot `seq`; False if it is absent and nothing follows it."""
        key = slot_key(self.seq)
        try:
            data = self.backend.get(key, SLOT_LIMIT)
            self.reads += 1
            record = decode_record(data, seq=self.seq, run=self.fmt.run, what=key, fetch=self._manifest)
        except KeyNotFoundError:
            return self._lost()
        except IncompatibleFormatError:
            raise
        except FormatError:
            self.builder.mark_damaged(self.seq)
            return True
        if self._follows(record):
            self.builder.apply(record, self.seq)
        elif self.seq % self.fmt.anchor_every and never_deleted(self.backend, self.fmt, self.seq):
            # No stray can be where nothing was ever deleted: this is the slot's own text, and it is wrong. (Of an
            # anchor that cannot be said: it is right, and a stray was taken for history just before it.)
            self.builder.mark_damaged(self.seq)
        else:
            raise _StaleError
        return True

    def _follows(self, record: Record) -> bool:
        """OPEN's term must be above the current one, COMMIT's equal to it; otherwise the slot is a stray.

        After a damaged slot, which may have been an OPEN, a COMMIT may bring a newer term.
        """
        term = self.builder.catalog.term
        if isinstance(record, OpenRecord):
            return record.term > term
        return record.term == term or (record.term > term and self.seq - 1 in self.builder.catalog.damage)

    def _lost(self) -> bool:
        """Slot `seq` is absent: True (and noted) if it was written once and is missing, not merely unwritten.

        The next slot is created only after this one. So if that exists and this one, asked for again, does not, this
        one was deleted, which an anchor above it shows, or the medium lost it.
        """
        if not exists(self.backend, slot_key(self.seq + 1)):
            return False
        if exists(self.backend, slot_key(self.seq)):
            return self._take_slot()
        if not never_deleted(self.backend, self.fmt, self.seq):
            raise _StaleError
        self.builder.mark_damaged(self.seq)
        return True

    def _manifest(self, key: str, size: int) -> bytes:
        """A manifest's bytes, whose `size` the caller compares."""
        self.reads += 1
        try:
            return self.backend.get(key, size)
        except KeyNotFoundError as error:
            # A manifest goes after its slot. If the slot is gone too, the view is stale; else the manifest is lost.
            if not exists(self.backend, slot_key(self.seq)):
                raise _StaleError from error
            raise FormatError(f"{slot_key(self.seq)}: its manifest of {size} bytes, {key}, is missing") from error
