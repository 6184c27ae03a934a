"""Decides which encodings of a damaged store are intact, which checkpoints they restore, and why others are lost."""

from __future__ import annotations

from collections.abc import Container
from contextlib import closing
from dataclasses import dataclass, field

from ckptstore.backends.base import Backend
from ckptstore.errors import CkptError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import Encoding, Node, ref_of
from ckptstore.maintenance.verify.verify_findings import Findings, edge_of
from ckptstore.restore.restore_plan import Plan
from ckptstore.segments.segment_reader import SegmentReader

__all__ = ["Assessment", "Loss", "assess"]


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a checkpoint cannot be restored.

    Attributes:
        why: in words.
        base: the checkpoint that it builds on, if that one's loss is the reason.
    """

    why: str
    base: Node | None = None


@dataclass
class Assessment:
    """What is kept.

    Attributes:
        edges: encodings in intact segments, whose base is kept.
        rewritten: encodings that are intact in a damaged segment: they are rewritten.
        otherwise: promised checkpoints that none of these restores, but a load does -> by which plan.
        lost: promised checkpoints that cannot be restored -> why.
    """

    edges: list[Encoding] = field(default_factory=list)
    rewritten: list[Encoding] = field(default_factory=list)
    lost: dict[Node, Loss] = field(default_factory=dict)
    otherwise: dict[Node, Plan] = field(default_factory=dict)

    @property
    def nodes(self) -> set[Node]:
        """The checkpoints that the kept encodings restore."""
        return {edge.checkpoint for edge in (*self.edges, *self.rewritten)}


def assess(backend: Backend, catalog: Catalog, found: Findings) -> Assessment:
    """Decide, after every byte was read and every encoding decoded.

    Args:
        catalog: the candidates.
        found: what `segment_scan.examine` found wrong with them.
    """
    assessor = _Assessor(backend, catalog, found)
    assessment = Assessment()
    waiting: dict[Node | None, list[Encoding]] = {}
    for edges in catalog.encodings.values():
        for edge in edges:
            if not assessor.reason(edge):
                waiting.setdefault(None if edge.base is None else edge.base.node, []).append(edge)
    # Start with fulls and work upwards. An encoding that is never reached builds on something that is lost.
    reached: list[Node | None] = [None]
    seen: set[Node] = set()
    while reached:
        for edge in waiting.pop(reached.pop(), ()):
            base = None if edge.base is None else catalog.find(edge.base.node)
            if edge.base is not None and (base is None or base.state != edge.base.state):
                continue
            (assessment.rewritten if assessor.torn(edge) else assessment.edges).append(edge)
            if edge.checkpoint not in seen:
                seen.add(edge.checkpoint)
                reached.append(edge.checkpoint)
    whole = {edge.checkpoint for edge in assessment.edges}
    assessment.rewritten = [edge for edge in assessment.rewritten if edge.checkpoint not in whole]
    for node in catalog.checkpoints:
        if node not in seen:
            assessment.lost[node] = assessor.why(node, seen)
    return assessment


class _Assessor:
    def __init__(self, backend: Backend, catalog: Catalog, found: Findings) -> None:
        self._backend = backend
        self._catalog = catalog
        self._found = found
        self._torn = found.bad_chunks.keys() | {one for _, segments, _ in found.flaws for one in segments}
        self._what: dict[str, str] = {}
        for key, what in (*found.damage, *found.unread.items()):
            self._what.setdefault(key, what)
        self._reasons: dict[object, str] = {}

    def torn(self, edge: Encoding) -> bool:
        """Tell whether one of its segments is damaged, even outside this encoding."""
        return not self._torn.isdisjoint(edge.segments)

    def reason(self, edge: Encoding) -> str:
        """Return why an encoding cannot be used, regardless of its base; empty: it can."""
        name = edge_of(edge)
        if name not in self._reasons:
            self._reasons[name] = self._reason(edge)
        return self._reasons[name]

    def _reason(self, edge: Encoding) -> str:
        for segment in edge.segments:
            entry = self._catalog.segments.get(segment)
            if entry is None:
                return f"the log no longer has its segment {segment}"
            if segment in self._found.bad_segments:
                return f"{entry.key}: {self._what.get(entry.key, 'it cannot be read')}"
        flaw = self._found.flaws.get(edge_of(edge))
        if flaw is not None and (flaw.whole or flaw.state or flaw.names or flaw.decoded):
            key = self._catalog.segments[edge.segments[0]].key
            wrong = flaw.names | flaw.decoded
            names = f"tensors {', '.join(sorted(map(repr, wrong))[:3])} are" if wrong else "it is"
            return f"{self._what.get(key, f'{key}: {names} not what was saved')}"
        return self._hit(edge)

    def _hit(self, edge: Encoding) -> str:
        """Return the first damaged chunk among its own."""
        step = edge.checkpoint[1]
        for segment in edge.segments:
            bad = self._found.bad_chunks.get(segment)
            if not bad:
                continue
            entry = self._catalog.segments[segment]
            try:
                with closing(SegmentReader(self._backend, entry)) as reader:
                    tensors = list(reader.doc.tensors.get(step, {}).values())
            except CkptError as error:
                return str(error)
            for tensor in tensors:
                if any(chunk.length and chunk.offset in bad for chunk in tensor.chunks):
                    return f"{entry.key}: tensor {tensor.name!r} is damaged"
        return ""

    def why(self, node: Node, kept: Container[Node]) -> Loss:
        """Return why a checkpoint is lost."""
        for edge in self._catalog.encodings.get(node, ()):
            if text := self.reason(edge):
                return Loss(text)
            if edge.base is not None and edge.base.node not in kept:
                return Loss(f"what it builds on is lost: {ref_of(edge.base.node)}", edge.base.node)
        return Loss("nothing stored restores it")
