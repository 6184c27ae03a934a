"""Divide the tensors among the ranks: which rank writes which rows, so that every element is stored exactly once.

Tensors with the same name are one tensor. Ranks that have the same box of it (all of it, for instance) are *replicas*
of each other. One of them writes the box: the rank with the fewest bytes so far. The others only report the digest of
theirs. A tensor larger than a rank's fair share is cut along its first dimension.

A *family* is a parameter and the optimizer's state for it. Its members go to the same ranks, cut at the same rows:
so each rank can compute the optimizer's step on what it has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ckptstore.errors import FormatError, RankMismatchError
from ckptstore.formats import dtypes, jsontext
from ckptstore.formats.segment_files.boxes import Box, gap, overlapping
from ckptstore.formats.segment_files.layout import TensorSpec
from ckptstore.write.ranks.messages.key_value_store import LETTER_LIMIT

__all__ = [
    "Division",
    "Family",
    "Item",
    "Rows",
    "decode_items",
    "decode_rows",
    "divide",
    "encode_items",
    "encode_rows",
]

CUT_FROM: Final = 64 << 20
"""Bytes below which a tensor is never cut."""

Family = tuple[str, ...]
"""Names of tensors whose elements correspond one to one."""
Rows = tuple[int, int] | None
"""Which rows of its part of a tensor a rank writes: [start, stop) of the first dimension; None: all of them."""


@dataclass(frozen=True, slots=True)
class Item:
    """What one rank has of a tensor.

    Attributes:
        name: flat name.
        dtype: logical dtype.
        box: which elements.
        whole: shape of the whole tensor.
    """

    name: str
    dtype: str
    box: Box
    whole: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return dtypes.nbytes(dtypes.get(self.dtype), self.box.shape)

    @property
    def empty(self) -> bool:
        """Whether the box has no element although the tensor has some."""
        return not self.box.size and bool(math.prod(self.whole))


@dataclass(slots=True)
class Division:
    """What every rank writes, and which tensors are compared.

    Attributes:
        writes: per rank: name -> rows.
        replicas: names of the tensors that several ranks hold -> for each box those ranks, ascending.
        specs: per rank: name -> the entry that its segments must have.
    """

    writes: list[dict[str, Rows]]
    replicas: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    specs: list[dict[str, TensorSpec]] = field(default_factory=list)

    def compared(self, rank: int) -> list[str]:
        """The tensors whose digests a rank has to report."""
        return [name for name, groups in self.replicas.items() if any(rank in group for group in groups)]


def divide(
    inventories: Sequence[Sequence[Item]], families: Sequence[Family] = (), *, replicas_apart: bool = True
) -> Division:
    """Divide the tensors of ranks 0, 1, ...

    Args:
        inventories: what each rank has; a name at most once per rank.
        families: tensors that have to go to the same ranks. If a tensor is in several families, the first counts.
            Members that have another shape, or are on other ranks, are divided separately.
        replicas_apart: divide replicas over the ranks by bytes. False: the lowest rank that has a replica writes it, so
            that as many as possible come from one rank.

    Raises:
        RankMismatchError: tensors with one name differ in dtype or shape, or their boxes do not cover the tensor
            exactly; the message names the tensor and the ranks.
    """
    count = len(inventories)
    holders: dict[str, list[tuple[int, Item]]] = {}
    for rank, items in enumerate(inventories):
        for item in items:
            holders.setdefault(item.name, []).append((rank, item))
    division = Division([{} for _ in range(count)], {}, [{} for _ in range(count)])
    loads = [0] * count
    shared: list[tuple[Item, list[int]]] = []
    for name, having in holders.items():
        for box, ranks in _boxes(name, having).items():
            item = next(item for _, item in having if item.box == box)
            if len(ranks) == 1:
                _assign(division, loads, item, ranks[0], None)
                continue
            division.replicas.setdefault(name, []).append(tuple(ranks))
            shared.append((item, ranks))
    if not replicas_apart:
        for item, ranks in shared:
            _assign(division, loads, item, ranks[0], None)
        return division
    fair = max(CUT_FROM, (sum(loads) + sum(item.nbytes for item, _ in shared)) // count)
    units = [(items, ranks, sum(item.nbytes for item in items)) for items, ranks in _together(shared, families)]
    for items, ranks, nbytes in sorted(units, key=lambda unit: -unit[2]):  # stable: equal sizes keep the state's order
        for rows, rank in _cuts(items[0].box, nbytes, ranks, loads, fair):
            for item in items:
                _assign(division, loads, item, rank, rows)
    return division


def _together(
    shared: Sequence[tuple[Item, list[int]]], families: Sequence[Family]
) -> list[tuple[list[Item], list[int]]]:
    """The units of the division: the members of each family that have the same box and ranks, and single tensors."""
    number: dict[str, int] = {}
    for place, family in enumerate(families):
        for name in family:
            number.setdefault(name, place)
    units: dict[object, tuple[list[Item], list[int]]] = {}
    for item, ranks in shared:
        key = (number.get(item.name, item.name), item.box, item.whole, tuple(ranks))
        units.setdefault(key, ([], ranks))[0].append(item)
    return list(units.values())


def _boxes(name: str, having: Sequence[tuple[int, Item]]) -> dict[Box, list[int]]:
    """The distinct boxes of one tensor, and the ranks of each.

    Raises `RankMismatchError` unless they cover the tensor exactly.
    """
    first_rank, first = having[0]
    for rank, item in having:
        if (item.dtype, item.whole) != (first.dtype, first.whole):
            raise RankMismatchError(
                f"tensor {name!r} is {_kind(first)} on rank {first_rank}, {_kind(item)} on rank {rank}: if each rank "
                "has its own, name it in RankOptions(per_rank=[...])"
            )
    boxes: dict[Box, list[int]] = {}
    for rank, item in having:
        if not item.empty:
            boxes.setdefault(item.box, []).append(rank)
    found = list(boxes)
    if (pair := overlapping([box for box in found if box.size])) is not None:
        one, other = (found[place] for place in pair)
        raise RankMismatchError(
            f"tensor {name!r}: rank {boxes[one][0]} has elements {one} and rank {boxes[other][0]} has {other}, which "
            "overlap and are not the same"
        )
    if math.prod(first.whole) and (missing := gap(first.whole, found)) is not None:
        raise RankMismatchError(
            f"tensor {name!r}: elements {missing} of {list(first.whole)} are on no rank: every rank of the device mesh "
            "has to be in the group"
        )
    return boxes


def _kind(item: Item) -> str:
    return f"{item.dtype} {list(item.whole)}"


def _cuts(box: Box, nbytes: int, ranks: Sequence[int], loads: Sequence[int], fair: int) -> list[tuple[Rows, int]]:
    """Which ranks write which rows of a replica or of a family of replicas; ranks with the fewest bytes come first."""
    order = sorted(ranks, key=lambda rank: (loads[rank], rank))
    rows = box.shape[0] if box.shape else 1
    pieces = min(-(-nbytes // fair), len(ranks), rows) if nbytes > fair else 1
    if pieces < 2:
        return [(None, order[0])]
    bounds = [rows * number // pieces for number in range(pieces + 1)]
    return [((bounds[number], bounds[number + 1]), order[number]) for number in range(pieces)]


def _assign(division: Division, loads: list[int], item: Item, rank: int, rows: Rows) -> None:
    division.writes[rank][item.name] = rows
    shape, offset = item.box.shape, item.box.offset
    if rows is not None:
        shape = (rows[1] - rows[0], *shape[1:])
        offset = (offset[0] + rows[0], *offset[1:])
    spec = TensorSpec(item.name, item.dtype, item.whole)
    if shape != item.whole:
        spec = TensorSpec(item.name, item.dtype, shape, item.whole, offset)
    division.specs[rank][item.name] = spec
    loads[rank] += spec.nbytes


def encode_items(items: Sequence[Item], families: Sequence[Family] = ()) -> bytes:
    """Return an inventory as canonical JSON."""
    rows = [[item.name, item.dtype, list(item.whole), list(item.box.offset), list(item.box.shape)] for item in items]
    return jsontext.dumps([rows, [list(family) for family in families]])


def decode_items(data: bytes, where: str) -> tuple[list[Item], list[Family]]:
    """The inverse of `encode_items`. Raises `FormatError`."""
    found: Any = jsontext.loads(data, what=where, max_bytes=LETTER_LIMIT)
    try:
        rows, families = found
        items = [
            Item(name, dtype, Box(tuple(offset), tuple(shape)), tuple(whole))
            for name, dtype, whole, offset, shape in rows
        ]
        return items, [tuple(family) for family in families]
    except (TypeError, ValueError) as error:
        raise FormatError(f"{where}: not an inventory") from error


def encode_rows(writes: Mapping[str, Rows]) -> list[list[Any]]:
    """Return what a rank writes, as JSON."""
    return [[name, None if rows is None else list(rows)] for name, rows in writes.items()]


def decode_rows(rows: list[list[Any]]) -> dict[str, Rows]:
    """The inverse of `encode_rows`."""
    return {name: None if cut is None else (cut[0], cut[1]) for name, cut in rows}
