"""The part of a catalog that one checkpoint can be restored from, by whatever way."""

from __future__ import annotations

from dataclasses import replace

from ckptstore.formats.catalog import Catalog
from ckptstore.formats.commit_checks import needed
from ckptstore.formats.records import Node

__all__ = ["restricted"]


def restricted(catalog: Catalog, target: Node) -> Catalog:
    """A catalog that promises `target` alone, and has every encoding that a way to it may lead through."""
    empty = Catalog()
    small = replace(
        catalog,
        checkpoints=empty.checkpoints,
        slots=empty.slots,
        held=empty.held,
        encodings=empty.encodings,
        segments=empty.segments,
        _edges=None,
    )
    for node in sorted(needed(catalog, [target])):
        entry = catalog.find(node)
        if entry is not None:
            (small.checkpoints if node == target else small.held)[node] = entry
        if edges := catalog.encodings.get(node, ()):
            small.encodings[node] = edges
        for segment in (segment for edge in edges for segment in edge.segments):
            if segment in catalog.segments:  # in a damaged log it need not be
                small.segments[segment] = catalog.segments[segment]
    if target in catalog.slots:
        small.slots[target] = catalog.slots[target]
    return small
