"""Restoring a state: plan, pin, read and verify in parallel, rebuild.

While anything is read its segments are pinned (`ckptstore.pins.claim`), so that no collector takes them away.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy.typing as npt

from ckptstore import refs, torch_seam
from ckptstore.assembling import Held, assemble, held_by, tree_of
from ckptstore.chains import Chain, fold_tensors, iterate_chain
from ckptstore.deltas import StoredBase
from ckptstore.formats import dtypes, hashing, jsontext
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.errors import (
    CorruptSegmentError,
    FormatError,
    IncompatibleFormatError,
    TensorNotFoundError,
    UsageError,
)
from ckptstore.formats.records import CheckpointEntry, CheckpointId, Encoding, SegmentEntry
from ckptstore.formats.segment import SegmentDoc, TensorEntry
from ckptstore.formats.sources import NumpySource, write_into
from ckptstore.formats.state import Origin, select, tensor_names, unflatten
from ckptstore.pins import claim
from ckptstore.planner import Plan, plan
from ckptstore.reading import Progress, SegmentReader, copy_tensors, load_tensors, map_tensors
from ckptstore.remarks import warn
from ckptstore.staging import Bytes, Staging, aligned
from ckptstore.store import LossyWarning, Store

__all__ = ["LoadOptions", "Opened", "chunks", "describe", "load", "one_of", "opened", "read_tensor", "tensors", "tree"]


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
            torch_seam.tensors().check_device(self.device)

    @property
    def to_torch(self) -> bool:
        """Whether tensors that were torch tensors come back as such."""
        return torch_seam.torch_in_use() if self.framework is None else self.framework == "torch"


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
def opened(store: Store, ref: str | int) -> Iterator[Opened]:
    """Plan, pin and open everything that restoring `ref` reads."""

    def choose_plan(catalog: Catalog) -> tuple[CheckpointEntry, Plan]:
        entry = refs.resolve(catalog, ref)
        return entry, plan(catalog, entry.id)

    with (
        claim(store.backend, store.format, choose_plan, lambda chosen: chosen[1].segments) as (view, (entry, chosen)),
        ExitStack() as stack,
    ):
        readers: dict[str, SegmentReader] = {}
        for segment in chosen.segments:
            readers[segment] = _open(store, view.catalog.segments[segment])
            stack.callback(readers[segment].close)
        found = Opened(entry, chosen, readers)
        found.check_identity()
        yield found


def _open(store: Store, entry: SegmentEntry) -> SegmentReader:
    reader = SegmentReader(store.backend, entry)
    try:
        reader.check_identity(store.run)
    except CorruptSegmentError:
        reader.close()
        raise
    return reader


def load(store: Store, ref: str | int, options: LoadOptions) -> Any:
    """See `Store.load`."""
    with opened(store, ref) as found:
        available = found.chains
        names = choose(available, options.select, found.entry.ref)
        if found.lossy:
            warn(f"{found.entry.ref} is lossy: not the bits that training had", LossyWarning)
        wanted = {name: available[name] for name in names}
        threads = options.threads or min(4, os.cpu_count() or 1)
        with ThreadPoolExecutor(threads, thread_name_prefix="ckptstore-read") as pool:
            fetch = _into if options.into is not None else _mapped if options.mmap else _fresh
            resolve = fetch(wanted, pool, threads, options)
        whole = found.tree if len(names) == len(available) else select(found.tree, set(names))
        return unflatten(whole, resolve, torch_seam.tensors().revive if options.to_torch else None)


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
            made = torch_seam.tensors().from_buffer(tensor.dtype, tensor.shape, data[name])
            return made if options.device is None else made.to(options.device)
        return data[name].view(dtypes.get(tensor.dtype).numpy).reshape(tensor.shape)

    return resolve


def _into(
    wanted: dict[str, Chain], pool: ThreadPoolExecutor, threads: int, options: LoadOptions
) -> Callable[[str, Origin], Any]:
    """Overwrite the tensors of `options.into`, through staging memory, with verified bytes."""
    targets = torch_seam.flattened(options.into).tensors
    if options.select is not None:  # what it asks for and the checkpoint has not would otherwise stay as it is, unsaid
        globs = [options.select] if isinstance(options.select, str) else options.select
        asked = {name for glob in globs for name in fnmatch.filter(targets, glob)}
        targets = {name: target for name, target in targets.items() if name in wanted or name in asked}
    _check_targets({name: chain.tensor for name, chain in wanted.items()}, targets)

    # What cannot be written by byte range is rewritten whole for each: one thread at a time, or one undoes another.
    whole = threading.Lock()

    def deliver(tensor: TensorEntry, offset: int, data: Bytes) -> None:
        target: Any = targets[tensor.name]
        if isinstance(target, NumpySource):
            write_into(target.array, data, offset)
        else:
            with nullcontext() if _by_range(target.tensor) else whole:
                torch_seam.tensors().copy_into(target.tensor, data, offset)

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


def describe(store: Store, ref: str | int) -> list[tuple[SegmentEntry, SegmentDoc]]:
    """See `Store.describe`."""
    with opened(store, ref) as found:
        return [(reader.entry, reader.doc) for reader in found.readers.values()]


def tensors(store: Store, ref: str | int) -> dict[str, TensorEntry]:
    """See `Store.tensors`."""
    with opened(store, ref) as found:
        return {name: chain.tensor for name, chain in found.chains.items()}


def tree(store: Store, ref: str | int) -> Any:
    """See `Store.tree`."""
    with opened(store, ref) as found:
        return found.tree


def chunks(store: Store, ref: str | int, name: str, verify: bool) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """See `Store.chunks`."""
    with opened(store, ref) as found:
        yield from iterate_chain(_chain_of(found, name), verify=verify)


def read_tensor(store: Store, ref: str | int, name: str, verify: bool) -> npt.NDArray[Any]:
    """See `Store.read_tensor`."""
    threads = min(4, os.cpu_count() or 1)
    with opened(store, ref) as found, ThreadPoolExecutor(threads) as pool:
        chain = _chain_of(found, name)
        if _in_place(chain):
            return load_tensors(chain.layers[-1].reader, [chain.tensor], pool, verify=verify)[name]
        data = aligned(chain.tensor.nbytes)
        fold_tensors({name: (chain, data)}, pool, _staging(threads), verify=verify)
        return data


def open_base(store: Store, identity: CheckpointId) -> StoredBase:
    """Open a committed checkpoint as the base of deltas. Close it with `StoredBase.forget`."""
    stack = ExitStack()
    try:
        found = stack.enter_context(opened(store, identity.ref))
        if found.entry.id != identity:
            raise CorruptSegmentError(f"checkpoint {identity.ref}: is another one now")
        return StoredBase(identity, found.chains, stack.close)
    except BaseException:
        stack.close()
        raise


def _chain_of(found: Opened, name: str) -> Chain:
    available = found.chains
    return available[one_of(available, name, found.entry.ref)]
