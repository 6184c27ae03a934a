"""WRITER OPEN and COMMIT, step by step as the design page numbers them. READ is in `ckptstore.log.log_reader`.

- A slot is created if absent; who created it owns it. An opener then asks for the anchor above: if there is none, the
  slot was never deleted before, so this was the head of the log and the term stands.
- A term sends one byte string per slot, ever. So bytes that are found equal are one's own, whoever delivered them. (An
  attempt that provably made nothing, `StorageError.unsent`, has sent nothing.)
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
from ckptstore.formats.catalog import REACHED, REMOTE, Catalog, CatalogBuilder
from ckptstore.formats.checksums import xxh3_128
from ckptstore.formats.commit_checks import check_commit
from ckptstore.formats.record_text import (
    KNOWN_FEATURES,
    SLOT_LIMIT,
    decode_format,
    decode_record,
    encode_commit,
    encode_open,
    unseal,
)
from ckptstore.formats.records import (
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
"""What a new term continues from, or how to find it in the view that its OPEN is built on."""

_R = TypeVar("_R", OpenRecord, CommitRecord)

_ONE_WRITER: Final = "of the ranks of one job only one may open a writer (rank 0, say), or every one with group="
_TOGETHER: Final = 60.0
"""Seconds between two OPENs within which they are likely to be of one job."""


# ------------------------------------------------------------------------------------------------ creating a slot


def _send(backend: Backend, key: str, data: bytes, patience: Patience) -> bool:
    """Create-if-absent until it is certain who owns `key` -> whether it holds `data`.

    A refusal or an error says little: the answer to a create that took effect may be lost, and a store that repeats a
    request refuses its own success. So the object is read back, and what it holds decides.

    What was only read back is visible, not yet durable (its folder's fsync may be what failed), so it is settled before
    it is believed. If that fails it fails for good, and is not tried again.

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
            # Prevents: a term that gives itself up over its own slot, of which a part is there.
            mine = text_bytes(backend, key, len(data)) == data
        except KeyNotFoundError:
            pass  # absent: resend identical bytes
        except ForeignObjectError:
            return False  # longer, or no object at all: not what was sent
        except StorageError as error:
            doubt = error
        else:
            if mine:
                # Prevents: an acknowledged slot that a power cut forgets, because its create failed after the link.
                backend.settle(key[: key.rindex("/") + 1])
            return mine
        if done < patience.tries:
            patience.pause(done)
    if isinstance(doubt, KeyExistsError):
        raise StorageError(f"{backend.url}: {key} exists and does not, by turns") from doubt
    doubt.unsent = not sent
    raise doubt


def check_same_store(journal: Journal) -> None:
    """Refuse to send a slot to another run's store. Media that reach it through a handle cannot mistake it.

    Raises:
        StoreReplacedError: another store is there now, or none.
        FormatError, StorageError: that cannot be said.
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
    """Raise `StoreReplacedError` if a slot that was sent, and is not ours, holds the text of another run."""
    try:
        run = unseal(slot_bytes(journal.backend, journal.run, seq), what=slot_key(seq))["run"]
    except (CkptError, LookupError, TypeError):
        return  # damaged or gone: it says nothing
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
        info: who opens, for people.
        like: the OPEN of this term in the run's other tier, which is there already: this one is the same term.
        remote: URL of the store's other tier from now on; None: that of the term before.
        view: the log as it was read just now, with a look above its end (`View.looked_above`). The first try builds on
            it; if the log has grown since, the slot is taken, and the next try reads.

    Raises:
        CheckpointNotFoundError: the parent is not promised.
        ReadOnlyError: the backend is read-only, or the store has a feature that this version must not write.
        FencedError: other writers opened first, every time.
        CorruptLogError: from READ, or from `parent` (``latest`` behind a damaged slot); or what the parent builds on is
            lost with a damaged slot.
        StoreReplacedError: the store is another one now.
        StorageError: the medium failed; nothing was opened, or a term that nobody owns.
    """
    journal = _own(journal)
    backend = journal.backend
    for done in range(patience.tries + 1):
        # 1. READ, with a look above its end; t = max term + 1; the parent must be live in this view. Each try.
        # Prevents: a term above a gap, where the end of the log was lost and nobody has looked above it.
        if done or view is None or not view.looked_above:
            view = read(journal, None, patience, look_above=True)
        _check_writable(journal, view.catalog)
        chosen = _live_parent(backend, view.catalog, parent)
        crash_point("open.read")
        if view.end:
            # Prevents: a power cut that keeps this OPEN and loses a slot before it, which a writer killed between link
            # and fsync left visible: a gap in the log, and a parent that is gone.
            backend.settle("log/")
        # 2. Create log/e = OPEN{t, parent, nonce}. Another's bytes there: start over, after a jittered pause.
        record, data = _encoded(_opening(view.catalog, chosen, info, like, remote), view.end, journal.run)
        check_same_store(journal)
        mine = _send(backend, slot_key(view.end), data, patience)
        crash_point("open.created")
        if not mine:
            _check_same_run(journal, view.end)
        # 3. Unless e is an anchor, GET the anchor above e: present: void, start over with a new nonce.
        # Or the slot before it, which was torn and is not any more: its writer lives, and what it holds counts.
        if mine and never_deleted(journal, view.end) and not outdated(journal, view):
            crash_point("open.verified")
            return Term(journal, view, record, xxh3_128(data), patience)
        patience.pause(done)
    raise FencedError(
        f"{backend.url}: other writers opened a term first, {patience.tries + 1} times in a row; {_ONE_WRITER}"
    )


def _own(journal: Journal) -> Journal:
    """The store as a term holds it. Raises `ReadOnlyError`."""
    # A store that is deleted and created again gets another medium, and a term must stay with the one it has.
    own = Journal(journal.backend, journal.format)
    own.fold = journal.fold
    if own.backend.read_only:
        raise ReadOnlyError(f"{own.url}: read-only, a term cannot be opened")
    return own


def _live_parent(backend: Backend, catalog: Catalog, parent: Parent) -> CheckpointId | None:
    """What the term continues from in this view. Raises as `open_term`."""
    chosen = parent(catalog) if callable(parent) else parent
    if chosen is not None and not (chosen.node in catalog.checkpoints and catalog.restorable(chosen)):
        raise _no_parent(backend, catalog, chosen)
    return chosen


def _opening(
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


def _encoded(record: OpenRecord, seq: int, run: str) -> tuple[OpenRecord, bytes]:
    """What every reader will make of an OPEN, and its bytes."""
    data = encode_open(record, seq=seq, run=run)
    return _understood(data, seq, run, OpenRecord), data


def _no_parent(backend: Backend, catalog: Catalog, chosen: CheckpointId) -> CkptError:
    """Why no term can continue from there, and from where one can."""
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


def _understood(data: bytes, seq: int, run: str, kind: type[_R], manifest: bytes | None = None) -> _R:
    """What every reader will make of these bytes: checked before they are sent."""
    record = decode_record(data, seq=seq, run=run, what=slot_key(seq), fetch=lambda _key, _size: manifest or b"")
    assert isinstance(record, kind)
    return record


# ------------------------------------------------------------------------------------------------ COMMIT


class Term:
    """A term that this process owns. One thread commits at a time; the others wait.

    Attributes:
        number: the term.
        nonce: of its OPEN, which every record of it repeats.
        parent: the checkpoint it continues from.
        dead: what ended this term for good (`FencedError`, `CommitUnknownError`, `StoreReplacedError`); None while it
            may commit.
        fold_seq: the slot through which the newest fold that this term knows of goes; -1: none.
        journal: the store's medium and FORMAT file.
        patience: how long a doubtful create is tried again.
    """

    def __init__(self, journal: Journal, view: View, record: OpenRecord, digest: str, patience: Patience) -> None:
        """Use `open_term`, which has created the slot `view.end` with `record`, of bytes whose hash is `digest`."""
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
        """What this term has acknowledged. It changes with every commit: `view` gives a copy for another thread."""
        return self._builder.catalog

    @property
    def next_seq(self) -> int:
        """The slot of the next commit."""
        return self._next_seq

    @property
    def opened(self) -> OpenRecord:
        """The OPEN that began it."""
        return self._opened

    def view(self) -> View:
        """What this term has acknowledged, as a view that stays as it is."""
        with self._lock:
            return View(self._builder.snapshot(), self._next_seq, self.fold_seq)

    def commit(self, record: CommitRecord) -> int:
        """COMMIT, steps 2 to 4, of segments that are durable already -> the slot. On return the record is history.

        Args:
            record: of this term; its `nonce` and `previous` are filled in here. If it is too long for a slot it goes
                into a manifest by itself.

        Raises:
            FencedError: a newer term exists, or the log is no longer the one that this term wrote. This term is dead.
            StoreReplacedError: the store is another one now. This term is dead.
            CommitUnknownError: the record may or may not have landed, now or later. This term is dead: it must not
                delete anything, and only a new term finds out.
            StepOrderError, CheckpointNotFoundError, UsageError, FormatError: the record breaks a rule
                (`ckptstore.formats.commit_checks`). Nothing was sent; the term goes on.
            StorageError: the manifest or the slot could not be written, and no slot was sent; the term goes on.
        """
        with self._lock:
            if self.dead is not None:
                raise self.dead
            check_commit(self.catalog, record)
            seq = self._next_seq
            self._check_log_is_mine(seq)
            record = replace(self.catalog.with_highest(record), nonce=self.nonce, previous=self.catalog.last)
            data, manifest = encode_commit(record, seq=seq, run=self.journal.run, manifest=secrets.token_hex(16))
            record = _understood(data, seq, self.journal.run, CommitRecord, manifest)
            if manifest is not None and record.manifest is not None:
                # 1. (the last of it) What the slot points to is durable before the slot is sent.
                key = manifest_key(self.number, record.manifest)
                if not _send(self.journal.backend, key, manifest, self.patience):
                    raise StorageError(f"{self.journal.url}: {key} exists already")
            self._create_slot(seq, data)
            # 4. Acknowledge.
            self._builder.apply(record, seq, xxh3_128(data))
            self._next_seq = seq + 1
            crash_point("commit.acknowledged")
            return seq

    def _check_log_is_mine(self, seq: int) -> None:
        """Stop if the slot before `seq` is not the one that this term knows, where looking is cheap.

        Prevents: going on in a store that was put back from an older copy, or that has lost slots. What would be
        acknowledged then would stand above a gap or beside another writer's records, and every reader would refuse it.
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
            return  # a look that fails says nothing of the log; the commit itself will tell
        self.dead = FencedError(
            f"{self.journal.url}: term {self.number} is over: {key}, the last slot that this writer knows, {what}: the "
            "store was put back from a copy, or has lost slots; open it again to see what it holds"
        )
        raise self.dead

    def _create_slot(self, seq: int, data: bytes) -> None:
        # The term is in doubt from before the slot is sent until its fate is known, so that whatever interrupts this
        # (Ctrl-C, out of memory) leaves a term that never sends other bytes to the same slot.
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
            # Nobody has been sent these bytes, so the slot may get others: no space, no descriptor, no permission.
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
        """Stop, in doubt, if slot `seq` took so long that somebody has taken it for torn, and opened a term over it."""
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
            # Prevents: an acknowledged commit that the next term lacks, and that folds forget for good.
            self.dead = CommitUnknownError(
                f"{self.journal.url}: slot {seq} took longer to write than others wait for one, and somebody has "
                "opened a term after it: the commit may count or not; open the store again to find out"
            )
            raise self.dead

    def _winner(self, seq: int) -> str:
        """Who took the slot, as far as that can be read."""
        try:
            data = slot_bytes(self.journal.backend, self.journal.run, seq)
            record = decode_record(data, seq=seq, run=self.journal.run, what=slot_key(seq))
        except (FormatError, KeyNotFoundError, StorageError):
            return f"slot {seq} holds what this writer did not send"
        writer: Mapping[str, Any] = record.writer if isinstance(record, OpenRecord) else {}
        about = ", ".join(f"{name} {writer[name]}" for name in ("host", "pid") if name in writer)
        text = f"term {record.term} was opened after it" + (f" ({about})" if about else "")
        return f"{text}; {_ONE_WRITER}" if self._opened_together(record) else text

    def _opened_together(self, other: Record) -> bool:
        """Whether another process opened a term so soon after this one that both are likely to be of one job."""
        if not isinstance(other, OpenRecord) or abs(other.time - self._opened.time) > _TOGETHER:
            return False
        return any(other.writer.get(name) != self._opened.writer.get(name) for name in ("host", "pid"))
