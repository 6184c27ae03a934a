"""What a damaged place still says: whose stores' objects are in it, and what is left of the log of one of them."""

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
from ckptstore.formats.catalog import Catalog, CatalogBuilder
from ckptstore.formats.checksums import xxh3_128
from ckptstore.formats.folds import FOLD_LIMIT, decode_fold
from ckptstore.formats.record_text import MANIFEST_LIMIT, decode_format, decode_record, unseal
from ckptstore.formats.records import FORMAT_KEY, FormatFile, OpenRecord, Record, fold_of, object_of, slot_key, slot_of
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import damaged_folds, read
from ckptstore.log.partial_objects import slot_bytes, text_bytes
from ckptstore.maintenance.repair.segment_descriptions import Told
from ckptstore.maintenance.verify.verify_findings import Damage

__all__ = ["Log", "choose_run", "format_of", "on_its_way", "read_log"]


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


def choose_run(backend: Backend, keys: Sequence[str], told: Mapping[str, Told], wanted: str | None) -> str:
    """The run whose store is to be repaired.

    Args:
        wanted: what its uuid begins with; None: there is only one.

    Raises:
        UsageError: objects of several are there, and it is not said which; or `wanted` is none of them, or several.
        StoreNotFoundError: there is nothing of any.
    """
    found: dict[str, Counter[str]] = {}
    for run, what in _claims(backend, keys, told):
        found.setdefault(run, Counter())[what] += 1
    if not found:
        raise StoreNotFoundError(f"{backend.url}: nothing here can be read as part of a store")
    matching = [run for run in found if wanted is None or run.startswith(wanted.lower())]
    if len(matching) == 1:
        return matching[0]
    said = "; ".join(
        f"{run} ({', '.join(f'{n} {what}' for what, n in counts.items())})" for run, counts in found.items()
    )
    if wanted is None:
        raise UsageError(f"{backend.url}: objects of {len(found)} runs are here, name one by run= (--run): {said}")
    raise UsageError(f"{backend.url}: {wanted!r} names {len(matching)} of the runs that are here: {said}")


def _claims(backend: Backend, keys: Sequence[str], told: Mapping[str, Told]) -> list[tuple[str, str]]:
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
    """The run's FORMAT file; where that is gone or another's, what it was before anybody chose otherwise.

    Raises `IncompatibleFormatError`: it is intact, and this version does not understand it.
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
    """Read the log as far as it can be.

    Raises:
        IncompatibleFormatError: it is intact, and a newer version's.
        StorageError: the medium failed.
    """
    damage = []
    judged: dict[int, str] = {}
    try:
        journal = Journal(backend, format_file)
        # Prevents: steps that are cut off, because somebody folds the log while it is read: then it is read again.
        view = read(journal, look_above=True, tell=False)
        catalog = view.catalog
        if view.end - 1 in view.damage:
            judged[view.end - 1] = catalog.last
        damage += [Damage(key, "the fold is damaged") for key in damaged_folds(journal, view)]
    except CorruptLogError as error:
        catalog = _whatever(backend, format_file, keys)
        damage.append(Damage("log", str(error).removeprefix(f"{backend.url}: ")))
    present = set(keys)
    for seq in catalog.damage:
        what = "it is damaged, or does not continue the log" if slot_key(seq) in present else "it is missing"
        damage.append(Damage(slot_key(seq), what))
    if not catalog.term:
        damage.append(Damage("log", "nothing of it is left"))
    elif catalog.lost > catalog.term:
        damage.append(Damage("log", f"it ends in term {catalog.term}, and there are segments of term {catalog.lost}"))
    return Log(catalog, bool(catalog.term) and not damage, tuple(damage), judged)


def on_its_way(log: Log, key: str) -> bool:
    """Whether a segment that cannot be read is none of a whole log's: a writer is writing it, or was killed then."""
    place = object_of(key)
    return log.whole and place is not None and place[0] >= log.catalog.term and place[1] not in log.catalog.segments


def _whatever(backend: Backend, format_file: FormatFile, keys: Sequence[str]) -> Catalog:
    """The newest fold that can be read, and every record above it that may continue it, whatever is between."""
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
