"""Restoring a state: plan, pin, read and verify in parallel, rebuild.

While anything is read its segments are pinned (`ckptstore.pins.claim`), so that no collector takes them away.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ckptstore import refs, torch_seam
from ckptstore.formats import dtypes, hashing, jsontext
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.errors import CorruptSegmentError, FormatError, TensorNotFoundError, UsageError
from ckptstore.formats.records import CheckpointEntry, SegmentEntry
from ckptstore.formats.segment import RAW, SegmentDoc, TensorEntry
from ckptstore.formats.sources import NumpySource, write_into
from ckptstore.formats.state import Origin, select, tensor_names, unflatten
from ckptstore.pins import claim
from ckptstore.planner import Plan, plan
from ckptstore.reading import Progress, SegmentReader, copy_tensors, iterate_tensor, load_tensors, map_tensors
from ckptstore.staging import Bytes, Staging
from ckptstore.store import Store

__all__ = ["LoadOptions", "Opened", "chunks", "describe", "load", "opened", "read_tensor", "tensors", "tree"]


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
        if self.into is not None and (self.mmap or self.device is not None):
            raise UsageError("into= already says where the tensors are: it cannot be combined with mmap= or device=")
        if self.device is not None and not self.to_torch:
            raise UsageError("device= needs framework='torch'")

    @property
    def to_torch(self) -> bool:
        """Whether tensors that were torch tensors come back as such."""
        return torch_seam.torch_in_use() if self.framework is None else self.framework == "torch"


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint with every segment of its plan open and described."""

    entry: CheckpointEntry
    plan: Plan
    readers: dict[str, SegmentReader]

    @property
    def tree(self) -> Any:
        """The typed JSON tree of the state."""
        for segment in self.plan.encodings[-1].segments:
            trees = self.readers[segment].doc.trees
            if self.entry.step in trees:
                return trees[self.entry.step]
        raise CorruptSegmentError(f"checkpoint {self.entry.ref}: none of its segments holds the state's tree")

    @property
    def tensors(self) -> dict[str, tuple[TensorEntry, SegmentReader]]:
        """name -> its entry in the last encoding, and the segment that holds it, in the order of the tree."""
        found: dict[str, tuple[TensorEntry, SegmentReader]] = {}
        for segment in self.plan.encodings[-1].segments:
            reader = self.readers[segment]
            for name, tensor in reader.doc.tensors.get(self.entry.step, {}).items():
                found[name] = (tensor, reader)
        names = tensor_names(self.tree)
        if missing := [name for name in names if name not in found]:
            raise CorruptSegmentError(f"checkpoint {self.entry.ref}: its segments lack tensor {missing[0]!r}")
        return {name: found[name] for name in names}

    def check_identity(self) -> None:
        """Compare the descriptions with the state hash of the log. Raises `CorruptSegmentError`."""
        parts = [(name, tensor.dtype, tensor.shape, tensor.hash) for name, (tensor, _) in self.tensors.items()]
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
    if (reader.doc.run, reader.doc.segment, reader.doc.term) != (store.run, entry.id, entry.term):
        reader.close()
        raise CorruptSegmentError(f"{entry.key}: holds segment {reader.doc.segment} of run {reader.doc.run}")
    return reader


def load(store: Store, ref: str | int, options: LoadOptions) -> Any:
    """See `Store.load`."""
    with opened(store, ref) as found:
        available = found.tensors
        names = choose(available, options.select, found.entry.ref)
        wanted = {name: available[name] for name in names}
        for tensor, reader in wanted.values():
            _require_raw(tensor, reader)
        threads = options.threads or min(4, os.cpu_count() or 1)
        with ThreadPoolExecutor(threads, thread_name_prefix="ckptstore-read") as pool:
            if options.into is not None:
                resolve = _restore_into(wanted, pool, threads, options)
            else:
                data: dict[str, Bytes] = {}
                for reader, members in _by_segment(wanted):
                    fetch = map_tensors if options.mmap else load_tensors
                    data |= fetch(reader, members, pool, verify=options.verify, progress=options.progress)
                resolve = _builder(wanted, data, options)
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
            close = difflib.get_close_matches(glob, names, 3, 0.4)
            hint = f"; close: {', '.join(close)}" if close else f"; it has {len(names)} tensors"
            raise TensorNotFoundError(f"checkpoint {where}: no tensor matches {glob!r}{hint}")
        picked.update(matches)
    return [name for name in names if name in picked]


def _by_segment(
    wanted: dict[str, tuple[TensorEntry, SegmentReader]],
) -> list[tuple[SegmentReader, list[TensorEntry]]]:
    groups: dict[int, tuple[SegmentReader, list[TensorEntry]]] = {}
    for tensor, reader in wanted.values():
        groups.setdefault(id(reader), (reader, []))[1].append(tensor)
    return list(groups.values())


