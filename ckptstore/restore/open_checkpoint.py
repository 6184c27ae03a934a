"""A checkpoint that is open: its plan, every segment of it, what they hold, and what restores each tensor.

While it is open its segments are pinned (`ckptstore.log.pins.claim`), so that no collector takes them away.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from ckptstore.backends.base import Backend
from ckptstore.errors import CkptError, CorruptSegmentError, FormatError, IncompatibleFormatError
from ckptstore.formats import checksums, jsontext
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.codecs import WITHOUT_BASE
from ckptstore.formats.records import CheckpointEntry, CheckpointId, Encoding, SegmentEntry
from ckptstore.formats.segment import SegmentDoc
from ckptstore.formats.shards import state_parts
from ckptstore.formats.state import tensor_names
from ckptstore.log import refs
from ckptstore.log.checkpoint_info import CheckpointInfo, describe_checkpoint
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import View
from ckptstore.log.pins import claim
from ckptstore.restore.alternatives import UNTRIED, Tried, next_way
from ckptstore.restore.assembly import Held, assemble, held_by, tree_of
from ckptstore.restore.chain import Chain
from ckptstore.restore.fallback import FAULTS, around
from ckptstore.restore.resident_checkpoint import HeldState
from ckptstore.restore.restore_plan import Edge, Plan, edge_of, plan, stored_bytes
from ckptstore.restore.restore_source import Restorable
from ckptstore.restore.stored_parts import Parts, stored_parts
from ckptstore.segments.open_files import Handles
from ckptstore.segments.segment_reader import SegmentReader

__all__ = ["Opened", "opened", "opened_readers"]

_OPEN: Final = 128
"""Segments that stay open; more of them (many ranks, long chains) are opened again when they are read."""


@dataclass(frozen=True)  # no slots: what costs a walk over all tensors is computed once
class Opened(Restorable):
    """A checkpoint with every segment of its plan open and described.

    Attributes:
        catalog: the log as it was read to open this.
        entry: the checkpoint in it.
        plan: how it is restored, from the first encoding that is read.
        readers: the plan's segments, by id.
        tried: what is known of ways that failed.
        base: what is held in memory, on which the plan's first encoding builds; None: it builds on nothing.
        cheap_reads: reading many small pieces costs little more than one large one.
        quiet: nobody is warned.
    """

    catalog: Catalog
    entry: CheckpointEntry
    plan: Plan
    readers: dict[str, SegmentReader]
    tried: Tried = UNTRIED
    base: HeldState | None = None
    cheap_reads: bool = True
    quiet: bool = False

    @property
    def ref(self) -> str:
        """The REF ``STEP@TERM``, which names this checkpoint for ever."""
        return self.entry.ref

    def around(self, error: CkptError, held: Collection[CheckpointId] = ()) -> Tried:
        """What to open this with once more, now that it has failed. See `fallback.around`."""
        target, used = self.plan.target, self.plan.encodings
        return around(self.catalog, target, used, self.tried, error, held, quiet=self.quiet)

    @property
    def info(self) -> CheckpointInfo:
        """What the store tells about it."""
        return describe_checkpoint(self.catalog, self.entry)

    @property
    def lossy(self) -> bool:
        """Whether it is not what training had, because something on the way was stored so."""
        return any(encoding.lossy for encoding in self.plan.encodings)

    @cached_property
    def merged(self) -> Any:
        """The typed JSON tree as it is stored: of all ranks that saved it (`formats.rank_trees`)."""
        last = self.plan.encodings[-1]
        return tree_of([self.readers[segment] for segment in last.segments], last)

    @cached_property
    def chains(self) -> dict[str, Chain]:
        """name -> what restores it, for every tensor of the state, in the tree's order; key -> of its shards.

        Raises:
            CorruptSegmentError: a link is missing, or does not fit the one below it.
        """
        return assemble(self.encodings, self.keys)

    @property
    def keys(self) -> list[str]:
        """Of everything that `chains` has."""
        return [key for keys in self.parts.values() for key in keys]

    @cached_property
    def parts(self) -> Parts:
        """name -> keys of `chains`: its own name, or those of its shards; in the order of the tree.

        Raises:
            CorruptSegmentError: a tensor is missing, or its shards do not make it up.
        """
        return stored_parts(self.encodings[-1], tensor_names(self.merged), f"checkpoint {self.ref}")

    @cached_property
    def encodings(self) -> list[Held]:
        """The tensors of each encoding of the plan, and before them those of `base`."""
        below = [] if self.base is None else [self.base.links]
        return [*below, *(self._held(encoding) for encoding in self.plan.encodings)]

    def _held(self, encoding: Encoding) -> Held:
        """The tensors of one encoding, which builds on what the plan says."""
        return held_by([self.readers[segment] for segment in encoding.segments], encoding)

    def check_identity(self) -> None:
        """Compare the descriptions with the state hash of the log. Raises `CorruptSegmentError`."""
        if self.base is None:
            self.chains  # noqa: B018  # raises where one has no beginning
        try:
            parts = state_parts(self.encodings[-1][key].tensor for key in self.keys)
        except IncompatibleFormatError:
            raise  # nothing is damaged: a newer version reads it
        except FormatError as error:  # a chunk whose decoded bytes have no hash
            raise CorruptSegmentError(f"checkpoint {self.ref}: {error}") from error
        if checksums.state_hash(jsontext.dumps(self.merged), parts) != self.entry.state:
            raise CorruptSegmentError(f"checkpoint {self.ref}: its segments describe another state than the log")


@contextmanager
def opened(
    journal: Journal,
    ref: str | int,
    tried: Tried = UNTRIED,
    bases: Sequence[HeldState] = (),
    since: View | None = None,
    catalog: Catalog | None = None,
) -> Iterator[Opened]:
    """Plan, pin and open everything that restoring `ref` reads.

    If a segment of the plan is missing, or its description is damaged, and there is another way, that one is
    opened, and a `FallbackWarning` says so.

    Args:
        tried: what is known of ways that failed.
        bases: other checkpoints, held in memory: what builds on one is preferred where that is less to read.
        since: what was read of the log just now.
        catalog: the log, for a command that examines a store. It is not read again, nothing is pinned, and no warning
            is given.
    """
    entered = False
    while not entered:
        attempt = _Attempt(bases, since, catalog, quiet=catalog is not None)
        try:
            # No ExitStack: Ctrl-C while it leaves would keep the pin until Python looks for cycles.
            with _opened(journal, ref, tried, attempt) as found:
                entered = True
                yield found
        except FAULTS as error:
            if entered:
                raise  # of the caller's work
            tried, ref = attempt.around(error, tried), attempt.ref


@dataclass
class _Attempt:
    """What is known of a checkpoint when it turns out that it cannot be opened."""

    bases: Sequence[HeldState] = ()
    since: View | None = None
    catalog: Catalog | None = None
    quiet: bool = False
    chosen: Plan | None = None
    needed: _Needed | None = None

    @property
    def ref(self) -> str:
        """What names the checkpoint for ever: ``latest`` may be another one the next time."""
        assert self.chosen is not None
        return self.chosen.target.ref

    def around(self, error: CkptError, tried: Tried) -> Tried:
        """See `fallback.around`."""
        needed = self.needed
        if self.catalog is None or self.chosen is None or needed is None or not needed.encodings:
            raise error
        known = tried.knowing(needed.based)
        return around(
            self.catalog,
            self.chosen.target,
            needed.encodings,
            known,
            error,
            self.held,
            needed.unreadable,
            quiet=self.quiet,
        )

    @property
    def held(self) -> list[CheckpointId]:
        """See `plan`."""
        return [base.id for base in self.bases]

    def choose(self, catalog: Catalog, ref: str | int, tried: Tried) -> tuple[CheckpointEntry, Plan]:
        """The checkpoint and the cheapest way to it; beside what is held, the one that reads the least."""
        self.needed = None
        entry = refs.resolve(catalog, ref)
        cost = stored_bytes if self.bases else None
        if tried != UNTRIED:
            chosen = next_way(catalog, entry.id, tried, cost, self.held)
        else:
            chosen = plan(catalog, entry.id, cost, held=self.held)
        self.catalog, self.chosen = catalog, chosen
        return entry, chosen


@contextmanager
def _opened(journal: Journal, ref: str | int, tried: Tried, attempt: _Attempt) -> Iterator[Opened]:
    def choose_plan(catalog: Catalog) -> tuple[CheckpointEntry, Plan]:
        return attempt.choose(catalog, ref, tried)

    def claimed() -> AbstractContextManager[tuple[Catalog, tuple[CheckpointEntry, Plan]]]:
        if attempt.quiet and attempt.catalog is not None:
            return nullcontext((attempt.catalog, choose_plan(attempt.catalog)))
        return _claimed(journal, choose_plan, attempt.since)

    with claimed() as (catalog, (entry, chosen)), ExitStack() as stack:
        attempt.needed = needed = _Needed(journal, catalog, chosen)
        readers = opened_readers(journal.backend, needed.entries(), needed.open, stack)
        used = replace(chosen, encodings=tuple(needed.encodings))
        readers = {segment: readers[segment] for segment in used.segments}  # in the plan's order
        base = next((one for one in attempt.bases if one.id == used.encodings[0].base), None)
        known = tried.knowing(needed.based)
        found = Opened(catalog, entry, used, readers, known, base, journal.backend.cheap_looks, quiet=attempt.quiet)
        found.check_identity()
        yield found


@contextmanager
def _claimed(
    journal: Journal, choose: Callable[[Catalog], tuple[CheckpointEntry, Plan]], since: View | None
) -> Iterator[tuple[Catalog, tuple[CheckpointEntry, Plan]]]:
    with claim(journal, choose, lambda chosen: chosen[1].segments, since=since) as (view, chosen):
        yield view.catalog, chosen


class _Needed:
    """What of a plan is read: its encodings from the last one down, to one in which no entry has a base tensor.

    Prevents: an intact checkpoint called damaged, because a segment is that nothing in it builds on.

    Attributes:
        encodings: those that are read, in the order of application.
        based: those of them that need something of their base.
        unreadable: the segment that could not be opened; None: all could.
    """

    def __init__(self, journal: Journal, catalog: Catalog, chosen: Plan) -> None:
        self.encodings: list[Encoding] = []
        self.based: set[Edge] = set()
        self.unreadable: str | None = None
        self._journal, self._catalog, self._chosen = journal, catalog, chosen
        self._docs: dict[str, SegmentDoc] = {}

    def open(self, entry: SegmentEntry) -> SegmentReader:
        """Open a segment."""
        self.unreadable = entry.id
        reader = _open(self._journal, entry)
        self.unreadable = None
        self._docs[entry.id] = reader.doc
        return reader

    def entries(self) -> Iterator[SegmentEntry]:
        """The segments to open, each once. Whether more follow, those that were opened tell."""
        for encoding in reversed(self._chosen.encodings):
            self.encodings.insert(0, encoding)
            for segment in encoding.segments:
                if segment not in self._docs:
                    yield self._catalog.segments[segment]
            step = encoding.checkpoint[1]
            tensors = (self._docs[segment].tensors.get(step, {}) for segment in encoding.segments)
            if all(tensor.codec in WITHOUT_BASE for own in tensors for tensor in own.values()):
                return
            self.based.add(edge_of(encoding))


def opened_readers(
    backend: Backend, entries: Iterable[SegmentEntry], open_: Callable[[SegmentEntry], SegmentReader], stack: ExitStack
) -> dict[str, SegmentReader]:
    """Segments by their ids, open until `stack` is left; those of many only when they are read.

    Args:
        open_: opens one.
    """
    readers: dict[str, SegmentReader] = {}
    handles = Handles(backend)
    stack.callback(handles.close)
    for number, entry in enumerate(entries):
        readers[entry.id] = reader = open_(entry)
        if number < _OPEN:
            stack.callback(reader.close)
        else:
            reader.close()
            reader.source = handles.source(reader.entry.key, reader.entry.size)
    return readers


def _open(journal: Journal, entry: SegmentEntry) -> SegmentReader:
    reader = SegmentReader(journal.backend, entry)
    try:
        reader.check_identity(journal.run)
    except CorruptSegmentError:
        reader.close()
        raise
    return reader
