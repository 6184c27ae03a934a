"""What a restore costs, before a merge and after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptstore.formats.catalog import Catalog
from ckptstore.formats.records import Encoding
from ckptstore.restore.restore_plan import Rates, restore_seconds

__all__ = ["RestoreCost", "restore_cost"]


@dataclass(frozen=True, slots=True)
class RestoreCost:
    """What restoring one checkpoint takes.

    Attributes:
        nbytes: stored bytes to read.
        segments: objects to read them from.
        links: encodings on the way, the full included.
        seconds: at the rates measured: reading, decoding deltas, replaying optimizer steps.
    """

    nbytes: int
    segments: int
    links: int
    seconds: float


def restore_cost(catalog: Catalog, encodings: Sequence[Encoding], rates: Rates) -> RestoreCost:
    """The cost of a plan, of checkpoints that `catalog` knows."""
    seconds = restore_seconds(catalog, rates)
    segments = {segment for edge in encodings for segment in edge.segments}
    return RestoreCost(
        nbytes=sum(edge.bytes for edge in encodings),
        segments=len(segments),
        links=len(encodings),
        seconds=sum(map(seconds, encodings)),
    )
