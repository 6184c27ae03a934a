"""Defines the result of preparing a merge, before it is committed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckptstore.formats.history.records import Encoding, Node, SegmentEntry
from ckptstore.log.change import CatalogChange
from ckptstore.maintenance.merge.merge_range import MergeSelection
from ckptstore.maintenance.merge.restore_cost import RestoreCost

__all__ = ["MergedSegments", "Method", "Prepared"]

Method = Literal["concatenated", "materialized", "kept"]


@dataclass(frozen=True, slots=True)
class MergedSegments:
    """Durable segments that no log names yet, and how they are read.

    Attributes:
        method: see `Merged.method`.
        chain: the chain that restores the target of the selection after the commit.
        segments: the new segments.
        encodings: the encodings that are read from them.
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
        term: the term in which it can be committed.
        selection: the selection that it is for.
        made: the segments written for it.
        change: the change to commit first.
        later: checkpoints that only a second change can retire: the first one gives them their new encodings.
        dropped: the segments that both changes together drop.
        before, after: cost of restoring the target.
    """

    term: int
    selection: MergeSelection
    made: MergedSegments
    change: CatalogChange
    later: tuple[Node, ...]
    dropped: tuple[SegmentEntry, ...]
    before: RestoreCost
    after: RestoreCost
