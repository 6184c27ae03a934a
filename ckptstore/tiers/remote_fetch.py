"""Restores data from the remote into the store: an empty disk, terms opened elsewhere, missing or damaged segments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final, TypeVar

from ckptstore.backends.exclusion import exclusive_access
from ckptstore.errors import (
    CheckpointNotFoundError,
    CkptError,
    CorruptionError,
    CorruptLogError,
    CorruptSegmentError,
    KeyNotFoundError,
    NotFoundError,
    StorageError,
    StoreNotFoundError,
    UsageError,
)
from ckptstore.formats.history.catalog import REMOTE, Catalog
from ckptstore.formats.history.records import COPYING_KEY, CheckpointId, Node, SegmentEntry, in_format, ref_of
from ckptstore.formats.html_tables import counted
from ckptstore.host.buffers import Staging
from ckptstore.host.caller_warnings import FallbackWarning, warn
from ckptstore.log import refs
from ckptstore.log.journal import Journal
from ckptstore.log.log_copy import CopyOrigin, LogCopy, is_begun
from ckptstore.log.log_reader import read
from ckptstore.log.pins import claim
from ckptstore.maintenance.copies.copy_selection import part_of
from ckptstore.maintenance.copies.parallel_copies import SegmentCopies
from ckptstore.maintenance.copies.segment_copy import BLOCKS, check_segment, copy_segment
from ckptstore.maintenance.copies.transfer import Transfer
from ckptstore.restore.restore_plan import plan
from ckptstore.tiers.drain_selection import foreign_terms
from ckptstore.tiers.store_pair import StorePair

__all__ = ["catch_up", "copy_back", "read_from_either", "restore_newest"]

_THREADS: Final = 4
_R = TypeVar("_R")


def restore_newest(pair: StorePair) -> str | None:
    """Make a store of an empty place: the remote's newest checkpoint, what it builds on, and its terms.

    The next call continues an interrupted one.

    Returns:
        REF of that checkpoint; None: there is a store here already, or no remote yet, or it has no checkpoint.

    Raises:
        UsageError: something else is here.
        CorruptionError: the remote is damaged in the part that is read.
        StorageError: a medium failed.
    """
    if _holds_store(pair.local):
        return None
    try:
        origin = CopyOrigin(pair.remote.format, "copy", "full: all of a tier")
    except StoreNotFoundError:
        return None
    here = pair.local.backend
    if not here.read_only:
        here.probe()  # creates the folder, which `exclusive_access` locks
    with exclusive_access(here):
        if _holds_store(pair.local):
            return None  # another process on this machine has restored it meanwhile
        try:
            return _restored(pair, origin)
        except UsageError:
            if not is_begun(here, origin):
                raise  # something else is there, perhaps another unfinished copy: it must not be deleted
            # An unfinished copy of an older newest checkpoint, which is in the way of this one.
            for key in here.list(""):
                if key != COPYING_KEY and in_format(key):
                    here.delete(key)
            return _restored(pair, origin)


def _holds_store(journal: Journal) -> bool:
    """Whether there is a store. Raises `StoreNotFoundError` if it has lost FORMAT: it must not be overwritten."""
    try:
        journal.format  # noqa: B018 - the property reads the file
    except StoreNotFoundError:
        if journal.rooms() and not _unfinished(journal):
            raise
        return False
    return True


def _unfinished(journal: Journal) -> bool:
    try:
        journal.backend.size(COPYING_KEY)
    except (KeyNotFoundError, StorageError):
        return False
    return True


def _restored(pair: StorePair, origin: CopyOrigin) -> str | None:
    def choose(catalog: Catalog) -> tuple[Node | None, Catalog]:
        latest = catalog.latest()
        node = None if latest is None else latest.node
        wanted = _line_of(catalog, node)
        _add_remote_url(wanted, pair.remote.url)
        return node, wanted

    with claim(pair.remote, choose, lambda chosen: tuple(chosen[1].segments)) as (_view, (node, wanted)):
        replica = LogCopy(pair.local.backend, origin)
        _copy_into(pair, wanted, replica)
        replica.finish()
    return None if node is None else ref_of(node)


def _add_remote_url(wanted: Catalog, url: str) -> None:
    """Add the remote's URL to every term that is copied from it: the remote's own log does not have it.

    Prevents: a store that does not know its remote, because it was killed before a writer opened the next term in it.
    """
    for number, opened in wanted.terms.items():
        wanted.terms[number] = replace(opened, extra={**opened.extra, REMOTE: url})


def _line_of(catalog: Catalog, node: Node | None) -> Catalog:
    """A checkpoint with what it builds on, its line of terms, and the retention rules."""
    part = part_of(catalog, [] if node is None else [node])
    part.keep, part.keep_seq = catalog.keep, catalog.keep_seq
    return part


def _copy_into(pair: StorePair, wanted: Catalog, replica: LogCopy) -> None:
    copies = SegmentCopies(pair.remote.backend, pair.local.backend, pair.remote.run, _THREADS, lambda _nbytes: None)
    transfer = Transfer(wanted, replica, copies)
    replica.backend.check_space(sum(entry.size for entry in transfer.missing()))
    transfer.run()


def catch_up(pair: StorePair, there: Catalog, parent: Node | None) -> None:
    """Add to the store the terms that it lacks, and the checkpoint that the next term continues from.

    Args:
        there: the remote's catalog, before the term that is to be opened.
        parent: the checkpoint that this term continues from.

    Raises:
        UsageError: a writer continued the store separately, or the store can no longer take what it lacks.
        CorruptionError: the remote is damaged in the part that is read.
        StorageError: a medium failed.
    """
    wanted = _line_of(there, parent)
    _add_remote_url(wanted, pair.remote.url)
    here = read(pair.local).catalog
    if foreign := foreign_terms(here, there):
        raise _cannot_follow(pair, f"a writer continued it separately in term {foreign[0]}")
    if parent is not None and parent in here.checkpoints and here.restorable(here.checkpoints[parent].id):
        # The store can restore the checkpoint, by whatever encodings: only terms can be missing.
        for table in (wanted.encodings, wanted.segments, wanted.held):
            table.clear()
        wanted.checkpoints.clear()
        wanted.tags.clear()
        wanted.checkpoints[parent] = here.checkpoints[parent]
    try:
        _copy_into(
            pair, wanted, LogCopy(pair.local.backend, CopyOrigin(pair.local.format, "copy", "full: all of a tier"))
        )
    except UsageError as error:
        raise _cannot_follow(pair, str(error)) from error


def _cannot_follow(pair: StorePair, why: str) -> UsageError:
    return UsageError(
        f"{pair.local.url}: the run was continued elsewhere, and this store cannot follow: {why}. No term was opened. "
        "Move the folder aside (it stays readable) and open the path again: it is restored from "
        f"{pair.remote.url}"
    )


def copy_back(pair: StorePair, entries: Iterable[SegmentEntry], damaged: str = "") -> int:
    """Copy back the segments that are missing here or whose id is in `damaged`, if the remote has them -> how many.

    Raises `StorageError`; `CorruptSegmentError` if the remote's segment is damaged as well.
    """
    local, remote = pair.local.backend, pair.remote.backend
    done = 0
    staging = Staging.for_chunks(BLOCKS)
    for entry in entries:
        if _size(local, entry.key) == entry.size and entry.id not in damaged:
            continue
        if _size(remote, entry.key) != entry.size:
            continue
        if _size(local, entry.key) >= 0:
            # Prevents: losing the intact parts of a damaged segment although the remote's copy is damaged as well.
            check_segment(remote, entry, pair.local.run, staging)
            local.delete(entry.key)
        copy_segment(remote, local, entry, pair.local.run, staging, lambda _nbytes: None)
        done += 1
    return done


def _size(backend: object, key: str) -> int:
    try:
        return int(backend.size(key))  # type: ignore[attr-defined]
    except (KeyNotFoundError, CkptError):
        return -1


def read_from_either(pair: StorePair, ref: str | int, work: Callable[[Journal, str | int], _R]) -> _R:
    """The result of `work` on the store, or if the store cannot provide it, on the remote.

    Segments that are missing or damaged here are copied back first, if the store can be written. Checkpoints that the
    store does not have (it keeps fewer) are read from the remote. A checkpoint of the store is never replaced by
    another one of the same name: another machine's term may have the number of a branch.

    Raises:
        the errors of `work` on the store.
    """
    try:
        return work(pair.local, ref)
    except (CheckpointNotFoundError, StoreNotFoundError) as error:
        failure: CkptError = error
        wanted = None
    except CorruptionError as error:
        failure = error
        wanted = _resolve(pair.local, ref)
        if wanted is None:  # the log itself is damaged: the REF cannot be resolved
            raise
        if _copied_back(pair, wanted, str(error)):
            try:
                return work(pair.local, ref)
            except CorruptionError as again:
                failure = again
    try:
        _check_there(pair, wanted)
        result = work(pair.remote, ref if wanted is None else wanted.ref)
    except CkptError as theirs:
        failure.add_note(f"the remote cannot provide it either: {theirs}")
        raise failure from theirs
    if wanted is not None:
        warn(f"{failure}; {wanted.ref} is read from the remote, {pair.remote.url}", FallbackWarning)
    return result


def _resolve(journal: Journal, ref: str | int) -> CheckpointId | None:
    """The checkpoint that a REF names in the store; None: it cannot be resolved."""
    try:
        return refs.resolve(read(journal).catalog, ref).id
    except CkptError:
        return None


def _check_there(pair: StorePair, wanted: CheckpointId | None) -> None:
    """Raise `UsageError` if the remote is of another run, `CheckpointNotFoundError` if it has another checkpoint."""
    with contextlib.suppress(StoreNotFoundError):  # there is none here
        if pair.local.run != pair.remote.run:
            raise UsageError(f"{pair.remote.url}: there is the store of another run, {pair.remote.run}")
    if wanted is not None:
        found = read(pair.remote).catalog.checkpoints.get(wanted.node)
        if found is None or found.state != wanted.state:
            raise CheckpointNotFoundError(f"{pair.remote.url}: {wanted.ref} is not there, or is another one")


def _copied_back(pair: StorePair, wanted: CheckpointId, damage: str) -> bool:
    if pair.local.backend.read_only:
        return False
    try:
        catalog = read(pair.local).catalog
        chain = plan(catalog, wanted).segments
        with exclusive_access(pair.local.backend):
            count = copy_back(pair, [catalog.segments[name] for name in chain], damage)
    except (CorruptLogError, CorruptSegmentError, NotFoundError, StorageError):
        return False
    if count:
        came = f"{counted(count, 'segment')} of {wanted.ref} {'was' if count == 1 else 'were'} brought back"
        warn(f"{damage}; {came} from {pair.remote.url}", FallbackWarning)
    return count > 0
