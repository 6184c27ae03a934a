"""READ: the log as it was at one instant, even if it is written, folded and trimmed meanwhile.

Slots are created once, in order, and never changed. Three facts carry every decision here:

- A slot whose seq is a multiple of K (an *anchor*) and a slot with an OPEN are never deleted, and another slot only
  when the next anchor above it exists. So "no anchor above s" proves that slot s was never deleted: if it is absent, it
  was never written.
- A record whose term or whose hash of the previous slot does not fit is a stray: a late create that landed where a
  folded slot had been deleted. Or the record is right, and the one before it is a stray that was taken for history.
- Slots are created in order. So a slot above an absent one proves that the absent one was deleted or lost: it was
  deleted if an anchor above it exists. A listing says where that higher slot is, but only what is then read by name
  counts. So a listing can make a reader report a loss, but never make it overlook a slot that exists.

``tools/protocol`` explores these rules; change them only together.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ckptstore.errors import (
    CkptError,
    CorruptLogError,
    ForeignObjectError,
    FormatError,
    IncompatibleFormatError,
    KeyNotFoundError,
)
from ckptstore.formats.checksums import xxh3_128
from ckptstore.formats.history.catalog import Catalog, CatalogBuilder
from ckptstore.formats.history.folds import FOLD_LIMIT, decode_fold
from ckptstore.formats.history.record_text import SLOT_LIMIT, decode_record, unseal
from ckptstore.formats.history.records import NO_SLOT, OpenRecord, Record, fold_of, folder_term, slot_key, slot_of
from ckptstore.log.damage_warnings import warn_of_damage
from ckptstore.log.foreign_segments import all_foreign
from ckptstore.log.journal import Journal
from ckptstore.log.partial_objects import exists, fold_bytes, slot_bytes

__all__ = [
    "LOOKS",
    "PATIENT",
    "Patience",
    "View",
    "anchor_above",
    "damaged_folds",
    "never_deleted",
    "outdated",
    "overtaken",
    "read",
    "same_history",
]


@dataclass(frozen=True, slots=True)
class Patience:
    """How often an operation is retried, with growing, jittered pauses. It only decides when to give up.

    Attributes:
        tries: maximum number of retries.
        first: seconds of the first pause.
        longest: seconds of the longest pause.
        sleep: called with seconds.
    """

    tries: int = 6
    first: float = 0.05
    longest: float = 2.0
    sleep: Callable[[float], None] = time.sleep

    def pause(self, done: int) -> None:
        """Pause after `done` tries. Jitter keeps two processes from colliding again and again."""
        self.sleep(min(self.longest, self.first * 2**done) * random.SystemRandom().uniform(0.5, 1.0))


PATIENT: Final = Patience()
WIDEST_GAP: Final = 4096
"""Longest gap of lost slots that is listed slot by slot: a file that happens to have a slot's name must not cost hours.
"""


@dataclass(frozen=True, slots=True)
class View:
    """The log as it was at one instant while it was read.

    Attributes:
        catalog: every record before `end`, applied. Read only.
        end: the next slot, absent at that instant.
        fold_seq: the last slot of the fold that it began from; -1: none.
        reads: number of objects fetched.
        bad_folds: keys of damaged folds.
        looked_above: slots and terms above `end` were searched for; they would prove that slots between are lost.
    """

    catalog: Catalog
    end: int
    fold_seq: int = -1
    reads: int = 0
    bad_folds: tuple[str, ...] = ()
    looked_above: bool = False

    @property
    def damage(self) -> tuple[int, ...]:
        """Slots that are damaged or missing."""
        return self.catalog.damage


def anchor_above(seq: int, every: int) -> int:
    """The first anchor above slot `seq`."""
    return (seq // every + 1) * every


def never_deleted(journal: Journal, seq: int) -> bool:
    """Whether slot `seq` was certainly never deleted: it is an anchor, or no anchor above it exists."""
    anchor_every = journal.format.anchor_every
    return seq % anchor_every == 0 or not exists(journal.backend, slot_key(anchor_above(seq, anchor_every)))


def read(
    journal: Journal,
    since: View | None = None,
    patience: Patience = PATIENT,
    *,
    look_above: bool | None = None,
    tell: bool = True,
) -> View:
    """READ: the history at one instant between call and return.

    Args:
        since: an earlier view: only later records are fetched.
        look_above: list ``log/`` for slots above the end, which prove that slots between were lost. Operations that
            depend on the end of the log (WRITER OPEN, gc, verify) set it; None: if it is cheap (`Backend.cheap_looks`).
        tell: warn of damage (`DamagedLogWarning`), once for each handle. Callers that report damage themselves unset
            it.

    Raises:
        CorruptLogError: the log cannot be read from any fold; names the slot.
        IncompatibleFormatError: a record or fold needs a feature that this version does not know.
        StorageError: the medium failed.

    A damaged slot does not stop READ: it is listed in the catalog's `damage`, and reading continues after it. A torn
    slot that nothing follows may still be being written: it is read again for `partial_objects.STILL` seconds before it
    counts as damaged.
    """
    if since is not None and outdated(journal, since):
        since = None
    cheap = journal.backend.cheap_looks and since is None
    reading = _LogRead(journal, cheap if look_above is None else look_above, patience)
    for done in range(patience.tries + 1):
        if (view := reading.run(since)) is not None:
            if tell:
                warn_of_damage(journal.backend, view.catalog)
            return view
        since = None
        if done < patience.tries:
            patience.pause(done)
    raise CorruptLogError(
        f"{journal.url}: slot {reading.seq} is absent or stray although later slots exist, and no fold replaces it"
        + (f"; damaged folds: {', '.join(reading.bad_folds)}" if reading.bad_folds else "")
    )


def damaged_folds(journal: Journal, view: View) -> tuple[str, ...]:
    """Keys of the damaged folds that `view` skipped, without those that were being written: for reports of damage."""
    return tuple(key for key in view.bad_folds if _is_damaged(journal, key))


def _is_damaged(journal: Journal, key: str) -> bool:
    seq, digest16 = fold_of(key) or (-1, "")
    try:
        decode_fold(
            fold_bytes(journal.backend, journal.run, key), seq=seq, run=journal.run, digest16=digest16, what=key
        )
    except KeyNotFoundError:  # deleted meanwhile
        return False
    except FormatError:
        return True
    return False


def outdated(journal: Journal, view: View) -> bool:
    """Whether the last slot of `view` was torn and has other bytes now: its writer was slow, not dead."""
    if view.end - 1 not in view.damage:
        return False
    try:
        return xxh3_128(journal.backend.get(slot_key(view.end - 1), SLOT_LIMIT)) != view.catalog.last
    except (KeyNotFoundError, ForeignObjectError):
        return False


LOOKS: Final = 3
"""How often a command examines a store again because a slot that looked damaged became intact (`overtaken`)."""


def overtaken(journal: Journal, judged: Mapping[int, str]) -> bool:
    """Whether a slot that counted as damaged has other bytes now: its writer was still writing it.

    For commands that report damage after long work on other things. (A reader that reads the log again uses
    `outdated`.)

    Args:
        judged: slot -> hash of the bytes that it had.
    """
    for seq, digest in judged.items():
        with contextlib.suppress(CkptError):  # still unreadable
            if xxh3_128(journal.backend.get(slot_key(seq), SLOT_LIMIT)) != digest:
                return True
    return False


def same_history(journal: Journal, view: View) -> bool | None:
    """Whether the last slot of `view` still holds the same bytes: the log is the one that was read.

    Returns:
        True: it does, or it was damaged (`read` compares a damaged slot itself). False: it holds others. None: it is
        absent, perhaps because of a fold, or the view is empty.
    """
    if not view.end:
        return None
    if view.end - 1 in view.damage:
        return True
    try:
        return xxh3_128(journal.backend.get(slot_key(view.end - 1), SLOT_LIMIT)) == view.catalog.last
    except KeyNotFoundError:
        return None
    except ForeignObjectError:
        return False


class _StaleError(Exception):
    """Slots to read have been folded and deleted: start over from a newer fold. Never leaves this module."""


class _LogRead:
    """One READ, with what it has fetched so far."""

    def __init__(self, journal: Journal, look_above: bool, patience: Patience) -> None:
        self.journal = journal
        self.sleep = patience.sleep
        self.backend = journal.backend
        self.fmt = journal.format
        self.look_above = look_above
        self.above = -1  # the highest slot that is known to exist
        self.seq = 0
        self.given_up = -1  # the last slot that this READ marked as damaged
        self.reads = 0
        self.bad_folds: tuple[str, ...] = ()
        self.fold_seq = -1
        self.builder = CatalogBuilder()

    def run(self, since: View | None) -> View | None:
        """Steps 1 to 3 once (formats/SPEC.md 10, READ); None: stale, start over."""
        # 1. List fold/, take the newest valid one (none: start at slot 0). An earlier view serves as a fold does.
        # The folders of segments are listed before the log is read: a term's OPEN is older than its first segment.
        terms = self.backend.folders("seg/") if self.look_above else ()
        if since is not None:
            self.builder, self.fold_seq = CatalogBuilder(since.catalog), since.fold_seq
        else:
            self._start_from_newest_fold()
        self.seq, self.above = self.builder.catalog.next_seq, -1
        try:
            # 2. GET contiguous slots until one, e, is absent.
            while self._take_slot():
                self.seq += 1
            # 3. Unless e is an anchor, GET the anchor above e: present: stale, start over.
            if not never_deleted(self.journal, self.seq):
                return None
        except _StaleError:
            return None
        self.builder.catalog.lost = self._lost_term(terms)
        self.builder.catalog.place = self.journal.url
        return View(self.builder.catalog, self.seq, self.fold_seq, self.reads, self.bad_folds, self.look_above)

    def _start_from_newest_fold(self) -> None:
        self.builder, self.fold_seq, self.bad_folds = CatalogBuilder(), -1, ()
        found = sorted(((place, key) for key in self.backend.list("fold/") if (place := fold_of(key))), reverse=True)
        for (seq, digest16), key in found:
            try:
                catalog = self._fold(key, seq, digest16)
            except KeyNotFoundError:  # deleted since the listing: two newer folds exist
                continue
            except IncompatibleFormatError:
                raise
            except FormatError:
                self.bad_folds += (key,)
                continue
            self.builder, self.fold_seq = CatalogBuilder(catalog), seq
            # Prevents: readers of an object store, which do not list, silently taking an older checkpoint for the
            # latest although another writer has begun where the fold ends.
            self._check_fold()
            return

    def _fold(self, key: str, seq: int, digest16: str) -> Catalog:
        """The contents of a fold. A process reads the newest fold once: its key contains its hash."""
        known = self.journal.fold
        if known is not None and known[0] == key:
            return known[1]
        data = self.backend.get(key, FOLD_LIMIT)
        self.reads += 1
        catalog = decode_fold(data, seq=seq, run=self.fmt.run, digest16=digest16, what=key)
        self.journal.fold = key, catalog
        return catalog

    def _lost_term(self, folders: Sequence[str]) -> int:
        """The highest term above the newest known one that has segments of this run but no OPEN; 0: none."""
        above = (term for name in folders if (term := folder_term(name)) > self.builder.catalog.term)
        return max((term for term in above if self._has_segments(term)), default=0)

    def _has_segments(self, term: int) -> bool:
        keys = self.backend.list(f"seg/{term:010d}/")
        return bool(keys) and not all_foreign(self.backend, self.fmt.run, keys)

    def _check_fold(self) -> None:
        """Mark the fold's end slot as damaged if another record is there now: it belongs to another history.

        A lost slot can be created again by a writer that the lost record had fenced. A damaged end slot costs nothing,
        since the fold replaces it, and `verify` reports it.
        """
        key = slot_key(self.fold_seq)
        try:
            data = self._slot(self.fold_seq)
            text = unseal(data, what=key)
        except (KeyNotFoundError, FormatError):
            return
        ours = type(text) is dict and (text.get("run"), text.get("seq")) == (self.fmt.run, self.fold_seq)
        if ours and xxh3_128(data) != self.builder.catalog.last:
            self.builder.mark_damaged(self.fold_seq, self.builder.catalog.last)

    def _slot(self, seq: int) -> bytes:
        return slot_bytes(self.backend, self.fmt.run, seq, self.sleep)

    def _take_slot(self) -> bool:
        """Apply slot `seq`; False if it is absent and nothing follows it."""
        key, digest = slot_key(self.seq), NO_SLOT
        try:
            data = self._slot(self.seq)
            self.reads += 1
            digest = xxh3_128(data)
            if self.given_up == self.seq - 1 and outdated(self.journal, View(self.builder.catalog, self.seq)):
                # Prevents: skipping a commit whose slot was complete before this one was created.
                raise _StaleError
            record = decode_record(data, seq=self.seq, run=self.fmt.run, what=key, fetch=self._manifest)
        except KeyNotFoundError:
            return self._lost()
        except IncompatibleFormatError:
            raise
        except ForeignObjectError:
            self.backend.list("log/")  # raises the same error if the folder, not the slot, is foreign
            return self._give_up(digest)
        except FormatError:
            return self._give_up(digest)
        if self._follows(record):
            self.builder.apply(record, self.seq, digest)
        elif not self.seq or (self.seq % self.fmt.anchor_every and never_deleted(self.journal, self.seq)):
            # There can be no stray where no slot was ever deleted: the slot's own record is wrong. (This does not hold
            # for an anchor: it is right, and a stray just before it was mistaken for history. Slot 0 has no slot
            # before it.)
            self.builder.mark_damaged(self.seq, digest)
        else:
            raise _StaleError
        return True

    def _follows(self, record: Record) -> bool:
        """Whether the record continues what was read; otherwise the slot is a stray.

        Both kinds name the slot before them by its hash. An OPEN's term must be above the current one. A COMMIT's term
        must be the current one, and its nonce that of the term's OPEN. After a damaged slot, whose hash is unknown and
        which may have been an OPEN, a COMMIT may have a newer term.
        """
        catalog = self.builder.catalog
        if isinstance(record, OpenRecord):
            return self._continues(record) and record.term > catalog.term
        if record.term == catalog.term:
            return self._continues(record) and catalog.terms[catalog.term].nonce == record.nonce
        return self._after_damage() and record.term > catalog.term

    def _continues(self, record: Record) -> bool:
        """Whether the record names the slot before it, or that slot is damaged, so that its hash is unknown."""
        return record.previous == self.builder.catalog.last or self._after_damage()

    def _after_damage(self) -> bool:
        return self.builder.catalog.damage[-1:] == (self.seq - 1,)

    def _give_up(self, digest: str) -> bool:
        self.builder.mark_damaged(self.seq, digest)
        self.given_up = self.seq
        return True

    def _lost(self) -> bool:
        """Slot `seq` is absent: return True (and record it) if it was written and lost, False if it was never written.

        A higher slot is created only after this one. So if a higher one exists, and this one is still absent when it is
        read again, this one was lost, or it was deleted, which an anchor above it shows.
        """
        if self.above < self.seq:
            self.above = self._slot_above()
            if self.above < 0:
                return False
            if self.above - self.seq > WIDEST_GAP:
                raise CorruptLogError(
                    f"{self.backend.url}: {slot_key(self.above)} exists, but the {self.above - self.seq} slots before "
                    "it do not; if it is not part of this store remove it, otherwise restore them from a copy"
                )
            return self._take_slot()  # read again
        if not never_deleted(self.journal, self.seq):
            raise _StaleError
        self.builder.mark_damaged(self.seq)
        return True

    def _slot_above(self) -> int:
        """The lowest existing slot above `seq`, as far as known; -1: there is none."""
        candidates = [self.seq + 1]
        if self.look_above:
            listed = [seq for key in self.backend.list("log/") if (seq := slot_of(key)) is not None]
            candidates += sorted(seq for seq in listed if seq > self.seq + 1)
        return next((seq for seq in candidates if exists(self.backend, slot_key(seq))), -1)

    def _manifest(self, key: str, size: int) -> bytes:
        """A manifest's bytes; the caller compares its `size`."""
        self.reads += 1
        try:
            return self.backend.get(key, size)
        except KeyNotFoundError as error:
            # A manifest is deleted after its slot. If the slot is gone too, the view is stale; else it is lost.
            if not exists(self.backend, slot_key(self.seq)):
                raise _StaleError from error
            raise FormatError(f"{slot_key(self.seq)}: its manifest of {size} bytes, {key}, is missing") from error
