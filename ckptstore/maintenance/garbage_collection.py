"""Deletes the segments that nothing needs (SPEC 10, GC and PINS).

1. READ.
2. List the pins, and only now: a pin made before this view of the log is seen, and a later reader notices the drop in
   its own second READ. If no pin is found and something would be deleted, a listing that includes the segments has to
   show no pins, either.
3. Delete segments dropped in that view, or unreferenced in it with a term below its newest, unless pinned. Segments of
   the current term are never deleted: its writer, or a process that prepares a request to it, may be about to name
   them.

Only regular files with a name of the format are deleted. Anything else below ``seg/`` is a foreign file (a stranger),
and is reported. No link is followed: nothing outside the store can be deleted.

The medium may keep the space of deleted segments for new ones (`Backend.release`), up to a limit. It does not if a pin
that was treated as dead claimed the segment: its reader may still read, from the file it has open.

Any number of collectors, writers and readers may run at once. Any process that may write to the store may collect.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ckptstore.backends.base import Backend
from ckptstore.errors import ForeignObjectError, KeyNotFoundError, ReadOnlyError, StorageError, UsageError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import object_of, pin_of
from ckptstore.formats.html_tables import HtmlTable, counted
from ckptstore.host.crash_points import crash_point
from ckptstore.host.progress import Progress, Tally
from ckptstore.log.checkpoint_info import damage_of
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import View, read
from ckptstore.log.pins import DEAD_AFTER, REFRESH_EVERY, PinWatch, Survey
from ckptstore.log.stale_listings import LOOKS, contradiction

__all__ = ["SHORTEST_TTL", "Collected", "Holder", "collect", "collect_patiently"]

SHORTEST_TTL: Final = 2 * REFRESH_EVERY
"""Minimum seconds without renewal to treat a pin as dead: a living reader may miss one renewal."""
_LONGEST_PAUSE: Final = 5.0
_SPARE_CHECKPOINTS: Final = 3
"""Number of checkpoints' worth of deleted segments that a medium may keep: those written at once, and one (N + 1)."""
_ENTRY: Final = 512
_HEADER: Final = 64 << 10
"""Upper estimates of a segment header's bytes: for each tensor, and for the rest."""
_SEGMENT: Final = ".safetensors"


@dataclass(frozen=True, slots=True)
class Holder:
    """A living pin that protects garbage from deletion.

    Attributes:
        key: the pin's key.
        reader: what the pin says about its reader (host, pid); information only.
        segments: keys of the garbage that it claims.
    """

    key: str
    reader: Mapping[str, Any]
    segments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Collected(HtmlTable):
    """The result of `collect`.

    Attributes:
        segments: keys that were deleted, or with `dry_run` would be.
        nbytes: their bytes.
        pinned: keys that only pins of readers protect; a later gc deletes them.
        pinned_nbytes: their bytes.
        holders: the pins that claim them.
        dead_pins: keys of pins that were not renewed for too long, or whose process on this host has ended. They were
            deleted.
        unreadable_pins: keys of damaged pins. While there is one nothing is deleted: it does not say what it claims.
        spare_nbytes: bytes of deleted segments, of this and earlier calls, that the medium keeps for new ones.
        strangers: foreign names below ``seg/``: other names, links, pipes. They stay.
        damage: what is wrong with the log, one sentence each. Then only segments are deleted that the newest term
            dropped by name: a lost record may have promised any other segment that no record names.
    """

    segments: tuple[str, ...] = ()
    nbytes: int = 0
    pinned: tuple[str, ...] = ()
    pinned_nbytes: int = 0
    holders: tuple[Holder, ...] = field(default=())
    dead_pins: tuple[str, ...] = ()
    unreadable_pins: tuple[str, ...] = ()
    strangers: tuple[str, ...] = ()
    spare_nbytes: int = 0
    damage: tuple[str, ...] = ()

    def __repr__(self) -> str:
        pinned = f", {self.pinned_nbytes:,} bytes pinned" if self.pinned else ""
        return f"<Collected: {counted(len(self.segments), 'segment')}, {self.nbytes:,} bytes{pinned}>"


