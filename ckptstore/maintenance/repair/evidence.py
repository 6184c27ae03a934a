"""Reads what a damaged place still says: which stores' objects it contains, and what is left of one log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckptstore.backends.base import Backend
from ckptstore.errors import (
    CkptError,
    CorruptLogError,
    FormatError,
    IncompatibleFormatError,
    KeyNotFoundError,
    StorageError,
    StoreNotFoundError,
    UsageError,
)
from ckptstore.formats.checksums import xxh3_128
from ckptstore.formats.history.catalog import Catalog, CatalogBuilder
from ckptstore.formats.history.folds import FOLD_LIMIT, decode_fold
from ckptstore.formats.history.record_text import MANIFEST_LIMIT, decode_format, decode_record, unseal
from ckptstore.formats.history.records import (
    FORMAT_KEY,
    FormatFile,
    OpenRecord,
    Record,
    fold_of,
    object_of,
    slot_key,
    slot_of,
)
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import damaged_folds, read
from ckptstore.log.partial_objects import slot_bytes, text_bytes
from ckptstore.maintenance.repair.segment_descriptions import SegmentDescription
from ckptstore.maintenance.verify.verify_findings import Damage

__all__ = ["Log", "choose_run", "format_of", "in_progress", "read_log"]


@dataclass(frozen=True, slots=True)
class Log:
    """What is left of a log.

    Attributes:
        catalog: what it says; empty if there is none.
        whole: whether nothing of it is damaged or known to be missing.
        damage: what is wrong with its objects.
        judged: its last slot, if that is damaged -> hash of the bytes that it had.
    """

    catalog: Catalog
    whole: bool
    damage: tuple[Damage, ...]
    judged: Mapping[int, str] = field(default_factory=dict)


def choose_run(
    backend: Backend, keys: Sequence[str], told: Mapping[str, SegmentDescription], wanted: str | None
) -> str:
    """Return the run to repair.

    Args:
        wanted: the start of its uuid; None: there is only one.

    Raises:
        UsageError: there are objects of several runs and `wanted` is None; or `wanted` matches none or several.
        StoreNotFoundError: there is no object of any run.
    """
    found: dict[str, Counter[str]] = {}
    for run, what in _claims(backend, keys, told):
        found.setdefault(run, Counter())[what] += 1
    if not found:
        raise StoreNotFoundError.at(backend.url, ": nothing here can be read as part of a store")
    matching = [run for run in found if wanted is None or run.startswith(wanted.lower())]
    if len(matching) == 1:
        return matching[0]
    said = "; ".join(
        f"{run} ({', '.join(f'{n} {what}' for what, n in counts.items())})" for run, counts in found.items()
    )
    if wanted is None:
        raise UsageError(f"{backend.url}: objects of {len(found)} runs are here, name one by run= (--run): {said}")
    raise UsageError(f"{backend.url}: {wanted!r} names {len(matching)} of the runs that are here: {said}")


def _claims(backend: Backend, keys: Sequence[str], told: Mapping[str, SegmentDescription]) -> list[tuple[str, str]]:
    claims = []
    for key in keys:
        if key == FORMAT_KEY or slot_of(key) is not None:
            try:
                run = unseal(text_bytes(backend, key), what=key)["run"]
            except (CkptError, LookupError, TypeError):
                continue
            claims.append((str(run), "FORMAT" if key == FORMAT_KEY else "log slots"))
    return [*claims, *((one.run, "segments") for one in told.values())]


def format_of(backend: Backend, run: str) -> tuple[FormatFile, list[Damage]]:
    """Return the run's FORMAT file; if it is missing or another run's, a default one.

    Raises:
        IncompatibleFormatError: it is intact, and this version does not understand it.
    """
    try:
        found = decode_format(text_bytes(backend, FORMAT_KEY))
    except IncompatibleFormatError:
        raise
    except KeyNotFoundError:
        return FormatFile(run=run), [Damage(FORMAT_KEY, "it is missing")]
    except FormatError as error:
        return FormatFile(run=run), [Damage(FORMAT_KEY, str(error).removeprefix("FORMAT: "))]
    if found.run != run:
        return FormatFile(run=run), [Damage(FORMAT_KEY, f"it is of run {found.run}")]
    return found, []


def read_log(backend: Backend, format_file: FormatFile, keys: Sequence[str]) -> Log:
    """Read the log as far as possible.

    Raises:
        IncompatibleFormatError: it is intact, and written by a newer version.
        StorageError: the medium failed.
    """
    damage = []
    judged: dict[int, str] = {}
    try:
        journal = Journal(backend, format_file)
        # Prevents: steps that are cut off, because the log is folded while it is read: then it is read again.
        view = read(journal, look_above=True, tell=False)
        catalog = view.catalog
        if view.end - 1 in view.damage:
            judged[view.end - 1] = catalog.last
        damage += [Damage(key, "the fold is damaged") for key in damaged_folds(journal, view)]
    except CorruptLogError as error:
        catalog = _readable_records(backend, format_file, keys)
        damage.append(Damage("log", str(error).removeprefix(f"{backend.url}: ")))
    present = set(keys)
    for seq in catalog.damage:
        what = "it is damaged, or does not continue the log" if slot_key(seq) in present else "it is missing"
        damage.append(Damage(slot_key(seq), what))
    if not catalog.term:
        damage.append(Damage("log", "no part of it is left"))
    elif catalog.lost > catalog.term:
        damage.append(Damage("log", f"it ends in term {catalog.term}, but there are segments of term {catalog.lost}"))
    return Log(catalog, bool(catalog.term) and not damage, tuple(damage), judged)


def in_progress(log: Log, key: str) -> bool:
    """Tell whether an unreadable segment is not one of a whole log: a writer is writing it, or was killed doing so."""
    place = object_of(key)
    return log.whole and place is not None and place[0] >= log.catalog.term and place[1] not in log.catalog.segments


def _readable_records(backend: Backend, format_file: FormatFile, keys: Sequence[str]) -> Catalog:
    """Apply the newest readable fold, and every record above it that may continue it, across gaps."""
    builder = CatalogBuilder(_fold(backend, format_file.run, keys))
    slots = sorted(seq for key in keys if (seq := slot_of(key)) is not None)
    for seq in slots:
        catalog, key = builder.catalog, slot_key(seq)
        if seq < catalog.next_seq:
            continue
        try:
            data = slot_bytes(backend, format_file.run, seq)
            record = decode_record(
                data, seq=seq, run=format_file.run, what=key, fetch=lambda name, _: backend.get(name, MANIFEST_LIMIT)
            )
        except IncompatibleFormatError:
            raise
        except (FormatError, KeyNotFoundError):
            builder.mark_damaged(seq)
            continue
        if seq > catalog.next_seq:
            builder.mark_damaged(seq - 1)
        if _may_follow(catalog, record):
            builder.apply(record, seq, xxh3_128(data))
    if not builder.catalog.damage:
        builder.mark_damaged(builder.catalog.next_seq)
    return builder.catalog


def _fold(backend: Backend, run: str, keys: Sequence[str]) -> Catalog:
    folds = sorted(((place, key) for key in keys if (place := fold_of(key)) is not None), reverse=True)
    for (seq, digest16), key in folds:
        try:
            return decode_fold(backend.get(key, FOLD_LIMIT), seq=seq, run=run, digest16=digest16, what=key)
        except IncompatibleFormatError:
            raise
        except (FormatError, KeyNotFoundError, StorageError):
            continue
    return Catalog()


def _may_follow(catalog: Catalog, record: Record) -> bool:
    if isinstance(record, OpenRecord) or record.term != catalog.term:
        return record.term > catalog.term
    return catalog.terms[record.term].nonce == record.nonce
