"""What rules of retention rank by: numbers that the metadata of checkpoints have, and the line of the newest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from ckptstore.formats import metadata
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.members import MAX_INT
from ckptstore.formats.records import CheckpointEntry, Node

__all__ = ["line", "metric", "metric_in", "names", "number"]

_METRICS: Final = "metrics"
"""Member of the metadata in which a `Checkpointer` puts what it is told."""


def metric(entry: CheckpointEntry, name: str) -> float | None:
    """`number` in a checkpoint's metadata."""
    return metric_in(entry.extra, name)


def metric_in(extra: Mapping[str, Any], name: str) -> float | None:
    """`number` in what a COMMIT says of a checkpoint besides."""
    said = extra.get(metadata.MEMBER)
    return number(said, name) if isinstance(said, Mapping) else None


def number(said: Mapping[str, Any], name: str) -> float | None:
    """The number of this name in metadata, or in its ``metrics``; None: there is none, or it is NaN."""
    inner = said.get(_METRICS)
    found = said.get(name, inner.get(name) if isinstance(inner, Mapping) else None)
    value = metadata.read({name: found})[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        as_float = float(value)
    except OverflowError:
        as_float = math.inf if value > 0 else -math.inf
    return None if math.isnan(as_float) else as_float


def names(catalog: Catalog) -> list[str]:
    """Of all numbers that the metadata of checkpoints have, sorted."""
    found: set[str] = set()
    for extra in catalog.checkpoints.extras().values():
        said = extra.get(metadata.MEMBER)
        if isinstance(said, Mapping):
            inner = said.get(_METRICS)
            said_names = {*said, *(inner if isinstance(inner, Mapping) else ())} - found
            found.update(name for name in said_names if number(said, name) is not None)
    return sorted(found)


def line(catalog: Catalog) -> Callable[[Node], bool]:
    """Tells whether a checkpoint is one that the newest term continues: on no branch that was gone back from."""
    until: dict[int, int] = {}
    term, step = catalog.term, MAX_INT
    while (opened := catalog.terms.get(term)) is not None:
        until[term] = step
        if opened.parent is None:
            break
        term, step = opened.parent.term, opened.parent.step
    return lambda node: node[1] <= until.get(node[0], -1)
