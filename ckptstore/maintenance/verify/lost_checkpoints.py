"""Which checkpoints damage costs: a tensor is lost with its payload, or with what that builds on."""

from __future__ import annotations

from collections.abc import Container, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from ckptstore.backends.base import Backend
from ckptstore.errors import CkptError
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.records import Encoding, Node
from ckptstore.formats.shards import name_of
from ckptstore.formats.state import tensor_names
from ckptstore.maintenance.verify.findings import Findings, Flaw, edge_of
from ckptstore.restore.assembly import Held, held_by, tree_of
from ckptstore.restore.chain import master_of
from ckptstore.restore.link import Link
from ckptstore.restore.plan import Plan
from ckptstore.segments.reading import SegmentReader

__all__ = ["casualties"]


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
    """

    lost: Container[str]
    state: bool


_WHOLE: Final = _After(frozenset(), False)
_NOTHING: Final = _After(_EVERYTHING, True)
_SOUND: Final = Flaw()


@dataclass(slots=True)
class _Damage:
    backend: Backend
    catalog: Catalog
    found: Findings
    known: dict[Node, _After] = field(default_factory=dict)

    def after(self, encoding: Encoding, below: _After) -> _After:
        """What is lost of the state to which `encoding` leads from one of which `below` is lost."""
        flaw = self.found.flaws.get(edge_of(encoding), _SOUND)
        if flaw.whole or any(segment in self.found.bad_segments for segment in encoding.segments):
            return _NOTHING
        hit = any(segment in self.found.bad_chunks for segment in encoding.segments)
        if not (below.lost or hit or flaw.names):
            return _After(below.lost, True) if flaw.state else _WHOLE
        try:
            with ExitStack() as stack:
                readers = []
                for segment in encoding.segments:
                    readers.append(SegmentReader(self.backend, self.catalog.segments[segment]))
                    stack.callback(readers[-1].close)
                lost = self._lost(held_by(readers, encoding), below.lost, flaw.names)
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


def casualties(backend: Backend, catalog: Catalog, plans: Iterable[Plan], found: Findings) -> set[Node]:
    """The targets of `plans` that cannot be restored as planned.

    Args:
        plans: of one call of `planner.plan_all`: where they go through the same state, they have come the same way.
        found: segments that cannot be read at all, chunks that are damaged, and what is wrong with encodings.
    """
    damage = _Damage(backend, catalog, found)
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
