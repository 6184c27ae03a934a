"""WRITER OPEN and COMMIT, step by step as formats/SPEC.md 10 numbers them. READ is in `ckptstore.log.log_reader`.

- A slot is created if absent; its creator owns it. A process that opens a term then asks for the anchor above: if there
  is none, the slot was never deleted before, so this was the head of the log and the term is valid.
- A term sends one byte string per slot, ever. So equal bytes are its own, whichever attempt delivered them. (An attempt
  that provably created nothing, `StorageError.unsent`, has sent nothing.)
- Only an OPEN can come between two commits of a term, and OPENs are never deleted: a fenced writer always finds out.

``tools/protocol`` explores these rules; change them only together.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from ckptstore.backends.base import Backend
from ckptstore.errors import (
    CheckpointNotFoundError,
    CkptError,
    CommitUnknownError,
    CorruptLogError,
    FencedError,
    ForeignObjectError,
    FormatError,
    KeyExistsError,
    KeyNotFoundError,
    ReadOnlyError,
    StorageError,
    StoreReplacedError,
    WriterError,
)
from ckptstore.formats.checksums import xxh3_128
from ckptstore.formats.history.catalog import REACHED, REMOTE, Catalog, CatalogBuilder
from ckptstore.formats.history.commit_checks import check_commit
from ckptstore.formats.history.record_text import (
    KNOWN_FEATURES,
    SLOT_LIMIT,
    decode_format,
    decode_record,
    encode_commit,
    encode_open,
    unseal,
)
from ckptstore.formats.history.records import (
    FORMAT_KEY,
    CheckpointId,
    CommitRecord,
    OpenRecord,
    Record,
    manifest_key,
    ref_of,
    slot_key,
)
from ckptstore.host.crash_points import crash_point
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import PATIENT, Patience, View, never_deleted, outdated, read
from ckptstore.log.partial_objects import opened_over, slot_bytes, text_bytes

__all__ = ["Parent", "Patience", "Term", "View", "open_term", "read"]

Parent = CheckpointId | None | Callable[[Catalog], CheckpointId | None]
"""The checkpoint that a new term continues from, or a function that finds it in the view that its OPEN is built on."""

_R = TypeVar("_R", OpenRecord, CommitRecord)

_ONE_WRITER: Final = "of the ranks of one job only one may open a writer (rank 0, say), or every one with group="
_SAME_JOB_SECONDS: Final = 60.0
"""Seconds between two OPENs within which they probably belong to one job."""


# ------------------------------------------------------------------------------------------------ creating a slot


def _send(backend: Backend, key: str, data: bytes, patience: Patience) -> bool:
    """Create-if-absent until it is certain which process owns `key` -> whether it holds `data`.

    A refusal or an error says little: the answer to a create that took effect may be lost, and a store that repeats a
    request refuses its own success. So the object is read back, and its contents decide.

    An object that was only read back is visible, but not yet durable (the fsync of its folder may be what failed). So
    it is made durable before it counts. If that fails, the failure is final, and is not retried.

    Raises:
        StorageError: still unknown after every try. The create may land at any later time; not if `unsent` says that
            no try has sent anything.
    """
    sent = False
    for done in range(patience.tries + 1):
        try:
            backend.create(key, data)
        except StorageError as error:  # KeyExistsError (412, 409), a timeout, EIO ...: GET the slot
            doubt = error
            sent = sent or not error.unsent
        else:
            return True
        try:
            # Prevents: a term that gives up because of its own slot, of which only a part is visible.
            mine = text_bytes(backend, key, len(data)) == data
        except KeyNotFoundError:
            pass  # absent: resend identical bytes
        except ForeignObjectError:
            return False  # longer, or no object at all: not what was sent
        except StorageError as error:
            doubt = error
        else:
            if mine:
                # Prevents: an acknowledged slot that a power cut removes, because its create failed after the link.
                backend.settle(key[: key.rindex("/") + 1])
            return mine
        if done < patience.tries:
            patience.pause(done)
    if isinstance(doubt, KeyExistsError):
        raise StorageError(f"{backend.url}: {key} exists and does not exist in turn") from doubt
    doubt.unsent = not sent
    raise doubt


def check_same_store(journal: Journal) -> None:
    """Refuse to send a slot to another run's store. Media that are reached through a handle cannot mistake it.

    Raises:
        StoreReplacedError: another store is there now, or none.
        FormatError, StorageError: this cannot be determined.
    """
    backend = journal.backend
    if backend.anchored:
        return
    try:
        run = decode_format(text_bytes(backend, FORMAT_KEY)).run
    except KeyNotFoundError as error:
        raise StoreReplacedError(f"{backend.url}: the store was deleted; nothing was committed") from error
    if run != journal.run:
        raise StoreReplacedError(f"{backend.url}: the store was replaced by that of run {run}; nothing was committed")


def _check_same_run(journal: Journal, seq: int) -> None:
    """Raise `StoreReplacedError` if the slot, which another process created, holds a record of another run."""
    try:
        run = unseal(slot_bytes(journal.backend, journal.run, seq), what=slot_key(seq))["run"]
    except (CkptError, LookupError, TypeError):
        return  # damaged or gone: nothing is known
    if run != journal.run:
        raise StoreReplacedError(
            f"{journal.url}: the store was replaced: slot {seq} is of run {run}, not {journal.run}; "
            "nothing was committed"
        )


# ------------------------------------------------------------------------------------------------ WRITER OPEN


def open_term(
    journal: Journal,
    parent: Parent,
    info: Mapping[str, Any] | None = None,
    patience: Patience = PATIENT,
    *,
    like: OpenRecord | None = None,
    remote: str | None = None,
    view: View | None = None,
) -> Term:
    """WRITER OPEN: begin a new term, which fences every earlier one.

    Args:
        parent: the checkpoint to continue from, None for none, or a function that chooses it in the view that the OPEN
            is built on (it may be called several times).
        info: description of the writer, for people.
        like: the OPEN of this term in the run's other tier, which exists already: this one is the same term.
        remote: URL of the store's other tier from now on; None: that of the previous term.
        view: the log as it was read just now, with a look above its end (`View.looked_above`). The first try builds on
            it; if the log has grown since, the slot is taken, and the next try reads again.

    Raises:
        CheckpointNotFoundError: the parent is not promised.
        ReadOnlyError: the backend is read-only, or the store has a feature that this version must not write.
        FencedError: other writers opened first, every time.
        CorruptLogError: from READ, or from `parent` (``latest`` behind a damaged slot); or what the parent builds on is
            lost with a damaged slot.
        StoreReplacedError: the store is another one now.
        StorageError: the medium failed; no term was opened, or one that no process owns.
    """
    journal = _term_journal(journal)
    backend = journal.backend
    for done in range(patience.tries + 1):
        # 1. READ, with a look above its end; t = max term + 1; the parent must be live in this view. Each try.
        # Prevents: a term above a gap, because the end of the log was lost and nothing looked above it.
        if done or view is None or not view.looked_above:
            view = read(journal, None, patience, look_above=True)
        _check_writable(journal, view.catalog)
        chosen = _live_parent(backend, view.catalog, parent)
        crash_point("open.read")
        if view.end:
            # Prevents: a power cut that keeps this OPEN and loses a slot before it, which a writer killed between link
            # and fsync left visible: a gap in the log, and a lost parent.
            backend.settle("log/")
        # 2. Create log/e = OPEN{t, parent, nonce}. Another's bytes there: start over, after a jittered pause.
        record, data = _encoded_open(_open_record(view.catalog, chosen, info, like, remote), view.end, journal.run)
        check_same_store(journal)
        mine = _send(backend, slot_key(view.end), data, patience)
        crash_point("open.created")
        if not mine:
            _check_same_run(journal, view.end)
        # 3. Unless e is an anchor, GET the anchor above e: present: void, start over with a new nonce.
        # The same if the slot before it was torn and is not any more: its writer is alive, and its record counts.
        if mine and never_deleted(journal, view.end) and not outdated(journal, view):
            crash_point("open.verified")
            return Term(journal, view, record, xxh3_128(data), patience)
        patience.pause(done)
    raise FencedError(
        f"{backend.url}: other writers opened a term first, {patience.tries + 1} times in a row; {_ONE_WRITER}"
    )


def _term_journal(journal: Journal) -> Journal:
    """The term's own journal of the store. Raises `ReadOnlyError`."""
    # If a store is deleted and created again, the caller's journal gets another medium. A term must keep its own.
    own = Journal(journal.backend, journal.format)
    own.fold = journal.fold
    if own.backend.read_only:
        raise ReadOnlyError(f"{own.url}: read-only, a term cannot be opened")
    return own


