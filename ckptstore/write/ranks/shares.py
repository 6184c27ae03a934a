"""Compute what one rank has of a state, and which part of that it stores."""

from __future__ import annotations

import fnmatch
import math
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from ckptstore.errors import UnsupportedStateError
from ckptstore.formats import digest, dtypes
from ckptstore.formats.checksums import xxh3_128
from ckptstore.formats.optim import SparseGradient
from ckptstore.formats.segment_files.boxes import Box
from ckptstore.formats.sources import BoxSource, place_of
from ckptstore.formats.states.state import FlatState, TensorSource, places, select_places, tensor_count
from ckptstore.frameworks import bridge
from ckptstore.write.ranks.division import Family, Item, Rows, encode_items
from ckptstore.write.steps.updates import LateGradient, Update

__all__ = ["ChosenDigests", "Holding", "Steady", "digests_of", "holding_of", "share_of", "steady", "updates_of"]

_PIECE: Final = 16 << 20
_READ: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Holding:
    """What a rank has of a state.

    Attributes:
        flat: the state.
        items: its tensors except this rank's own (`RankOptions.per_rank`), in access order.
        own: name of one of this rank's own tensors -> name under which it is stored.
        letter: `items`, encoded for the committer.
        id: equal for two holdings with the same items.
    """

    flat: FlatState
    items: tuple[Item, ...]
    own: Mapping[str, str]
    letter: bytes
    id: str

    @property
    def tree(self) -> Any:
        """The state's tree, in which the rank's own tensors have the names that they are stored under."""
        if not self.own:
            return self.flat.tree
        found = places(self.flat.tree)
        kept = {position: self.own.get(place.tensor, place.tensor) for position, place in enumerate(found)}
        return select_places(self.flat.tree, kept)


@dataclass(frozen=True, slots=True)
class Steady:
    """A state in which no tensor's name depends on the order of the state's members.

    Attributes:
        flat: the state.
        renamed: earlier name of a tied tensor -> its name in `flat`.
        places: name of a tied tensor in `flat` -> its name at each of its places.
    """

    flat: FlatState
    renamed: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def moved(self, updates: Sequence[Update]) -> Sequence[Update]:
        """The optimizers' updates, with the new names."""
        if not self.renamed:
            return updates
        return [replace(one, slots=tuple(self.renamed.get(name, name) for name in one.slots)) for one in updates]


def steady(flat: FlatState, per_rank: Sequence[str] = ()) -> Steady:
    """Give a tied tensor the same name on all ranks: of the names of its places, the one that sorts first.

    Without this it has the name of its first place. A rank whose dicts have another order would then have a different
    tensor: it would be stored twice and compared with nothing.

    Args:
        per_rank: names or globs of the rank's own tensors: these keep their names, which no other rank has.
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
    """Return what `rank` has.

    Args:
        per_rank: names or globs of the rank's own tensors; a tied tensor matches at any of its places.
        families: tensors that belong together; a family with a tensor that is not among the items is ignored.

    Raises:
        UnsupportedStateError: the stored name of one of the rank's own tensors is the name of another tensor.
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
    """Whether a tensor with these names at its places is one of the rank's own."""
    return any(fnmatch.fnmatchcase(name, glob) or name.startswith(f"{glob}.") for name in called for glob in per_rank)


def _item(name: str, source: TensorSource) -> Item:
    shape = tuple(source.shape)
    whole, offset = place_of(source)
    if whole is None or offset is None:
        whole, offset = shape, (0,) * len(shape)
    box = Box(offset, shape) if math.prod(whole) else Box.whole(whole)
    return Item(name, source.dtype, box, whole)


def share_of(holding: Holding, writes: Mapping[str, Rows]) -> FlatState:
    """What a rank stores: its share of the common tensors, and its own tensors. The tree is that of its state.

    Args:
        writes: what the rank stores of `Holding.items`.
    """
    tensors: dict[str, TensorSource] = {}
    for item in holding.items:
        if item.name in writes:
            tensors[item.name] = _piece(holding.flat.tensors[item.name], item, writes[item.name])
    for name, stored in holding.own.items():
        source = holding.flat.tensors[name]
        if place_of(source) != (None, None):
            source = BoxSource(source, tuple(source.shape))  # a shard that is the rank's own is stored as a tensor
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
        return source  # an uncut shard
    return BoxSource(source, shape, start, item.whole, offset)


