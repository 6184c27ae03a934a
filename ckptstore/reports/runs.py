"""Finds the stores below a folder: how far each run is, its size, and its writer.

It writes nothing, follows no links, and opens only stores. Folders that cannot be read are named.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ckptstore.backends import open_backend
from ckptstore.backends.base import Backend
from ckptstore.errors import CkptError, CorruptLogError, KeyNotFoundError, NotFoundError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import FORMAT_KEY
from ckptstore.formats.html_tables import HtmlTable, counted
from ckptstore.log.change_committer import WriterState, last_writer
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import read
from ckptstore.reports.store_stats import bytes_by_step, growth

__all__ = ["FoundRuns", "RunInfo", "find_runs"]

_ROOMS: Final = ("log", "seg")
_DEEPEST: Final = 64
_DAMAGED: Final = "its log is damaged or lost: `ckpt verify` names the damage, `ckpt repair` keeps the rest"
_NO_FORMAT: Final = "a store without its FORMAT file: `ckpt repair` makes a store of what is intact"
_GONE: Final = "missing: `ckpt verify` says what needs them, `ckpt repair` keeps the rest"


@dataclass(frozen=True, slots=True)
class RunInfo(HtmlTable):
    """A store that was found.

    Attributes:
        path: its folder, relative to the searched folder as that was given.
        error: why it cannot be read (the other attributes are then empty); or that its log is damaged or segments are
            missing (the others are then what the log says). Whether the bytes of segments are intact is not checked.
        run: the run's uuid; None: it cannot be read.
        checkpoints: number of checkpoints.
        latest: REF of the newest; None: there is none, or damage hides it. `step`: its step.
        nbytes: bytes of the segments that its log names.
        growth: see `StoreStats.growth`.
        time: time of the newest checkpoint or of the newest term's start, whichever is later, in seconds since the
            Unix epoch, by the writer's clock; None: the store has never been written to.
        writer: state of the newest term's writer. ``alive``: the process that opened the term is running on this host.
            ``gone``: no process on this host has its number: it was killed, or a save failed after its last one.
            ``unknown``: it is on another host, or its state cannot be determined; see `time`. ``closed``: the log says
            that the term has ended and that no save is missing. After a take-over (``ckpt tag --take-over``): how the
            run before it ended, ``closed`` or ``gone``. ``none``: the store has never been written to.
        host, pid: host and process of that writer; None: it did not say.
    """

    path: str
    error: str | None = None
    run: str | None = None
    checkpoints: int = 0
    latest: str | None = None
    step: int | None = None
    nbytes: int = 0
    growth: float | None = None
    time: float | None = None
    writer: WriterState = "none"
    host: str | None = None
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class FoundRuns:
    """The stores below a folder, by path, and the folders that could not be read, each with the reason."""

    runs: tuple[RunInfo, ...]
    unreadable: tuple[tuple[str, str], ...]


def find_runs(folder: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> FoundRuns:
    """Find stores in a folder and below it, but not inside stores.

    Args:
        folder: a path; or a URL of a bucket, or of a part of it. In a bucket each folder above a store costs a listing.
        storage_options: options for reaching an object store; None: from the environment.

    Raises:
        NotFoundError: there is no such folder.
        UsageError: the URL is malformed.
        StorageError: the medium failed.
    """
    unreadable: list[tuple[str, str]] = []
    if "://" in os.fspath(folder):
        url = os.fspath(folder).rstrip("/")
        within = open_backend(url, create=False, storage_options=storage_options)
        try:
            places = list(_places(within, "", unreadable, 0))
        finally:
            within.close()
        urls = [f"{url}/{place}".rstrip("/") for place in places]
        runs = [_look_at(one, storage_options) for one in urls]
        return FoundRuns(tuple(runs), tuple((f"{url}/{place}".rstrip("/"), why) for place, why in unreadable))
    top = Path(os.path.expanduser(os.fspath(folder)))  # noqa: PTH111  # as every STORE is read
    if not top.is_dir():
        raise NotFoundError(f"{top}: {'it is a file' if top.exists() else 'there is no such folder'}")
    runs = [_look_at(str(path)) for path in _stores(top, unreadable, 0)]
    return FoundRuns(tuple(runs), tuple(unreadable))


def _places(within: Backend, prefix: str, unreadable: list[tuple[str, str]], depth: int) -> Iterator[str]:
    """Yield the folders of an object store that have a FORMAT object and a log, in order, without a final slash."""
    try:
        names = sorted(within.folders(prefix))
        if any(room in names for room in _ROOMS) and _there(within, f"{prefix}{FORMAT_KEY}"):
            yield prefix.rstrip("/")
            return
    except CkptError as error:
        if not prefix:
            raise
        unreadable.append((prefix.rstrip("/"), str(error)))
        return
    if all(room in names for room in _ROOMS):
        unreadable.append((prefix.rstrip("/"), _NO_FORMAT))
        return
    if names and depth >= _DEEPEST:
        unreadable.append((prefix.rstrip("/"), f"more than {_DEEPEST} folders deep"))
        return
    for name in names:
        yield from _places(within, f"{prefix}{name}/", unreadable, depth + 1)


def _there(within: Backend, key: str) -> bool:
    try:
        within.size(key)
    except KeyNotFoundError:
        return False
    return True


def _stores(folder: Path, unreadable: list[tuple[str, str]], depth: int) -> Iterator[Path]:
    """Yield the folders that have a FORMAT file and a log, in order."""
    try:
        with os.scandir(folder) as entries:
            found = sorted(((entry.name, _kind(entry)) for entry in entries), key=lambda one: one[0])
    except OSError as error:
        unreadable.append((str(folder), error.strerror or str(error)))
        return
    kinds = dict(found)
    if kinds.get(FORMAT_KEY) == stat.S_IFREG and any(kinds.get(room) == stat.S_IFDIR for room in _ROOMS):
        yield folder
        return
    if kinds.get(FORMAT_KEY) == stat.S_IFREG and _begun(folder):
        yield folder
        return
    if FORMAT_KEY not in kinds and all(kinds.get(room) == stat.S_IFDIR for room in ("log", "seg")):
        unreadable.append((str(folder), _NO_FORMAT))
        return
    below = [name for name, kind in found if kind == stat.S_IFDIR]
    if below and depth >= _DEEPEST:
        unreadable.append((str(folder), f"more than {_DEEPEST} folders deep"))
        return
    for name in below:
        yield from _stores(folder / name, unreadable, depth + 1)


def _kind(entry: os.DirEntry[str]) -> int:
    try:
        return stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode)
    except OSError:
        return 0


def _begun(folder: Path) -> bool:
    """Tell whether a folder with a FORMAT file but without a log is a store that was never written to."""
    try:
        journal = Journal(open_backend(folder, create=False))
        try:
            return bool(journal.run)
        finally:
            journal.backend.close()
    except (CkptError, OSError):
        return False


def _look_at(path: str, storage_options: Mapping[str, Any] | None = None) -> RunInfo:
    try:
        journal = Journal(open_backend(path, create=False, storage_options=storage_options))
        try:
            catalog = read(journal, look_above=True, tell=False).catalog
            found = _described(path, journal.run, catalog)
            if catalog.damage or catalog.lost > catalog.term:
                return replace(found, error=_DAMAGED)
            if gone := _missing(journal, catalog):
                return replace(found, error=f"{counted(gone, 'segment')} {'is' if gone == 1 else 'are'} {_GONE}")
            return found
        finally:
            journal.backend.close()
    except (CkptError, OSError) as error:
        return RunInfo(path, error=str(error).removeprefix(f"{path}: "), writer="unknown")


def _missing(journal: Journal, catalog: Catalog) -> int:
    """Count the segments that the log names and that do not exist."""
    gone = {entry.id for entry in catalog.segments.values()}
    for _ in range(2):  # the log no longer names segments that were retired and collected in the meantime
        present = set(journal.backend.list("seg/"))
        gone &= {entry.id for entry in catalog.segments.values() if entry.key not in present}
        if not gone:
            break
        catalog = read(journal).catalog
    return len(gone & {entry.id for entry in catalog.segments.values()})


def _described(path: str, run: str, catalog: Catalog) -> RunInfo:
    try:
        newest = catalog.latest()
    except CorruptLogError:
        newest = None
    writer = last_writer(catalog)
    return RunInfo(
        path,
        run=run,
        checkpoints=len(catalog.checkpoints),
        latest=None if newest is None else newest.ref,
        step=None if newest is None else newest.step,
        nbytes=sum(segment.size for segment in catalog.segments.values()),
        growth=None if newest is None else growth(bytes_by_step(catalog), newest.step),
        time=writer.time,
        writer=writer.state,
        host=writer.host,
        pid=writer.pid,
    )