def collect(
    journal: Journal,
    watch: PinWatch | None = None,
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
    since: View | None = None,
) -> Collected:
    """Delete what no checkpoint and no reader needs.

    Args:
        watch: this collector's observation of the pins, kept between calls: a pin counts as dead only after it was
            watched for long enough. Without one every pin counts, except those of ended processes of this host.
        dry_run: delete nothing.
        progress: called with (bytes deleted, bytes to delete).
        since: a view of this log that the caller has just read: only later records are fetched.

    Raises:
        ReadOnlyError: the store cannot be written (except with `dry_run`).
        CorruptLogError: the log cannot be read.
        ForeignObjectError: ``seg/`` itself is a link.
        StorageError: the medium failed. Deletions so far stay; the next call deletes the rest.
    """
    backend = journal.backend
    if backend.read_only and not dry_run:
        raise ReadOnlyError(f"{journal.url}: read-only, nothing can be collected")
    # 1. READ.
    catalog = read(journal, since, look_above=True).catalog
    # 2. List pins.
    watch = watch or PinWatch(backend)
    pins = watch.survey()
    keys = backend.list("seg/")
    sizes, links = _sizes(backend, filter(catalog.collectable, keys))
    strangers = [*(key for key in keys if object_of(key) is None), *links]
    if sizes:
        pins = _confirmed(pins, watch, backend)
    claimed = {key for key in sizes if pins.unreadable or _identity(key) in pins.segments}
    segments = tuple(key for key in sizes if key not in claimed)
    spare = 0
    if not dry_run:
        crash_point("gc.surveyed")
        _delete(backend, segments, sizes, pins.lapsed, progress)
        for key in pins.dead:
            backend.delete(key)
        spare = backend.shrink_spare(_spare_limit(catalog))
        backend.keep_reserve()
    return Collected(
        segments,
        sum(sizes[key] for key in segments),
        tuple(key for key in sizes if key in claimed),
        sum(sizes[key] for key in claimed),
        _holders(pins, claimed),
        pins.dead,
        pins.unreadable,
        tuple(sorted(strangers)),
        spare,
        damage_of(catalog),
    )


def _sizes(backend: Backend, keys: Iterable[str]) -> tuple[dict[str, int], list[str]]:
    """The bytes of each of `keys`, and those of them that are not files of a store."""
    sizes: dict[str, int] = {}
    foreign = []
    for key in keys:
        try:
            sizes[key] = _size(backend, key)
        except ForeignObjectError:
            foreign.append(key)
    return sizes, foreign


def _confirmed(pins: Survey, watch: PinWatch, backend: Backend) -> Survey:
    """Return `pins`; if there are none, list again until a listing that includes the segments has no pins, either.

    Raises:
        StorageError: the listings contradict each other.
    """
    # Prevents: a pinned segment that is deleted because a proxy answered the listing of ``pins/`` with a page of its
    # own. Clients of object stores take any XML that they do not know for a listing of nothing.
    for _ in range(LOOKS):
        if pins.alive or pins.dead or pins.unreadable or not _has_pins(backend):
            return pins
        pins = watch.survey()  # also finds a reader that has come in the meantime
    raise _contradiction(backend, "pins")


def _has_pins(backend: Backend) -> bool:
    """Tell whether a listing that includes the segments has pins, too. Raises as `_confirmed`."""
    folders = backend.folders("")
    if "seg" not in folders:
        raise _contradiction(backend, "segments")
    # The folder may be empty, or contain other files than pins.
    return "pins" in folders and any(pin_of(key) is not None for key in backend.list(""))


def _contradiction(backend: Backend, what: str) -> StorageError:
    outcome = "Nothing was deleted: check the endpoint and the proxies, then run gc again"
    return contradiction(backend, "one listing", what, "another", outcome)


