"""Restores a state, or a part of it: plans, pins, reads and verifies in parallel, and rebuilds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile
from typing import Any, Final, Literal, TypeVar

from ckptstore.errors import CkptError, UsageError
from ckptstore.formats import dtypes
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import SegmentEntry
from ckptstore.formats.segment_files.boxes import Box
from ckptstore.formats.segment_files.segment import SegmentDoc, TensorEntry
from ckptstore.formats.states.state import Origin, places, select, unflatten
from ckptstore.frameworks import bridge
from ckptstore.frameworks.flat_states import tensors_and_data
from ckptstore.host.buffers import Bytes, Staging, aligned
from ckptstore.host.caller_warnings import LossyWarning, warn
from ckptstore.host.option_checks import MOST_THREADS, whole
from ckptstore.host.progress import Advance, Progress, Tally
from ckptstore.host.threads import Workers, default_threads, workers
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import View
from ckptstore.restore.alternatives import NO_FAILED_WAYS, FailedWays
from ckptstore.restore.box_reads import (
    LINE,
    BoxRead,
    MemorySink,
    Part,
    PartRead,
    Sink,
    bytes_to_read,
    fill,
    jobs_of,
    new_sinks,
)
from ckptstore.restore.chains.chain import Chain, restore_tensors
from ckptstore.restore.fallback import FAULTS
from ckptstore.restore.load_targets import MadeTargets, Targets, TargetSink, find_targets, made_targets
from ckptstore.restore.open_checkpoint import OpenCheckpoint, opened
from ckptstore.restore.resident_checkpoint import ResidentCheckpoint
from ckptstore.restore.restore_source import RestoreSource
from ckptstore.restore.selection import TensorSelection, select_from
from ckptstore.segments.segment_reader import SegmentReader, copy_tensors, load_tensors, map_tensors

__all__ = [
    "LoadOptions",
    "describe",
    "load",
    "mappable",
    "rebuild",
    "restore_with",
    "tensors",
    "tree",
]

_R = TypeVar("_R")

_COPIED: Final = 1 << 20
"""Tensors below this many bytes are copied if they are not aligned to `LINE`; larger ones are read in another way."""
_BLOCK: Final = 64 << 20
"""Bytes of memory that small tensors share. It is unmapped with the last of them."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """See `Store.load`. `progress` is called with the logical bytes of the tensors that are restored, each once."""

    framework: Literal["torch", "numpy"] | None = None
    into: Any = None
    select: str | Sequence[str] | None = None
    device: Any = None
    mmap: bool = False
    verify: bool = True
    threads: int | None = None
    progress: Progress | None = None
    rank: int | None = None
    layout: Literal["nested", "flat"] = "nested"
    keep_foreign: bool = False

    def __post_init__(self) -> None:
        if self.framework not in (None, "torch", "numpy"):
            raise UsageError(f"framework={self.framework!r}: 'torch' or 'numpy'")
        if self.layout not in ("nested", "flat"):
            raise UsageError(f"layout={self.layout!r}: 'nested' or 'flat'")
        if self.threads is not None:
            whole("threads", self.threads, 1, MOST_THREADS)
        if self.rank is not None:
            whole("rank", self.rank, 0)
        if self.progress is not None and not callable(self.progress):
            raise UsageError(f"progress: {self.progress!r:.80}; it takes a function of (bytes done, bytes in all)")
        if self.into is not None and (self.mmap or self.device is not None):
            raise UsageError("into= already says where the tensors are: it cannot be combined with mmap= or device=")
        if self.device is not None:
            if not self.to_torch:
                raise UsageError("device= needs framework='torch'")
            bridge.tensors().check_device(self.device)

    @property
    def to_torch(self) -> bool:
        """Whether tensors that were torch tensors are returned as torch tensors."""
        return bridge.torch_in_use() if self.framework is None else self.framework == "torch"


@dataclass(frozen=True, slots=True)
class _Requested:
    """What to restore, by name.

    Attributes:
        entries: every tensor.
        whole: the chains of tensors that are restored as they are stored.
        parts: all stored parts of tensors that are assembled, or of which only a part is wanted.
    """

    entries: dict[str, TensorEntry]
    whole: dict[str, Chain]
    parts: dict[str, list[Part]]

    @classmethod
    def of(cls, found: RestoreSource, names: Iterable[str], targets: Targets | None) -> _Requested:
        entries = {name: found.tensors[name] for name in names}

        def is_whole(name: str) -> bool:
            return not found.sharded(name) and (targets is None or targets.box(name).shape == entries[name].shape)

        whole = {name: found.chains[name] for name in entries if is_whole(name)}
        return cls(entries, whole, {name: found.stored(name) for name in entries if name not in whole})

    def jobs(self, sink: Callable[[str], Sink]) -> list[PartRead]:
        """The jobs that fill a sink for each of `parts`."""
        return jobs_of([BoxRead(parts, sink(name)) for name, parts in self.parts.items()])

    def nbytes(self, jobs: Sequence[PartRead]) -> int:
        """Number of logical bytes that are read."""
        return sum(chain.tensor.nbytes for chain in self.whole.values()) + bytes_to_read(jobs)


def load(journal: Journal, ref: str | int, options: LoadOptions) -> Any:
    """See `Store.load`."""
    return restore_with(journal, ref, lambda found: rebuild(found, options))


def rebuild(found: RestoreSource, options: LoadOptions) -> Any:
    """The state of a checkpoint, in the form that `options` request. Raises as `Store.load`."""
    picked = select_from(found.tree_of(options.rank), options.select, found.ref)
    if found.lossy:
        warn(f"{found.ref} is lossy: these are not the bits that training had", LossyWarning)
    targets = None if options.into is None else _targets(found, picked, options)
    placed = [] if targets is None else [name for name in picked.tensors if name in targets]
    rest = [name for name in picked.tensors if targets is None or name not in targets]
    resolvers: dict[str, Callable[[str, Origin], Any]] = {}
    with workers(options.threads or default_threads(), "read") as readers:
        if targets is None or rest:
            resolvers |= dict.fromkeys(rest, _restore_new(_Requested.of(found, rest, None), readers, options))
        if targets is not None:
            resolvers |= dict.fromkeys(
                placed, _restore_into(_Requested.of(found, placed, targets), targets, readers, options)
            )

    made: dict[str, Any] = {}

    def resolve(name: str, origin: Origin) -> Any:
        made[name] = tensor = resolvers[name](name, origin)
        return tensor

    make = bridge.object_maker(to_torch=options.to_torch, keep_foreign=options.keep_foreign)
    revive = bridge.tensors().revive if options.to_torch else None
    state = unflatten(picked.tree(), resolve, revive, make)
    if options.layout == "nested":
        return state
    there = places(picked.whole) if picked.all else picked.kept.values()
    rest = unflatten(select(picked.whole, set()), resolve, revive, make)
    return tensors_and_data(state, {place.name: made[place.tensor] for place in there}, rest)


def _targets(found: RestoreSource, picked: TensorSelection, options: LoadOptions) -> Targets:
    """The tensors to overwrite. Raises `UsageError` if one does not fit."""
    entries = {name: found.tensors[name] for name in picked.tensors}
    if not isinstance(options.into, MadeTargets):
        return find_targets(entries, picked, options.into, options.select)
    return made_targets(entries, options.into.find(unflatten(picked.tree(), lambda name, _: entries[name])))


def restore_with(
    journal: Journal,
    ref: str | int,
    work: Callable[[OpenCheckpoint], _R],
    bases: Sequence[ResidentCheckpoint] = (),
    since: View | None = None,
    tried: FailedWays = NO_FAILED_WAYS,
    catalog: Catalog | None = None,
) -> _R:
    """The result of `work` on an open checkpoint; if an encoding is damaged, `work` is called again with another.

    Args:
        work: reads with checksums, and has no effect outside before it returns.
        bases, since, tried, catalog: see `open_checkpoint`.

    Raises:
        CorruptSegmentError, StorageError: the damage, if there is no other way or the other way is of no use here.
        anything that `work` raises.
    """
    damage: CkptError | None = None
    while True:
        with opened(journal, ref, tried, bases, since, catalog) as found:
            try:
                return work(found)
            except FAULTS as error:
                tried = found.record_failure(error, [base.id for base in bases])
                ref, damage = found.ref, error
            except UsageError as error:  # another encoding cannot be mapped, for instance
                raise (damage or error) from (error if damage else None)


def _by_segment(chains: Iterable[Chain]) -> list[tuple[SegmentReader, list[TensorEntry]]]:
    groups: dict[int, tuple[SegmentReader, list[TensorEntry]]] = {}
    for chain in chains:
        reader = chain.links[-1].reader
        groups.setdefault(id(reader), (reader, []))[1].append(chain.tensor)
    return list(groups.values())


def _in_place(chain: Chain) -> bool:
    """Whether the stored bytes are the tensor's, at an offset that is valid for its dtype."""
    if not chain.raw:
        return False
    chunks = chain.tensor.chunks
    if any(left.offset + left.length != right.offset for left, right in pairwise(chunks)):
        return False  # the packed form may hold a tensor's chunks in any order
    return not chunks or chunks[0].offset % dtypes.get(chain.tensor.dtype).itemsize == 0


