"""What one rank has of a state, and what it stores of that."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from ckptstore.errors import UnsupportedStateError
from ckptstore.formats import digest, dtypes
from ckptstore.formats.boxes import Box
from ckptstore.formats.checksums import xxh3_128
from ckptstore.formats.optim import SparseGradient
from ckptstore.formats.sources import BoxSource, place_of
from ckptstore.formats.state import FlatState, TensorSource, places, select_places, tensor_count
from ckptstore.frameworks import bridge
from ckptstore.write.ranks.division import Family, Item, Rows, encode_items
from ckptstore.write.steps.updates import Update

__all__ = ["Holding", "Steady", "digests_of", "holding_of", "share_of", "steady", "updates_of"]

_PIECE: Final = 16 << 20
_READ: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Holding:
    """What a rank has of a state.

    Attributes:
        flat: the state.
        items: its tensors, but those that are this rank's own; in access order.
        own: name -> name under which a tensor of its own is stored.
        letter: `items` for the committer.
        id: equal for two holdings of the same items.
    """

    flat: FlatState
    items: tuple[Item, ...]
    own: Mapping[str, str]
    letter: bytes
    id: str

    @property
    def tree(self) -> Any:
        """The state's tree, in which its own tensors have the names that they are stored under."""
        if not self.own:
            return self.flat.tree
        found = places(self.flat.tree)
        kept = {position: self.own.get(place.tensor, place.tensor) for position, place in enumerate(found)}
        return select_places(self.flat.tree, kept)


@dataclass(frozen=True, slots=True)
class Steady:
    """A state whose tensors have names that do not depend on the order of its members.

    Attributes:
        flat: the state.
        renamed: name that a tied tensor had -> its name in `flat`.
        places: name in `flat` -> what a tied tensor is called at each of its places.
    """

    flat: FlatState
    renamed: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def moved(self, updates: Sequence[Update]) -> Sequence[Update]:
        """What the optimizers did, by these names."""
        if not self.renamed:
            return updates
        return [replace(one, slots=tuple(self.renamed.get(name, name) for name in one.slots)) for one in updates]


def steady(flat: FlatState, per_rank: Sequence[str] = ()) -> Steady:
    """A rank's state with the same name for a tied tensor on all ranks: of its places that whose name sorts first.

    By itself it has the name of its first place, so a rank whose dicts have another order would have another tensor,
    which would be stored twice and compared with nothing.

    Args:
        per_rank: names of tensors of its own, or globs: these keep their names, which nobody else has.
    """
    found = places(flat.tree) if tensor_count(flat.tree) > len(flat.tensors) else []
    tied: dict[str, list[str]] = {}
    for place in found:
        tied.setdefault(place.tensor, []).append(place.name)
    names = {name: name if _is_own(called, per_rank) else min(called) for name, called in tied.items()}
    renamed = {before: name for before, name in names.items() if name != before}
    called = {names[before]: every for before, every in tied.items() if len(every) > 1}
    if not renamed:
        return Steady(flat, places=called)
    tree = select_places(flat.tree, {position: names[place.tensor] for position, place in enumerate(found)})
    return Steady(FlatState(tree, {names[name]: source for name, source in flat.tensors.items()}), renamed, called)


def holding_of(state: Steady, rank: int, per_rank: Sequence[str], families: Sequence[Family] = ()) -> Holding:
    """What `rank` has. Raises `UnsupportedStateError` if a name of an own tensor is another tensor's.

    Args:
        per_rank: names of tensors of its own, or globs; of a tied one at any of its places.
        families: tensors that belong together; those that are not among the items do not count.
    """
    flat = state.flat
    own: dict[str, str] = {}
    items: list[Item] = []
    for name, source in flat.tensors.items():
        if _is_own(state.places.get(name, (name,)), per_rank):
            own[name] = f"{name}@{rank}"
            if own[name] in flat.tensors:
                raise UnsupportedStateError(f"tensor {name!r} is this rank's own, but {own[name]!r} is another tensor")
            continue
        items.append(_item(name, source))
    names = {item.name for item in items}
    letter = encode_items(items, [family for family in families if names.issuperset(family)])
    return Holding(flat, tuple(items), own, letter, xxh3_128(letter))


def _is_own(called: Sequence[str], per_rank: Sequence[str]) -> bool:
    """Whether a tensor that is called so at its places is one of a rank's own."""
    return any(fnmatch.fnmatchcase(name, glob) or name.startswith(f"{glob}.") for name in called for glob in per_rank)


