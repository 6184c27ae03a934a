"""Restoring a state, or one tensor of it: plan, pin, read and verify in parallel, rebuild."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy.typing as npt

from ckptstore.errors import UsageError
from ckptstore.formats import dtypes
from ckptstore.formats.records import SegmentEntry
from ckptstore.formats.segment import SegmentDoc, TensorEntry
from ckptstore.formats.state import Origin, places, unflatten
from ckptstore.frameworks import bridge
from ckptstore.host.buffers import Bytes, Staging, aligned
from ckptstore.host.caller_warnings import LossyWarning, warn
from ckptstore.host.progress import Advance, Progress, Tally
from ckptstore.host.threads import Workers, default_threads, workers
from ckptstore.log.journal import Journal
from ckptstore.restore.chain import Chain, iterate_chain, restore_tensors
from ckptstore.restore.opened import Opened, opened
from ckptstore.restore.selection import one_of, select_from
from ckptstore.restore.targets import Targets, find_targets
from ckptstore.segments.reading import SegmentReader, copy_tensors, load_tensors, map_tensors

__all__ = ["LoadOptions", "chunks", "describe", "load", "read_tensor", "tensors", "tree"]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """See `Store.load`. `progress` is told of the logical bytes of the tensors that are restored, each once."""

    framework: Literal["torch", "numpy"] | None = None
    into: Any = None
    select: str | Sequence[str] | None = None
    device: Any = None
    mmap: bool = False
    verify: bool = True
    threads: int | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if self.framework not in (None, "torch", "numpy"):
            raise UsageError(f"framework={self.framework!r}: 'torch' or 'numpy'")
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"threads={self.threads}: at least 1 is needed")
        if self.into is not None and (self.mmap or self.device is not None):
            raise UsageError("into= already says where the tensors are: it cannot be combined with mmap= or device=")
        if self.device is not None:
            if not self.to_torch:
                raise UsageError("device= needs framework='torch'")
            bridge.tensors().check_device(self.device)

    @property
    def to_torch(self) -> bool:
        """Whether tensors that were torch tensors come back as such."""
        return bridge.torch_in_use() if self.framework is None else self.framework == "torch"


def load(journal: Journal, ref: str | int, options: LoadOptions) -> Any:
    """See `Store.load`."""
    with opened(journal, ref) as found:
        picked = select_from(found.tree, options.select, found.ref)
        if found.lossy:
            warn(f"{found.ref} is lossy: not the bits that training had", LossyWarning)
        wanted = {tensor: found.chains[tensor] for tensor in picked.tensors}
        targets = None
        if options.into is not None:
            entries = {name: chain.tensor for name, chain in wanted.items()}
            targets = find_targets(entries, picked, options.into, options.select)
        tally = Tally(options.progress, sum(chain.tensor.nbytes for chain in wanted.values()))
        with workers(options.threads or default_threads(), "read") as readers:
            if targets is not None:
                resolve = _into(wanted, targets, readers, options, tally.advance)
            else:
                fetch = _mapped if options.mmap else _fresh
                resolve = fetch(wanted, readers, options, tally.advance)
        return unflatten(picked.tree(), resolve, bridge.tensors().revive if options.to_torch else None)


def _by_segment(chains: Iterable[Chain]) -> list[tuple[SegmentReader, list[TensorEntry]]]:
    groups: dict[int, tuple[SegmentReader, list[TensorEntry]]] = {}
    for chain in chains:
        reader = chain.layers[-1].reader
        groups.setdefault(id(reader), (reader, []))[1].append(chain.tensor)
    return list(groups.values())


def _in_place(chain: Chain) -> bool:
    """Whether the stored bytes are the tensor's, where its numbers may lie."""
    if not chain.raw:
        return False
    chunks = chain.tensor.chunks
    if any(left.offset + left.length != right.offset for left, right in pairwise(chunks)):
        return False  # the packed form may hold a tensor's chunks in any order
    return not chunks or chunks[0].offset % dtypes.get(chain.tensor.dtype).itemsize == 0


def _fresh(
    wanted: dict[str, Chain], readers: Workers, options: LoadOptions, advance: Advance
) -> Callable[[str, Origin], Any]:
    """Restore into new memory: raw tensors are read straight into it, chains are applied in it."""
    data: dict[str, Bytes] = {}
    for reader, members in _by_segment(chain for chain in wanted.values() if _in_place(chain)):
        data |= load_tensors(reader, members, readers.pool, verify=options.verify, advance=advance)
    chained = {name: chain for name, chain in wanted.items() if name not in data}
    data |= {name: aligned(chain.tensor.nbytes) for name, chain in chained.items()}
    if chained:
        targets = {name: (chain, data[name]) for name, chain in chained.items()}
        restore_tensors(targets, readers.pool, _staging(readers.threads), verify=options.verify, advance=advance)
    return _builder(wanted, data, options)


