"""The checkpoints of a store as a forest: who continues from whom. What ``ckpt log`` shows; reads the log once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptstore.checkpoint import CheckpointInfo, TermInfo, describe_checkpoint
from ckptstore.formats.errors import CorruptLogError

if TYPE_CHECKING:
    from ckptstore.formats.catalog import Catalog
    from ckptstore.formats.records import Node
    from ckptstore.store import Store

__all__ = ["Lineage", "lineage"]


@dataclass(frozen=True, slots=True)
class Lineage:
    """The checkpoints and terms of a store at one moment.

    Attributes:
        checkpoints: newest first: every checkpoint of a term was committed after all of earlier terms.
        parents: REF -> REF of the checkpoint it continues from; None for the first of a run. Retired checkpoints are
            skipped: the nearest one before it that is still there stands in.
        terms: newest first.
        latest: REF of what ``latest`` means; None in an empty store, or if damage hides it.
        damage: what is wrong with the log, one sentence each; the checkpoints listed do not need those slots.
    """

    checkpoints: tuple[CheckpointInfo, ...]
    parents: Mapping[str, str | None]
    terms: tuple[TermInfo, ...]
    latest: str | None
    damage: tuple[str, ...]


def lineage(store: Store) -> Lineage:
    """Read the log of `store`.

    Raises:
        CorruptLogError: nothing of the log can be read.
        StorageError: the medium failed.
    """
    catalog = store.view().catalog
    infos = [describe_checkpoint(catalog, entry) for _, entry in sorted(catalog.checkpoints.items(), reverse=True)]
    counts: dict[int, int] = {}
    for info in infos:
        counts[info.term] = counts.get(info.term, 0) + 1
    terms = [
        TermInfo(number, opened.parent and opened.parent.ref, opened.time, counts.get(number, 0), dict(opened.writer))
        for number, opened in sorted(catalog.terms.items(), reverse=True)
    ]
    damage = [f"log slot {seq} is damaged or missing" for seq in catalog.damage]
    latest = None
    try:
        newest = catalog.latest()
        latest = None if newest is None else newest.ref
    except CorruptLogError as error:
        damage.append(str(error))
    return Lineage(tuple(infos), _parents(catalog), tuple(terms), latest, tuple(damage))


def _parents(catalog: Catalog) -> dict[str, str | None]:
    steps: dict[int, list[int]] = {}
    for term, step in sorted(catalog.checkpoints):
        steps.setdefault(term, []).append(step)
    found: dict[str, str | None] = {}
    for term, members in steps.items():
        before = _line(catalog, steps, term)
        for step in members:
            found[f"{step}@{term}"] = None if before is None else f"{before[1]}@{before[0]}"
            before = (term, step)
    return found


def _line(catalog: Catalog, steps: Mapping[int, list[int]], term: int) -> Node | None:
    """The nearest checkpoint still there on the line of parents before `term`'s first."""
    while (opened := catalog.terms.get(term)) is not None and opened.parent is not None:
        term, limit = opened.parent.term, opened.parent.step
        if earlier := [step for step in steps.get(term, ()) if step <= limit]:
            return (term, earlier[-1])
    return None