def _require_raw(tensor: TensorEntry, reader: SegmentReader) -> None:
    if tensor.codec != RAW:
        raise FormatError(f"{reader.entry.key}: tensor {tensor.name!r}: codec {tensor.codec!r} is not known")


def _builder(
    wanted: dict[str, tuple[TensorEntry, SegmentReader]], data: dict[str, Bytes], options: LoadOptions
) -> Callable[[str, Origin], Any]:
    """Makes tensors of bytes: views, no copies."""

    def resolve(name: str, origin: Origin) -> Any:
        tensor = wanted[name][0]
        if origin == "torch" and options.to_torch:
            made = torch_seam.tensors().from_buffer(tensor.dtype, tensor.shape, data[name])
            return made if options.device is None else made.to(options.device)
        return data[name].view(dtypes.get(tensor.dtype).numpy).reshape(tensor.shape)

    return resolve


def _restore_into(
    wanted: dict[str, tuple[TensorEntry, SegmentReader]],
    pool: ThreadPoolExecutor,
    threads: int,
    options: LoadOptions,
) -> Callable[[str, Origin], Any]:
    """Overwrite the tensors of `options.into`, through staging memory, with verified bytes."""
    targets = torch_seam.flattened(options.into).tensors
    if options.select is not None:
        targets = {name: target for name, target in targets.items() if name in wanted}
    _check_targets({name: tensor for name, (tensor, _) in wanted.items()}, targets)

    def deliver(tensor: TensorEntry, offset: int, data: Bytes) -> None:
        target: Any = targets[tensor.name]
        if isinstance(target, NumpySource):
            write_into(target.array, data, offset)
        else:
            torch_seam.tensors().copy_into(target.tensor, data, offset)

    staging = Staging(max(2, threads) * (16 << 20))
    for reader, members in _by_segment(wanted):
        copy_tensors(reader, members, pool, staging, deliver, verify=options.verify, progress=options.progress)

    def resolve(name: str, origin: Origin) -> Any:  # noqa: ARG001  # the target says what it is
        target: Any = targets[name]
        return target.array if isinstance(target, NumpySource) else target.tensor

    return resolve


def _check_targets(wanted: dict[str, TensorEntry], targets: dict[str, Any]) -> None:
    """Everything that cannot fit is refused before the first byte is overwritten."""
    if missing := [name for name in wanted if name not in targets]:
        raise UsageError(f"into= has no tensor {missing[0]!r} ({len(missing)} of {len(wanted)} are missing)")
    if extra := [name for name in targets if name not in wanted]:
        raise UsageError(f"into= has a tensor {extra[0]!r} that the checkpoint has not ({len(extra)} in all)")
    for name, tensor in wanted.items():
        have = (targets[name].dtype, tuple(targets[name].shape))
        if have != (tensor.dtype, tensor.shape):
            raise UsageError(
                f"into= tensor {name!r} is {have[0]} {list(have[1])}, "
                f"the checkpoint's is {tensor.dtype} {list(tensor.shape)}"
            )


def describe(store: Store, ref: str | int) -> list[tuple[SegmentEntry, SegmentDoc]]:
    """See `Store.describe`."""
    with opened(store, ref) as found:
        return [(reader.entry, reader.doc) for reader in found.readers.values()]


def tensors(store: Store, ref: str | int) -> dict[str, TensorEntry]:
    """See `Store.tensors`."""
    with opened(store, ref) as found:
        return {name: tensor for name, (tensor, _) in found.tensors.items()}


def tree(store: Store, ref: str | int) -> Any:
    """See `Store.tree`."""
    with opened(store, ref) as found:
        return found.tree


def chunks(store: Store, ref: str | int, name: str, verify: bool) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """See `Store.chunks`."""
    with opened(store, ref) as found:
        tensor, reader = _tensor(found, name)
        _require_raw(tensor, reader)
        yield from iterate_tensor(reader, tensor, verify=verify)


def read_tensor(store: Store, ref: str | int, name: str, verify: bool) -> npt.NDArray[Any]:
    """See `Store.read_tensor`."""
    with opened(store, ref) as found, ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        tensor, reader = _tensor(found, name)
        _require_raw(tensor, reader)
        return load_tensors(reader, [tensor], pool, verify=verify)[name].view(np.uint8)


def _tensor(found: Opened, name: str) -> tuple[TensorEntry, SegmentReader]:
    available = found.tensors
    if name not in available:
        choose(available, name.replace("[", "[[]"), found.entry.ref)  # raises, with suggestions
    return available[name]
