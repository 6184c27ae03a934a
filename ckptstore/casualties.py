"""Which checkpoints damaged chunks cost: a tensor is lost with its payload, or with what that builds on."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from ckptstore.assembling import Held, held_by
from ckptstore.backends.base import Backend
from ckptstore.chains import master_of
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.errors import CkptError
from ckptstore.formats.records import Encoding, Node
from ckptstore.formats.state import tensor_names
from ckptstore.layers import Layer
from ckptstore.planner import Plan
from ckptstore.reading import SegmentReader

__all__ = ["casualties"]


class _Everything(Container[str]):
    def __contains__(self, name: object) -> bool:
        return True


_EVERYTHING: Final = _Everything()


@dataclass(frozen=True, slots=True)
class _After:
    """What is lost once an encoding was applied.

    Attributes:
        lost: names of tensors.
        state: whether one of them belongs to the state.
    """

    lost: Container[str]
    state: bool


_WHOLE: Final = _After(frozenset(), False)
_NOTHING: Final = _After(_EVERYTHING, True)


@dataclass(slots=True)
class _Damage:
    backend: Backend
    catalog: Catalog
    segments: Collection[str]
    chunks: Mapping[str, Collection[int]]
    known: dict[Node, _After] = field(default_factory=dict)

    def after(self, encoding: Encoding, below: _After) -> _After:
        """What is lost of the state to which `encoding` leads from one of which `below` is lost."""
        if any(segment in self.segments for segment in encoding.segments):
            return _NOTHING
        if below is _WHOLE and not any(segment in self.chunks for segment in encoding.segments):
            return _WHOLE
        try:
            with ExitStack() as stack:
                readers = []
                for segment in encoding.segments:
                    readers.append(SegmentReader(self.backend, self.catalog.segments[segment]))
                    stack.callback(readers[-1].close)
                step = encoding.checkpoint[1]
                lost = self._lost(held_by(readers, step), below.lost)
                tree = next(reader.doc.trees[step] for reader in readers if step in reader.doc.trees)
                names = tensor_names(tree)
        except (CkptError, StopIteration):  # it cannot be loaded, either
            return _NOTHING
        return _After(lost, not lost.isdisjoint(names)) if lost else _WHOLE

    def _lost(self, held: Held, below: Container[str]) -> set[str]:
        lost: set[str] = set()
        for name, layer in held.items():
            if layer.group is not None:  # its leader has the payload of all, and all that were are needed
                gone = self._hit(held[layer.group.leader]) or any(member in below for member in layer.group.names)
            else:
                gone = self._hit(layer) or (layer.base_ratio == 1 and name in below)
            if gone:
                lost.add(name)
        lost |= {
            name
            for name, layer in held.items()
            if layer.base_ratio == 2 and ((master := master_of(layer.tensor)) is None or master in lost)
        }
        return lost

    def _hit(self, layer: Layer) -> bool:
        chunks = self.chunks.get(layer.reader.entry.id, ())
        return bool(chunks) and any(chunk.length and chunk.offset in chunks for chunk in layer.tensor.chunks)


def casualties(
    backend: Backend,
    catalog: Catalog,
    plans: Iterable[Plan],
    segments: Collection[str],
    chunks: Mapping[str, Collection[int]],
) -> set[Node]:
    """The targets of `plans` that cannot be restored as planned.

    Args:
        plans: of one call of `planner.plan_all`: where they go through the same state, they have come the same way.
        segments: ids of segments that cannot be read at all.
        chunks: id of a segment -> the offsets at which its damaged chunks begin.
    """
    damage = _Damage(backend, catalog, segments, chunks)
    found: set[Node] = set()
    for plan in plans:
        after = _WHOLE
        for encoding in plan.encodings:
            node = encoding.checkpoint
            if node not in damage.known:
                damage.known[node] = damage.after(encoding, after)
            after = damage.known[node]
        if after.state:
            found.add(plan.target.node)
    return found
