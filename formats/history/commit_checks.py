"""Check whether a COMMIT may be written, and which segments may be dropped (SPEC.md 7.4 and 7.5).

The owner of a term calls `check_commit` before it sends a record. The cost of everything here is proportional to what
the record touches, not to the size of the store.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from ckptstore.errors import CheckpointNotFoundError, StepOrderError, UsageError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import CheckpointEntry, CommitRecord, Encoding, Node, ref_of, valid_tag
from ckptstore.formats.history.retention_rules import checked

__all__ = ["check_commit", "droppable", "needed", "pinned", "users"]


def check_commit(catalog: Catalog, record: CommitRecord) -> None:
    """Refuse a record that would make the catalog inconsistent.

    Raises:
        StepOrderError: a step already exists in this term, or is not above the parent's.
        CheckpointNotFoundError: a base cannot be restored (any more): encode again, against another one.
        UsageError: the record breaks another rule of COMMIT; the message says which.
    """
    if record.term != catalog.term:
        raise UsageError(f"a record of term {record.term} in term {catalog.term}")
    after = _CatalogAfter(catalog, record)
    _check_segments(catalog, record)
    _check_checkpoints(catalog, record)
    for node in record.retires:
        if node not in catalog.checkpoints:
            raise UsageError(f"{ref_of(node)} cannot be retired: it is not promised")
    for edge in record.encodings:
        _check_encoding(after, edge)
    for checkpoint in record.checkpoints:
        if not after.restorable(checkpoint.node):
            raise UsageError(f"{checkpoint.ref} has no encoding that restores it")
    _check_reachable(after)
    _check_tags(after)
    if record.keep is not None:
        checked(record.keep)
    if again := record.requests.keys() & catalog.requests.keys():
        raise UsageError(f"request {min(again)} was handled before")
    if unknown := set(record.swept) - catalog.dropped:
        raise UsageError(f"segment {min(unknown)} is swept but was not dropped in this term")


class _CatalogAfter:
    """The catalog as it would be after a record, computed without applying the record."""

    def __init__(self, catalog: Catalog, record: CommitRecord) -> None:
        self.catalog = catalog
        self.record = record
        self.drops = frozenset(record.drops)
        self.retires = frozenset(record.retires)
        self.segments = {segment.id for segment in record.segments}
        self.checkpoints = {checkpoint.node: checkpoint for checkpoint in record.checkpoints}
        self.added: dict[Node, list[Encoding]] = {}
        self.added_dependents: dict[Node, list[Node]] = {}
        for edge in record.encodings:
            self.added.setdefault(edge.checkpoint, []).append(edge)
            if edge.base is not None:
                self.added_dependents.setdefault(edge.base.node, []).append(edge.checkpoint)

    def promised(self, node: Node) -> bool:
        return node not in self.retires and (node in self.catalog.checkpoints or node in self.checkpoints)

    def find(self, node: Node) -> CheckpointEntry | None:
        return self.checkpoints.get(node) or self.catalog.find(node)

    def live(self, segment: str) -> bool:
        return segment not in self.drops and (segment in self.catalog.segments or segment in self.segments)

    def edges(self, node: Node) -> list[Encoding]:
        both = (*self.catalog.encodings.get(node, ()), *self.added.get(node, ()))
        return [edge for edge in both if self.drops.isdisjoint(edge.segments)]

    def dependents(self, node: Node) -> list[Node]:
        return [*self.catalog.edges().dependents(node), *self.added_dependents.get(node, ())]

    def restorable(self, node: Node) -> bool:
        stack, seen = [node], {node}
        while stack:
            for edge in self.edges(stack.pop()):
                if edge.base is None:
                    return True
                base = self.find(edge.base.node)
                if base is not None and base.state == edge.base.state and base.node not in seen:
                    seen.add(base.node)
                    stack.append(base.node)
        return False


def _check_segments(catalog: Catalog, record: CommitRecord) -> None:
    added = {segment.id for segment in record.segments}
    used = {segment for edge in record.encodings for segment in edge.segments}
    if len(added) != len(record.segments):
        raise UsageError("a segment is added twice")
    for segment in record.segments:
        if segment.term != record.term:
            raise UsageError(f"segment {segment.id} is of term {segment.term}, not of {record.term}")
        if segment.id in catalog.segments or segment.id in catalog.dropped:
            raise UsageError(f"segment {segment.id} was committed or dropped before")
        if segment.id not in used:
            raise UsageError(f"segment {segment.id} is added, but no encoding reads it")
    if both := added.intersection(record.drops):
        raise UsageError(f"segment {min(both)} is both added and dropped")


def _check_checkpoints(catalog: Catalog, record: CommitRecord) -> None:
    parent = catalog.terms[record.term].parent
    steps: set[int] = set()
    for checkpoint in record.checkpoints:
        if checkpoint.term != record.term:
            raise UsageError(f"{checkpoint.ref} is not of term {record.term}")
        if parent is not None and checkpoint.step <= parent.step:
            raise StepOrderError(
                f"step {checkpoint.step} is not above step {parent.step}, from which this run continues"
            )
        exists = catalog.find(checkpoint.node) is not None or checkpoint.step in catalog.spent
        if exists or checkpoint.step in steps:
            raise StepOrderError(f"step {checkpoint.step} exists already in term {record.term}")
        steps.add(checkpoint.step)


def _check_encoding(after: _CatalogAfter, edge: Encoding) -> None:
    if not after.promised(edge.checkpoint):
        raise UsageError(f"an encoding of {ref_of(edge.checkpoint)}, which is not promised")
    if not edge.segments:
        raise UsageError(f"an encoding of {ref_of(edge.checkpoint)} without segments")
    for segment in edge.segments:
        if not after.live(segment):
            raise UsageError(f"an encoding of {ref_of(edge.checkpoint)} reads segment {segment}, which is not live")
    if edge.base is not None:
        base = after.find(edge.base.node)
        if base is None or base.state != edge.base.state or not after.restorable(base.node):
            raise CheckpointNotFoundError(
                f"base {edge.base.ref} of {ref_of(edge.checkpoint)} cannot be restored any more"
            )


def _check_reachable(after: _CatalogAfter) -> None:
    """Check that no promised checkpoint loses its last path. Only users of dropped segments, and dependents, can."""
    stack = [node for segment in after.drops for node in after.catalog.edges().users(segment)]
    lost: set[Node] = set()
    while stack:
        node = stack.pop()
        if node in lost or after.restorable(node):
            continue
        if after.promised(node):
            raise UsageError(f"the drop of a segment would leave {ref_of(node)} without a way to restore it")
        lost.add(node)
        stack.extend(after.dependents(node))


def _check_tags(after: _CatalogAfter) -> None:
    tags = dict(after.catalog.tags)
    for name, node in after.record.tags.items():
        if not valid_tag(name):
            raise UsageError(f"{name!r} is not a tag name")
        if node is None:
            tags.pop(name, None)
        elif after.promised(node):
            tags[name] = node
        else:
            raise UsageError(f"tag {name!r} names {ref_of(node)}, which is not promised")
    if after.retires:
        for name, node in tags.items():
            if node in after.retires:
                raise UsageError(f"{ref_of(node)} cannot be retired: tag {name!r} names it")


def droppable(catalog: Catalog, retires: Iterable[Node], keep: Iterable[Node] = ()) -> tuple[str, ...]:
    """Return the ids of the segments that no promised checkpoint needs once `retires` are retired.

    Only the retired checkpoints, and unpromised ones connected to them, are visited.

    Args:
        catalog: the catalog to which the record will be applied.
        retires: (term, step) of checkpoints that are about to be retired, or already are.
        keep: (term, step) of bases of encodings that are about to be committed.
    """
    retired = set(retires)
    unpromised: set[Node] = set()
    needed_by_others = set(keep)
    stack = list(retired)
    while stack:
        node = stack.pop()
        if node in unpromised:
            continue
        unpromised.add(node)
        for other in (*_bases(catalog, node), *_dependents(catalog, node)):
            if other in retired or other not in catalog.checkpoints:
                stack.append(other)
            elif node in _bases(catalog, other):
                needed_by_others.add(node)
    garbage = unpromised - needed(catalog, needed_by_others)
    segments = dict.fromkeys(
        segment for node in sorted(garbage) for edge in catalog.encodings.get(node, ()) for segment in edge.segments
    )
    return tuple(segment for segment in segments if garbage.issuperset(users(catalog, segment)))


def pinned(catalog: Catalog, kept: Iterable[Node], current: Iterable[Node]) -> tuple[list[Node], int]:
    """Return the retired checkpoints that stay stored only for `kept` (ascending), and the bytes of their segments.

    Args:
        kept: (term, step) of promised checkpoints.
        current: (term, step) of the bases of the next checkpoints; whatever those need is not counted.
    """
    held = {node for node in needed(catalog, kept) if node in catalog.held} - needed(catalog, current)
    segments = {segment for node in held for edge in catalog.encodings.get(node, ()) for segment in edge.segments}
    nbytes = sum(
        catalog.segments[segment].size
        for segment in segments
        if segment in catalog.segments and held.issuperset(users(catalog, segment))
    )
    return sorted(held), nbytes


def _bases(catalog: Catalog, node: Node) -> set[Node]:
    return {edge.base.node for edge in catalog.encodings.get(node, ()) if edge.base is not None}


def _dependents(catalog: Catalog, node: Node) -> list[Node]:
    """Return the checkpoints with a live encoding against `node`."""
    return [other for other in catalog.edges().dependents(node) if node in _bases(catalog, other)]


def users(catalog: Catalog, segment: str) -> Iterator[Node]:
    """Yield the checkpoints with a live encoding that reads `segment`."""
    for node in catalog.edges().users(segment):
        if any(segment in edge.segments for edge in catalog.encodings.get(node, ())):
            yield node


def needed(
    catalog: Catalog, promised: Iterable[Node] | None = None, without: Collection[Node] = frozenset()
) -> set[Node]:
    """Return every (term, step) that `promised` (default: all of them) need through bases, including themselves.

    The encodings of checkpoints in `without` are not followed.
    """
    found: set[Node] = set()
    stack = list(catalog.checkpoints if promised is None else promised)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            if node not in without:
                stack += _bases(catalog, node)
    return found
