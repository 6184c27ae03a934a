"""Restoring a state: plan, pin, read and verify in parallel, rebuild.

While anything is read its segments are pinned (`ckptstore.log.pins.claim`), so that no collector takes them away.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from ckptstore.errors import (
    CorruptSegmentError,
    FormatError,
    IncompatibleFormatError,
    TensorNotFoundError,
    UsageError,
)
from ckptstore.formats import dtypes, hashing, jsontext
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.records import CheckpointEntry, CheckpointId, Encoding, SegmentEntry
from ckptstore.formats.segment import SegmentDoc, TensorEntry
from ckptstore.formats.sources import NumpySource, write_into
from ckptstore.formats.state import Origin, Place, places, select_places, tensor_names, unflatten
from ckptstore.frameworks import bridge
from ckptstore.host.buffers import Bytes, Staging, aligned
from ckptstore.host.caller_warnings import LossyWarning, warn
from ckptstore.log import refs
from ckptstore.log.journal import Journal
from ckptstore.log.pins import claim
from ckptstore.restore.assembly import Held, assemble, held_by, tree_of
from ckptstore.restore.chain import Chain, fold_tensors, iterate_chain
from ckptstore.restore.plan import Plan, plan
from ckptstore.restore.stored_base import StoredBase
from ckptstore.segments.reading import Progress, SegmentReader, copy_tensors, load_tensors, map_tensors

__all__ = [
    "LoadOptions",
    "Opened",
    "Selection",
    "chunks",
    "describe",
    "load",
    "one_of",
    "opened",
    "read_tensor",
    "select_from",
    "tensors",
    "tree",
]

_MOST_WORK: Final = 1_000_000
"""Of `numpy.shares_memory`; views of one buffer take a few steps."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """See `Store.load`."""

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


@dataclass(frozen=True)  # no slots: what costs a walk over all tensors is computed once
class Opened:
    """A checkpoint with every segment of its plan open and described."""

    entry: CheckpointEntry
    plan: Plan
    readers: dict[str, SegmentReader]

    @property
    def lossy(self) -> bool:
        """Whether it is not what training had, because something on the way was stored so."""
        return any(encoding.lossy for encoding in self.plan.encodings)

    @cached_property
    def tree(self) -> Any:
        """The typed JSON tree of the state."""
        last = self.plan.encodings[-1]
        return tree_of([self.readers[segment] for segment in last.segments], last)

    @cached_property
    def chains(self) -> dict[str, Chain]:
        """name -> what restores it, for every tensor of the state, in the order of the tree.

        Raises:
            CorruptSegmentError: a layer is missing, or does not fit the one below it.
        """
        held = [self._held(encoding) for encoding in self.plan.encodings]
        names = tensor_names(self.tree)
        if missing := [name for name in names if name not in held[-1]]:
            raise CorruptSegmentError(f"checkpoint {self.entry.ref}: its segments lack tensor {missing[0]!r}")
        return assemble(held, names)

    @property
    def tensors(self) -> dict[str, tuple[TensorEntry, SegmentReader]]:
        """name -> its entry in the last encoding, and the segment that holds it, in the order of the tree."""
        return {name: (chain.tensor, chain.layers[-1].reader) for name, chain in self.chains.items()}

    def _held(self, encoding: Encoding) -> Held:
        """The tensors of one encoding, which builds on what the plan says."""
        return held_by([self.readers[segment] for segment in encoding.segments], encoding)

    def check_identity(self) -> None:
        """Compare the descriptions with the state hash of the log. Raises `CorruptSegmentError`."""
        try:
            parts = [(name, held.dtype, held.shape, held.hash) for name, (held, _) in self.tensors.items()]
        except IncompatibleFormatError:
            raise  # nothing is damaged: a newer version reads it
        except FormatError as error:  # a chunk whose decoded bytes have no hash
            raise CorruptSegmentError(f"checkpoint {self.entry.ref}: {error}") from error
        if hashing.state_hash(jsontext.dumps(self.tree), parts) != self.entry.state:
            raise CorruptSegmentError(f"checkpoint {self.entry.ref}: its segments describe another state than the log")


@contextmanager
def opened(journal: Journal, ref: str | int) -> Iterator[Opened]:
    """Plan, pin and open everything that restoring `ref` reads."""

    def choose_plan(catalog: Catalog) -> tuple[CheckpointEntry, Plan]:
        entry = refs.resolve(catalog, ref)
        return entry, plan(catalog, entry.id)

    with (
        claim(journal, choose_plan, lambda chosen: chosen[1].segments) as (view, (entry, chosen)),
        ExitStack() as stack,
    ):
        readers: dict[str, SegmentReader] = {}
        for segment in chosen.segments:
            readers[segment] = _open(journal, view.catalog.segments[segment])
            stack.callback(readers[segment].close)
        found = Opened(entry, chosen, readers)
        found.check_identity()
        yield found


def _open(journal: Journal, entry: SegmentEntry) -> SegmentReader:
    reader = SegmentReader(journal.backend, entry)
    try:
        reader.check_identity(journal.run)
    except CorruptSegmentError:
        reader.close()
        raise
    return reader


def load(journal: Journal, ref: str | int, options: LoadOptions) -> Any:
    """See `Store.load`."""
    with opened(journal, ref) as found:
        picked = select_from(found.tree, options.select, found.entry.ref)
        if found.lossy:
            warn(f"{found.entry.ref} is lossy: not the bits that training had", LossyWarning)
        wanted = {tensor: found.chains[tensor] for tensor in picked.tensors}
        targets = None if options.into is None else _targets(wanted, picked, options)
        threads = options.threads or min(4, os.cpu_count() or 1)
        with ThreadPoolExecutor(threads, thread_name_prefix="ckptstore-read") as pool:
            if targets is not None:
                resolve = _into(wanted, targets, pool, threads, options)
            else:
                fetch = _mapped if options.mmap else _fresh
                resolve = fetch(wanted, pool, threads, options)
        return unflatten(picked.tree(), resolve, bridge.tensors().revive if options.to_torch else None)


@dataclass(frozen=True, slots=True)
class Selection:
    """What a selection takes of a state.

    Attributes:
        whole: the tree of the state.
        kept: position in `formats.state.places` -> the place; those that match, in tree order.
        all: nothing was selected: everything is in it.
    """

    whole: Any
    kept: Mapping[int, Place]
    all: bool

    @property
    def tensors(self) -> dict[str, str]:
        """tensor -> the name of the first of its places that match, in tree order."""
        found: dict[str, str] = {}
        for place in self.kept.values():
            found.setdefault(place.tensor, place.name)
        return found

    def tree(self, names: Mapping[str, str] | None = None) -> Any:
        """The tree with no other tensors.

        Args:
            names: tensor -> the name that it has there; by default its own.
        """
        if self.all:
            return self.whole
        return select_places(
            self.whole,
            {position: place.tensor if names is None else names[place.tensor] for position, place in self.kept.items()},
        )


def select_from(tree: Any, chosen: str | Sequence[str] | None, where: str) -> Selection:
    """The places at which a state has tensors and that a selection (one glob or several) matches.

    A tied tensor is at each of its places under another name: one that does not match is left out.

    Raises:
        TensorNotFoundError: a glob matches nothing; suggests names that are close.
        FormatError: the tree is not what `flatten` writes.
    """
    if chosen is None:
        return Selection(tree, {index: Place(name, name) for index, name in enumerate(tensor_names(tree))}, all=True)
    found = places(tree)
    names = set(choose(list(dict.fromkeys(place.name for place in found)), chosen, where))
    kept = {position: place for position, place in enumerate(found) if place.name in names}
    return Selection(tree, kept, all=False)


def choose(available: Sequence[str] | dict[str, Any], chosen: str | Sequence[str] | None, where: str) -> list[str]:
    """The names that a selection (one glob or several) matches, in order.

    Raises:
        TensorNotFoundError: a glob matches nothing; suggests names that are close.
    """
    names = list(available)
    if chosen is None:
        return names
    picked: set[str] = set()
    for glob in [chosen] if isinstance(chosen, str) else chosen:
        matches = [name for name in names if name == glob] or fnmatch.filter(names, glob)
        if not matches:
            raise TensorNotFoundError(f"checkpoint {where}: no tensor matches {glob!r}; {_close(names, glob)}")
        picked.update(matches)
    return [name for name in names if name in picked]


def one_of(available: Collection[str], name: str, where: str) -> str:
    """`name`, which is no glob, if it is there. Raises `TensorNotFoundError` with names that are close."""
    if name in available:
        return name
    names = list(available)
    if matches := fnmatch.filter(names, name):
        hint = f"this takes one name, and {len(matches)} match: {', '.join(matches[:3])}"
    else:
        hint = _close(names, name)
    raise TensorNotFoundError(f"checkpoint {where}: no tensor is named {name!r}; {hint}")


def _close(names: Sequence[str], name: str) -> str:
    close = difflib.get_close_matches(name, names, 3, 0.4)
    return f"close: {', '.join(close)}" if close else f"it has {len(names)} tensors"


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
    wanted: dict[str, Chain], pool: ThreadPoolExecutor, threads: int, options: LoadOptions
) -> Callable[[str, Origin], Any]:
    """Restore into new memory: raw tensors are read straight into it, chains are folded in it."""
    data: dict[str, Bytes] = {}
    for reader, members in _by_segment(chain for chain in wanted.values() if _in_place(chain)):
        data |= load_tensors(reader, members, pool, verify=options.verify, progress=options.progress)
    folded = {name: chain for name, chain in wanted.items() if name not in data}
    data |= {name: aligned(chain.tensor.nbytes) for name, chain in folded.items()}
    if folded:
        targets = {name: (chain, data[name]) for name, chain in folded.items()}
        fold_tensors(targets, pool, _staging(threads), verify=options.verify, progress=options.progress)
    return _builder(wanted, data, options)


def _mapped(
    wanted: dict[str, Chain], pool: ThreadPoolExecutor, _threads: int, options: LoadOptions
) -> Callable[[str, Origin], Any]:
    if coded := [name for name, chain in wanted.items() if not _in_place(chain)]:
        raise UsageError(f"mmap=True needs an uncompressed full checkpoint; {coded[0]!r} is stored as something else")
    data: dict[str, Bytes] = {}
    for reader, members in _by_segment(wanted.values()):
        data |= map_tensors(reader, members, pool, verify=options.verify, progress=options.progress)
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


def _targets(wanted: Mapping[str, Chain], picked: Selection, options: LoadOptions) -> dict[str, Any]:
    """tensor -> the tensor of `options.into` that is overwritten with it. Raises `UsageError` if one does not fit."""
    flat = bridge.flattened(options.into)
    names = picked.tensors  # those that the caller knows
    if options.select is None:
        targets: dict[str, Any] = dict(flat.tensors)
    else:
        there = {place.name: place.tensor for place in places(flat.tree)}
        targets = {}
        used: set[str] = set()
        for place in picked.kept.values():
            if place.name in there and names[place.tensor] not in targets:
                targets[names[place.tensor]] = flat.tensors[there[place.name]]
                used.add(there[place.name])
        # What it asks for and the checkpoint has not would otherwise stay as it is, unsaid; so would one of two tensors
        # that are one in the checkpoint.
        globs = [options.select] if isinstance(options.select, str) else options.select
        asked = {name for glob in globs for name in (glob, *fnmatch.filter(there, glob)) if name in there}
        targets |= {
            name: flat.tensors[tensor] for name, tensor in there.items() if name in asked and tensor not in used
        }
    _check_targets({names[name]: chain.tensor for name, chain in wanted.items()}, targets)
    return {name: targets[names[name]] for name in wanted}


def _into(
    wanted: dict[str, Chain], targets: Mapping[str, Any], pool: ThreadPoolExecutor, threads: int, options: LoadOptions
) -> Callable[[str, Origin], Any]:
    """Overwrite `targets`, through staging memory, with verified bytes."""
    # What cannot be written by byte range is rewritten whole for each: one thread at a time, or one undoes another.
    whole = threading.Lock()

    def deliver(tensor: TensorEntry, offset: int, data: Bytes) -> None:
        target: Any = targets[tensor.name]
        if isinstance(target, NumpySource):
            write_into(target.array, data, offset)
        else:
            with nullcontext() if _by_range(target.tensor) else whole:
                bridge.tensors().copy_into(target.tensor, data, offset)

    def deliver_to(chain: Chain) -> Callable[[int, Bytes], None]:
        return lambda offset, data: deliver(chain.tensor, offset, data)

    staging = _staging(threads)
    for reader, members in _by_segment(chain for chain in wanted.values() if chain.raw):
        copy_tensors(reader, members, pool, staging, deliver, verify=options.verify, progress=options.progress)
    folded = {name: (chain, deliver_to(chain)) for name, chain in wanted.items() if not chain.raw}
    fold_tensors(folded, pool, staging, verify=options.verify, progress=options.progress)

    def resolve(name: str, origin: Origin) -> Any:  # noqa: ARG001  # the target says what it is
        target: Any = targets[name]
        return target.array if isinstance(target, NumpySource) else target.tensor

    return resolve


def _check_targets(wanted: dict[str, TensorEntry], targets: dict[str, Any]) -> None:
    """Everything that cannot fit is refused before the first byte is overwritten."""
    if missing := [name for name in wanted if name not in targets]:
        first = f"into= has no tensor {missing[0]!r} ({len(missing)} of {len(wanted)} are missing)"
        raise UsageError(f"{first}: {_what_to_do(missing, targets)}")
    if extra := [name for name in targets if name not in wanted]:
        raise UsageError(f"into= has a tensor {extra[0]!r} that the checkpoint has not ({len(extra)} in all)")
    for name, tensor in wanted.items():
        have = (targets[name].dtype, tuple(targets[name].shape))
        if have != (tensor.dtype, tensor.shape):
            raise UsageError(
                f"into= tensor {name!r} is {have[0]} {list(have[1])}, "
                f"the checkpoint's is {tensor.dtype} {list(tensor.shape)}"
            )
        if not _writable(targets[name]):
            raise UsageError(f"into= tensor {name!r} is read-only, or several of its elements are one in memory")
    if (shared := _sharing([(name, targets[name]) for name in wanted])) is not None:
        raise UsageError(
            f"into= tensors {shared[0]!r} and {shared[1]!r} share memory, and are two tensors in the checkpoint: "
            "what is read last would overwrite the other; load one of them without into= (select=[...])"
        )


def _what_to_do(missing: Sequence[str], targets: Collection[str]) -> str:
    """Advice for `into` without some of the checkpoint's tensors."""
    if (optimizer := _fresh_optimizer(missing, targets)) is None:
        return "load what it has with select=[...], the rest without into="
    others = (name.partition(".")[0] for name in targets)
    rest = [f"{key}.*" for key in dict.fromkeys(others) if key != optimizer]
    return (
        f"an optimizer has no state before its first step; load({optimizer!r} left out of into=, select={rest}), then "
        f"give load(select='{optimizer}.*')['{optimizer}'] to its load_state_dict()"
    )