def _mapped(
    wanted: dict[str, Chain], readers: Workers, options: LoadOptions, advance: Advance
) -> Callable[[str, Origin], Any]:
    if coded := [name for name, chain in wanted.items() if not _in_place(chain)]:
        raise UsageError(f"mmap=True needs an uncompressed full checkpoint; {coded[0]!r} is stored as something else")
    data: dict[str, Bytes] = {}
    for reader, members in _by_segment(wanted.values()):
        data |= map_tensors(reader, members, readers.pool, verify=options.verify, advance=advance)
    return _builder(wanted, data, options)


def _staging(threads: int) -> Staging:
    """Two blocks for each thread: a payload, and what it becomes."""
    return Staging.for_chunks(2 * threads)


def _builder(wanted: dict[str, Chain], data: dict[str, Bytes], options: LoadOptions) -> Callable[[str, Origin], Any]:
    """Makes tensors of bytes: views, no copies."""

    def resolve(name: str, origin: Origin) -> Any:
        tensor = wanted[name].tensor
        if origin == "torch" and options.to_torch:
            made = bridge.tensors().from_buffer(tensor.dtype, tensor.shape, data[name])
            return made if options.device is None else made.to(options.device)
        return data[name].view(dtypes.get(tensor.dtype).numpy).reshape(tensor.shape)

    return resolve


def _into(
    wanted: dict[str, Chain], targets: Targets, readers: Workers, options: LoadOptions, advance: Advance
) -> Callable[[str, Origin], Any]:
    """Overwrite `targets`, through staging memory, with verified bytes."""

    def deliver(tensor: TensorEntry, offset: int, data: Bytes) -> None:
        targets.write(tensor.name, offset, data)

    def deliver_to(name: str) -> Callable[[int, Bytes], None]:
        return lambda offset, data: targets.write(name, offset, data)

    staging = _staging(readers.threads)
    for reader, members in _by_segment(chain for chain in wanted.values() if chain.raw):
        copy_tensors(reader, members, readers.pool, staging, deliver, verify=options.verify, advance=advance)
    chained = {name: (chain, deliver_to(name)) for name, chain in wanted.items() if not chain.raw}
    restore_tensors(chained, readers.pool, staging, verify=options.verify, advance=advance)
    return lambda name, _origin: targets.tensor(name)  # the target says what it is


def describe(journal: Journal, ref: str | int) -> list[tuple[SegmentEntry, SegmentDoc]]:
    """See `Store.describe`."""
    with opened(journal, ref) as found:
        return [(reader.entry, reader.doc) for reader in found.readers.values()]


def tensors(journal: Journal, ref: str | int) -> dict[str, TensorEntry]:
    """See `Store.tensors`."""
    with opened(journal, ref) as found:
        return {name: chain.tensor for name, chain in found.chains.items()}


def tree(journal: Journal, ref: str | int) -> Any:
    """See `Store.tree`."""
    with opened(journal, ref) as found:
        return found.tree


def chunks(journal: Journal, ref: str | int, name: str, verify: bool) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """See `Store.chunks`."""
    with opened(journal, ref) as found:
        yield from iterate_chain(_chain_of(found, name), verify=verify)


def read_tensor(journal: Journal, ref: str | int, name: str, verify: bool) -> npt.NDArray[Any]:
    """See `Store.read_tensor`."""
    with opened(journal, ref) as found, workers(default_threads(), "read") as readers:
        chain = _chain_of(found, name)
        name = chain.tensor.name
        if _in_place(chain):
            return load_tensors(chain.layers[-1].reader, [chain.tensor], readers.pool, verify=verify)[name]
        data = aligned(chain.tensor.nbytes)
        restore_tensors({name: (chain, data)}, readers.pool, _staging(readers.threads), verify=verify)
        return data


def _chain_of(found: Opened, name: str) -> Chain:
    """Of a tensor, or of the tensor at a place (`formats.state.places`)."""
    if name in found.chains:
        return found.chains[name]
    named = {place.name: place.tensor for place in places(found.tree)}
    return found.chains[named[one_of(named, name, found.ref)]]
