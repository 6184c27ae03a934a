"""What a merge has made and prepared, before anybody is asked to commit it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckptstore.formats.records import Encoding, Node, SegmentEntry
from ckptstore.log.change import Change
from ckptstore.maintenance.merge.merge_range import Selection
from ckptstore.maintenance.merge.restore_cost import RestoreCost

__all__ = ["Made", "Method", "Prepared"]

Method = Literal["concatenated", "materialized", "kept"]


@dataclass(frozen=True, slots=True)
class Made:
    """Segments that are durable and that nobody knows of yet, and how they are read.

    Attributes:
        method: see `Merged.method`.
        chain: what then restores the target of the selection.
        segments: the new ones.
        encodings: those that are read from them.
    """

    method: Method
    chain: tuple[Encoding, ...]
    segments: tuple[SegmentEntry, ...] = ()
    encodings: tuple[Encoding, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the new segments."""
        return sum(segment.size for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A change that is ready to be committed.

    Attributes:
        term: the term in which it can be.
        selection: what it is about.
        made: what was written for it.
        change: what is to be committed first.
        later: checkpoints that only a second change can retire: in the first they are given their new encodings.
        dropped: the segments that both together drop.
        before, after: what restoring the target costs.
    """

    term: int
    selection: Selection
    made: Made
    change: Change
    later: tuple[Node, ...]
    dropped: tuple[SegmentEntry, ...]
    before: RestoreCost
    after: RestoreCost