def collect_patiently(
    journal: Journal,
    *,
    wait: float = 0.0,
    dead_after: float = DEAD_AFTER,
    dry_run: bool = False,
    progress: Progress | None = None,
    since: View | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Collected:
    """Collect as `collect`, and look again while garbage is pinned, until its readers are done or found dead.

    Args:
        wait: seconds after which segments that are still pinned stay. A pin of another host is found dead only within
            a wait of `dead_after`; one of this host whose process has ended, at once.
        dead_after: seconds without renewal after which a pin is dead; at least `SHORTEST_TTL`.
        dry_run, progress: as for `collect`.
        since: as for `collect`, for the first look.

    Returns:
        All that was deleted, and what the last look left.

    Raises:
        UsageError: `wait` is not a time, or `dead_after` is so short that living readers would count as dead.
        ReadOnlyError, CorruptLogError, StorageError: as for `collect`.
    """
    if not wait >= 0:
        raise UsageError(f"wait: {wait} s, 0 or more are needed")
    if not dead_after >= SHORTEST_TTL:
        raise UsageError(
            f"a pin is renewed every {REFRESH_EVERY:g} s: not renewed for {dead_after:g} s it may still be alive; "
            f"wait {SHORTEST_TTL:g} s at least"
        )
    watch = PinWatch(journal.backend, dead_after, clock)
    end = clock() + wait
    pause = 0.2
    done = Collected()
    while True:
        found = collect(journal, watch, dry_run=dry_run, progress=progress, since=since)
        since = None
        done = found if dry_run else _together(done, found)
        left = end - clock()
        if not found.pinned or left <= 0:
            return done
        sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)


def _together(before: Collected, found: Collected) -> Collected:
    return replace(
        found,
        segments=(*before.segments, *found.segments),
        nbytes=before.nbytes + found.nbytes,
        dead_pins=(*before.dead_pins, *found.dead_pins),
    )


def _holders(pins: Survey, claimed: set[str]) -> tuple[Holder, ...]:
    by_identity = {_identity(key): key for key in claimed}
    found = []
    for key, record in pins.records.items():
        held = tuple(by_identity[segment] for segment in record.segments if segment in by_identity)
        if held:
            found.append(Holder(key, dict(record.reader), held))
    return tuple(found)


def _spare_limit(catalog: Catalog) -> int:
    """Return the bytes of deleted segments that the medium may keep: about what the next checkpoints need."""
    node = catalog.checkpoints.highest(catalog.term)
    if node is None and (entry := catalog.terms.get(catalog.term)) is not None and entry.parent is not None:
        node = entry.parent.node
    newest = None if node is None else catalog.find(node)
    return 0 if newest is None else _SPARE_CHECKPOINTS * (newest.nbytes + newest.tensors * _ENTRY + _HEADER)


def _delete(
    backend: Backend,
    segments: Sequence[str],
    sizes: Mapping[str, int],
    lapsed: frozenset[str] | None,
    progress: Progress | None,
) -> None:
    # 3. Delete.
    if not segments:
        return
    # Prevents: a power cut that keeps the deletion and takes back the record that dropped the segment, or the OPEN that
    # made its term an old one, which were visible and not yet durable.
    backend.settle("log/")
    backend.settle("fold/")
    tally = Tally(progress, sum(sizes[key] for key in segments))
    for key in segments:
        crash_point("gc.before-delete")
        if lapsed is None or _identity(key) in lapsed or not key.endswith(_SEGMENT):
            backend.delete(key)
        else:
            backend.release(key)
        crash_point("gc.deleted")
        tally.advance(sizes[key])


def _identity(key: str) -> str:
    return key.rpartition("/")[2].partition(".")[0]


def _size(backend: Backend, key: str) -> int:
    try:
        return backend.size(key)
    except KeyNotFoundError:  # another collector was faster
        return 0
