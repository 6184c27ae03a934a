"""Groups the tensors of a tree of encodings that need each other and have to be decoded together.

Optimizer steps encode tensors together, and a rounded copy needs its master. Every other tensor is a column of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptstore.formats.segment_files.layout import chunk_count
from ckptstore.maintenance.verify.encoding_trees import Branch
from ckptstore.restore.chains.assembly import Held, spec_of
from ckptstore.restore.chains.chain import master_of
from ckptstore.restore.chains.chain_link import TensorLink
from ckptstore.restore.chains.replay import Cell

__all__ = ["Column", "ColumnStep", "cell_of", "columns_of"]


@dataclass(frozen=True, slots=True)
class ColumnStep:
    """What one encoding does to a column.

    Attributes:
        links: single tensors, and leaders of groups.
        copies: rounded copies, which are computed from the others.
    """

    links: tuple[TensorLink, ...]
    copies: tuple[TensorLink, ...]


@dataclass(slots=True)
class Column:
    """Tensors that need each other, with all of their chunks.

    Attributes:
        steps: what each encoding does to them.
        cells: the tensors.
        paired: whether two chunks of an fp32 tensor correspond to one of its copy.
        sums: (encoding, tensor) -> the sum of its state digest's parts so far, and the number of chunks in it.
        left: number of places that are not done yet.
    """

    cells: list[Cell] = field(default_factory=list)
    steps: dict[Branch, ColumnStep] = field(default_factory=dict)
    paired: bool = False
    sums: dict[tuple[Branch, str], tuple[int, int]] = field(default_factory=dict)
    left: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def places(self) -> int:
        """Number of places at which it is decoded separately, at least one."""
        return max(1, *(-(-chunk_count(cell.nbytes) // self._width(cell)) for cell in self.cells))

    def chunks(self, cell: Cell, place: int) -> range:
        """Return the chunks of one of its tensors at a place."""
        width = self._width(cell)
        return range(place * width, min((place + 1) * width, chunk_count(cell.nbytes)))

    def _width(self, cell: Cell) -> int:
        return 2 if self.paired and cell.dtype == "F32" else 1


def cell_of(link: TensorLink) -> Cell:
    """Return a tensor's cell, which identifies its memory."""
    return Cell(link.tensor.name, *spec_of(link.tensor))


def columns_of(held: Mapping[Branch, Held]) -> list[Column]:
    """Return the columns of a tree, from the tensors of each of its encodings."""
    joined = _TensorSets()
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


def _divide(held: Mapping[Branch, Held], columns: Mapping[Cell, Column], joined: _TensorSets) -> None:
    for branch, tensors in held.items():
        links: dict[Cell, tuple[list[TensorLink], list[TensorLink]]] = {}
        for link in tensors.values():
            if link.group is None or link.tensor.name == link.group.leader:
                column = links.setdefault(joined.find(cell_of(link)), ([], []))
                column[link.base_ratio == 2].append(link)
        for top, (alone, copies) in links.items():
            columns[top].steps[branch] = ColumnStep(tuple(alone), tuple(copies))


class _TensorSets:
    """Disjoint sets of tensors that need each other (union-find)."""

    def __init__(self) -> None:
        self._above: dict[Cell, Cell] = {}

    @property
    def cells(self) -> list[Cell]:
        """All tensors, in the order of their first use."""
        return list(self._above)

    def find(self, cell: Cell) -> Cell:
        """Return the representative of the tensor's set."""
        top = self._above.setdefault(cell, cell)
        while (above := self._above[top]) != top:
            top = above
        while cell != top:
            self._above[cell], cell = top, self._above[cell]
        return top

    def join(self, one: Cell, other: Cell) -> None:
        """Unite the sets of two tensors."""
        self._above[self.find(one)] = self.find(other)
