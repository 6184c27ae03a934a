"""Verifies a store: reads every byte and compares it with its checksum, and every description with the log.

No byte is unchecked: FORMAT, log slots, folds, pins and requests carry their own hash; a segment's header is hashed in
the log, its chunks in its header. Then the segments' descriptions are compared with the log (`description_check`). With
``deep`` every state is decoded (`deep_verify`): a checkpoint reported as restorable was restored. Damage is reported
with the checkpoints that need the damaged object; the rest stays usable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from ckptstore.errors import (
    CkptError,
    CorruptionError,
    CorruptLogError,
    FormatError,
    IncompatibleFormatError,
    KeyNotFoundError,
    StorageError,
)
from ckptstore.formats.checksums import xxh3_128
from ckptstore.formats.history import record_text
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.folds import FOLD_LIMIT, decode_fold, intact
from ckptstore.formats.history.records import (
    FORMAT_KEY,
    CheckpointEntry,
    FormatFile,
    Node,
    fold_of,
    in_format,
    object_of,
    pin_of,
    request_of,
    slot_key,
    slot_of,
)
from ckptstore.formats.html_tables import HtmlTable
from ckptstore.host.option_checks import MOST_THREADS, whole
from ckptstore.host.progress import Progress, Tally, phase
from ckptstore.host.threads import default_threads
from ckptstore.log import refs
from ckptstore.log.checkpoint_info import CheckpointInfo, describe_checkpoint
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import LOOKS, overtaken, read
from ckptstore.log.partial_objects import exists, read_all_when_complete, slot_bytes
from ckptstore.log.stale_listings import every_object
from ckptstore.maintenance.verify.log_check import UNSAID, SlotHashes, check_folds_listed, check_log
from ckptstore.maintenance.verify.lost_checkpoints import lost_checkpoints
from ckptstore.maintenance.verify.one_checkpoint import restricted
from ckptstore.maintenance.verify.segment_scan import examine
from ckptstore.maintenance.verify.verify_findings import Damage, Findings, Unread
from ckptstore.restore.restore_plan import Plan, plan_all

__all__ = ["Damage", "Unread", "VerificationReport", "verify"]


@dataclass(frozen=True, slots=True)
class VerificationReport(HtmlTable):
    """The result of `verify`.

    Attributes:
        damage: everything that is wrong; empty if the store is intact.
        unread: objects that could not be read for reasons other than damage: their state is unknown.
        restorable: REFs of checkpoints that can be restored, by term and step; with ``deep`` they were.
        lost: REFs of promised checkpoints that cannot be restored.
        unknown: REFs of checkpoints whose state is unknown, because something could not be read.
        latest: the checkpoint to continue from: the newest restorable one, or None.
        orphans: segments that nothing refers to (crashed saves; gc deletes them); not damage, and not checked.
        strangers: foreign files that are not objects of the store: names that the format does not have (from an editor,
            a sync client, a user), or objects of another run (left by a writer whose store was deleted). Not damage:
            nothing reads or deletes them.
        objects: number of checked objects.
        nbytes: number of checked bytes.
        deep: whether everything was decoded.
        ref: REF of the requested checkpoint, if only its segments were checked; None: all.
    """

    damage: tuple[Damage, ...]
    unread: tuple[Unread, ...]
    restorable: tuple[str, ...]
    lost: tuple[str, ...]
    unknown: tuple[str, ...]
    latest: CheckpointInfo | None
    orphans: tuple[str, ...]
    strangers: tuple[str, ...]
    objects: int
    nbytes: int
    deep: bool
    ref: str | None = None

    @property
    def ok(self) -> bool:
        """Whether everything was read and nothing is damaged."""
        return not self.damage and not self.unread


def verify(
    journal: Journal,
    ref: str | int | None = None,
    *,
    deep: bool = False,
    progress: Progress | None = None,
    threads: int | None = None,
) -> VerificationReport:
    """Check every byte of a store, and its segments' descriptions.

    Args:
        journal: the store's journal.
        ref: check the log, and only the segments that this checkpoint can be restored from.
        deep: also decode and replay every checkpoint, each chain once. Memory: the descriptions of all that builds on
            one full, and for each thread a payload and a few chunks.
        progress: called with the number of checked bytes; with `deep` also of decoded ones.
        threads: number of threads that read and decode; None: up to four.

    Raises:
        StoreNotFoundError: there is no store.
        CheckpointNotFoundError: `ref` names no checkpoint.
        StorageError: the medium failed so that nothing can be verified (a listing, the log).
    """
    threads = default_threads() if threads is None else whole("threads", threads, 1, MOST_THREADS)
    for _ in range(LOOKS):
        judged: dict[int, str] = {}
        report = _verified(journal, ref, judged, progress, threads, deep=deep)
        # Prevents: an intact store called damaged, because its writer was slow: stopped for longer than a reader waits
        # for a torn slot, and done before this ends.
        if not overtaken(journal, judged):
            break
    return report


def _verified(
    journal: Journal,
    ref: str | int | None,
    judged: dict[int, str],
    progress: Progress | None,
    threads: int,
    *,
    deep: bool,
) -> VerificationReport:
    """Verify once. `judged` collects the slots that are reported as damaged, each with the hash of its bytes."""
    keys = every_object(journal.backend, UNSAID)
    found = Findings(Tally(progress))
    format_file = _format(journal, keys, found)
    journal = Journal(journal.backend, format_file)
    everything = catalog = _history(journal, keys, found, judged, progress)
    if ref is not None:
        target = refs.resolve(everything, ref)
        ref, catalog = target.ref, restricted(everything, target.node)
    planned = plan_all(catalog)
    plans = {node: plan for node, plan in planned.items() if isinstance(plan, Plan)}
    _check_log(catalog, planned, found)
    examine(journal.backend, journal.run, catalog, plans, found, threads, deep=deep)
    report = _report(journal, catalog, plans, keys, found, threads, deep=deep)
    if ref is None:
        return report
    committed = {segment.key for segment in everything.segments.values()}
    return replace(report, ref=ref, orphans=tuple(key for key in report.orphans if key not in committed))


def _format(journal: Journal, keys: list[str], found: Findings) -> FormatFile:
    """Return FORMAT, or what is known without it, so that one bad byte in it hides no other damage."""
    try:
        format_file = journal.format
    except (CorruptionError, FormatError) as error:
        found.add(FORMAT_KEY, error)
        for key in keys:
            if slot_of(key) is not None:
                try:
                    run = record_text.unseal(journal.backend.get(key, record_text.SLOT_LIMIT), what=key)["run"]
                except (CkptError, KeyError, TypeError):
                    continue
                return FormatFile(run=str(run))
        raise
    try:
        found.done(journal.backend.size(FORMAT_KEY), 1)
    except KeyNotFoundError:
        return Journal(journal.backend).format  # raises an error that says what is there instead
    return format_file


def _history(
    journal: Journal, keys: list[str], found: Findings, judged: dict[int, str], progress: Progress | None
) -> Catalog:
    """Check every slot, fold, pin and request, whether or not the newest view needs it. `judged`: see `_verified`."""
    backend = journal.backend
    slots: dict[int, SlotHashes] = {}

    def slot(key: str, data: bytes) -> None:
        seq = slot_of(key)
        assert seq is not None
        judged[seq] = xxh3_128(data)
        record = record_text.decode_record(data, seq=seq, run=journal.run, what=key, fetch=backend.get)
        slots[seq] = SlotHashes(judged.pop(seq), record.previous)

    def other(key: str, data: bytes) -> None:
        if (place := fold_of(key)) is not None:
            decode_fold(data, seq=place[0], run=journal.run, digest16=place[1], what=key)
        elif pin_of(key) is not None:
            record_text.decode_pin(data, what=key)
        else:
            record_text.decode_request(data, run=journal.run, what=key)

    def check(key: str, get: Callable[[], bytes], judge: Callable[[str, bytes], None]) -> None:
        try:
            data = get()
            judge(key, data)
            found.done(len(data), 1)
        except KeyNotFoundError as error:
            if exists(backend, key):
                found.add(key, CorruptionError(f"its manifest is missing: {error}"))
            # otherwise it was removed since the listing: a pin that ended, a slot that was folded
        except (CorruptionError, FormatError) as error:
            found.add(key, _with_remedy(key, error))
        except StorageError as error:
            found.add(key, error)

    for key in keys:
        if (seq := slot_of(key)) is not None:
            check(key, partial(slot_bytes, backend, journal.run, seq), slot)
    small = [key for key in keys if fold_of(key) or pin_of(key) or request_of(key)]
    # Writers and readers may be at work at the same time: a torn object may still be arriving.
    arriving = read_all_when_complete(
        small,
        lambda key: backend.get(key, FOLD_LIMIT if fold_of(key) else record_text.MANIFEST_LIMIT),
        lambda key, data: not intact(data, place[1]) if (place := fold_of(key)) else record_text.torn(data),
        lambda done, total: phase(progress, "waiting for files that may be half written", done, total, "files"),
    )
    for key, got in arriving:
        check(key, partial(_given, got), other)
    try:
        view = read(journal, look_above=True, tell=False)
    except CorruptLogError:
        check_folds_listed(journal.backend, keys)
        raise
    catalog = view.catalog
    if view.end - 1 in view.damage:
        judged[view.end - 1] = catalog.last
    check_log(journal, catalog, slots, keys, found)
    return catalog


def _with_remedy(key: str, error: CkptError) -> CkptError:
    """Add to an error of a pin or request, which no checkpoint needs, what it blocks and how to fix it."""
    if isinstance(error, IncompatibleFormatError):  # written by a newer version, and intact
        return error
    if pin_of(key) is not None:
        held = (
            "no checkpoint needs it. While it is there gc deletes nothing, because a damaged pin does not say what it "
            "claims. Its reader rewrites it within 30 s: if it stays damaged, delete this file"
        )
    elif request_of(key) is not None:
        held = (
            "no checkpoint needs it, and it blocks nothing. A writer refuses and deletes it; if no run is writing, "
            "delete this file, and repeat the command that made it"
        )
    else:
        return error
    return CorruptionError(f"{str(error).removeprefix(f'{key}: ')}; {held}")


def _given(found: bytes | CkptError) -> bytes:
    if isinstance(found, CkptError):
        raise found
    return found


def _check_log(catalog: Catalog, planned_all: Mapping[Node, Plan | CorruptionError], found: Findings) -> None:
    """Report checkpoints that the log promises but cannot restore. If slots are damaged, these are the cause."""
    if catalog.damage:
        return
    for node, planned in planned_all.items():
        if not isinstance(planned, Plan):
            found.add(slot_key(catalog.slots.get(node, catalog.next_seq - 1)), planned)


def _report(
    journal: Journal,
    catalog: Catalog,
    plans: dict[Node, Plan],
    keys: list[str],
    found: Findings,
    threads: int,
    *,
    deep: bool,
) -> VerificationReport:
    gone = lost_checkpoints(journal, catalog, plans, found, threads)
    restorable: list[str] = []
    lost: list[str] = []
    unknown: list[str] = []
    latest: CheckpointEntry | None = None
    affected: dict[str, list[str]] = {}
    for node, entry in sorted(catalog.checkpoints.items()):
        planned = plans.get(node)
        if planned is not None and node not in gone.nodes and node not in gone.unknown:
            restorable.append(entry.ref)
            latest = entry
            continue
        segments = planned.segments if planned is not None else ()
        (unknown if node in gone.unknown else lost).append(entry.ref)
        for segment in segments:
            affected.setdefault(catalog.segments[segment].key, []).append(entry.ref)
    live = {entry.key for entry in catalog.segments.values()}
    manifests = {f"seg/{term:010d}/{identity}.json" for identity, (term, _) in catalog.manifests.items()}
    others = [key for key in keys if object_of(key) is not None and key not in live | manifests | found.strangers]
    return VerificationReport(
        damage=tuple(Damage(key, what, tuple(affected.get(key, ()))) for key, what in sorted(found.damage)),
        unread=tuple(Unread(key, what, tuple(affected.get(key, ()))) for key, what in sorted(found.unread.items())),
        restorable=tuple(restorable),
        lost=tuple(lost),
        unknown=tuple(unknown),
        latest=None if latest is None else describe_checkpoint(catalog, latest),
        orphans=tuple(others),
        strangers=tuple(
            key for key in keys if key in found.strangers or not (in_format(key) or key.startswith("probe/"))
        ),
        objects=found.objects,
        nbytes=found.nbytes,
        deep=deep,
    )
