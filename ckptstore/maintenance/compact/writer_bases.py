"""What the newest term's writer may build on next, and whether it may be there at all."""

from __future__ import annotations

from ckptstore.errors import CorruptionError
from ckptstore.formats.catalog import CLOSED, Catalog
from ckptstore.formats.records import Node
from ckptstore.restore.restore_plan import plan

__all__ = ["built_on"]


def built_on(catalog: Catalog) -> frozenset[Node]:
    """What stays stored only for the newest checkpoint; nothing, if the term says that its writer has ended.

    A writer may code the next checkpoint against the newest, or against what that is coded against. If such a base is
    gone it starts with a full, which costs more than the base takes. What lies below a kept checkpoint is none of its
    business: that one stays, however it is stored.
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
