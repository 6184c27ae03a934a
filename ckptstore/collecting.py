"""GC: deleting the segments that nothing needs any more (design: GC, PINS).

1. READ.
2. List the pins: only now, so that whoever pinned what was live in this view is seen, and whoever pins later finds out
   by its own second READ.
3. Delete segments dropped in that view, or unreferenced in it with a term below its newest, unless pinned. Never the
   current term's: its writer, and who prepares a request to it, may be about to name them.

Any number of collectors may run, beside writers and readers; whoever may write to the store may collect.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptstore.backends.base import Backend
from ckptstore.formats.errors import KeyNotFoundError, ReadOnlyError
from ckptstore.pins import PinWatch
from ckptstore.store import Store

__all__ = ["Collected", "collect"]


@dataclass(frozen=True, slots=True)
class Collected:
    """What `collect` found.

    Attributes:
        segments: keys that were deleted, or with `dry_run` would be.
        nbytes: their bytes.
        pinned: keys that nothing needs but a reader has pinned: they go another time.
        dead_pins: keys of pins that were not renewed for too long, and were deleted.
        unreadable_pins: keys of damaged pins. While there is one nothing is deleted: nobody knows what it claims.
    """

    segments: tuple[str, ...] = ()
    nbytes: int = 0
    pinned: tuple[str, ...] = ()
    dead_pins: tuple[str, ...] = ()
    unreadable_pins: tuple[str, ...] = ()


def collect(store: Store, watch: PinWatch | None = None, *, dry_run: bool = False) -> Collected:
    """Delete what no checkpoint and no reader needs.

    Args:
        watch: this collector's observation of the pins, kept from call to call: only who has watched a pin for long
            enough may take it for dead. Without one every pin counts.
        dry_run: delete nothing.

    Raises:
        ReadOnlyError: the store cannot be written (except with `dry_run`).
        CorruptLogError: the log cannot be read.
        StorageError: the medium failed. What was deleted is gone, the rest goes another time.
    """
    backend = store.backend
    if backend.read_only and not dry_run:
        raise ReadOnlyError(f"{store.url}: read-only, nothing can be collected")
    # 1. READ.
    catalog = store.view().catalog
    # 2. List pins.
    pins = (watch or PinWatch(backend)).survey()
    garbage = [key for key in backend.list("seg/") if catalog.collectable(key)]
    if pins.unreadable:
        return Collected(pinned=tuple(garbage), unreadable_pins=pins.unreadable)
    pinned = tuple(key for key in garbage if _identity(key) in pins.segments)
    segments = tuple(key for key in garbage if _identity(key) not in pins.segments)
    sizes = [_size(backend, key) for key in segments]
    if not dry_run:
        _delete(backend, segments)
        for key in pins.dead:
            backend.delete(key)
    return Collected(segments, sum(sizes), pinned, pins.dead)


def _delete(backend: Backend, segments: tuple[str, ...]) -> None:
    # 3. Delete.
    if not segments:
        return
    # Prevents: a power cut that keeps the deletion and takes back the record that dropped the segment, or the OPEN that
    # made its term an old one, which were visible and not yet durable.
    backend.settle("log/")
    backend.settle("fold/")
    for key in segments:
        backend.delete(key)


def _identity(key: str) -> str:
    return key.rpartition("/")[2].partition(".")[0]


def _size(backend: Backend, key: str) -> int:
    try:
        return backend.size(key)
    except KeyNotFoundError:  # another collector was faster
        return 0
