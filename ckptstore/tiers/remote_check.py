"""Whether a remote is still what was brought there: FORMAT, the slot below the next one, the newest segment.

A drain knows the remote by what it read and wrote. Somebody may delete or replace it meanwhile: a lifecycle rule of a
bucket, a clean-up of a disk, another mount. What is added to the rest is no store, and nobody could restore from it.
"""

from __future__ import annotations

import errno

from ckptstore.errors import FormatError, KeyNotFoundError, NotFoundError, RemoteLostError, StorageError
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.checksums import xxh3_128
from ckptstore.formats.record_text import SLOT_LIMIT, decode_format
from ckptstore.formats.records import FORMAT_KEY, SegmentEntry, slot_key
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import View, never_deleted, read

__all__ = ["absent", "check_first_slot", "check_same", "check_whole", "lost"]


def lost(here: str, there: str, what: str) -> RemoteLostError:
    """The error of a remote that is not what it was, with what to do.

    Args:
        here, there: URLs of the store and of its remote.
        what: is wrong there.
    """
    return RemoteLostError(
        f"{there}: {what}. Nothing more is brought there. If what is missing is gone for good, "
        f"`ckpt sync {here} {there} --anew` deletes what is left of it and brings everything there again."
    )


def check_same(here: str, remote: Journal, view: View) -> None:
    """Before something is added to a remote: raise if it is not the one that was seen last.

    Three small requests. Its folder may have been moved: a handle follows it, and that is no loss.

    Args:
        here: the store's URL.
        remote: with the run's FORMAT file.
        view: its log, as it was seen last.

    Raises:
        RemoteLostError: FORMAT, the newest slot or the newest segment is gone, or is another.
        StorageError: that cannot be said.
    """
    try:
        _check_format(here, remote)
        _check_slot(here, remote, view)
        _check_newest_segment(here, remote, view)
    except NotFoundError as error:  # the folder of it all
        raise lost(here, remote.url, f"it was deleted ({error})") from error
    except StorageError as error:
        if error.errno == errno.ESTALE:  # the folder of some of it
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
        # Prevents: a slot of this run in another run's log.
        raise lost(here, remote.url, f"another run's store, {run}, is in its place")


def _check_slot(here: str, remote: Journal, view: View) -> None:
    """The slot below the next one is never deleted while it is that: only when the anchor above it is there."""
    if not view.end:
        return
    seq = view.end - 1
    key = slot_key(seq)
    try:
        found = xxh3_128(remote.backend.get(key, SLOT_LIMIT))
    except KeyNotFoundError as error:
        if never_deleted(remote, seq):
            # Prevents: a log that begins in the middle, which nobody can read.
            raise lost(here, remote.url, f"{key} is gone: its log was deleted, or a part of it") from error
        return  # others have gone on there, and folded it: READ starts over
    if found != view.catalog.last:
        raise lost(here, remote.url, f"{key} is not the one that was there: its log was replaced")


def check_first_slot(here: str, remote: Journal) -> None:
    """Raise `RemoteLostError` where FORMAT is there and the log is not, though terms were opened in it."""
    if absent(remote, slot_key(0)):
        # Prevents: an empty log, which knows nothing of who continued the run, taken for a new remote's.
        raise lost(here, remote.url, f"{slot_key(0)} is gone: its log was deleted, or a part of it")


def check_whole(here: str, remote: Journal, view: View) -> None:
    """Raise `RemoteLostError` where the log, read from its beginning, is not all that it was. As `check_same`."""
    catalog = view.catalog
    if catalog.lost > catalog.term:
        # Prevents: what was brought there after the loss, added to a log that does not know who continued the run.
        raise lost(here, remote.url, f"its log ends in term {catalog.term}, and there are segments of {catalog.lost}")
    _check_newest_segment(here, remote, view)


def _check_newest_segment(here: str, remote: Journal, view: View) -> None:
    newest = _newest_segment(view.catalog)
    if newest is None or not absent(remote, newest.key):
        return
    again = read(remote, look_above=False).catalog  # somebody may have retired and collected it since
    if newest.id in again.segments and absent(remote, newest.key):
        # Prevents: checkpoints that the remote's log promises, and nobody can restore, counted as brought there.
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