def _fresh_optimizer(missing: Sequence[str], targets: Collection[str]) -> str | None:
    """The key of an optimizer of which every state that the checkpoint has is missing: its names go on ``.state.``"""
    found = {name.partition(".state.")[0] for name in missing if ".state." in name}
    fresh = [key for key in found if not any(name.startswith(f"{key}.state.") for name in targets)]
    return fresh[0] if len(fresh) == 1 else None


def _by_range(tensor: Any) -> bool:
    """Whether `copy_into` touches only the range of a torch tensor that it is given."""
    lazy = bool(tensor.is_conj() or tensor.is_neg())
    return not lazy and bool(tensor.is_contiguous() or tensor.device.type == "cpu")


def _writable(target: Any) -> bool:
    """Whether every element can be given a value of its own (`expand` makes tensors of which that is not so)."""
    array = target.array if isinstance(target, NumpySource) else None
    if array is not None and not array.flags.writeable:
        return False
    strides = target.tensor.stride() if array is None else array.strides
    reach = 0 if array is None else array.itemsize - 1
    for stride, size in sorted((abs(stride), size) for stride, size in zip(strides, target.shape, strict=True)):
        if size > 1 and stride <= reach:
            return bool(target.nbytes == 0)
        reach += stride * (size - 1)
    return True