def mappable(wanted: Mapping[str, Chain]) -> list[tuple[SegmentReader, list[TensorEntry]]]:
    """The segments that hold tensors which can be mapped. Raises `UsageError` if one of them cannot."""
    if coded := [name for name, chain in wanted.items() if not _in_place(chain)]:
        raise UsageError(f"mmap=True needs an uncompressed full checkpoint; {coded[0]!r} is stored as something else")
    return _by_segment(wanted.values())


def _large_unaligned(chain: Chain) -> bool:
    """Whether a raw tensor, at an offset valid for its dtype, is not aligned to `LINE` and is too large to copy."""
    return chain.tensor.nbytes >= _COPIED and chain.tensor.chunks[0].offset % LINE != 0


def _aligned_copies(images: dict[str, Bytes]) -> dict[str, Bytes]:
    """Small images, copied to aligned addresses."""
    if not images:
        return {}
    block, at = aligned(sum(-(-len(image) // LINE) * LINE for image in images.values())), 0
    moved: dict[str, Bytes] = {}
    for name, image in images.items():
        moved[name] = block[at : at + len(image)]
        moved[name][:] = image
        at += -(-len(image) // LINE) * LINE
    return moved


def _memory_for(sizes: Mapping[str, int]) -> dict[str, Bytes]:
    """New memory for tensors, at aligned addresses. Small ones share blocks: a mapping of its own costs as much as
    restoring such a tensor."""
    memory = {name: aligned(nbytes) for name, nbytes in sizes.items() if nbytes >= _COPIED}
    small = [(name, nbytes) for name, nbytes in sizes.items() if nbytes < _COPIED]
    while small:
        ends = list(takewhile(_BLOCK.__ge__, accumulate(-(-nbytes // LINE) * LINE for _, nbytes in small)))
        block = aligned(ends[-1])
        for (name, nbytes), end in zip(small, ends, strict=False):
            at = end + -nbytes // LINE * LINE
            memory[name] = block[at : at + nbytes]
        small = small[len(ends) :]
    return memory


def _restore_new(wanted: _Requested, readers: Workers, options: LoadOptions) -> Callable[[str, Origin], Any]:
    """Restore into new memory: raw tensors are read straight into it (or mapped), chains are applied in it, and shards
    are read to their places in it."""
    memories = _new_memory(wanted)
    jobs = wanted.jobs(memories.__getitem__)
    tally = Tally(options.progress, wanted.nbytes(jobs))
    fetch = _mapped if options.mmap else _read
    data = fetch(wanted.whole, readers, options, tally.advance)
    if memories:
        staging = _staging(readers.threads)
        fill(jobs, readers, staging, verify=options.verify, advance=tally.advance)
        data |= {name: sink.image for name, sink in memories.items()}
    return _builder(wanted.entries, data, options)


def _read(wanted: dict[str, Chain], readers: Workers, options: LoadOptions, advance: Advance) -> dict[str, Bytes]:
    """name -> image, for tensors that are stored whole."""
    data: dict[str, Bytes] = {}
    for reader, members in _by_segment(
        chain for chain in wanted.values() if _in_place(chain) and not _large_unaligned(chain)
    ):
        data |= load_tensors(reader, members, readers.pool, verify=options.verify, advance=advance)
    data |= _aligned_copies(
        {name: image for name, image in data.items() if image.__array_interface__["data"][0] % LINE}
    )
    chained = {name: chain for name, chain in wanted.items() if name not in data}
    data |= _memory_for({name: chain.tensor.nbytes for name, chain in chained.items()})
    if chained:
        targets = {name: (chain, data[name]) for name, chain in chained.items()}
        restore_tensors(targets, readers.pool, _staging(readers.threads), verify=options.verify, advance=advance)
    return data


def _mapped(wanted: dict[str, Chain], readers: Workers, options: LoadOptions, advance: Advance) -> dict[str, Bytes]:
    """The same as `_read`, but mapped."""
    data: dict[str, Bytes] = {}
    for reader, members in mappable(wanted):
        data |= map_tensors(reader, members, readers.pool, verify=options.verify, advance=advance)
    return data


def _new_memory(wanted: _Requested) -> dict[str, MemorySink]:
    """New memory for assembled tensors."""
    boxes = [(parts, Box.whole(wanted.entries[name].shape)) for name, parts in wanted.parts.items()]
    return dict(zip(wanted.parts, new_sinks(boxes), strict=True))


def _staging(threads: int) -> Staging:
    """Two blocks for each thread: a payload, and its decoded bytes."""
    return Staging.for_chunks(2 * threads)


def _builder(
    entries: dict[str, TensorEntry], data: dict[str, Bytes], options: LoadOptions
) -> Callable[[str, Origin], Any]:
    """A function that makes tensors as views of the bytes, without copies."""

    def resolve(name: str, origin: Origin) -> Any:
        tensor = entries[name]
        if origin == "torch" and options.to_torch:
            made = bridge.tensors().from_buffer(tensor.dtype, tensor.shape, data[name])
            return made if options.device is None else made.to(options.device)
        return data[name].view(dtypes.get(tensor.dtype).numpy).reshape(tensor.shape)

    return resolve


def _restore_into(
    wanted: _Requested, targets: Targets, readers: Workers, options: LoadOptions
) -> Callable[[str, Origin], Any]:
    """Overwrite `targets`, through staging memory, with verified bytes."""

    def deliver(tensor: TensorEntry, offset: int, data: Bytes) -> None:
        targets.write(tensor.name, offset, data)

    def deliver_to(name: str) -> Callable[[int, Bytes], None]:
        return lambda offset, data: targets.write(name, offset, data)

    jobs = wanted.jobs(lambda name: TargetSink(targets, name))
    advance = Tally(options.progress, wanted.nbytes(jobs)).advance
    staging, verify = _staging(readers.threads), options.verify
    for reader, members in _by_segment(chain for chain in wanted.whole.values() if chain.raw):
        copy_tensors(reader, members, readers.pool, staging, deliver, verify=verify, advance=advance)
    chained = {name: (chain, deliver_to(name)) for name, chain in wanted.whole.items() if not chain.raw}
    restore_tensors(chained, readers.pool, staging, verify=verify, advance=advance)
    fill(jobs, readers, staging, verify=verify, advance=advance)
    return lambda name, _origin: targets.tensor(name)  # the caller's own tensor


def describe(journal: Journal, ref: str | int) -> list[tuple[SegmentEntry, SegmentDoc]]:
    """See `Store.describe`."""
    with opened(journal, ref) as found:
        return [(reader.entry, reader.doc) for reader in found.readers.values()]


def tensors(journal: Journal, ref: str | int) -> dict[str, TensorEntry]:
    """See `Store.tensors`."""
    with opened(journal, ref) as found:
        return dict(found.tensors)


def tree(journal: Journal, ref: str | int) -> Any:
    """See `Store.tree`."""
    with opened(journal, ref) as found:
        return found.merged
