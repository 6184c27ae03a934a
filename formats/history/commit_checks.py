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
        StepOrderError: a step already exists in this term, or is below the parent's.
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
        self._losing: set[Node] | None = None
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

    def losing(self) -> set[Node]:
        """The checkpoints that may lose a path: users of dropped segments, and what builds on those."""
        if self._losing is None:
            stack = [node for segment in self.drops for node in self.catalog.edges().users(segment)]
            self._losing = set()
            while stack:
                node = stack.pop()
                if node not in self._losing:
                    self._losing.add(node)
                    stack += self.dependents(node)
        return self._losing

    def restorable(self, node: Node) -> bool:
        stack, seen = [node], {node}
        while stack:
            for edge in self.edges(stack.pop()):
                if edge.base is None:
                    return True
                base = self.find(edge.base.node)
                if base is None or base.state != edge.base.state or base.node in seen:
                    continue
                # A path that the catalog has stays, unless the record drops a segment of it.
                if base.node not in self.losing() and self.catalog.restorable(edge.base):
                    return True
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
        if parent is not None and checkpoint.step < parent.step:  # at the parent's step it replaces the parent
            raise StepOrderError(f"step {checkpoint.step} is below step {parent.step}, from which this run continues")
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

    Only the retired checkpoints, what builds on them and, below those that nobody needs, their bases are visited.

    Args:
        catalog: the catalog to which the record will be applied.
        retires: (term, step) of checkpoints that are about to be retired, or already are.
        keep: (term, step) of bases of encodings that are about to be committed.
    """
    retired = set(retires)
    uses = _Uses(catalog, retired, keep)
    stack = list(retired)
    while stack:
        node = stack.pop()
        if node in retired or node not in catalog.checkpoints:
            for one in uses.unneeded(node):  # what only those were built on is not needed either
                stack += catalog.bases(one)
    garbage = uses.garbage
    segments = dict.fromkeys(
        segment for node in sorted(garbage) for edge in catalog.encodings.get(node, ()) for segment in edge.segments
    )
    return tuple(segment for segment in segments if garbage.issuperset(users(catalog, segment)))


class _Uses:
    """What promised checkpoints need, found from the checkpoints asked about, upwards.

    Attributes:
        garbage: the checkpoints found so far that no promised one needs.
    """

    def __init__(self, catalog: Catalog, retired: set[Node], keep: Iterable[Node]) -> None:
        self.garbage: set[Node] = set()
        self._catalog = catalog
        self._retired = retired
        self._needed = set(keep)

    def unneeded(self, start: Node) -> list[Node]:
        """The checkpoints that are new in `garbage`: `start` and all that build on it, unless any of them is needed."""
        if start in self.garbage:
            return []
        below = {start: start}  # each one found -> the one it builds on
        stack = [start]
        while stack:
            node = stack.pop()
            if node in self._needed or (node in self._catalog.checkpoints and node not in self._retired):
                while node != start:
                    self._needed.add(node)
                    node = below[node]
                self._needed.add(start)
                return []
            for other in self._catalog.dependents(node):
                if other not in self.garbage and other not in below:
                    below[other] = node
                    stack.append(other)
        new = [node for node in below if node not in self.garbage]
        self.garbage.update(new)
        return new


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
                stack += catalog.bases(node)
    return found
