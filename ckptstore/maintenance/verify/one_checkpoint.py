"""Selects the part of a catalog that one checkpoint can be restored from, by any way."""

from __future__ import annotations

from dataclasses import replace

from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.commit_checks import needed
from ckptstore.formats.history.records import Node

__all__ = ["restricted"]


def restricted(catalog: Catalog, target: Node) -> Catalog:
    """Return a catalog that promises only `target`, with every encoding that a way to it may need."""
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
            if segment in catalog.segments:  # a damaged log may not name it
                small.segments[segment] = catalog.segments[segment]
    if target in catalog.slots:
        small.slots[target] = catalog.slots[target]
    return small
