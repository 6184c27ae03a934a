"""Opens a checkpoint: its plan, every segment of it, their descriptions, and the chain that restores each tensor.

While it is open its segments are pinned (`ckptstore.log.pins.claim`), so that no collector deletes them.
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
from ckptstore.formats.codecs import WITHOUT_BASE
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import CheckpointEntry, CheckpointId, Encoding, SegmentEntry
from ckptstore.formats.segment_files.segment import SegmentDoc
from ckptstore.formats.segment_files.shards import state_parts
from ckptstore.formats.states.state import tensor_names
from ckptstore.log import refs
from ckptstore.log.checkpoint_info import CheckpointInfo, describe_checkpoint
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import View
from ckptstore.log.pins import claim
from ckptstore.restore.alternatives import NO_FAILED_WAYS, FailedWays, next_way
from ckptstore.restore.chains.assembly import Held, assemble, held_by, tree_of
from ckptstore.restore.chains.chain import Chain
from ckptstore.restore.fallback import FAULTS, record_failure
from ckptstore.restore.resident_checkpoint import ResidentCheckpoint
from ckptstore.restore.restore_plan import Edge, Plan, edge_of, plan, stored_bytes
from ckptstore.restore.restore_source import RestoreSource
from ckptstore.restore.stored_parts import Parts, stored_parts
from ckptstore.segments.open_files import OpenFiles
from ckptstore.segments.segment_reader import SegmentReader

__all__ = ["OpenCheckpoint", "opened", "opened_readers"]

_OPEN: Final = 128
"""Number of segments that stay open; further ones (many ranks, long chains) are opened again when they are read."""


@dataclass(frozen=True)  # no slots: values that need a walk over all tensors are computed once
class OpenCheckpoint(RestoreSource):
    """A checkpoint with every segment of its plan open and described.

    Attributes:
        catalog: the log as it was read to open this.
        entry: the checkpoint's entry in it.
        plan: the plan of the restore, from the first encoding that is read.
        readers: the plan's segments, by id.
        tried: what is known of failed ways.
        base: the state in memory on which the plan's first encoding builds; None: it builds on nothing.
        cheap_reads: reading many small pieces costs little more than reading one large one.
        quiet: no warnings.
    """

    catalog: Catalog
    entry: CheckpointEntry
    plan: Plan
    readers: dict[str, SegmentReader]
    tried: FailedWays = NO_FAILED_WAYS
    base: ResidentCheckpoint | None = None
    cheap_reads: bool = True
    quiet: bool = False

    @property
    def ref(self) -> str:
        """The REF ``STEP@TERM``, which names this checkpoint for ever."""
        return self.entry.ref

    def record_failure(self, error: CkptError, held: Collection[CheckpointId] = ()) -> FailedWays:
        """Record that this way has failed -> what is known of the ways now: see `fallback.record_failure`."""
        target, used = self.plan.target, self.plan.encodings
        return record_failure(self.catalog, target, used, self.tried, error, held, quiet=self.quiet)

    @property
    def info(self) -> CheckpointInfo:
        """The public description of the checkpoint."""
        return describe_checkpoint(self.catalog, self.entry)

    @property
    def lossy(self) -> bool:
        """Whether the state differs from the one that training had, because an encoding on the way is lossy."""
        return any(encoding.lossy for encoding in self.plan.encodings)

    @cached_property
    def merged(self) -> Any:
        """The typed JSON tree as it is stored: that of all ranks that saved it (`formats.states.rank_trees`)."""
        last = self.plan.encodings[-1]
        return tree_of([self.readers[segment] for segment in last.segments], last)

    @cached_property
    def chains(self) -> dict[str, Chain]:
        """name -> its chain, for every tensor of the state in the tree's order; for a sharded tensor key of shard ->
        chain.

        Raises:
            CorruptSegmentError: a link is missing, or does not fit the one below it.
        """
        return assemble(self.encodings, self.keys)

    @property
    def keys(self) -> list[str]:
        """The keys of everything in `chains`."""
        return [key for keys in self.parts.values() for key in keys]

    @cached_property
    def parts(self) -> Parts:
        """name -> keys of `chains`: the name itself, or the keys of its shards; in the order of the tree.

        Raises:
            CorruptSegmentError: a tensor is missing, or its shards do not cover it.
        """
        return stored_parts(self.encodings[-1], tensor_names(self.merged), f"checkpoint {self.ref}")

    @cached_property
    def encodings(self) -> list[Held]:
        """The tensors of each encoding of the plan, and before them those of `base`."""
        below = [] if self.base is None else [self.base.links]
        # The last one first: all of its entries are needed, and what is checked of them holds for others like it.
        own = [self._tensors_of(encoding) for encoding in reversed(self.plan.encodings)]
        return [*below, *reversed(own)]

    def _tensors_of(self, encoding: Encoding) -> Held:
        """The tensors of one encoding, which builds on the base that the plan says."""
        return held_by([self.readers[segment] for segment in encoding.segments], encoding)

    def check_identity(self) -> None:
        """Compare the descriptions with the state hash in the log. Raises `CorruptSegmentError`."""
        if self.base is None:
            self.chains  # noqa: B018  # raises if a chain has no beginning
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
    tried: FailedWays = NO_FAILED_WAYS,
    bases: Sequence[ResidentCheckpoint] = (),
    since: View | None = None,
    catalog: Catalog | None = None,
) -> Iterator[OpenCheckpoint]:
    """Plan, pin and open everything that restoring `ref` reads.

    If a segment of the plan is missing, or its description is damaged, and there is another way, that way is opened,
    and a `FallbackWarning` says so.

    Args:
        tried: what is known of failed ways.
        bases: other checkpoints in memory: encodings that build on one are preferred if that means less to read.
        since: a view of the log that was read just now.
        catalog: the log, for a command that examines a store. It is not read again, nothing is pinned, and no warning
            is given.
    """
    entered = False
    while not entered:
        attempt = _Attempt(bases, since, catalog, quiet=catalog is not None)
        try:
            # No ExitStack: Ctrl-C while it exits would keep the pin until Python collects cycles.
            with _opened(journal, ref, tried, attempt) as found:
                entered = True
                yield found
        except FAULTS as error:
            if entered:
                raise  # an error of the caller's work
            tried, ref = attempt.record_failure(error, tried), attempt.ref


@dataclass
class _Attempt:
    """What is known of a checkpoint when opening it fails."""

    bases: Sequence[ResidentCheckpoint] = ()
    since: View | None = None
    catalog: Catalog | None = None
    quiet: bool = False
    chosen: Plan | None = None
    needed: _NeededSegments | None = None

    @property
    def ref(self) -> str:
        """The permanent REF of the checkpoint: ``latest`` may be another one the next time."""
        assert self.chosen is not None
        return self.chosen.target.ref

    def record_failure(self, error: CkptError, tried: FailedWays) -> FailedWays:
        """See `fallback.record_failure`."""
        needed = self.needed
        if self.catalog is None or self.chosen is None or needed is None or not needed.encodings:
            raise error
        known = tried.with_based(needed.based)
        return record_failure(
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

    def choose(self, catalog: Catalog, ref: str | int, tried: FailedWays) -> tuple[CheckpointEntry, Plan]:
        """The checkpoint and the cheapest way to it; if states are in memory, the way that reads the fewest bytes."""
        self.needed = None
        entry = refs.resolve(catalog, ref)
        cost = stored_bytes if self.bases else None
        if tried != NO_FAILED_WAYS:
            chosen = next_way(catalog, entry.id, tried, cost, self.held)
        else:
            chosen = plan(catalog, entry.id, cost, held=self.held)
        self.catalog, self.chosen = catalog, chosen
        return entry, chosen


@contextmanager
def _opened(journal: Journal, ref: str | int, tried: FailedWays, attempt: _Attempt) -> Iterator[OpenCheckpoint]:
    def choose_plan(catalog: Catalog) -> tuple[CheckpointEntry, Plan]:
        return attempt.choose(catalog, ref, tried)

    def claimed() -> AbstractContextManager[tuple[Catalog, tuple[CheckpointEntry, Plan]]]:
        if attempt.quiet and attempt.catalog is not None:
            return nullcontext((attempt.catalog, choose_plan(attempt.catalog)))
        return _claimed(journal, choose_plan, attempt.since)

    with claimed() as (catalog, (entry, chosen)), ExitStack() as stack:
        attempt.needed = needed = _NeededSegments(journal, catalog, chosen)
        readers = opened_readers(journal.backend, needed.entries(), needed.open, stack)
        used = replace(chosen, encodings=tuple(needed.encodings))
        readers = {segment: readers[segment] for segment in used.segments}  # in the plan's order
        base = next((one for one in attempt.bases if one.id == used.encodings[0].base), None)
        known = tried.with_based(needed.based)
        found = OpenCheckpoint(
            catalog, entry, used, readers, known, base, journal.backend.cheap_looks, quiet=attempt.quiet
        )
        found.check_identity()
        yield found


@contextmanager
def _claimed(
    journal: Journal, choose: Callable[[Catalog], tuple[CheckpointEntry, Plan]], since: View | None
) -> Iterator[tuple[Catalog, tuple[CheckpointEntry, Plan]]]:
    with claim(journal, choose, lambda chosen: chosen[1].segments, since=since) as (view, chosen):
        yield view.catalog, chosen


class _NeededSegments:
    """The encodings of a plan that are read: from the last one down to one in which no entry has a base tensor.

    Prevents: an intact checkpoint reported as damaged because of a segment that nothing in it builds on.

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
        """The segments to open, each once. The segments that were opened decide whether more follow."""
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
    """Readers of segments by their ids, open until `stack` exits; of many segments, some open only while they are read.

    Args:
        open_: opens one segment.
    """
    readers: dict[str, SegmentReader] = {}
    handles = OpenFiles(backend)
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