@dataclass(frozen=True, slots=True)
class _Span:
    """The memory that a tensor's elements lie in; their byte strides may be negative."""

    name: str
    space: str
    address: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, name: str, target: Any) -> _Span:
        if isinstance(target, NumpySource):
            array = target.array
            address = array.__array_interface__["data"][0]
            return cls(name, "cpu", address, array.itemsize, array.shape, array.strides)
        tensor = target.tensor
        width = tensor.element_size()
        strides = tuple(stride * width for stride in tensor.stride())
        return cls(name, str(tensor.device), tensor.data_ptr(), width, tuple(target.shape), strides)

    @property
    def start(self) -> int:
        steps = zip(self.shape, self.strides, strict=True)
        return self.address + sum((size - 1) * stride for size, stride in steps if stride < 0)

    @property
    def end(self) -> int:
        steps = zip(self.shape, self.strides, strict=True)
        return self.address + sum((size - 1) * stride for size, stride in steps if stride > 0) + self.itemsize

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """For questions about addresses only: what lies there may be on a device."""
        return {
            "version": 3,
            "data": (self.address, True),
            "shape": self.shape,
            "strides": self.strides,
            "typestr": f"|V{self.itemsize}",
        }


def _sharing(targets: Sequence[tuple[str, Any]]) -> tuple[str, str] | None:
    """The first two targets that have a byte in common. Views of one buffer that lie in each other's gaps have none."""
    spans = [_Span.of(name, target) for name, target in targets if target.nbytes]
    ranges = sorted(((span.space, span.start, span.end, index) for index, span in enumerate(spans)))
    reaching: list[tuple[str, int, int]] = []
    for space, start, end, index in ranges:
        reaching = [other for other in reaching if other[0] == space and other[1] > start]
        for _, _, other in reaching:
            if _overlap(spans[other], spans[index]):
                first, second = sorted((other, index))
                return spans[first].name, spans[second].name
        reaching.append((space, end, index))
    return None


