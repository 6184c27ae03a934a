"""Copies checkpoints of a store, or all of it, to another place: the same run, terms, states and segments.

1. READ, choose, pin, READ again (`ckptstore.log.pins.claim`): the copy is what the log said at one instant, whatever a
   writer, a collector or a merge does in the meantime.
2. Copy it (`transfer`), with every byte compared with its hash on the way.
3. Write FORMAT: from now on the place is a store.

A kill at any instant leaves a place that is not yet a store; the same command continues there. A copy that is already
a store gets what is new.

Several processes may make one copy at once. In a folder those of one machine take turns. In a bucket they do not wait:
a segment has the same bytes from every sender, no process deletes what another may be about to name, and a process
that finds a slot taken starts again. Each reads the target before the source, so no process restores what another one
has already superseded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ckptstore.backends.base import Backend
from ckptstore.backends.exclusion import exclusive_access
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.errors import CorruptLogError, ReadOnlyError, UsageError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.record_text import KNOWN_FEATURES
from ckptstore.formats.history.records import FormatFile, Node, ref_of
from ckptstore.formats.html_tables import HtmlTable
from ckptstore.host.option_checks import MOST_THREADS, whole
from ckptstore.host.progress import Progress, Tally
from ckptstore.host.threads import default_threads
from ckptstore.log.journal import Journal
from ckptstore.log.log_copy import CopyOrigin, LogCopy, TakenError
from ckptstore.log.log_reader import View, read
from ckptstore.log.pins import claim
from ckptstore.maintenance.copies.copies_as_fulls import WrittenFulls, copy_as_fulls
from ckptstore.maintenance.copies.copy_selection import chosen_nodes, left_out, part_of
from ckptstore.maintenance.copies.parallel_copies import SegmentCopies
from ckptstore.maintenance.copies.transfer import Transfer

__all__ = ["As", "Copied", "check_apart", "check_known", "copy"]

As = Literal["stored", "full"]
_FORMS: Final = ("stored", "full")
_TRIES: Final = 16
"""Number of times that another process may add to the place before this one gives up."""


@dataclass(frozen=True, slots=True)
class Copied(HtmlTable):
    """The result of `copy`.

    Attributes:
        run: the run's uuid, which both stores have.
        checkpoints: REFs of the requested checkpoints, ascending: all of them are there now.
        bases: REFs of checkpoints copied only because others build on them; not promised there.
        segments: number of segments written by this call, of `nbytes` bytes.
        present: number of needed segments that were already there.
        went_on: whether the place had a copy, complete or not, that this call continued.
    """

    run: str
    checkpoints: tuple[str, ...]
    bases: tuple[str, ...]
    segments: int
    nbytes: int
    present: int
    went_on: bool


def copy(
    journal: Journal,
    target: Backend,
    names: Sequence[str | int] = (),
    *,
    form: As = "stored",
    progress: Progress | None = None,
    threads: int | None = None,
) -> Copied:
    """Copy checkpoints to another place. See `Store.copy`.

    Args:
        target: an empty place, an unfinished copy of the same, or a copy of this run.
        names: REFs; none: everything.
        form: ``full``: decode each checkpoint, and store it as an uncompressed full.
        threads: segments copied at once; None: up to four.

    Raises:
        UsageError: the target is something else, is in the store, or has been written to.
        CheckpointNotFoundError: a REF names no checkpoint.
        CorruptionError: the store is damaged. What was copied so far stays, for another try.
        ReadOnlyError, StorageError: a medium failed, or cannot be written.
    """
    if form not in _FORMS:
        raise UsageError(f"{form!r}: a copy is made as 'stored' or as 'full'")
    threads = default_threads() if threads is None else whole("threads", threads, 1, MOST_THREADS)
    check_apart(journal.backend, target)
    view = read(journal)
    _chosen(journal, view.catalog, names)  # raises before anything is written
    copying = _CopyRun(journal, view, target, tuple(names), form, progress, threads)
    with exclusive_access(target, make=True):
        tries = 0
        while True:
            try:
                return copying.once()
            except TakenError as error:
                tries += 1
                if tries == _TRIES:
                    raise UsageError(str(error)) from error


def _chosen(journal: Journal, catalog: Catalog, names: Sequence[str | int]) -> tuple[list[Node], Catalog]:
    """Return the requested checkpoints, and the part of the catalog with all that they build on."""
    _check_copyable(journal, catalog)
    nodes = chosen_nodes(catalog, names)
    return nodes, part_of(catalog, nodes if names else None)


@dataclass
class _CopyRun:
    """A copy in progress. It may have to start again, if another process has added to the target.

    Attributes:
        view: the store's log as it was last read.
        brought, nbytes: segments written in all tries together.
    """

    journal: Journal
    view: View
    target: Backend
    names: tuple[str | int, ...]
    form: As
    progress: Progress | None
    threads: int
    brought: int = 0
    nbytes: int = 0

    def once(self) -> Copied:
        """Try once. Raises as `copy`, and `TakenError`."""

        def choose(catalog: Catalog) -> tuple[Catalog, list[Node], Catalog]:
            return catalog, *_chosen(self.journal, catalog, self.names)

        replica = LogCopy(self.target, CopyOrigin(self.journal.format, "copy", _request(self.names, self.form)))
        went_on = not replica.begun or bool(replica.catalog.term)
        # Prevents: tags, rules and promises from a view that is older than the one that another process has copied.
        self.view = read(self.journal, self.view)
        claimed = claim(self.journal, choose, lambda chosen: tuple(chosen[2].segments), since=self.view)
        with claimed as (_, (source, nodes, wanted)):
            lacks = left_out(source, wanted, replica.catalog)
            if self.form == "full":
                present = self._write(source, nodes, replica, lacks)
            else:
                present = self._bring(source, wanted, replica, lacks)
            replica.finish()
        return Copied(
            run=self.journal.run,
            checkpoints=tuple(ref_of(node) for node in nodes),
            bases=() if self.form == "full" else tuple(ref_of(node) for node in wanted.held),
            segments=self.brought,
            nbytes=self.nbytes,
            present=present,
            went_on=went_on,
        )

    def _write(self, source: Catalog, nodes: Sequence[Node], replica: LogCopy, lacks: Mapping[int, int]) -> int:
        """Write each checkpoint as a full. Return the number of segments that were already there."""
        done = WrittenFulls()
        try:
            copy_as_fulls(self.journal, source, nodes, replica, done, lacks, self.progress, self.threads)
        finally:
            self._count(done)
        whole = sum(len(replica.catalog.encodings.get(node, ())) for node in nodes)
        return max(0, whole - done.brought)

    def _bring(self, source: Catalog, wanted: Catalog, replica: LogCopy, lacks: Mapping[int, int]) -> int:
        """Copy every segment unchanged. Return the number of those that were already there."""
        tally = Tally(self.progress)
        done = SegmentCopies(self.journal.backend, self.target, self.journal.run, self.threads, tally.advance)
        transfer = Transfer(wanted, replica, done, lacks, source)
        tally.total = sum(entry.size for entry in transfer.missing())
        self.target.check_space(tally.total)
        try:
            transfer.run()
        finally:
            self._count(done)
        return len(wanted.segments) - done.brought

    def _count(self, done: WrittenFulls | SegmentCopies) -> None:
        self.brought += done.brought
        self.nbytes += done.nbytes


def check_apart(source: Backend, target: Backend) -> None:
    """Raise `UsageError` if one place is in the other, or if the copy would be in some other store."""
    if isinstance(source, LocalBackend) and isinstance(target, LocalBackend):
        there, here = Path(target.root).resolve(), Path(source.root).resolve()
        if there == here or here in there.parents or there in here.parents:
            raise UsageError(f"{target.url}: the copy of a store needs a place of its own, outside of {source.url}")
    if isinstance(target, LocalBackend) and not Path(target.root).exists():  # before anything is created there
        Journal(target).check_outside()


def _check_copyable(journal: Journal, catalog: Catalog) -> None:
    """Raise `CorruptLogError` if the log is damaged, `ReadOnlyError` if a newer version wrote it."""
    if catalog.damage or catalog.lost > catalog.term:
        raise CorruptLogError(
            f"{journal.url}: the log is damaged, so its content is unknown; `ckpt repair` copies what is intact"
        )
    check_known(journal.url, journal.format, catalog)


def check_known(url: str, format_file: FormatFile, catalog: Catalog) -> None:
    """Raise `ReadOnlyError` if a newer version wrote something that a copy by this version would omit."""
    needs = catalog.ro_compat.union(format_file.features.get("write", ())) - KNOWN_FEATURES
    needs = needs.union(name for _, members in catalog.unknown for name in members)
    if needs:
        raise ReadOnlyError(f"{url}: copying needs {', '.join(sorted(needs))}, which only a newer version knows")


def _request(names: Sequence[str | int], form: As) -> str:
    """Return a text that identifies this request: an unfinished copy is continued only by the same request."""
    return f"{form}: {' '.join(str(name) for name in names) or 'all'}"[:10_000]
