"""Determines which bases the newest term's writer may build on next, and whether it may still be alive."""

from __future__ import annotations

from ckptstore.errors import CorruptionError
from ckptstore.formats.history.catalog import CLOSED, Catalog
from ckptstore.formats.history.records import Node
from ckptstore.restore.restore_plan import plan

__all__ = ["writer_bases"]


def writer_bases(catalog: Catalog) -> frozenset[Node]:
    """Return the bases that are stored only for the newest checkpoint; empty, if the term says that its writer ended.

    A writer may encode the next checkpoint against the newest, or against the newest one's base. Without such a base it
    starts with a full, which costs more than the base takes. The bases of a kept checkpoint do not concern the
    writer: that checkpoint stays, however it is stored.
    """
    opened = catalog.terms.get(catalog.term)
    if not catalog.checkpoints or (opened is not None and opened.extra.get(CLOSED) is True):
        return frozenset()
    try:
        chain = plan(catalog, catalog.checkpoints[max(catalog.checkpoints)].id)
    except CorruptionError:
        return frozenset()
    found: set[Node] = set()
    for edge in reversed(chain.encodings[:-1]):
        if edge.checkpoint in catalog.checkpoints:
            break
        found.add(edge.checkpoint)
    return frozenset(found)
