"""Reading every byte of a store and comparing it with its checksum.

No byte is unchecked: FORMAT, log slots, folds, pins and requests carry their own hash; a segment's header is hashed in
the log, its chunks in its header. What is damaged is reported with the checkpoints that need it; the rest stays usable.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import PurePath

from ckptstore.casualties import casualties
from ckptstore.checkpoint import CheckpointInfo, describe_checkpoint
from ckptstore.formats import texts
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.errors import CkptError, CorruptionError, FormatError, KeyNotFoundError, StorageError, UsageError
from ckptstore.formats.folds import decode_fold
from ckptstore.formats.records import FORMAT_KEY, CheckpointEntry, FormatFile, SegmentEntry, fold_of, slot_of
from ckptstore.planner import Plan, plan_all
from ckptstore.reading import Piece, SegmentReader, check_chunk, extents, run_all
from ckptstore.staging import Bytes, Staging
from ckptstore.store import Store, open_store
from ckptstore.view import exists, read

__all__ = ["Damage", "VerificationReport", "verify"]

BytesDone = Callable[[int, int], None]
"""Called with (bytes checked so far, bytes in all), from any thread."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that is not as it was written.

    Attributes:
        key: the object.
        what: what is wrong, with tensor and offset where they are known.
        checkpoints: REFs of the checkpoints that are lost with it.
    """

    key: str
    what: str
    checkpoints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VerificationReport:
    """What `verify` found.

    Attributes:
        damage: everything that is wrong; empty when the store is intact.
        restorable: REFs of checkpoints that can be restored, by term and step.
        lost: REFs of promised checkpoints that cannot.
        latest: the checkpoint to continue from: the newest restorable one, or None.
        orphans: segments that nothing refers to (crashed saves, gc's prey); not damage, and not checked.
        strangers: objects that are not part of a store.
        objects: how many objects were checked.
        nbytes: how many bytes were checked.
    """

    damage: tuple[Damage, ...]
    restorable: tuple[str, ...]
    lost: tuple[str, ...]
    latest: CheckpointInfo | None
    orphans: tuple[str, ...]
    strangers: tuple[str, ...]
    objects: int
    nbytes: int

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damage


@dataclass(slots=True)
class _Findings:
    """Collects damage from several threads."""

    total: int
    progress: BytesDone | None
    damage: dict[tuple[str, str], None] = field(default_factory=dict)
    bad_segments: set[str] = field(default_factory=set)  # of which nothing can be read
    bad_chunks: dict[str, set[int]] = field(default_factory=dict)  # segment -> where its damaged chunks begin
    objects: int = 0
    nbytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, key: str, error: CkptError, segment: str | None = None, chunks: Iterable[int] | None = None) -> None:
        with self.lock:
            self.damage[key, str(error).removeprefix(f"{key}: ")] = None
            if segment is not None and chunks is not None:
                self.bad_chunks.setdefault(segment, set()).update(chunks)
            elif segment is not None:
                self.bad_segments.add(segment)

    def done(self, nbytes: int, objects: int = 0) -> None:
        with self.lock:
            self.nbytes += nbytes
            self.objects += objects
            done = self.nbytes
        if self.progress is not None:
            self.progress(done, max(self.total, done))


def verify(
    store: Store | str | os.PathLike[str], *, progress: BytesDone | None = None, threads: int = 2
) -> VerificationReport:
    """Check every byte of a store.

    Args:
        store: a store, or its path or URL.
        progress: called as bytes are done.
        threads: reading threads.

    Raises:
        StoreNotFoundError: there is none.
        StorageError: the medium failed where nothing else can be said (a listing).
    """
    if threads < 1:
        raise UsageError(f"threads={threads}: at least 1 is needed")
    if not isinstance(store, Store):
        store = open_store(store)
    backend = store.backend
    keys = backend.list("")
    found = _Findings(0, progress)
    format_file = _format(store, keys, found)
    catalog = _history(store, format_file, keys, found)
    found.total = found.nbytes + sum(segment.size for segment in catalog.segments.values())
    staging = Staging.for_chunks(max(2, threads))
    with ThreadPoolExecutor(threads, thread_name_prefix="ckptstore-verify") as pool:
        for segment in sorted(catalog.segments.values(), key=lambda entry: (entry.term, entry.id)):
            _check_segment(store, segment, staging, pool, found)
    return _report(store, catalog, keys, found)


def _format(store: Store, keys: list[str], found: _Findings) -> FormatFile:
    """FORMAT, or what can be known without it, so that one bad byte there hides nothing else."""
    try:
        format_file = store.format
    except (CorruptionError, FormatError) as error:
        found.add(FORMAT_KEY, error)
        for key in keys:
            if slot_of(key) is not None:
                try:
                    run = texts.unseal(store.backend.get(key), what=key)["run"]
                except (CkptError, KeyError, TypeError):
                    continue
                return FormatFile(run=str(run))
        raise
    found.done(store.backend.size(FORMAT_KEY), 1)
    return format_file


def _history(store: Store, format_file: FormatFile, keys: list[str], found: _Findings) -> Catalog:
    """Every slot, fold, pin and request, whether the newest view needs it or not."""
    backend = store.backend

    def slot(key: str, data: bytes) -> object:
        seq = slot_of(key)
        if seq is None:
            raise FormatError(f"{key}: not the name of a log slot")
        return texts.decode_record(
            data, seq=seq, run=format_file.run, what=key, fetch=lambda manifest, _size: backend.get(manifest)
        )

    def fold(key: str, data: bytes) -> object:
        place = fold_of(key)
        if place is None:
            raise FormatError(f"{key}: not the name of a fold")
        return decode_fold(data, seq=place[0], run=format_file.run, digest16=place[1], what=key)

    checks: dict[str, Callable[[str, bytes], object]] = {
        "log": slot,
        "fold": fold,
        "pins": lambda key, data: texts.decode_pin(data, what=key),
        "req": lambda key, data: texts.decode_request(data, run=format_file.run, what=key),
    }
    for key in keys:
        check = checks.get(key.partition("/")[0])
        if check is None:
            continue
        try:
            data = backend.get(key)
            check(key, data)
            found.done(len(data), 1)
        except KeyNotFoundError as error:
            if exists(backend, key):
                found.add(key, CorruptionError(f"its manifest is missing: {error}"))
            # else removed since the listing: a pin that ended, a slot that was folded
        except (CorruptionError, FormatError, StorageError) as error:
            found.add(key, error)
    view = read(backend, format_file)
    for seq in view.catalog.damage:
        key = f"log/{seq:020d}"
        if key not in keys:
            found.add(key, CorruptionError("the slot is missing, and later ones exist"))
    return view.catalog


def _check_segment(
    store: Store, entry: SegmentEntry, staging: Staging, pool: ThreadPoolExecutor, found: _Findings
) -> None:
    try:
        reader = SegmentReader(store.backend, entry)
    except (CorruptionError, FormatError, StorageError) as error:
        found.add(entry.key, error, entry.id)
        return

    def check(extent: list[Piece], block: Bytes) -> None:
        begin = extent[0].chunk.offset
        end = extent[-1].chunk.offset + extent[-1].chunk.length
        data = block[begin % 4096 : begin % 4096 + end - begin]
        try:
            reader.source.read_into(begin, data.data)
        except (CorruptionError, StorageError) as error:
            if len(extent) > 1:  # one bad sector is no reason to give its neighbours up
                for piece in extent:
                    check([piece], block)
                return
            what = f"tensor {extent[0].tensor.name!r}: bytes {begin}..{end} of the file: {error}"
            found.add(entry.key, CorruptionError(what), entry.id, [begin])
            return
        for piece in extent:
            at = piece.chunk.offset - begin
            try:
                check_chunk(entry.key, piece, data[at : at + piece.chunk.length])
            except CorruptionError as error:
                found.add(entry.key, error, entry.id, [piece.chunk.offset])
        found.done(end - begin)

    def job(extent: list[Piece]) -> Callable[[], None]:
        def work() -> None:
            with staging.block() as block:
                check(extent, block)

        return work

    try:
        doc = reader.doc
        tensors = [tensor for step in doc.steps for tensor in doc.tensors.get(step, {}).values()]
        run_all(pool, [job(extent) for extent in extents(tensors)])
        found.done(entry.size - sum(tensor.stored for tensor in tensors), 1)
    finally:
        reader.close()


def _report(store: Store, catalog: Catalog, keys: list[str], found: _Findings) -> VerificationReport:
    bad = frozenset(found.bad_segments | found.bad_chunks.keys())
    restorable, lost = [], []
    latest: CheckpointEntry | None = None
    affected: dict[str, list[str]] = {}
    plans, intact = plan_all(catalog), plan_all(catalog, avoid=bad)
    stored = [plan for plan in plans.values() if isinstance(plan, Plan)]
    gone = casualties(store.backend, catalog, stored, found.bad_segments, found.bad_chunks)
    for node, entry in sorted(catalog.checkpoints.items()):
        planned = plans[node]
        if isinstance(planned, Plan) and (node not in gone or isinstance(intact[node], Plan)):
            restorable.append(entry.ref)
            latest = entry
            continue
        lost.append(entry.ref)
        if isinstance(planned, Plan):
            for segment in planned.segments:
                affected.setdefault(catalog.segments[segment].key, []).append(entry.ref)
    live = {entry.key for entry in catalog.segments.values()}
    manifests = {f"seg/{term:010d}/{identity}.json" for identity, (term, _) in catalog.manifests.items()}
    others = [key for key in keys if key.startswith("seg/") and key not in live | manifests]
    known = ("seg/", "log/", "fold/", "pins/", "req/", "probe/")
    return VerificationReport(
        damage=tuple(Damage(key, what, tuple(affected.get(key, ()))) for key, what in sorted(found.damage)),
        restorable=tuple(restorable),
        lost=tuple(lost),
        latest=None if latest is None else describe_checkpoint(catalog, latest),
        orphans=tuple(key for key in others if PurePath(key).suffix in (".safetensors", ".json")),
        strangers=tuple(key for key in keys if key != FORMAT_KEY and not key.startswith(known)),
        objects=found.objects,
        nbytes=found.nbytes,
    )
