"""Which checkpoints damage costs: a tensor is lost with its payload, or with what that builds on.

That is found out for all checkpoints at once, of the way to each that a restore takes first. Where it says that one is
lost, and another way may lead to it, the restore itself is asked: no second set of rules says of a store what `load`
does not.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from ckptstore.backends.base import Backend
from ckptstore.errors import CkptError, CorruptionError, FormatError, StorageError
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.codecs import WITHOUT_BASE
from ckptstore.formats.commit_checks import needed
from ckptstore.formats.records import Encoding, Node
from ckptstore.formats.shards import name_of
from ckptstore.formats.state import tensor_names
from ckptstore.log.journal import Journal
from ckptstore.maintenance.verify.verify_findings import Findings, Flaw, edge_of, is_bad_medium
from ckptstore.restore.alternatives import UNTRIED, Tried, next_way
from ckptstore.restore.assembly import Held, held_by, tree_of
from ckptstore.restore.chain import master_of
from ckptstore.restore.chain_link import Link
from ckptstore.restore.restore_plan import Plan
from ckptstore.restore.trial_restore import try_restoring
from ckptstore.segments.segment_reader import SegmentReader

__all__ = ["Lost", "lost_checkpoints", "untried"]


class _Everything(Container[str]):
    def __contains__(self, name: object) -> bool:
        return True


_EVERYTHING: Final = _Everything()


@dataclass(frozen=True, slots=True)
class _After:
    """What is lost once an encoding was applied.

    Attributes:
        lost: names of tensors, keys of shards.
        state: whether the checkpoint that it leads to is.
        closed: what builds on it cannot be restored at all, if it needs anything of it: a segment cannot be opened.
    """

    lost: Container[str]
    state: bool
    closed: bool = False


_WHOLE: Final = _After(frozenset(), False)
_NOTHING: Final = _After(_EVERYTHING, True, True)
_SOUND: Final = Flaw()


@dataclass(slots=True)
class _Damage:
    backend: Backend
    catalog: Catalog
    found: Findings
    decoded: bool
    known: dict[Node, _After] = field(default_factory=dict)

    def after(self, encoding: Encoding, below: _After) -> _After:
        """What is lost of the state to which `encoding` leads from one of which `below` is lost."""
        flaw = self.found.flaws.get(edge_of(encoding), _SOUND)
        if flaw.whole or any(segment in self.found.bad_segments for segment in encoding.segments):
            return _NOTHING
        hit = any(segment in self.found.bad_chunks for segment in encoding.segments)
        flawed = flaw.names | flaw.decoded if self.decoded else flaw.names
        if not (below.lost or hit or flawed):
            return _After(below.lost, True) if flaw.state else _WHOLE
        try:
            with ExitStack() as stack:
                readers = []
                for segment in encoding.segments:
                    readers.append(SegmentReader(self.backend, self.catalog.segments[segment]))
                    stack.callback(readers[-1].close)
                held = held_by(readers, encoding)
                # Prevents: a checkpoint that is called restorable, although a restore opens a segment that is damaged.
                if below.closed and any(link.tensor.codec not in WITHOUT_BASE for link in held.values()):
                    return _NOTHING
                lost = self._lost(held, below.lost, flawed)
                if not lost:
                    return _After(frozenset(), flaw.state)
                named = tensor_names(tree_of(readers, encoding))
                return _After(lost, flaw.state or not {name_of(key) for key in lost}.isdisjoint(named))
        except CkptError:  # it cannot be loaded, either
            return _NOTHING

    def _lost(self, held: Held, below: Container[str], flawed: Container[str]) -> set[str]:
        lost: set[str] = set()
        for name, link in held.items():
            if name in flawed:
                gone = True
            elif link.group is not None:  # its leader has the payload of all, and all that were are needed
                gone = self._hit(held[link.group.leader]) or any(member in below for member in link.group.names)
            else:
                gone = self._hit(link) or (link.base_ratio == 1 and name in below)
            if gone:
                lost.add(name)
        return lost | {
            name
            for name, link in held.items()
            if name not in lost
            and link.base_ratio == 2
            and ((master := master_of(link.tensor)) is None or master in lost)
        }

    def _hit(self, link: Link) -> bool:
        chunks = self.found.bad_chunks.get(link.reader.entry.id, ())
        return bool(chunks) and any(chunk.length and chunk.offset in chunks for chunk in link.tensor.chunks)


@dataclass
class Lost:
    """What damage costs.

    Attributes:
        nodes: checkpoints that no way leads to.
        unknown: those of which that cannot be said, because of what could not be read.
    """

    nodes: set[Node] = field(default_factory=set)
    unknown: set[Node] = field(default_factory=set)


def lost_checkpoints(
    journal: Journal, catalog: Catalog, plans: Mapping[Node, Plan], found: Findings, threads: int
) -> Lost:
    """The targets of `plans` that cannot be restored, neither so nor otherwise.

    Args:
        catalog: the log.
        plans: of one call of `plan.plan_all`: where they go through the same state, they have come the same way.
        found: segments that cannot be read at all, chunks that are damaged, and what is wrong with encodings.
        threads: threads that read and decode what is tried.
    """
    gone = _as_planned(journal.backend, catalog, plans.values(), found, decoded=True)
    certain = _as_planned(journal.backend, catalog, plans.values(), found, decoded=False)
    known, lost = untried(found), Lost()
    for node in sorted(gone):
        # Prevents: a checkpoint that is called lost, and dropped, although a load restores it by another way.
        if node not in certain or _another(catalog, plans[node], known):
            try:
                try_restoring(journal, catalog, node, threads, known)
                continue
            except (CorruptionError, FormatError):
                pass
            except StorageError as error:
                if not is_bad_medium(error):
                    lost.unknown.add(node)
                    continue
        (lost.unknown if _unread(catalog, node, found) else lost.nodes).add(node)
    return lost


def untried(found: Findings) -> Tried:
    """What is known of the ways to a checkpoint before any was tried."""
    return UNTRIED.failed((), (), unreadable=found.bad_segments) if found.bad_segments else UNTRIED


def _another(catalog: Catalog, planned: Plan, known: Tried) -> bool:
    """Whether there is another way than the planned one."""
    try:
        next_way(catalog, planned.target, known.failed(reversed(planned.encodings), ()))
    except CorruptionError:
        return False
    return True


def _unread(catalog: Catalog, node: Node, found: Findings) -> bool:
    """Whether a way to a checkpoint leads through a segment that may be all right, and could not be read."""
    if not found.unread_segments:
        return False
    return any(
        not found.unread_segments.isdisjoint(edge.segments)
        for below in needed(catalog, [node])
        for edge in catalog.encodings.get(below, ())
    )


def _as_planned(
    backend: Backend, catalog: Catalog, plans: Iterable[Plan], found: Findings, *, decoded: bool
) -> set[Node]:
    """The targets of `plans` that cannot be restored as planned.

    Args:
        decoded: what was decoded wrongly on the way counts, too.
    """
    damage = _Damage(backend, catalog, found, decoded)
    gone: set[Node] = set()
    for plan in plans:
        after = _WHOLE
        for encoding in plan.encodings:
            node = encoding.checkpoint
            if node not in damage.known:
                damage.known[node] = damage.after(encoding, after)
            after = damage.known[node]
        if after.state:
            gone.add(plan.target.node)
    return gone