def _live_parent(backend: Backend, catalog: Catalog, parent: Parent) -> CheckpointId | None:
    """The checkpoint that the term continues from in this view. Raises as `open_term`."""
    chosen = parent(catalog) if callable(parent) else parent
    if chosen is not None and not (chosen.node in catalog.checkpoints and catalog.restorable(chosen)):
        raise _parent_error(backend, catalog, chosen)
    return chosen


def _open_record(
    catalog: Catalog,
    parent: CheckpointId | None,
    info: Mapping[str, Any] | None,
    like: OpenRecord | None,
    remote: str | None,
) -> OpenRecord:
    """An OPEN that continues this catalog, with a new nonce, or as the same term as `like`."""
    newest = max(catalog.term, catalog.lost)
    if like is not None and like.term <= newest:
        raise FencedError(f"term {like.term} of the other tier: this one has term {newest} already")
    before = catalog.terms.get(catalog.term)
    remote = remote or (None if before is None else before.extra.get(REMOTE))
    extra: dict[str, Any] = {} if remote is None else {REMOTE: remote}
    if (reached := catalog.reached()) is not None:
        extra[REACHED] = reached
    return OpenRecord(
        newest + 1 if like is None else like.term,
        parent,
        secrets.token_hex(16) if like is None else like.nonce,
        time.time() if like is None else like.time,
        dict(info or {}),
        previous=catalog.last,
        extra=extra,
    )


