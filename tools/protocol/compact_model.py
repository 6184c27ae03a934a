"""Part ``compact``: compaction with retention: prunes and moves beside a live writer that retires, gc, damage, kills.

It includes the earlier parts: a requester that prunes by rules, one that rebuilds a checkpoint and frees its bases. New
is the content of segments: one may be torn (its requester's write was cut), damaged (by the medium), or wrong (made
from damaged ones, with its own hashes). A requester may stop anywhere, and another begins. Whether it is the same
command makes no difference, because it begins with the log.

Invariants: those of part ``prune``, and: a promised checkpoint that could be restored, each byte as it was saved, still
can be after a move was accepted; no live segment is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tools.protocol.explore import ViolationError
from tools.protocol.prune_model import PruneModel
from tools.protocol.store_catalog import Catalog, Checkpoint, Edge, Request, Segment, catalog, paths
from tools.protocol.store_model import Reader, State, Steps, Writer

__all__ = ["CompactModel"]


@dataclass(frozen=True)
class CompactModel(PruneModel):
    """The store's model with requesters that prune or make a move.

    Attributes:
        damages: segments that the medium damages, at any time.
        torn: writes of a requester that may be cut, and look complete.
        compared: the requester compares decoded data with the saved data.
        read_back: it reads back and compares its segment before it posts a request.
        one_record: one request has the new encoding and the drops; else the drops come first.
    """

    damages: int = 0
    torn: bool = True
    compared: bool = True
    read_back: bool = True
    one_record: bool = True

    def successors(self, state: State) -> Iterator[tuple[str, State]]:
        """Everything that can happen next."""
        yield from super().successors(state)
        if len(state.damaged) < self.damages:
            for edge in catalog(state.log).edges:
                if edge.segment not in state.damaged:
                    yield f"the medium damages {edge.segment}", state._replace(damaged=state.damaged | {edge.segment})

    def _check(self, state: State) -> None:
        super()._check(state)
        if wrong := {edge.segment for edge in catalog(state.log).edges} & state.wrong:
            raise ViolationError(f"segment {min(wrong)} is live, and holds what nobody saved")

    def _answer(self, state: State, index: int, writer: Writer, mine: Catalog, request: Request) -> Steps:
        for what, following in super()._answer(state, index, writer, mine, request):
            self._compare(state, following)
            yield what, following

    def _compare(self, before: State, after: State) -> None:
        """A move loses nothing: everything intact stays intact."""
        then = catalog(after.log)
        for checkpoint in catalog(before.log).promised & then.promised:
            if _intact(before, checkpoint) and not _intact(after, checkpoint):
                raise ViolationError(f"{checkpoint} could be restored, and after the move nothing intact restores it")

    def _compact(self, state: State, index: int, compactor: Reader) -> Steps:
        if compactor.phase == "idle":
            yield from super()._compact(state, index, compactor)  # a prune
            yield from self._plan(state, index)
        elif compactor.phase in ("pin", "reread"):
            yield from self._claim(state, index, compactor._replace(end=len(state.log)), _name(index), Reader("done"))
        elif compactor.phase == "read":
            yield from self._rebuild(state, index, compactor)
        elif compactor.phase == "check":
            yield from self._read_back(state, index, compactor)
        elif compactor.phase == "post":
            yield from self._ask(state, index, compactor)

    def _plan(self, state: State, index: int) -> Steps:
        now = catalog(state.log)
        for checkpoint in sorted(now.promised):
            for path in paths(now.edges, checkpoint):
                if len(path) > 1:
                    plan = Reader("pin", checkpoint=checkpoint, path=path, term=now.term)
                    yield f"{_name(index)} reads the log, will rebuild {checkpoint}", _put(state, index, plan)

    def _rebuild(self, state: State, index: int, compactor: Reader) -> Steps:
        """Decode through the chain, compare every chunk with its hash, and write it again."""
        name, segment = _name(index), _segment(index, compactor)
        if not state.segments.issuperset(compactor.path):
            raise ViolationError("a pinned segment was deleted under a requester")
        spoiled = bool(state.damaged.intersection(compactor.path))
        if spoiled and self.compared:
            yield f"{name}: a source is damaged, gives the move up", self._ended(state, index)
            return
        written = state._replace(segments=state.segments | {segment})
        if spoiled:
            written = written._replace(wrong=written.wrong | {segment})
        following = compactor._replace(phase="check" if self.read_back else "post")
        yield f"{name} writes {segment}", _put(written, index, following)
        if self.torn:
            cut = written._replace(damaged=written.damaged | {segment})
            yield f"{name} writes {segment}, torn", _put(cut, index, following)

    def _read_back(self, state: State, index: int, compactor: Reader) -> Steps:
        segment = _segment(index, compactor)
        if segment in state.damaged:
            removed = state._replace(segments=state.segments - {segment})
            yield f"{_name(index)}: {segment} is not what was written, removed", self._ended(removed, index)
        else:
            yield f"{_name(index)} has read {segment} back", _put(state, index, compactor._replace(phase="post"))

    def _ask(self, state: State, index: int, compactor: Reader) -> Steps:
        """One record: the new encoding, and the drop of segments that are then unneeded."""
        assert compactor.checkpoint is not None
        view = catalog(state.log[: compactor.end])
        old = tuple(
            edge.segment
            for edge in view.edges
            if edge.checkpoint == compactor.checkpoint and edge.segment in compactor.path
        )
        for base in self._new_bases(view, compactor.checkpoint):
            edge = Edge(_segment(index, compactor), compactor.checkpoint, base)
            drops = self._unneeded(view, edge, old)
            asked = {Request(compactor.term, (edge,), drops)}
            if not self.one_record:
                asked = {Request(compactor.term, (), drops), Request(compactor.term, (edge,))}
            posted = state._replace(requests=state.requests | asked)
            yield f"{_name(index)} asks: add {edge}, drop {list(drops)}", self._ended(posted, index)

    def _ended(self, state: State, index: int) -> State:
        pins = frozenset(pin for pin in state.pins if pin.who != _name(index))
        return _put(state._replace(pins=pins), index, Reader("done"))


def _intact(state: State, checkpoint: Checkpoint) -> bool:
    """Whether some way to a checkpoint has no segment that is damaged or wrong."""
    spoiled = state.damaged | state.wrong
    return any(spoiled.isdisjoint(path) for path in paths(catalog(state.log).edges, checkpoint))


def _segment(index: int, compactor: Reader) -> Segment:
    return (compactor.term, _name(index), 0)


def _name(index: int) -> str:
    return f"K{index}"


def _put(state: State, index: int, process: Reader) -> State:
    return state._replace(processes=(*state.processes[:index], process, *state.processes[index + 1 :]))
