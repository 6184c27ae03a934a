"""Collects the checkpoints that repair may keep: those in the log, and those in segments whose log record is lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ckptstore.backends.base import Backend
from ckptstore.formats.checksums import xxh3_128
from ckptstore.formats.history.catalog import Catalog, TermEntry
from ckptstore.formats.history.records import CheckpointEntry, CheckpointId, Encoding, Node, ref_of
from ckptstore.maintenance.repair.evidence import Log
from ckptstore.maintenance.repair.log_rebuild import CompleteEncoding, groups_of, rebuild
from ckptstore.maintenance.repair.segment_descriptions import SegmentDescription

__all__ = ["Candidates", "candidates"]


@dataclass
class Candidates:
    """A history that may be kept, as far as its segments are intact.

    Attributes:
        catalog: the whole history.
        found: checkpoints that only segments describe.
        unproven: those of them whose state hash is recorded nowhere else: a changed header would not be noticed.
        broken: what is lost already -> why.
    """

    catalog: Catalog
    found: set[Node] = field(default_factory=set)
    unproven: set[Node] = field(default_factory=set)
    broken: dict[Node, str] = field(default_factory=dict)


def candidates(backend: Backend, run: str, log: Log, told: Mapping[str, SegmentDescription]) -> Candidates:
    """Combine what the log and the segments of a run say. Raises as `log_rebuild.rebuild`."""
    known = log.catalog
    own = [one for one in told.values() if one.run == run]
    groups = {
        (node, first): members
        for (node, first), members in groups_of(own).items()
        if _is_news(log, node, [one.entry.id for one in members])
    }
    made = rebuild(backend, groups)
    parents: dict[int, CheckpointId | None] = {}
    for one in own:
        parents |= one.parents
    catalog = Catalog(term=known.term)
    found = Candidates(catalog, broken=dict(made.broken))
    for table, part in ((known.checkpoints, catalog.checkpoints), (known.held, catalog.held)):
        part.update(table)
    catalog.encodings.update(known.encodings)
    catalog.segments.update(known.segments)
    catalog.tags.update(known.tags)
    catalog.keep, catalog.keep_seq = known.keep, known.keep_seq
    named = _named(own, known, parents)
    for whole in _one_state_each(made.whole, named, found.broken, known):
        node = whole.entry.node
        if catalog.find(node) is None:
            catalog.checkpoints[node] = whole.entry
            found.found.add(node)
            if whole.entry.id not in named:
                found.unproven.add(node)
        edges = catalog.encodings.get(node, ())
        if all(edge.segments != whole.encoding.segments for edge in edges):
            catalog.encodings[node] = (*edges, whole.encoding)
            catalog.segments.update((one, told[one].entry) for one in whole.encoding.segments)
    for node in found.found:
        found.broken.pop(node, None)
    if not log.whole:
        _name_the_lost(found, named, known)
    _terms(catalog, known, parents, run)
    return found


def _is_news(log: Log, node: Node, segments: Iterable[str]) -> bool:
    """Tell whether an encoding may be one whose COMMIT is lost.

    A whole log names everything, except for a lost end that left no trace: a copy taken while a writer continued has
    segments of its newest checkpoints, but not their slots.
    """
    catalog = log.catalog
    if not log.whole and catalog.find(node) is None:
        spent = node[0] == catalog.term and node[1] in catalog.spent
        return not spent and catalog.dropped.isdisjoint(segments)
    if any(one in catalog.segments or one in catalog.dropped for one in segments):
        return False
    if not log.whole:
        return True
    newest = catalog.checkpoints.highest(catalog.term)
    opened = catalog.terms[catalog.term]
    first = 0 if opened.parent is None else opened.parent.step  # a checkpoint may replace the parent
    below = first - 1 if newest is None else newest[1]
    return node[0] == catalog.term and node[1] > below and node[1] not in catalog.spent


def _named(
    told: Iterable[SegmentDescription], known: Catalog, parents: Mapping[int, CheckpointId | None]
) -> dict[CheckpointId, str]:
    """Map checkpoints whose state hash is recorded elsewhere to where it is recorded, in words."""
    named: dict[CheckpointId, str] = {}
    for term, parent in parents.items():
        if parent is not None:
            named.setdefault(parent, f"term {term} continues from it")
    for opened in known.terms.values():
        if opened.parent is not None:
            named.setdefault(opened.parent, f"term {opened.term} continues from it")
    for one in told:
        for step, encoding in one.steps.items():
            if encoding.base is not None:
                named.setdefault(encoding.base, f"{ref_of((encoding.term, step))} builds on it")
    return named


def _one_state_each(
    whole: Iterable[CompleteEncoding], named: Mapping[CheckpointId, str], broken: dict[Node, str], known: Catalog
) -> list[CompleteEncoding]:
    """Choose encodings of one state for each checkpoint: the log's, else a recorded one, else the newest."""
    by_node: dict[Node, list[CompleteEncoding]] = {}
    for one in whole:
        by_node.setdefault(one.entry.node, []).append(one)
    chosen = []
    for node, found in by_node.items():
        entry = known.find(node)
        best = max(found, key=lambda one: (one.entry.id in named, one.entry.time)).entry
        state = best.state if entry is None else entry.state
        chosen += [one for one in found if one.entry.state == state]
        if entry is not None and not any(one.entry.state == state for one in found):
            broken.setdefault(node, "its segments hold another state than the log says")
    return chosen


def _name_the_lost(found: Candidates, named: Mapping[CheckpointId, str], known: Catalog) -> None:
    """Add checkpoints that others build on or continue from, and that are missing, unless the log retired them."""
    retired = {one.parent.node for one in known.terms.values() if one.parent is not None and one.parent_found}
    for identity, why in named.items():
        if found.catalog.find(identity.node) is None and identity.node not in retired:
            found.broken.setdefault(identity.node, f"only its name is recorded here: {why}")


def _terms(catalog: Catalog, known: Catalog, parents: Mapping[int, CheckpointId | None], run: str) -> None:
    """Add the terms of the log, and those that only checkpoints, segments and other terms name."""
    catalog.terms.update(known.terms)
    entries: list[CheckpointEntry] = [*catalog.checkpoints.values(), *catalog.held.values()]
    times: dict[int, float] = {}
    for entry in entries:
        times[entry.term] = min(entry.time, times.get(entry.term, entry.time))
    waiting = [*times, *(segment.term for segment in catalog.segments.values())]
    waiting += [edge.base.term for edge in _edges(catalog) if edge.base is not None]
    waiting += [one.parent.term for one in known.terms.values() if one.parent is not None]
    while waiting:
        number = waiting.pop()
        opened = catalog.terms.get(number)
        if opened is not None and opened.known:
            continue
        parent = parents.get(number)
        nonce = xxh3_128(f"repaired {run} {number}".encode()) if opened is None else opened.nonce
        time = times.get(number, 0.0)
        catalog.terms[number] = TermEntry(number, parent, time, {"repaired": True}, 0, True, nonce)
        if parent is not None:
            waiting.append(parent.term)
    catalog.term = max(catalog.terms, default=0)
    for number, opened in catalog.terms.items():
        if opened.parent is not None and opened.parent.term not in catalog.terms:
            catalog.terms[number] = replace(opened, parent=None)


def _edges(catalog: Catalog) -> Iterable[Encoding]:
    return (edge for edges in catalog.encodings.values() for edge in edges)
