"""Computes the cost of a restore, before a merge and after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import Encoding
from ckptstore.restore.restore_plan import Rates, restore_seconds

__all__ = ["RestoreCost", "restore_cost"]


@dataclass(frozen=True, slots=True)
class RestoreCost:
    """The cost of restoring one checkpoint.

    Attributes:
        nbytes: stored bytes to read.
        segments: number of segments to read them from.
        links: number of encodings, the full included.
        seconds: at the measured rates: reading, decoding deltas, replaying optimizer steps.
    """

    nbytes: int
    segments: int
    links: int
    seconds: float


def restore_cost(catalog: Catalog, encodings: Sequence[Encoding], rates: Rates) -> RestoreCost:
    """Compute the cost of a plan whose checkpoints `catalog` contains."""
    seconds = restore_seconds(catalog, rates)
    segments = {segment for edge in encodings for segment in edge.segments}
    return RestoreCost(
        nbytes=sum(edge.bytes for edge in encodings),
        segments=len(segments),
        links=len(encodings),
        seconds=sum(map(seconds, encodings)),
    )
