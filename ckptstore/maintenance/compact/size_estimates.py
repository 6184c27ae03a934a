"""About how many bytes a checkpoint will take, coded anew: from what the store has already, and from samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from ckptstore.formats.catalog import Catalog
from ckptstore.formats.layout import ALIGN
from ckptstore.formats.records import CheckpointEntry

__all__ = ["Samples", "Sizes", "known_sizes"]


class Sizes(Protocol):
    """Guesses how large an encoding will be. The same question has the same answer."""

    def full(self, entry: CheckpointEntry) -> int:
        """Stored bytes of a compressed full."""

    def delta(self, entry: CheckpointEntry, base: CheckpointEntry) -> int | None:
        """Stored bytes of a delta against another checkpoint; None: there is nothing to guess from."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Stored bytes per logical byte, as `size_samples` or the store's own encodings show them.

    Attributes:
        full: of a compressed full.
        deltas: (steps between the two, stored per logical byte), ascending.
    """

    full: float = 1.0
    deltas: tuple[tuple[int, float], ...] = ()

    def delta(self, gap: int) -> float | None:
        """Of a delta over so many steps: what was seen at the two gaps around it, by the gap's magnitude."""
        if not self.deltas:
            return None
        below = [found for found in self.deltas if found[0] <= gap]
        above = [found for found in self.deltas if found[0] > gap]
        if not below or not above:
            return (below[-1] if below else above[0])[1]
        (near, low), (far, high) = below[-1], above[0]
        share = math.log(gap / near) / math.log(far / near)
        return low + (high - low) * share


@dataclass(frozen=True, slots=True)
class _Sampled:
    samples: Samples

    def full(self, entry: CheckpointEntry) -> int:
        return ALIGN + math.ceil(entry.nbytes * self.samples.full)

    def delta(self, entry: CheckpointEntry, base: CheckpointEntry) -> int | None:
        if (entry.nbytes, entry.tensors) != (base.nbytes, base.tensors):
            return None  # another model, it seems: nothing is known of its tensors
        ratio = self.samples.delta(max(1, abs(entry.step - base.step)))
        return None if ratio is None else ALIGN + math.ceil(entry.nbytes * ratio)


def known_sizes(catalog: Catalog, samples: Samples | None = None) -> Sizes:
    """What the store's own deltas and compressed fulls show, and `samples` besides, which count more."""
    fulls: list[float] = []
    deltas: dict[int, list[float]] = {}
    for node, edges in catalog.encodings.items():
        entry = catalog.find(node)
        if entry is None or not entry.nbytes:
            continue
        for edge in edges:
            ratio = edge.bytes / entry.nbytes
            if edge.base is None and ratio < 1:
                fulls.append(ratio)
            elif edge.base is not None and edge.kind == "delta":
                deltas.setdefault(max(1, abs(entry.step - edge.base.step)), []).append(ratio)
    found = {gap: sum(ratios) / len(ratios) for gap, ratios in deltas.items()}
    full = sum(fulls) / len(fulls) if fulls else 1.0
    if samples is not None:
        found.update(samples.deltas)
        full = samples.full
    return _Sampled(Samples(full, tuple(sorted(found.items()))))
