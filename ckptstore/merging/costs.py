"""What a restore costs, before a merge and after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptstore.explaining import Rates
from ckptstore.formats.records import Encoding

__all__ = ["RestoreCost", "restore_cost"]


@dataclass(frozen=True, slots=True)
class RestoreCost:
    """What restoring one checkpoint takes.

    Attributes:
        nbytes: stored bytes to read.
        segments: objects to read them from.
        layers: encodings on the way, the full included.
        seconds: at the rates measured: reading, then decoding every layer above the full.
    """

    nbytes: int
    segments: int
    layers: int
    seconds: float


def restore_cost(encodings: Sequence[Encoding], logical: int, rates: Rates) -> RestoreCost:
    """The cost of a plan for a state of `logical` bytes."""
    nbytes = sum(edge.bytes for edge in encodings)
    segments = {segment for edge in encodings for segment in edge.segments}
    seconds = nbytes / rates.read + (len(encodings) - 1) * logical / rates.decode
    return RestoreCost(nbytes, len(segments), len(encodings), seconds)
