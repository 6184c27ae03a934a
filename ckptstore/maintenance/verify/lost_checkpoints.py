"""Determines which checkpoints damage makes unrestorable: a tensor is lost with its payload, or with its base.

This is computed for all checkpoints at once, along the chain that a restore tries first. If that chain is damaged and
another one may exist, a trial restore decides, so that verify never contradicts `load`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from ckptstore.backends.base import Backend
from ckptstore.errors import CkptError, CorruptionError, FormatError, StorageError
from ckptstore.formats.codecs import WITHOUT_BASE
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.commit_checks import needed
from ckptstore.formats.history.records import Encoding, Node
from ckptstore.formats.segment_files.shards import name_of
from ckptstore.formats.states.state import tensor_names
from ckptstore.log.journal import Journal
from ckptstore.maintenance.verify.verify_findings import Findings, Flaw, edge_of, is_bad_medium
from ckptstore.restore.alternatives import NO_FAILED_WAYS, FailedWays, next_way
from ckptstore.restore.chains.assembly import Held, held_by, tree_of
from ckptstore.restore.chains.chain import master_of
from ckptstore.restore.chains.chain_link import TensorLink
from ckptstore.restore.restore_plan import Plan
from ckptstore.restore.trial_restore import try_restoring
from ckptstore.segments.segment_reader import SegmentReader

__all__ = ["Lost", "lost_checkpoints", "untried"]


class _Everything(Container[str]):
    def __contains__(self, name: object) -> bool:
        return True


_EVERYTHING: Final = _Everything()


@dataclass(frozen=True, slots=True)
class _Loss:
    """What is lost after an encoding was applied.

    Attributes:
        lost: names of tensors, keys of shards.
        state: whether the checkpoint that it restores is lost.
        closed: a segment cannot be opened, so nothing that needs any part of this state can be restored.
    """

    lost: Container[str]
    state: bool
    closed: bool = False


_WHOLE: Final = _Loss(frozenset(), False)
_NOTHING: Final = _Loss(_EVERYTHING, True, True)
_SOUND: Final = Flaw()


@dataclass(slots=True)
class _Damage:
    backend: Backend
    catalog: Catalog
    found: Findings
    decoded: bool
    known: dict[Node, _Loss] = field(default_factory=dict)

    def after(self, encoding: Encoding, below: _Loss) -> _Loss:
        """Return what is lost of the state that `encoding` restores from a base that has lost `below`."""
        flaw = self.found.flaws.get(edge_of(encoding), _SOUND)
        if flaw.whole or any(segment in self.found.bad_segments for segment in encoding.segments):
            return _NOTHING
        hit = any(segment in self.found.bad_chunks for segment in encoding.segments)
        flawed = flaw.names | flaw.decoded if self.decoded else flaw.names
        if not (below.lost or hit or flawed):
            return _Loss(below.lost, True) if flaw.state else _WHOLE
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
                    return _Loss(frozenset(), flaw.state)
                named = tensor_names(tree_of(readers, encoding))
                return _Loss(lost, flaw.state or not {name_of(key) for key in lost}.isdisjoint(named))
        except CkptError:  # a load fails, too
            return _NOTHING

    def _lost(self, held: Held, below: Container[str], flawed: Container[str]) -> set[str]:
        lost: set[str] = set()
        for name, link in held.items():
            if name in flawed:
                gone = True
            elif link.group is not None:  # its leader has the payload of all members, and needs all of their bases
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

    def _hit(self, link: TensorLink) -> bool:
        chunks = self.found.bad_chunks.get(link.reader.entry.id, ())
        return bool(chunks) and any(chunk.length and chunk.offset in chunks for chunk in link.tensor.chunks)


@dataclass
class Lost:
    """The checkpoints that damage affects.

    Attributes:
        nodes: checkpoints that cannot be restored.
        unknown: those for which this cannot be determined, because something could not be read.
    """

    nodes: set[Node] = field(default_factory=set)
    unknown: set[Node] = field(default_factory=set)


def lost_checkpoints(
    journal: Journal, catalog: Catalog, plans: Mapping[Node, Plan], found: Findings, threads: int
) -> Lost:
    """Return the targets of `plans` that no chain restores.

    Args:
        catalog: the log.
        plans: from one call of `restore_plan.plan_all`: plans through the same state share the chain to it.
        found: unreadable segments, damaged chunks, and errors of encodings.
        threads: number of threads that read and decode in trial restores.
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


def untried(found: Findings) -> FailedWays:
    """Return what is known of the ways to a checkpoint before any was tried."""
    return NO_FAILED_WAYS.failed((), (), unreadable=found.bad_segments) if found.bad_segments else NO_FAILED_WAYS


def _another(catalog: Catalog, planned: Plan, known: FailedWays) -> bool:
    """Tell whether there is another way than the planned one."""
    try:
        next_way(catalog, planned.target, known.failed(reversed(planned.encodings), ()))
    except CorruptionError:
        return False
    return True


def _unread(catalog: Catalog, node: Node, found: Findings) -> bool:
    """Tell whether a way to a checkpoint needs a segment that could not be read but may be intact."""
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
    """Return the targets of `plans` that cannot be restored as planned.

    Args:
        decoded: also count tensors that were decoded wrongly.
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
