"""What retention rules rank by: numbers in the metadata of checkpoints, and the line of the newest checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from ckptstore.formats.history import metadata
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.members import MAX_INT
from ckptstore.formats.history.records import CheckpointEntry, Node

__all__ = ["line", "metric", "metric_in", "names", "number"]

_METRICS: Final = "metrics"
"""Member of the metadata in which a `Checkpointer` stores the metrics it is given."""


def metric(entry: CheckpointEntry, name: str) -> float | None:
    """Return `number` of a checkpoint's metadata."""
    return metric_in(entry.extra, name)


def metric_in(extra: Mapping[str, Any], name: str) -> float | None:
    """Return `number` of the metadata among the extra members of a checkpoint's entry."""
    labels = extra.get(metadata.MEMBER)
    return number(labels, name) if isinstance(labels, Mapping) else None


def number(labels: Mapping[str, Any], name: str) -> float | None:
    """Return the number `name` in metadata, or in its ``metrics``; None: there is none, or it is NaN."""
    inner = labels.get(_METRICS)
    found = labels.get(name, inner.get(name) if isinstance(inner, Mapping) else None)
    value = metadata.read({name: found})[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        as_float = float(value)
    except OverflowError:
        as_float = math.inf if value > 0 else -math.inf
    return None if math.isnan(as_float) else as_float


def names(catalog: Catalog) -> list[str]:
    """Return the names of all numbers in the metadata of checkpoints, sorted."""
    found: set[str] = set()
    for extra in catalog.checkpoints.extras().values():
        labels = extra.get(metadata.MEMBER)
        if isinstance(labels, Mapping):
            inner = labels.get(_METRICS)
            new_names = {*labels, *(inner if isinstance(inner, Mapping) else ())} - found
            found.update(name for name in new_names if number(labels, name) is not None)
    return sorted(found)


def line(catalog: Catalog) -> Callable[[Node], bool]:
    """Return a predicate for the line of the newest term: the checkpoints it continues, without abandoned branches."""
    until: dict[int, int] = {}
    term, step = catalog.term, MAX_INT
    while (opened := catalog.terms.get(term)) is not None:
        until[term] = step
        if opened.parent is None:
            break
        term, step = opened.parent.term, opened.parent.step
    return lambda node: node[1] <= until.get(node[0], -1)