def _encoded_open(record: OpenRecord, seq: int, run: str) -> tuple[OpenRecord, bytes]:
    """The OPEN as every reader will decode it, and its bytes."""
    data = encode_open(record, seq=seq, run=run)
    return _decode_sent(data, seq, run, OpenRecord), data


def _parent_error(backend: Backend, catalog: Catalog, chosen: CheckpointId) -> CkptError:
    """The error that says why no term can continue from there, and from which checkpoint one can."""
    entry = catalog.checkpoints.get(chosen.node)
    if entry is None or entry.state != chosen.state:
        return CheckpointNotFoundError(f"{backend.url}: parent {chosen.ref} is not in the store")
    slots = ", ".join(str(seq) for seq in sorted(catalog.damage)[:3])
    why = f" with log slot {slots}, which is damaged" if slots else ""
    newest = max((entry.node for entry in catalog.checkpoints.values() if catalog.restorable(entry.id)), default=None)
    way = "none can" if newest is None else f"the newest that can is {ref_of(newest)}: name it as parent"
    return CorruptLogError(
        f"{backend.url}: parent {chosen.ref} cannot be restored, what it builds on is lost{why}; {way}"
    )


def _check_writable(journal: Journal, catalog: Catalog) -> None:
    needs = catalog.ro_compat.union(journal.format.features.get("write", ())) - KNOWN_FEATURES
    if needs:
        raise ReadOnlyError(
            f"{journal.url}: writing needs {', '.join(sorted(needs))}, which this version does not know; "
            "it can be read, not written"
        )


def _decode_sent(data: bytes, seq: int, run: str, kind: type[_R], manifest: bytes | None = None) -> _R:
    """The record as every reader will decode these bytes: checked before they are sent."""
    record = decode_record(data, seq=seq, run=run, what=slot_key(seq), fetch=lambda _key, _size: manifest or b"")
    assert isinstance(record, kind)
    return record


