"""Clears a remote of which a part was deleted, so that the whole store can be copied there again.

Everything is checked before anything is changed: the objects to delete are this run's, none is newer than the store,
and the store has every segment of the remote, intact. The place is marked as an unfinished copy before the first object
is deleted. So this function, or an ordinary sync, continues after an interruption.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from ckptstore.backends.exclusion import exclusive_access
from ckptstore.errors import (
    CorruptLogError,
    CorruptSegmentError,
    FormatError,
    KeyExistsError,
    KeyNotFoundError,
    RemoteLostError,
    UsageError,
)
from ckptstore.formats.byte_text import size
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.folds import FOLD_LIMIT, decode_fold
from ckptstore.formats.history.record_text import SLOT_LIMIT, decode_format, decode_record, unseal
from ckptstore.formats.history.records import (
    COPYING_KEY,
    FORMAT_KEY,
    SegmentEntry,
    fold_of,
    folder_term,
    in_format,
    object_of,
    slot_of,
)
from ckptstore.formats.html_tables import counted
from ckptstore.host.buffers import Staging
from ckptstore.log.journal import Journal
from ckptstore.log.log_copy import CopyOrigin
from ckptstore.log.log_reader import read
from ckptstore.maintenance.copies.segment_copy import BLOCKS, check_segment
from ckptstore.tiers.remote_check import check_whole
from ckptstore.tiers.store_pair import StorePair

__all__ = ["clear_remote"]

_PROBE: Final = "probe/"
_ROOMS: Final = ("log/", "seg/", "fold/", "pins/", "req/", _PROBE)
_FILES: Final = (FORMAT_KEY, COPYING_KEY)


def clear_remote(pair: StorePair) -> int:
    """Delete the rest of a remote that is not a complete store -> number of objects. A complete one is not changed.

    Raises:
        UsageError: something else is there, or another run; the run was continued elsewhere; or there are segments that
            this store lacks, or has damaged.
        CorruptLogError, StorageError: one of the two cannot be read.
    """
    local, remote = pair.local, pair.remote.backend
    with exclusive_access(local.backend), exclusive_access(remote):
        there = Journal(remote, local.format)
        keys = remote.list("")
        _check_ours(there, keys)
        if FORMAT_KEY in keys and _whole(local.url, there, keys):
            return 0
        here = read(local, tell=False).catalog
        if here.damage or here.lost > here.term:
            raise CorruptLogError(f"{local.url}: the log is damaged: it is unknown what must be copied to the remote")
        _check_not_newer(there, keys, here)
        _check_here(pair, keys, here)
        if not keys:
            return 0
        # Prevents: mistaking the half of a store that an interrupted call leaves for something else.
        with suppress(KeyExistsError):
            remote.create(COPYING_KEY, CopyOrigin(local.format, "copy", "full: all of a tier").text())
        # Prevents: deleting a foreign file among the store's objects.
        ours = {key for key in keys if in_format(key) or key.startswith(_PROBE)}
        for key in sorted(ours - {COPYING_KEY}, key=lambda one: (one != FORMAT_KEY, one)):
            remote.delete(key)
        return len(ours)


def _check_ours(there: Journal, keys: list[str]) -> None:
    """Raise `UsageError` if there is an object that no store has, or one of another run."""
    if strangers := [key for key in keys if key not in _FILES and not key.startswith(_ROOMS)]:
        raise UsageError(f"{there.url}: it holds {strangers[0]!r}, which is not part of a store: nothing was deleted")
    for key in keys:
        run = _run_of(there, key)
        if run not in (None, there.run):
            # Prevents: deleting another run's store because its place was given by mistake.
            raise UsageError(
                f"{there.url}: {key} is of another run, {run}, not {there.run}: nothing was deleted; give another place"
            )


def _run_of(there: Journal, key: str) -> str | None:
    """The run that a small object names; None: the object is damaged, or names none."""
    with suppress(FormatError, LookupError, TypeError):
        if key == FORMAT_KEY:
            return decode_format(there.backend.get(key, SLOT_LIMIT)).run
        if key == COPYING_KEY or slot_of(key) is not None:
            return str(unseal(there.backend.get(key, SLOT_LIMIT), what=key)["run"])
    return None


def _whole(here: str, there: Journal, keys: list[str]) -> bool:
    """Whether there is a complete store, to which an ordinary sync may add."""
    try:
        # No warning: the caller asked to replace what is lost there.
        view = read(there, look_above=True, tell=False)
        check_whole(here, there, view)
    except (CorruptLogError, RemoteLostError):
        return False
    catalog, present = view.catalog, set(keys)
    entries = catalog.segments.values()
    named = all(entry.key in present for entry in entries)
    # Prevents: a truncated segment in the remote that counts as intact although it is unreadable.
    return view.end > 0 and not view.damage and named and all(_has_length(there, entry) for entry in entries)


def _has_length(there: Journal, entry: SegmentEntry) -> bool:
    with suppress(KeyNotFoundError):
        return there.backend.size(entry.key) == entry.size
    return False  # deleted since the listing


def _check_not_newer(there: Journal, keys: list[str], here: Catalog) -> None:
    """Raise `UsageError` if a term was opened in the remote that the store does not have."""
    for number, nonce, what in _terms(there, keys):
        known = here.terms.get(number)
        if known is None or (nonce is not None and known.nonce != nonce):
            # Prevents: deleting the only trace of a machine that has continued the run.
            raise UsageError(
                f"{there.url}: {what} is of term {number}, which this store does not have: the run was continued "
                "elsewhere. Nothing was deleted; move the remote away, or restore it with `ckpt repair`"
            )


def _terms(there: Journal, keys: list[str]) -> Iterator[tuple[int, str | None, str]]:
    """The terms of objects that exist there: (number, nonce if it is known, key)."""
    for key in keys:
        if (seq := slot_of(key)) is not None:
            with suppress(FormatError, KeyNotFoundError):
                data = there.backend.get(key, SLOT_LIMIT)
                record = decode_record(data, seq=seq, run=there.run, what=key, fetch=there.backend.get)
                yield record.term, record.nonce, key
        elif (place := fold_of(key)) is not None:
            with suppress(FormatError, KeyNotFoundError):
                data = there.backend.get(key, FOLD_LIMIT)
                fold = decode_fold(data, seq=place[0], run=there.run, digest16=place[1], what=key)
                yield from ((number, opened.nonce, key) for number, opened in fold.terms.items())
        elif key.startswith("seg/") and (term := folder_term(key.split("/")[1])):
            yield term, None, key


def _check_here(pair: StorePair, keys: list[str], here: Catalog) -> None:
    """Raise `UsageError` if the remote may have the only intact copy of a segment."""
    remote, mine = pair.remote.backend, {entry.key: entry for entry in here.segments.values()}
    found = [key for key in keys if object_of(key) is not None and not key.endswith(".json")]  # no manifests
    if unknown := [key for key in found if key not in mine]:
        raise UsageError(
            f"{remote.url}: {counted(len(unknown), 'segment')} ({size(sum(map(remote.size, unknown)))}) of checkpoints "
            f"that this store does not keep, {unknown[0]} among them: nothing was deleted. `ckpt repair {remote.url} "
            "PLACE` restores the intact ones in another place; or delete the remote's folder seg/, and repeat"
        )
    staging = Staging.for_chunks(BLOCKS)
    for key in found:
        try:
            check_segment(pair.local.backend, mine[key], pair.local.run, staging)
        except (CorruptSegmentError, KeyNotFoundError) as error:
            raise UsageError(
                f"{pair.local.url}: {key} is damaged or missing here, and the remote may have it intact: nothing was "
                f"deleted. `ckpt verify {pair.local.url}` names the checkpoints that need it: load one, which copies "
                f"it back; or retire them ({error})"
            ) from error
