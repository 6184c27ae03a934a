"""The stores below a folder: how far each run is, how large, and what is known of who writes it.

Nothing is written, no link is followed, and nothing is opened but stores. A folder that cannot be read is named.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ckptstore.backends import open_backend
from ckptstore.errors import CkptError, CorruptLogError, NotFoundError, UsageError
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.markup import HtmlTable
from ckptstore.formats.records import FORMAT_KEY
from ckptstore.log.authors import WriterState, last_writer
from ckptstore.log.journal import Journal
from ckptstore.log.reading import read
from ckptstore.reports.stats import bytes_by_step, growth

__all__ = ["FoundRuns", "RunInfo", "find_runs"]

_ROOMS: Final = ("log", "seg")
_DEEPEST: Final = 64
_DAMAGED: Final = "its log is damaged or lost: `ckpt verify` says what, `ckpt repair` keeps the rest"


@dataclass(frozen=True, slots=True)
class RunInfo(HtmlTable):
    """A store that was found.

    Attributes:
        path: its folder, as the one that was looked through was given.
        error: why it cannot be read, and the rest is then empty; or that its log is damaged, and the rest is what is
            left of it.
        run: the run's uuid.
        checkpoints: how many it has.
        latest: REF of the newest; None: there is none, or damage hides it. `step`: its step.
        nbytes: bytes of the segments that its log holds.
        growth: see `StoreStats.growth`.
        time: seconds since the Unix epoch of the newest checkpoint or, if that is later, of the newest term's
            beginning, by the writer's clock; None: nobody has written to it.
        writer: of the newest term, which has not closed: ``alive``: on this host the process that opened it is running.
            ``gone``: this host has no process of its number, so it was killed, or a save failed after its last one.
            ``unknown``: it is another host's, or nothing can be said: look at `time`. ``closed``: the log says that the
            term has ended and that nothing it was given is missing. After a take-over (``ckpt tag --take-over``): how
            the run before it ended, ``closed`` or ``gone``. ``none``: nobody has written to it.
        host, pid: where that writer is, or was; None: it did not say.
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
    """The stores below a folder, by path; and the folders that could not be read, each with the reason."""

    runs: tuple[RunInfo, ...]
    unreadable: tuple[tuple[str, str], ...]


def find_runs(folder: str | os.PathLike[str]) -> FoundRuns:
    """Look for stores in a folder and below it, not within stores.

    Raises:
        NotFoundError: there is no such folder.
        UsageError: it is a URL.
    """
    if "://" in os.fspath(folder):
        error = UsageError(f"{os.fspath(folder)}: runs are looked for below a folder, not a URL")
        error.add_note("of a bucket name the store: `ckpt log s3://bucket/prefix`")
        raise error
    top = Path(os.path.expanduser(os.fspath(folder)))  # noqa: PTH111  # as every STORE is read
    if not top.is_dir():
        raise NotFoundError(f"{top}: {'it is a file' if top.exists() else 'there is no such folder'}")
    unreadable: list[tuple[str, str]] = []
    runs = [_look_at(path) for path in _stores(top, unreadable, 0)]
    return FoundRuns(tuple(runs), tuple(unreadable))


def _stores(folder: Path, unreadable: list[tuple[str, str]], depth: int) -> Iterator[Path]:
    """Folders that have a FORMAT file and a log, in order."""
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
        unreadable.append((str(folder), "a store without its FORMAT file: `ckpt repair` makes one of what is intact"))
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
    """Whether a FORMAT file without a log is a store's that nobody has written to."""
    try:
        journal = Journal(open_backend(folder, create=False))
        try:
            return bool(journal.run)
        finally:
            journal.backend.close()
    except (CkptError, OSError):
        return False


def _look_at(path: Path) -> RunInfo:
    try:
        journal = Journal(open_backend(path, create=False))
        try:
            catalog = read(journal, look_above=True, tell=False).catalog
            found = _described(str(path), journal.run, catalog)
            if catalog.damage or catalog.lost > catalog.term:
                return replace(found, error=_DAMAGED)
            return found
        finally:
            journal.backend.close()
    except (CkptError, OSError) as error:
        return RunInfo(str(path), error=str(error).removeprefix(f"{path}: "), writer="unknown")


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
