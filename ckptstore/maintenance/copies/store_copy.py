"""``copy``: checkpoints of a store, or all of it, in another place: the same run, terms, states and segments.

1. READ, choose, pin, READ again (`ckptstore.log.pins.claim`): what is copied is what the log said at one instant,
   whatever a writer, a collector or a merge does meanwhile.
2. Bring it over (`transfer`), every byte compared with its hash on the way.
3. FORMAT: from now on it is a store.

Killed at any instant, it leaves a place that is no store yet; the same command goes on with it. A copy that is a store
already takes what is new.

Several may make one copy at once. Those of one machine take turns in a folder. In a bucket nobody waits: a segment has
the same bytes whoever sends it, nobody deletes what another may be about to name, and who finds a slot taken begins
anew. What is there is read before what there is to copy: so nobody puts back what another has brought there since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ckptstore.backends.base import Backend
from ckptstore.backends.exclusion import alone
from ckptstore.backends.local import LocalBackend
from ckptstore.errors import CorruptLogError, ReadOnlyError, UsageError
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.html_tables import HtmlTable
from ckptstore.formats.record_text import KNOWN_FEATURES
from ckptstore.formats.records import FormatFile, Node, ref_of
from ckptstore.host.option_checks import MOST_THREADS, whole
from ckptstore.host.progress import Progress, Tally
from ckptstore.host.threads import default_threads
from ckptstore.log.journal import Journal
from ckptstore.log.log_copy import Origin, Replica, TakenError
from ckptstore.log.log_reader import View, read
from ckptstore.log.pins import claim
from ckptstore.maintenance.copies.copies_as_fulls import Written, copy_as_fulls
from ckptstore.maintenance.copies.copy_selection import chosen_nodes, left_out, part_of
from ckptstore.maintenance.copies.parallel_copies import Copies
from ckptstore.maintenance.copies.transfer import Transfer

__all__ = ["As", "Copied", "check_apart", "check_known", "copy"]

As = Literal["stored", "full"]
_FORMS: Final = ("stored", "full")
_TRIES: Final = 16
"""Times that another process may add to the place before this one."""


@dataclass(frozen=True, slots=True)
class Copied(HtmlTable):
    """What `copy` did.

    Attributes:
        run: the run's uuid, which both have.
        checkpoints: REFs of what was asked for, ascending: all of it is there now.
        bases: REFs of what had to come along, because others build on it; not promised there.
        segments: how many were written this time, of `nbytes` bytes.
        present: how many of those that are needed were there already.
        went_on: whether the place had a copy, finished or not, which this call went on with.
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
        target: where to: nothing, an unfinished copy of the same, or a copy of this run.
        names: REFs; none: everything.
        form: ``full``: each checkpoint is decoded, and stored as an uncompressed full.
        threads: segments that are copied at once; None: up to four.

    Raises:
        UsageError: the target is something else, lies in the store, or went on by itself.
        CheckpointNotFoundError: nothing answers to a REF.
        CorruptionError: the store is damaged. What was copied so far stays, for another try.
        ReadOnlyError, StorageError: a medium failed, or cannot be written.
    """
    if form not in _FORMS:
        raise UsageError(f"{form!r}: a copy is made as 'stored' or as 'full'")
    threads = default_threads() if threads is None else whole("threads", threads, 1, MOST_THREADS)
    check_apart(journal.backend, target)
    view = read(journal)
    _chosen(journal, view.catalog, names)  # raises before anything is made
    copying = _Copying(journal, view, target, tuple(names), form, progress, threads)
    with alone(target, make=True):
        tries = 0
        while True:
            try:
                return copying.once()
            except TakenError as error:
                tries += 1
                if tries == _TRIES:
                    raise UsageError(str(error)) from error


def _chosen(journal: Journal, catalog: Catalog, names: Sequence[str | int]) -> tuple[list[Node], Catalog]:
    """What is asked for, and that with what it builds on."""
    _check_copyable(journal, catalog)
    nodes = chosen_nodes(catalog, names)
    return nodes, part_of(catalog, nodes if names else None)


@dataclass
class _Copying:
    """A copy, which may have to be begun again: what another process adds meanwhile is there then.

    Attributes:
        view: the store's log as it was read last.
        brought, nbytes: segments that were written, all tries together.
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
        """Raises as `copy`, and `TakenError`."""

        def choose(catalog: Catalog) -> tuple[Catalog, list[Node], Catalog]:
            return catalog, *_chosen(self.journal, catalog, self.names)

        replica = Replica(self.target, Origin(self.journal.format, "copy", _request(self.names, self.form)))
        went_on = not replica.begun or bool(replica.catalog.term)
        # Prevents: tags, rules and promises of a view that is older than that from which another process has made what
        # is there.
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

    def _write(self, source: Catalog, nodes: Sequence[Node], replica: Replica, lacks: Mapping[int, int]) -> int:
        """Each checkpoint as a full -> segments that were there already."""
        done = Written()
        try:
            copy_as_fulls(self.journal, source, nodes, replica, done, lacks, self.progress, self.threads)
        finally:
            self._count(done)
        whole = sum(len(replica.catalog.encodings.get(node, ())) for node in nodes)
        return max(0, whole - done.brought)

    def _bring(self, source: Catalog, wanted: Catalog, replica: Replica, lacks: Mapping[int, int]) -> int:
        """Every segment as it is -> how many were there already."""
        tally = Tally(self.progress)
        done = Copies(self.journal.backend, self.target, self.journal.run, self.threads, tally.advance)
        transfer = Transfer(wanted, replica, done, lacks, source)
        tally.total = sum(entry.size for entry in transfer.missing())
        self.target.check_space(tally.total)
        try:
            transfer.run()
        finally:
            self._count(done)
        return len(wanted.segments) - done.brought

    def _count(self, done: Written | Copies) -> None:
        self.brought += done.brought
        self.nbytes += done.nbytes


def check_apart(source: Backend, target: Backend) -> None:
    """Raise `UsageError` if one place lies in the other, or what is to be made in some other store."""
    if isinstance(source, LocalBackend) and isinstance(target, LocalBackend):
        there, here = Path(target.root).resolve(), Path(source.root).resolve()
        if there == here or here in there.parents or there in here.parents:
            raise UsageError(f"{target.url}: the copy of a store has a place of its own, outside of {source.url}")
    if isinstance(target, LocalBackend) and not Path(target.root).exists():  # before anything is made there
        Journal(target).check_outside()


def _check_copyable(journal: Journal, catalog: Catalog) -> None:
    """Raise `CorruptLogError` if the log is damaged, `ReadOnlyError` if a newer version wrote it."""
    if catalog.damage or catalog.lost > catalog.term:
        raise CorruptLogError(
            f"{journal.url}: the log is damaged: nobody knows what belongs to it; `ckpt repair` copies what is intact"
        )
    check_known(journal.url, journal.format, catalog)


def check_known(url: str, format_file: FormatFile, catalog: Catalog) -> None:
    """Raise `ReadOnlyError` if a newer version wrote what a copy of this one's would not have."""
    needs = catalog.ro_compat.union(format_file.features.get("write", ())) - KNOWN_FEATURES
    needs = needs.union(name for _, members in catalog.unknown for name in members)
    if needs:
        raise ReadOnlyError(f"{url}: copying needs {', '.join(sorted(needs))}, which only a newer version knows")


def _request(names: Sequence[str | int], form: As) -> str:
    """What tells this request from others: who goes on with a copy has to ask for the same."""
    return f"{form}: {' '.join(str(name) for name in names) or 'all'}"[:10_000]
