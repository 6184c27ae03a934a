"""Rebuilds a log in another place: the same terms and checkpoints, in new slots (formats/SPEC.md 10, COPIES).

While the copy is being made the place has an object ``COPYING`` and no FORMAT. So it is not a store: it is not read,
not written to, and not mistaken for a store that lost its FORMAT file. FORMAT comes last. After a crash the same
request continues after the existing slots: the segments that they name are durable.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from ckptstore.backends.base import Backend
from ckptstore.errors import CkptError, KeyExistsError, KeyNotFoundError, ReadOnlyError, StorageError, UsageError
from ckptstore.formats.checksums import xxh3_128
from ckptstore.formats.history.catalog import Catalog, CatalogBuilder
from ckptstore.formats.history.record_text import encode_commit, encode_format, encode_open, seal, unseal
from ckptstore.formats.history.records import (
    COPYING_KEY,
    FORMAT_KEY,
    CommitRecord,
    FormatFile,
    OpenRecord,
    Record,
    manifest_key,
    object_of,
    slot_key,
)
from ckptstore.host.crash_points import crash_point
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import View, never_deleted, read
from ckptstore.log.partial_objects import opened_over, text_bytes

__all__ = ["CopyOrigin", "DamagedCopyError", "LogCopy", "TakenError", "is_begun"]


class TakenError(UsageError):
    """Another process has added to this place: read what it added before anything else."""


class DamagedCopyError(UsageError):
    """The log at the place has a slot that is damaged or missing: nothing is added to it."""


@dataclass(frozen=True, slots=True)
class CopyOrigin:
    """The source of a copy, as ``COPYING`` records it.

    Attributes:
        format: FORMAT of the store that is made; it is the one of the run.
        how: ``copy`` or ``repair``.
        what: the request, so that a different request does not continue this one's unfinished copy.
    """

    format: FormatFile
    how: str
    what: str

    def text(self) -> bytes:
        """The contents of ``COPYING``."""
        return seal({"ckptstore": "copying", "run": self.format.run, "how": self.how, "what": self.what})


class LogCopy:
    """The log that is being made. Only one process at a time makes one in a folder (`exclusion`).

    Attributes:
        backend: the medium of the copy.
        begun: False if the place was already a complete store of this run, to which records are added.
    """

    def __init__(
        self,
        backend: Backend,
        origin: CopyOrigin,
        since: View | None = None,
        on_record: Callable[[LogCopy], object] = lambda _replica: None,
    ) -> None:
        """Read what the place has, and claim it if it is empty.

        Args:
            since: an earlier view of a place that was a complete store and still is: only later records are read.
            on_record: called after each record that was added.

        Raises:
            UsageError: something else is there: another run's store, an unfinished copy of something else, files; or
                the place is inside another store.
            DamagedReplicaError: a slot at the place is damaged or missing.
            CorruptLogError: the store at the place is damaged.
            ReadOnlyError, StorageError, UnsupportedBackendError: it cannot be written, or not safely.
        """
        self.backend = backend
        self._origin = origin
        if backend.read_only:
            raise ReadOnlyError(f"{backend.url}: read-only, nothing can be copied to it")
        self._journal = Journal(backend, origin.format)
        self.begun = self._must_copy() if since is None else False
        # No warning: damage is refused here, and a copy under construction has segments before their terms.
        view = read(self._journal, since, look_above=True if since is None else None, tell=False)
        if view.damage:
            raise DamagedCopyError(
                f"{backend.url}: slot {view.damage[0]} of the copy that is there is damaged or missing; delete the "
                "copy, and copy again"
            )
        if view.end:
            backend.settle("log/")  # a killed process may have left a slot that is visible but not durable
        self._builder = CatalogBuilder(view.catalog)
        self._next = view.end
        self._fold_seq = view.fold_seq
        self._on_record = on_record

    def view(self) -> View:
        """The current state of the log, as a view that does not change."""
        return View(self._builder.snapshot(), self._next, self._fold_seq)

    @property
    def catalog(self) -> Catalog:
        """The current state of the log. Changes with every record."""
        return self._builder.catalog

    def _must_copy(self) -> bool:
        """Whether a copy must be started or continued here; False: there is a complete store of the run."""
        backend, run = self.backend, self._origin.format.run
        marker, wanted = _marker(backend), self._origin.text()
        if marker not in (None, wanted):
            raise UsageError(
                f"{backend.url}: an unfinished copy of something else is there (or of other checkpoints); finish it "
                "with the command that began it, or delete it"
            )
        try:
            there = Journal(backend).format
        except CkptError as error:
            if marker is None and (strangers := [key for key in backend.list("") if not key.startswith("probe/")]):
                if _marker(backend) is not None:  # of a process that has started since
                    return self._must_copy()
                raise UsageError(
                    f"{backend.url}: not empty (it holds {strangers[0]!r}), and no unfinished copy; give an empty place"
                ) from error
        else:
            if there.run != run:
                raise UsageError(f"{backend.url}: there is the store of another run, {there.run}, not {run}")
            if self._origin.how != "copy" and marker is None:
                raise UsageError(f"{backend.url}: there is a store already; give an empty place")
            return False
        if marker is None:
            Journal(backend).check_outside()
            backend.probe()
            try:
                backend.create(COPYING_KEY, wanted)
            except KeyExistsError:  # another process was faster, perhaps with another request
                return self._must_copy()
            crash_point("copy.claimed")
            with contextlib.suppress(KeyNotFoundError):
                backend.size(FORMAT_KEY)
                # Prevents: mistaking a store that others have completed meanwhile for one that is still to be made.
                backend.delete(COPYING_KEY)
                return self._must_copy()
        return True

    def open(self, record: OpenRecord) -> None:
        """Append an OPEN. Raises as `commit`."""
        record = replace(record, previous=self.catalog.last)
        self._append(record, encode_open(record, seq=self._next, run=self._origin.format.run))

    def commit(self, record: CommitRecord) -> None:
        """Append a COMMIT of the newest term; its segments are durable. On return the COMMIT is durable, too.

        Raises:
            TakenError: another process writes to this place.
            FormatError: the record is too long.
            StorageError: the medium failed.
        """
        nonce = self.catalog.terms[record.term].nonce
        record = replace(self.catalog.with_highest(record), nonce=nonce, previous=self.catalog.last)
        run = self._origin.format.run
        data, manifest = encode_commit(record, seq=self._next, run=run, manifest=secrets.token_hex(16))
        if manifest is not None:
            key = slot_key(self._next)
            record = replace(record, manifest=_manifest_of(data, key))
            self.backend.create(manifest_key(record.term, record.manifest or ""), manifest)
        self._append(record, data)

    def _append(self, record: Record, data: bytes) -> None:
        key = slot_key(self._next)
        crash_point("replica.before-slot")
        try:
            self.backend.create(key, data)
        except StorageError as error:
            # It may exist all the same, also if the error says that it does; a later call reads what is there.
            if not self._was_created(key, data):
                if not isinstance(error, KeyExistsError):
                    raise
                raise TakenError(
                    f"{self.backend.url}: another process writes to this place ({key} is there)"
                ) from error
        if not never_deleted(self._journal, self._next):
            # Prevents: trusting a record that landed where a folded slot had been deleted meanwhile.
            raise TakenError(f"{self.backend.url}: another process writes to this place ({key} was deleted)")
        if opened_over(self.backend, self._next):
            # Prevents: acknowledging a record that the next term lacks, because its slot was torn for too long.
            raise TakenError(
                f"{self.backend.url}: another process writes to this place (it continued after {key}, not yet whole)"
            )
        crash_point("replica.slot-created")
        self._builder.apply(record, self._next, xxh3_128(data))
        self._next += 1
        self._on_record(self)

    def _was_created(self, key: str, data: bytes) -> bool:
        try:
            mine = text_bytes(self.backend, key) == data
        except CkptError:
            return False
        if mine:
            self.backend.settle("log/")
        return mine

    def finish(self) -> None:
        """Turn the copy into a store: create FORMAT, then delete ``COPYING``. Raises `StorageError`.

        In a folder this also deletes what a killed process left below ``seg/``. In a bucket that process may be alive
        and may name those objects next.
        """
        if self.begun:
            if self.backend.anchored:
                self._sweep()
            self.backend.settle("log/")
            crash_point("copy.before-format")
            with contextlib.suppress(KeyExistsError):
                self.backend.create(FORMAT_KEY, encode_format(self._origin.format))
        crash_point("copy.finished")
        self.backend.delete(COPYING_KEY)

    def _sweep(self) -> None:
        there = self.catalog
        for key in self.backend.list("seg/"):
            place = object_of(key)
            # Prevents: deleting what a writer has saved here after another process that made the same copy finished
            # before this one. A writer's term is above all terms that are copied.
            if place is None or place[0] > there.term:
                continue
            if place[1] not in there.segments and place[1] not in there.manifests:
                self.backend.delete(key)


def is_begun(backend: Backend, origin: CopyOrigin) -> bool:
    """Whether a copy from there was started in this place and is not finished. Raises `StorageError`."""
    return _marker(backend) == origin.text()


def _marker(backend: Backend) -> bytes | None:
    try:
        return text_bytes(backend, COPYING_KEY)
    except KeyNotFoundError:
        return None


def _manifest_of(data: bytes, key: str) -> str:
    """The id of the manifest that a slot points to."""
    identity: str = unseal(data, what=key)["manifest"]["id"]
    return identity
