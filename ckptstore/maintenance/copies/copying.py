"""``copy``: checkpoints of a store, or all of it, in another place: the same run, terms, states and segments.

1. READ, choose, pin, READ again (`ckptstore.log.pins.claim`): what is copied is what the log said at one instant,
   whatever a writer, a collector or a merge does meanwhile.
2. Bring it over (`transfer`), every byte compared with its hash on the way.
3. FORMAT: from now on it is a store.

Killed at any instant, it leaves a place that is no store yet; the same command goes on with it. A copy that is a store
already takes what is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ckptstore.backends.base import Backend
from ckptstore.backends.local import LocalBackend
from ckptstore.errors import CorruptLogError, ReadOnlyError, UsageError
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.markup import HtmlTable
from ckptstore.formats.records import FormatFile, Node, ref_of
from ckptstore.formats.texts import KNOWN_FEATURES
from ckptstore.host.checks import MOST_THREADS, whole
from ckptstore.host.progress import Progress, Tally
from ckptstore.host.threads import default_threads
from ckptstore.log.journal import Journal
from ckptstore.log.pins import claim
from ckptstore.log.replica import Origin, Replica
from ckptstore.maintenance.copies.choosing import chosen_nodes, part_of
from ckptstore.maintenance.copies.fulls import Written, copy_as_fulls
from ckptstore.maintenance.copies.supplies import Copies
from ckptstore.maintenance.copies.transfer import Transfer

__all__ = ["As", "Copied", "check_apart", "check_known", "copy"]

As = Literal["stored", "full"]
_FORMS: Final = ("stored", "full")


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

    def choose(catalog: Catalog) -> tuple[list[Node], Catalog]:
        _check_copyable(journal, catalog)
        nodes = chosen_nodes(catalog, names)
        return nodes, part_of(catalog, nodes if names else None)

    with claim(journal, choose, lambda chosen: tuple(chosen[1].segments)) as (view, (nodes, wanted)):
        origin = Origin(journal.format, "copy", _request(names, form))
        replica = Replica(target, origin)
        went_on = not replica.begun or bool(replica.catalog.term)
        done: Written | Copies
        if form == "full":
            done = copy_as_fulls(journal, view.catalog, nodes, replica, progress, threads)
        else:
            tally = Tally(progress)
            done = Copies(journal.backend, target, journal.run, threads, tally.advance)
            transfer = Transfer(wanted, replica, done)
            missing = transfer.missing()
            tally.total = sum(entry.size for entry in missing)
            target.check_space(tally.total)
            transfer.run()
        replica.finish()
    bases = () if form == "full" else tuple(ref_of(node) for node in wanted.held)
    present = sum(len(replica.catalog.encodings.get(node, ())) for node in nodes) if form == "full" else 0
    return Copied(
        run=journal.run,
        checkpoints=tuple(ref_of(node) for node in nodes),
        bases=bases,
        segments=done.brought,
        nbytes=done.nbytes,
        present=max(0, present - done.brought) if form == "full" else len(wanted.segments) - done.brought,
        went_on=went_on,
    )


def check_apart(source: Backend, target: Backend) -> None:
    """Raise `UsageError` if one place lies in the other."""
    if isinstance(source, LocalBackend) and isinstance(target, LocalBackend):
        there, here = Path(target.root).resolve(), Path(source.root).resolve()
        if there == here or here in there.parents or there in here.parents:
            raise UsageError(f"{target.url}: the copy of a store has a place of its own, outside of {source.url}")


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
