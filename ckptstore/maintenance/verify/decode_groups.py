"""Which tensors of a tree of encodings need each other, and so have to be decoded side by side.

Optimizer steps move tensors together; a rounded copy needs its master. Everything else is a column of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptstore.formats.layout import chunk_count
from ckptstore.maintenance.verify.encoding_trees import Branch
from ckptstore.restore.assembly import Held, spec_of
from ckptstore.restore.chain import master_of
from ckptstore.restore.chain_link import Link
from ckptstore.restore.replay import Cell

__all__ = ["Column", "Step", "cell_of", "columns_of"]


@dataclass(frozen=True, slots=True)
class Step:
    """What one encoding does to a column.

    Attributes:
        links: tensors by themselves, and leaders of groups.
        copies: rounded copies, which are made of what the others give.
    """

    links: tuple[Link, ...]
    copies: tuple[Link, ...]


@dataclass(slots=True)
class Column:
    """Tensors that need each other; all of their chunks.

    Attributes:
        steps: what each encoding does to them.
        cells: the tensors.
        paired: whether two chunks of an fp32 tensor go with one of its copy.
        sums: by encoding and tensor, the parts of its state digest so far, and of how many chunks these are.
        left: places that are not done yet.
    """

    cells: list[Cell] = field(default_factory=list)
    steps: dict[Branch, Step] = field(default_factory=dict)
    paired: bool = False
    sums: dict[tuple[Branch, str], tuple[int, int]] = field(default_factory=dict)
    left: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def places(self) -> int:
        """Places at which it is decoded by itself, at least one."""
        return max(1, *(-(-chunk_count(cell.nbytes) // self._width(cell)) for cell in self.cells))

    def chunks(self, cell: Cell, place: int) -> range:
        """Chunks of one of its tensors at a place."""
        width = self._width(cell)
        return range(place * width, min((place + 1) * width, chunk_count(cell.nbytes)))

    def _width(self, cell: Cell) -> int:
        return 2 if self.paired and cell.dtype == "F32" else 1


def cell_of(link: Link) -> Cell:
    """A tensor as something that has memory."""
    return Cell(link.tensor.name, *spec_of(link.tensor))


def columns_of(held: Mapping[Branch, Held]) -> list[Column]:
    """The columns of a tree, from the tensors of each of its encodings."""
    joined = _Joined()
    paired: list[Cell] = []
    for tensors in held.values():
        for link in tensors.values():
            cell = cell_of(link)
            joined.find(cell)
            if link.group is not None:
                for name in link.group.names:
                    if name in tensors:
                        joined.join(cell, cell_of(tensors[name]))
            elif link.base_ratio == 2:
                paired.append(cell)
                joined.join(cell, cell_of(tensors[(master_of(link.tensor) or "")]))
    columns: dict[Cell, Column] = {}
    for cell in joined.cells:
        columns.setdefault(joined.find(cell), Column()).cells.append(cell)
    for cell in paired:
        columns[joined.find(cell)].paired = True
    _divide(held, columns, joined)
    return list(columns.values())


def _divide(held: Mapping[Branch, Held], columns: Mapping[Cell, Column], joined: _Joined) -> None:
    for branch, tensors in held.items():
        links: dict[Cell, tuple[list[Link], list[Link]]] = {}
        for link in tensors.values():
            if link.group is None or link.tensor.name == link.group.leader:
                column = links.setdefault(joined.find(cell_of(link)), ([], []))
                column[link.base_ratio == 2].append(link)
        for top, (alone, copies) in links.items():
            columns[top].steps[branch] = Step(tuple(alone), tuple(copies))


class _Joined:
    """Sets of tensors that need each other."""

    def __init__(self) -> None:
        self._above: dict[Cell, Cell] = {}

    @property
    def cells(self) -> list[Cell]:
        """All of them, in the order in which they were met."""
        return list(self._above)

    def find(self, cell: Cell) -> Cell:
        """One of the set's, the same for all of them."""
        top = self._above.setdefault(cell, cell)
        while (above := self._above[top]) != top:
            top = above
        while cell != top:
            self._above[cell], cell = top, self._above[cell]
        return top

    def join(self, one: Cell, other: Cell) -> None:
        """The sets of two tensors are one."""
        self._above[self.find(one)] = self.find(other)