# ------------------------------------------------------------------------------------------------ COMMIT


class Term:
    """A term that this process owns. One thread commits at a time; the others wait.

    Attributes:
        number: the term.
        nonce: the nonce of its OPEN, which every record of the term repeats.
        parent: the checkpoint that it continues from.
        dead: the error that ended this term for good (`FencedError`, `CommitUnknownError`, `StoreReplacedError`); None
            while it may commit.
        fold_seq: the last slot of the newest fold that this term knows of; -1: none.
        journal: the store's medium and FORMAT file.
        patience: how often a doubtful create is retried.
    """

    def __init__(self, journal: Journal, view: View, record: OpenRecord, digest: str, patience: Patience) -> None:
        """Use `open_term`: it created the slot `view.end` with `record`, from bytes with the hash `digest`."""
        self.journal = journal
        self.number = record.term
        self.nonce = record.nonce
        self.parent = record.parent
        self.patience = patience
        self.fold_seq = view.fold_seq
        self.dead: WriterError | None = None
        self._builder = CatalogBuilder(view.catalog)
        self._builder.apply(record, view.end, digest)
        self._next_seq = view.end + 1
        self._opened = record
        self._lock = threading.Lock()

    @property
    def catalog(self) -> Catalog:
        """What this term has acknowledged. It changes with every commit: `view` returns a copy for another thread."""
        return self._builder.catalog

    @property
    def next_seq(self) -> int:
        """The slot of the next commit."""
        return self._next_seq

    @property
    def opened(self) -> OpenRecord:
        """The OPEN that began the term."""
        return self._opened

    def view(self) -> View:
        """What this term has acknowledged, as a view that does not change."""
        with self._lock:
            return View(self._builder.snapshot(), self._next_seq, self.fold_seq)

    def commit(self, record: CommitRecord) -> int:
        """COMMIT, steps 2 to 4; the segments are durable already -> the slot. On return the record is committed.

        Args:
            record: a record of this term; its `nonce` and `previous` are filled in here. If it is too long for a slot
                it is put into a manifest.

        Raises:
            FencedError: a newer term exists, or the log is no longer the one that this term wrote. This term is dead.
            StoreReplacedError: the store is another one now. This term is dead.
            CommitUnknownError: the record may or may not have landed, now or later. This term is dead: it must not
                delete anything, and only a new term finds out.
            StepOrderError, CheckpointNotFoundError, UsageError, FormatError: the record breaks a rule
                (`ckptstore.formats.history.commit_checks`). Nothing was sent; the term continues.
            StorageError: the manifest or the slot could not be written, and no slot was sent; the term continues.
        """
        with self._lock:
            if self.dead is not None:
                raise self.dead
            check_commit(self.catalog, record)
            seq = self._next_seq
            self._check_last_slot(seq)
            record = replace(self.catalog.with_highest(record), nonce=self.nonce, previous=self.catalog.last)
            data, manifest = encode_commit(record, seq=seq, run=self.journal.run, manifest=secrets.token_hex(16))
            record = _decode_sent(data, seq, self.journal.run, CommitRecord, manifest)
            if manifest is not None and record.manifest is not None:
                # 1. (its last part) What the slot points to is durable before the slot is sent.
                key = manifest_key(self.number, record.manifest)
                if not _send(self.journal.backend, key, manifest, self.patience):
                    raise StorageError(f"{self.journal.url}: {key} exists already")
            self._create_slot(seq, data)
            # 4. Acknowledge.
            self._builder.apply(record, seq, xxh3_128(data))
            self._next_seq = seq + 1
            crash_point("commit.acknowledged")
            return seq

    def _check_last_slot(self, seq: int) -> None:
        """Raise if the slot before `seq` is not the one that this term knows, if the check is cheap.

        Prevents: continuing in a store that was restored from an older copy, or that has lost slots. Commits would then
        be above a gap or among another writer's records, and every reader would refuse them.
        """
        if not self.journal.backend.cheap_looks:
            return
        key = slot_key(seq - 1)
        try:
            if xxh3_128(self.journal.backend.get(key, SLOT_LIMIT)) == self.catalog.last:
                return
            what = "holds other bytes"
        except KeyNotFoundError:
            what = "is gone"
        except StorageError:
            return  # a failed look says nothing about the log; the commit itself will find out
        self.dead = FencedError(
            f"{self.journal.url}: term {self.number} is over: {key}, the last slot that this writer knows, {what}: the "
            "store was put back from a copy, or has lost slots; open it again to see what it holds"
        )
        raise self.dead

    def _create_slot(self, seq: int, data: bytes) -> None:
        # The term is in doubt from before the slot is sent until its outcome is known, so that an interruption (Ctrl-C,
        # out of memory) leaves a term that never sends other bytes to the same slot.
        try:
            check_same_store(self.journal)
        except StoreReplacedError as error:
            self.dead = error
            raise
        self.dead = doubt = CommitUnknownError(
            f"{self.journal.url}: slot {seq} was sent and may or may not be committed; open the store again to find out"
        )
        crash_point("commit.before-create")
        try:
            # 2. Create the next slot if absent.
            # 3. On 412, 409, timeout, EIO: GET the slot; absent: resend identical bytes, bounded.
            mine = _send(self.journal.backend, slot_key(seq), data, self.patience)
        except StorageError as error:
            if not error.unsent:
                raise doubt from error
            # These bytes were never sent, so the slot may get others: no space, no descriptor, no permission.
            self.dead = None
            raise
        crash_point("commit.created")
        if not mine:
            # 3. Other bytes: a newer term owns the slot. Stop for good.
            try:
                _check_same_run(self.journal, seq)
            except StoreReplacedError as error:
                self.dead = error
                raise
            self.dead = FencedError(f"{self.journal.url}: term {self.number} is over: {self._winner(seq)}")
            raise self.dead
        self._check_not_opened_over(seq, doubt)
        self.dead = None

    def _check_not_opened_over(self, seq: int, doubt: CommitUnknownError) -> None:
        """Raise `doubt` if slot `seq` took so long to write that another process opened a term over it."""
        for done in range(self.patience.tries + 1):
            try:
                over = opened_over(self.journal.backend, seq)
            except StorageError as error:
                if done == self.patience.tries:
                    raise doubt from error
                self.patience.pause(done)
            else:
                break
        if over:
            # Prevents: an acknowledged commit that the next term lacks, and that folds drop for good.
            self.dead = CommitUnknownError(
                f"{self.journal.url}: slot {seq} took longer to write than others wait for one, and another writer has "
                "opened a term after it: the commit may count or not; open the store again to find out"
            )
            raise self.dead

    def _winner(self, seq: int) -> str:
        """A text that names the writer that took the slot, as far as it is readable."""
        try:
            data = slot_bytes(self.journal.backend, self.journal.run, seq)
            record = decode_record(data, seq=seq, run=self.journal.run, what=slot_key(seq))
        except (FormatError, KeyNotFoundError, StorageError):
            return f"slot {seq} holds what this writer did not send"
        writer: Mapping[str, Any] = record.writer if isinstance(record, OpenRecord) else {}
        about = ", ".join(f"{name} {writer[name]}" for name in ("host", "pid") if name in writer)
        text = f"term {record.term} was opened after it" + (f" ({about})" if about else "")
        return f"{text}; {_ONE_WRITER}" if self._same_job(record) else text

    def _same_job(self, other: Record) -> bool:
        """Whether another process opened a term so soon after this one that both probably belong to one job."""
        if not isinstance(other, OpenRecord) or abs(other.time - self._opened.time) > _SAME_JOB_SECONDS:
            return False
        return any(other.writer.get(name) != self._opened.writer.get(name) for name in ("host", "pid"))