def _overlap(a: _Span, b: _Span) -> bool:
    try:
        one, other = np.asarray(a), np.asarray(b)
        return bool(np.shares_memory(one, other, max_work=_MOST_WORK))  # type: ignore[arg-type,unused-ignore]  # any int
    except np.exceptions.TooHardError:
        return True  # many dimensions of strides that have nothing to do with each other: rather refused than wrong


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
    threads = min(4, os.cpu_count() or 1)
    with opened(journal, ref) as found, ThreadPoolExecutor(threads) as pool:
        chain = _chain_of(found, name)
        name = chain.tensor.name
        if _in_place(chain):
            return load_tensors(chain.layers[-1].reader, [chain.tensor], pool, verify=verify)[name]
        data = aligned(chain.tensor.nbytes)
        fold_tensors({name: (chain, data)}, pool, _staging(threads), verify=verify)
        return data


def open_base(journal: Journal, identity: CheckpointId) -> StoredBase:
    """Open a committed checkpoint as the base of deltas. Close it with `StoredBase.forget`."""
    stack = ExitStack()
    try:
        found = stack.enter_context(opened(journal, identity.ref))
        if found.entry.id != identity:
            raise CorruptSegmentError(f"checkpoint {identity.ref}: is another one now")
        return StoredBase(identity, found.chains, stack.close)
    except BaseException:
        stack.close()
        raise


def _chain_of(found: Opened, name: str) -> Chain:
    """Of a tensor, or of the tensor at a place (`formats.state.places`)."""
    if name in found.chains:
        return found.chains[name]
    named = {place.name: place.tensor for place in places(found.tree)}
    return found.chains[named[one_of(named, name, found.entry.ref)]]