def updates_of(holding: Holding, writes: Mapping[str, Rows], updates: Sequence[Update]) -> list[Update]:
    """The updates that apply to what a rank stores: those of whose slots it stores the same rows.

    Each gets the matching part of its gradient.

    Args:
        writes: what the rank stores of `Holding.items`.
        updates: the updates of what the rank has, with the names of `Holding.flat`.
    """
    items = {item.name: item for item in holding.items if item.name in writes}
    found = []
    for update in updates:
        if all(name in holding.own for name in update.slots):
            slots = tuple(holding.own[name] for name in update.slots)
            found.append(replace(update, slots=slots))
        elif all(name in items for name in update.slots) and len({writes[name] for name in update.slots}) == 1:
            first = items[update.slots[0]]
            rows = writes[first.name]
            gradient = _part_of(update.gradient, first, rows)
            found.append(replace(update, gradient=gradient, carried=_dense_part(update.carried, first, rows)))
    return found


def _part_of(
    gradient: TensorSource | SparseGradient | LateGradient | None, item: Item, rows: Rows
) -> TensorSource | SparseGradient | LateGradient | None:
    """The gradient of some rows of an item. A gradient of another size explains nothing and is returned whole."""
    if gradient is None or rows is None:
        return gradient
    if not isinstance(gradient, SparseGradient | LateGradient):
        return _dense_part(gradient, item, rows)
    row = math.prod(item.box.shape[1:])
    whole = gradient.size == math.prod(item.box.shape)
    return gradient.part(rows[0] * row, rows[1] * row) if whole else gradient


def _dense_part(gradient: TensorSource | None, item: Item, rows: Rows) -> TensorSource | None:
    """As `_part_of`, of a gradient that is a tensor."""
    if gradient is None or rows is None:
        return gradient
    count, row = math.prod(item.box.shape), math.prod(item.box.shape[1:])
    first, stop = rows[0] * row, rows[1] * row
    itemsize = dtypes.get(gradient.dtype).itemsize
    if gradient.nbytes != count * itemsize:
        return gradient
    return BoxSource(gradient, (stop - first,), first * itemsize)


class ChosenDigests(Mapping[str, int]):
    """Some of the digests of another mapping, which may still be computed: reading one may wait for a device."""

    def __init__(self, digests: Mapping[str, int], names: Iterable[str]) -> None:
        """
        Args:
            digests: state digests, by name.
            names: those that are chosen. `digests` has all of them.
        """
        self._digests = digests
        self._names = dict.fromkeys(names)

    def __getitem__(self, name: str) -> int:
        if name not in self._names:
            raise KeyError(name)
        return self._digests[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names  # waits for nothing

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def digests_of(sources: Mapping[str, TensorSource], pool: ThreadPoolExecutor) -> Mapping[str, int]:
    """State digests of tensors, by name.

    A device computes those of its tensors if it can; the threads of `pool` compute the others. The tensors may change
    when this returns. Reading the digest of a tensor on a device waits for it.
    """
    queue = bridge.copy_queue(sources)
    found: Mapping[str, int] = {}
    if queue is not None:
        try:
            found = queue.digests(small=True)
        finally:
            queue.gate()
    jobs = []
    for name, source in sources.items():
        if name in found:
            continue
        jobs += [(name, pool.submit(_partial, source, start)) for start in range(0, source.nbytes, _PIECE)]
    sums = dict.fromkeys((name for name in sources if name not in found), 0)
    for name, job in jobs:
        sums[name] += job.result()
    mine = {name: digest.combine(total, nbytes=sources[name].nbytes) for name, total in sums.items()}
    return ChainMap(mine, found) if found else mine  # type: ignore[arg-type]  # nothing is changed there


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
