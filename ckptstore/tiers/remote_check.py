"""Checks whether a remote is still what was drained there: FORMAT, the last slot, the newest segment.

A drain knows the remote from what it read and wrote. Meanwhile it may be deleted or replaced: by a lifecycle rule of a
bucket, by a clean-up of a disk, by another mount. Adding to the rest would not give a store that can be restored.
"""

from __future__ import annotations

import errno

from ckptstore.errors import FormatError, KeyNotFoundError, NotFoundError, RemoteLostError, StorageError
from ckptstore.formats.checksums import xxh3_128
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.record_text import SLOT_LIMIT, decode_format
from ckptstore.formats.history.records import FORMAT_KEY, SegmentEntry, slot_key
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import View, never_deleted, read

__all__ = ["absent", "check_first_slot", "check_same", "check_whole", "lost"]


def lost(here: str, there: str, what: str) -> RemoteLostError:
    """The error for a remote that is not what it was; it says what to do.

    Args:
        here, there: URLs of the store and of its remote.
        what: what is wrong there.
    """
    return RemoteLostError(
        f"{there}: {what}. Nothing more is copied there. If the missing part is lost for good, "
        f"`ckpt sync {here} {there} --anew` deletes the rest of it and copies everything there again."
    )


def check_same(here: str, remote: Journal, view: View) -> None:
    """Raise if the remote is not the one that was read last. Called before something is added to it.

    Makes three small requests. If its folder was moved, the handle follows it, and nothing is lost.

    Args:
        here: the store's URL.
        remote: the remote, with the run's FORMAT file.
        view: the last view of its log.

    Raises:
        RemoteLostError: FORMAT, the newest slot or the newest segment is missing or different.
        StorageError: this cannot be determined.
    """
    try:
        _check_format(here, remote)
        _check_slot(here, remote, view)
        _check_newest_segment(here, remote, view)
    except NotFoundError as error:  # the folder of the whole store is gone
        raise lost(here, remote.url, f"it was deleted ({error})") from error
    except StorageError as error:
        if error.errno == errno.ESTALE:  # the folder of a part is gone
            raise lost(here, remote.url, f"a part of it was deleted or replaced ({error})") from error
        raise


def _check_format(here: str, remote: Journal) -> None:
    try:
        run = decode_format(remote.backend.get(FORMAT_KEY, SLOT_LIMIT)).run
    except KeyNotFoundError as error:
        raise lost(here, remote.url, "its FORMAT file is gone: the store was deleted, or a part of it") from error
    except FormatError as error:
        raise lost(here, remote.url, f"its FORMAT file is not what it was ({error})") from error
    if run != remote.run:
        # Prevents: adding a slot of this run to another run's log.
        raise lost(here, remote.url, f"another run's store, {run}, is in its place")


def _check_slot(here: str, remote: Journal, view: View) -> None:
    """Check the last slot: it is deleted only after the log has grown, when the anchor above it exists."""
    if not view.end:
        return
    seq = view.end - 1
    key = slot_key(seq)
    try:
        found = xxh3_128(remote.backend.get(key, SLOT_LIMIT))
    except KeyNotFoundError as error:
        if never_deleted(remote, seq):
            # Prevents: a log that begins in the middle, which no reader accepts.
            raise lost(here, remote.url, f"{key} is gone: its log was deleted, or a part of it") from error
        return  # other processes have added to the log and folded it: READ starts over
    if found != view.catalog.last:
        raise lost(here, remote.url, f"{key} is not the one that was there: its log was replaced")


def check_first_slot(here: str, remote: Journal) -> None:
    """Raise `RemoteLostError` if FORMAT exists but slot 0 does not, although terms were opened in the log."""
    if absent(remote, slot_key(0)):
        # Prevents: mistaking an empty log, which does not say who continued the run, for that of a new remote.
        raise lost(here, remote.url, f"{slot_key(0)} is gone: its log was deleted, or a part of it")


def check_whole(here: str, remote: Journal, view: View) -> None:
    """Raise `RemoteLostError` if the log, read from its beginning, has lost a part. Otherwise as `check_same`."""
    catalog = view.catalog
    if catalog.lost > catalog.term:
        # Prevents: adding to a log that lost its end, and so does not say who continued the run.
        raise lost(here, remote.url, f"its log ends in term {catalog.term}, and there are segments of {catalog.lost}")
    _check_newest_segment(here, remote, view)


def _check_newest_segment(here: str, remote: Journal, view: View) -> None:
    newest = _newest_segment(view.catalog)
    if newest is None or not absent(remote, newest.key):
        return
    again = read(remote, look_above=False).catalog  # it may have been retired and collected meanwhile
    if newest.id in again.segments and absent(remote, newest.key):
        # Prevents: counting checkpoints as drained that the remote's log promises but that cannot be restored.
        raise lost(here, remote.url, f"{newest.key} is gone: its segments were deleted, or some of them")


def _newest_segment(catalog: Catalog) -> SegmentEntry | None:
    latest = catalog.latest()
    edges = () if latest is None else catalog.encodings.get(latest.node, ())
    return next((catalog.segments[name] for edge in edges for name in edge.segments[-1:]), None)


def absent(remote: Journal, key: str) -> bool:
    """Whether an object is absent; raises as `Backend.size` otherwise."""
    try:
        remote.backend.size(key)
    except KeyNotFoundError:
        return True
    return False