def _item(name: str, source: TensorSource) -> Item:
    shape = tuple(source.shape)
    whole, offset = place_of(source)
    if whole is None or offset is None:
        whole, offset = shape, (0,) * len(shape)
    box = Box(offset, shape) if math.prod(whole) else Box.whole(whole)
    return Item(name, source.dtype, box, whole)


def share_of(holding: Holding, writes: Mapping[str, Rows]) -> FlatState:
    """What a rank stores: its share of what all have, and its own tensors; the tree is its own.

    Args:
        writes: what it stores of `Holding.items`.
    """
    tensors: dict[str, TensorSource] = {}
    for item in holding.items:
        if item.name in writes:
            tensors[item.name] = _piece(holding.flat.tensors[item.name], item, writes[item.name])
    for name, stored in holding.own.items():
        source = holding.flat.tensors[name]
        if place_of(source) != (None, None):
            source = BoxSource(source, tuple(source.shape))  # its own shard alone is nobody's shard
        tensors[stored] = source
    return FlatState(holding.tree, tensors)


def _piece(source: TensorSource, item: Item, rows: Rows) -> TensorSource:
    shape, offset, start = item.box.shape, item.box.offset, 0
    if rows is not None:
        row = dtypes.nbytes(dtypes.get(item.dtype), shape[1:])
        start = rows[0] * row
        shape, offset = (rows[1] - rows[0], *shape[1:]), (offset[0] + rows[0], *offset[1:])
    if shape == item.whole:
        return source if place_of(source) == (None, None) else BoxSource(source, shape)
    if rows is None:
        return source  # a shard, as it is
    return BoxSource(source, shape, start, item.whole, offset)


def updates_of(holding: Holding, writes: Mapping[str, Rows], updates: Sequence[Update]) -> list[Update]:
    """What the optimizers did to what a rank stores: updates whose slots it has alike, with that part of the gradient.

    Args:
        writes: what it stores of `Holding.items`.
        updates: of what it has, by the names of `Holding.flat`.
    """
    items = {item.name: item for item in holding.items if item.name in writes}
    found = []
    for update in updates:
        if all(name in holding.own for name in update.slots):
            slots = tuple(holding.own[name] for name in update.slots)
            found.append(Update(slots, update.optimizer, update.step, update.gradient))
        elif all(name in items for name in update.slots) and len({writes[name] for name in update.slots}) == 1:
            first = items[update.slots[0]]
            gradient = _part_of(update.gradient, first, writes[first.name])
            found.append(Update(update.slots, update.optimizer, update.step, gradient))
    return found


def _part_of(
    gradient: TensorSource | SparseGradient | None, item: Item, rows: Rows
) -> TensorSource | SparseGradient | None:
    """The gradient of some rows of an item; all of one that is not of the item's size, which explains nothing."""
    if gradient is None or rows is None:
        return gradient
    count, row = math.prod(item.box.shape), math.prod(item.box.shape[1:])
    first, stop = rows[0] * row, rows[1] * row
    if isinstance(gradient, SparseGradient):
        return gradient.part(first, stop) if gradient.size == count else gradient
    itemsize = dtypes.get(gradient.dtype).itemsize
    if gradient.nbytes != count * itemsize:
        return gradient
    return BoxSource(gradient, (stop - first,), first * itemsize)


def digests_of(sources: Mapping[str, TensorSource], pool: ThreadPoolExecutor) -> dict[str, int]:
    """State digests of tensors, by name; on devices that can, computed there, otherwise by the threads of `pool`."""
    found = bridge.device_digests(sources)
    jobs = []
    for name, source in sources.items():
        if name in found:
            continue
        jobs += [(name, pool.submit(_partial, source, start)) for start in range(0, source.nbytes, _PIECE)]
    sums = dict.fromkeys((name for name in sources if name not in found), 0)
    for name, job in jobs:
        sums[name] += job.result()
    mine = {name: digest.combine(total, nbytes=sources[name].nbytes) for name, total in sums.items()}
    return {**found, **mine}


def _partial(source: TensorSource, start: int) -> int:
    stop = min(start + _PIECE, source.nbytes)
    view = source.view()
    if view is not None:
        return digest.partial(view[start:stop], start // 4)
    total = 0
    for at in range(start, stop, _READ):
        piece = np.empty(min(_READ, stop - at), np.uint8)
        source.read(at, piece)
        total += digest.partial(piece, at // 4)
    return total
