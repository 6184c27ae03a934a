"""Estimates how many bytes a re-encoded checkpoint will take, from the store's own encodings and from samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import CheckpointEntry
from ckptstore.formats.segment_files.layout import ALIGN

__all__ = ["Samples", "Sizes", "known_sizes"]


class Sizes(Protocol):
    """Estimates the size of encodings. The same question always gets the same answer."""

    def full(self, entry: CheckpointEntry) -> int:
        """Return the stored bytes of a compressed full."""

    def delta(self, entry: CheckpointEntry, base: CheckpointEntry) -> int | None:
        """Return the stored bytes of a delta against another checkpoint; None: there is nothing to estimate from."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Stored bytes per logical byte, from `size_samples` or from the store's own encodings.

    Attributes:
        full: of a compressed full.
        deltas: (steps between the two, stored bytes per logical byte), ascending.
    """

    full: float = 1.0
    deltas: tuple[tuple[int, float], ...] = ()

    def delta(self, gap: int) -> float | None:
        """Return the ratio of a delta over `gap` steps, interpolated over the logarithm of the two nearest gaps."""
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
            return None  # probably another model: nothing is known of its tensors
        ratio = self.samples.delta(max(1, abs(entry.step - base.step)))
        return None if ratio is None else ALIGN + math.ceil(entry.nbytes * ratio)


def known_sizes(catalog: Catalog, samples: Samples | None = None) -> Sizes:
    """Return estimates from the store's own deltas and compressed fulls; `samples` take precedence."""
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
