"""Part ``store``: segments over an ideal log: retention, pins, gc, forks, requests of an external compactor.

The log may be ideal here because part ``log`` shows that a validated view is the history at one instant of the read,
and that a confirmed create is the first at the head.

Invariants: a segment in the catalog is on the medium; a promised checkpoint can be restored; a term's parent can be
restored when the term begins; a pinned reader, and a compactor, never find a segment deleted while they use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tools.protocol.explore import ViolationError
from tools.protocol.store_catalog import (
    Catalog,
    Checkpoint,
    Edge,
    Rec,
    Request,
    Segment,
    catalog,
    needed,
    ordered,
    paths,
)

__all__ = ["StoreModel", "StoreRules"]


@dataclass(frozen=True)
class StoreRules:
    """Bounds of the search, and the rules, each of which a mutant breaks."""

    writers: int = 1
    opens: int = 2  # per writer: it may crash and open again
    checkpoints: int = 2  # per term
    records: int = 5  # slots of the log
    readers: int = 1
    tries: int = 2  # per reader
    collectors: int = 1
    rounds: int = 1  # per collector
    compactors: int = 0
    faults: int = 0  # creates that arrive after their writer has given up
    in_flight: int = 1  # segments written and not yet committed
    redundant: bool = False  # writers drop redundant segments, and give up unfinished ones by name
    sweep: bool = False  # writers forget dropped segments that are gone
    pins_may_die: bool = False
    # -- the rules
    read_after_pin: bool = True
    pin_names_segments: bool = True
    log_before_pins: bool = True
    orphans: Literal["older terms", "other terms", "all"] = "older terms"
    check_base: bool = True
    keep_bases: bool = True
    check_parent: bool = True
    requests_of_own_term: bool = True
    requests_checked: bool = True
    requests_once: bool = True
    delete_after_unknown: bool = False
    compactor_writes_under_the_term: bool = True
    frees_bases: bool = False  # the compactor: a delta, too, and drops segments that no promised checkpoint needs then
    requests_checked_for_others: bool = True


class Writer(NamedTuple):
    """`phase`: idle | chosen | opening | own."""

    phase: str = "idle"
    opens: int = 0
    parent: Checkpoint | None = None
    slot: int = 0
    term: int = 0
    last: Checkpoint | None = None
    saved: int = 0
    pending: tuple[Edge, ...] = ()
    handled: frozenset[Request] = frozenset()


class Reader(NamedTuple):
    """A reader (or, with `rebuilds`, the compactor). `phase`: idle | pin | reread | read | post | done."""

    phase: str = "idle"
    tries: int = 0
    checkpoint: Checkpoint | None = None
    path: tuple[Segment, ...] = ()
    position: int = 0
    term: int = 0
    end: int = 0


class Collector(NamedTuple):
    """`phase`: idle | list | listing | delete."""

    phase: str = "idle"
    rounds: int = 0
    end: int = 0
    seen: frozenset[Pin] = frozenset()
    claimed: frozenset[Segment] = frozenset()


class Pin(NamedTuple):
    """A claim. `checkpoint` matters only to the mutant that pins checkpoints."""

    who: str
    path: tuple[Segment, ...]
    checkpoint: Checkpoint | None


Process = Writer | Reader | Collector


class State(NamedTuple):
    """The whole state. `dead`: processes whose pin was taken for dead; `damaged`, `wrong`: segments, for part
    ``compact``."""

    log: tuple[Rec, ...] = ()
    segments: frozenset[Segment] = frozenset()
    pins: frozenset[Pin] = frozenset()
    requests: frozenset[Request] = frozenset()
    net: frozenset[tuple[int, Rec]] = frozenset()
    faults: int = 0
    dead: frozenset[str] = frozenset()
    processes: tuple[Process, ...] = ()
    damaged: frozenset[Segment] = frozenset()
    wrong: frozenset[Segment] = frozenset()


Steps = Iterator[tuple[str, State]]


@dataclass(frozen=True)
class StoreModel:
    """The transition system of `rules`."""

    rules: StoreRules

    def initial(self) -> State:
        """An empty store."""
        rules = self.rules
        processes: list[Process] = [Writer()] * rules.writers
        processes += [Reader()] * (rules.compactors + rules.readers)
        processes += [Collector()] * rules.collectors
        return State(processes=tuple(processes))

    def successors(self, state: State) -> Iterable[tuple[str, State]]:
        """Everything that can happen next."""
        self._check(state)
        for index, process in enumerate(state.processes):
            if isinstance(process, Writer):
                yield from self._write(state, index, process)
            elif isinstance(process, Collector):
                yield from self._collect(state, index, process)
            elif index < self.rules.writers + self.rules.compactors:
                yield from self._compact(state, index, process)
            else:
                yield from self._restore(state, index, process)
        for slot, record in state.net:
            if slot == len(state.log):
                landed = state._replace(log=(*state.log, record), net=state.net - {(slot, record)})
                yield f"a late create of slot {slot} lands: {record}", landed

    def _check(self, state: State) -> None:
        now = catalog(state.log)
        for edge in now.edges:
            if edge.segment not in state.segments:
                raise ViolationError(f"segment {edge.segment} of {edge.checkpoint} is in the catalog but gone")
        for checkpoint in now.promised:
            if not paths(now.edges, checkpoint):
                raise ViolationError(f"promised checkpoint {checkpoint} cannot be restored")
        if state.log and state.log[-1].opens and (parent := state.log[-1].parent) and not paths(now.edges, parent):
            raise ViolationError(f"term {now.term} continues from {parent}, which is gone")

    def _create(self, state: State, index: int, record: Rec, slot: int, success: Writer, failure: Writer) -> Steps:
        """Create a slot. `failure`: the writer is fenced, or gives up without knowing the outcome."""
        name = _name(index)
        if slot >= self.rules.records:
            return
        if slot != len(state.log):
            yield f"{name} finds slot {slot} taken: fenced", _set(state, index, failure)
            return
        yield f"{name} commits slot {slot}: {record}", _set(state, index, success)._replace(log=(*state.log, record))
        if state.faults < self.rules.faults:
            late = _set(state, index, failure)._replace(net=state.net | {(slot, record)}, faults=state.faults + 1)
            if self.rules.delete_after_unknown:
                late = late._replace(segments=late.segments - {edge.segment for edge in record.adds})
            yield f"{name}'s create of slot {slot} times out, still on its way: {record}", late

    # ---- writers

    def _write(self, state: State, index: int, writer: Writer) -> Steps:
        name, now = _name(index), catalog(state.log)
        if writer.phase == "idle" and writer.opens < self.rules.opens:
            parents: list[Checkpoint | None] = [*sorted(now.promised)]
            for parent in parents or [None]:
                chosen = Writer("chosen", writer.opens, parent)
                yield f"{name} reads the log, will continue from {parent}", _set(state, index, chosen)
        elif writer.phase == "chosen":
            # WRITER OPEN 1. READ; the parent must be live in this view.
            if self.rules.check_parent and writer.parent is not None and writer.parent not in now.promised:
                over = Writer("idle", writer.opens)
                yield f"{name}: {writer.parent} was dropped, starts over", _set(state, index, over)
            else:
                opening = writer._replace(phase="opening", slot=len(state.log), term=now.term + 1)
                yield f"{name} reads the log again", _set(state, index, opening)
        elif writer.phase == "opening":
            # WRITER OPEN 2. Create log/e.
            owner = writer._replace(phase="own", slot=writer.slot + 1, last=writer.parent)
            record = Rec(writer.term, opens=True, parent=writer.parent)
            lost = Writer("idle", writer.opens)
            if writer.slot == len(state.log):
                lost = Writer("idle", writer.opens + 1)
            yield from self._create(state, index, record, writer.slot, owner, lost)
        elif writer.phase == "own":
            yield from self._own(state, index, writer)

    def _own(self, state: State, index: int, writer: Writer) -> Steps:
        name, mine = _name(index), catalog(state.log[: writer.slot])
        ended = Writer("idle", writer.opens + 1)
        if writer.opens + 1 < self.rules.opens:
            yield f"{name} crashes", _set(state, index, ended)
        if writer.saved < self.rules.checkpoints and len(writer.pending) < self.rules.in_flight:
            yield from self._encode(state, index, writer, mine)
        if writer.pending:
            yield from self._commit_pending(state, index, writer, mine)
        following = writer._replace(slot=writer.slot + 1)
        if self.rules.redundant:
            for edge in mine.edges:
                rest = tuple(other for other in mine.edges if other != edge)
                if all(paths(rest, checkpoint) for checkpoint in mine.promised):
                    record = Rec(writer.term, opens=False, drops=(edge.segment,))
                    yield from self._create(state, index, record, writer.slot, following, ended)
        if self.rules.sweep and (gone := mine.dropped - state.segments):
            record = Rec(writer.term, opens=False, swept=tuple(sorted(gone)))
            yield from self._create(state, index, record, writer.slot, following, ended)
        for request in state.requests:
            yield from self._answer(state, index, writer, mine, request)

    def _encode(self, state: State, index: int, writer: Writer, mine: Catalog) -> Steps:
        """COMMIT 1. Write a segment and make it durable: a full, a delta on the last, or a delta on an old one."""
        bases = dict.fromkeys([None, *([writer.last] if writer.last else []), *sorted(mine.promised)[:1]])
        for base in bases:
            segment, checkpoint = (writer.term, _name(index), writer.saved), (writer.term, writer.saved)
            pending = (*writer.pending, Edge(segment, checkpoint, base))
            busy = writer._replace(last=checkpoint, saved=writer.saved + 1, pending=pending)
            written = _set(state, index, busy)._replace(segments=state.segments | {segment})
            yield f"{_name(index)} writes {segment} for {checkpoint} on {base}", written

    def _commit_pending(self, state: State, index: int, writer: Writer, mine: Catalog) -> Steps:
        """Commit the first segment in flight, and perhaps retire a checkpoint with it."""
        edge, rest = writer.pending[0], writer.pending[1:]
        ended = Writer("idle", writer.opens + 1)
        last = None if writer.last == edge.checkpoint else writer.last
        given_up = writer._replace(pending=rest, last=last)
        if self.rules.redundant:  # a segment of this term that will never be committed is named in a drop
            record = Rec(writer.term, opens=False, drops=(edge.segment,))
            yield from self._create(state, index, record, writer.slot, given_up._replace(slot=writer.slot + 1), ended)
        if self.rules.check_base and edge.base is not None and not paths(mine.edges, edge.base):
            # A base must be restorable in the catalog to which the record is applied; otherwise encode again.
            yield f"{_name(index)}: the base of {edge.segment} was dropped, gives it up", _set(state, index, given_up)
            return
        edges = ordered((*mine.edges, edge))
        done = writer._replace(slot=writer.slot + 1, pending=rest)
        for retired in (None, *self._retirable(state.log[: writer.slot], (edge.checkpoint,))):
            drops: tuple[Segment, ...] = ()
            if retired is not None:
                # Drop only what no promised checkpoint reaches through bases.
                stay = needed(edges, (mine.promised | {edge.checkpoint}) - {retired})
                if not self.rules.keep_bases:
                    stay = {e.checkpoint for e in edges} - {retired}
                drops = tuple(e.segment for e in edges if e.checkpoint not in stay)
            retires = () if retired is None else (retired,)
            record = Rec(writer.term, opens=False, adds=(edge,), drops=drops, retires=retires)
            yield from self._create(state, index, record, writer.slot, done, ended)

    def _retirable(self, log: tuple[Rec, ...], adding: Sequence[Checkpoint] = ()) -> list[Checkpoint]:  # noqa: ARG002
        """The checkpoints that a process that sees `log` and adds checkpoints may retire: any."""
        return sorted(catalog(log).promised)

    def _answer(self, state: State, index: int, writer: Writer, mine: Catalog, request: Request) -> Steps:
        """REQUESTS, the writer's side."""
        rules = self.rules
        if (rules.requests_of_own_term and request.term != writer.term) or (
            rules.requests_once and request in writer.handled
        ):
            return  # ignored
        ended = Writer("idle", writer.opens + 1)
        done = writer._replace(slot=writer.slot + 1, handled=writer.handled | {request})
        if request.adds:  # refusing is always allowed: its segments are dropped by name
            refused = Rec(writer.term, opens=False, drops=tuple(edge.segment for edge in request.adds))
            yield from self._create(state, index, refused, writer.slot, done, ended)
        if rules.requests_checked:
            edges = ordered(e for e in (*mine.edges, *request.adds) if e.segment not in request.drops)
            stay = mine.promised - set(request.retires)
            if request.adds and not rules.requests_checked_for_others:
                stay &= {edge.checkpoint for edge in request.adds}
            if not (
                {edge.segment for edge in mine.edges}.issuperset(request.drops)
                and all(paths(edges, checkpoint) for checkpoint in stay)
                and all(edge.checkpoint in mine.promised for edge in request.adds)
                and mine.promised.issuperset(request.retires)
            ):
                return
        record = Rec(writer.term, False, None, request.adds, request.drops, request.retires)
        yield from self._create(state, index, record, writer.slot, done, ended)

    # ---- the external compactor

    def _compact(self, state: State, index: int, compactor: Reader) -> Steps:
        """REQUESTS, the requester's side: retire something, or rebuild a delta as a full and drop the delta."""
        now, done = catalog(state.log), Reader("done")
        if compactor.phase == "idle":
            for checkpoint in sorted(now.promised):
                stay = needed(now.edges, now.promised - {checkpoint})
                drops = tuple(edge.segment for edge in now.edges if edge.checkpoint not in stay)
                posted = state._replace(requests=state.requests | {Request(now.term, (), drops, (checkpoint,))})
                yield f"K asks: retire {checkpoint}, drop {list(drops)}", _set(posted, index, done)
                for path in paths(now.edges, checkpoint):
                    if len(path) > 1:
                        plan = Reader("pin", checkpoint=checkpoint, path=path, term=now.term)
                        yield f"K reads the log, will rebuild {checkpoint} from {list(path)}", _set(state, index, plan)
        elif compactor.phase in ("pin", "reread"):
            seen = compactor._replace(end=len(state.log)) if self.rules.frees_bases else compactor
            yield from self._claim(state, index, seen, "K", done)
        elif compactor.phase == "read":
            if not state.segments.issuperset(compactor.path):
                if "K" not in state.dead:
                    raise ViolationError("a pinned segment was deleted under the compactor")
                yield "K: its pin was taken for dead, gives up", _set(state, index, done)
                return
            segment = (compactor.term if self.rules.compactor_writes_under_the_term else 0, "K", 0)
            written = state._replace(segments=state.segments | {segment})
            yield f"K writes {segment}", _set(written, index, compactor._replace(phase="post"))
        elif compactor.phase == "post":
            assert compactor.checkpoint is not None
            segment = (compactor.term if self.rules.compactor_writes_under_the_term else 0, "K", 0)
            # Compaction plans on the view that it read under its pin; the writer knows the later commits.
            view = catalog(state.log[: compactor.end]) if self.rules.frees_bases else now
            mine = [e for e in view.edges if e.checkpoint == compactor.checkpoint]
            old = tuple(e.segment for e in mine if e.segment in compactor.path)
            for base in self._new_bases(view, compactor.checkpoint):
                edge = Edge(segment, compactor.checkpoint, base)
                for drops in {(), old, self._unneeded(view, edge, old)}:
                    request = Request(compactor.term, (edge,), drops)
                    posted = state._replace(
                        requests=state.requests | {request},
                        pins=frozenset(pin for pin in state.pins if pin.who != "K"),
                    )
                    yield f"K asks: add {edge}, drop {list(drops)}", _set(posted, index, done)

    def _new_bases(self, view: Catalog, checkpoint: Checkpoint) -> list[Checkpoint | None]:
        """The bases that the compactor may encode against: none, or a promised one that is restored without the
        checkpoint."""
        if not self.rules.frees_bases:
            return [None]
        rest = ordered(edge for edge in view.edges if edge.checkpoint != checkpoint)
        return [None, *(other for other in sorted(view.promised - {checkpoint}) if paths(rest, other))]

    def _unneeded(self, view: Catalog, edge: Edge, old: tuple[Segment, ...]) -> tuple[Segment, ...]:
        """The segments that no promised checkpoint needs, once `edge` has replaced `old`."""
        if not self.rules.frees_bases:
            return old
        edges = ordered((*(one for one in view.edges if one.segment not in old), edge))
        stay = needed(edges, view.promised)
        return tuple(one.segment for one in view.edges if one.segment in old or one.checkpoint not in stay)

    # ---- readers

    def _claim(self, state: State, index: int, reader: Reader, name: str, restart: Reader) -> Steps:
        """PINS: pin the plan, READ again; if any planned segment was dropped, plan again."""
        now = catalog(state.log)
        if reader.phase == "pin":
            pin = Pin(name, reader.path, reader.checkpoint)
            following = reader._replace(phase="reread" if self.rules.read_after_pin else "read")
            yield f"{name} pins {list(reader.path)}", _set(state, index, following)._replace(pins=state.pins | {pin})
            return
        live = {edge.segment for edge in now.edges}
        if live.issuperset(reader.path):
            yield f"{name} reads the log again: all there", _set(state, index, reader._replace(phase="read"))
        else:
            unpinned = state._replace(pins=frozenset(pin for pin in state.pins if pin.who != name))
            yield f"{name}: dropped meanwhile, starts over", _set(unpinned, index, restart)

    def _restore(self, state: State, index: int, reader: Reader) -> Steps:
        now, name = catalog(state.log), f"R{index}"
        if reader.phase == "idle" and reader.tries < self.rules.tries:
            for checkpoint in sorted(now.promised):
                for path in paths(now.edges, checkpoint):
                    plan = Reader("pin", reader.tries, checkpoint, path)
                    yield f"{name} reads the log, plans {checkpoint} from {list(path)}", _set(state, index, plan)
        elif reader.phase in ("pin", "reread"):
            yield from self._claim(state, index, reader, name, Reader("idle", reader.tries))
        elif reader.phase == "read":
            unpinned = state._replace(pins=frozenset(pin for pin in state.pins if pin.who != name))
            segment = reader.path[reader.position]
            if segment not in state.segments:
                if name not in state.dead:
                    raise ViolationError(f"segment {segment} was deleted under a pinned reader")
                yield f"{name}: {segment} is gone, starts over", _set(unpinned, index, Reader("idle", reader.tries + 1))
            elif reader.position + 1 < len(reader.path):
                yield f"{name} reads {segment}", _set(state, index, reader._replace(position=reader.position + 1))
            else:
                yield f"{name} has restored {reader.checkpoint}", _set(unpinned, index, Reader("done"))

    # ---- collectors

    def _collect(self, state: State, index: int, gc: Collector) -> Steps:
        """GC. The listing of the pins is not atomic: it may miss a pin that appeared or vanished meanwhile."""
        name = f"G{index}"
        if gc.phase == "idle" and gc.rounds < self.rules.rounds:
            # 1. READ.
            if self.rules.log_before_pins:
                yield f"{name} reads the log", _set(state, index, Collector("list", gc.rounds, len(state.log)))
            else:
                claimed = frozenset(segment for pin in state.pins for segment in pin.path)
                yield f"{name} lists the pins first", _set(state, index, Collector("late", gc.rounds, claimed=claimed))
        elif gc.phase == "late":
            yield f"{name} reads the log", _set(state, index, gc._replace(phase="delete", end=len(state.log)))
        elif gc.phase == "list":
            # 2. List pins.
            yield f"{name} begins to list the pins", _set(state, index, gc._replace(phase="listing", seen=state.pins))
        elif gc.phase == "listing":
            pins = gc.seen & state.pins
            listed = gc._replace(phase="delete", seen=frozenset(), claimed=self._claimed(state, gc.end, pins))
            yield f"{name} has listed the pins", _set(state, index, listed)
            if self.rules.pins_may_die and pins:
                dead = state._replace(dead=state.dead | {pin.who for pin in pins})
                yield f"{name} takes every pin for dead", _set(dead, index, listed._replace(claimed=frozenset()))
        elif gc.phase == "delete":
            # 3. Delete segments that the view dropped, and segments of terms below its newest that it does not name,
            #     unless pinned.
            view = catalog(state.log[: gc.end])
            for segment in state.segments - gc.claimed:
                orphan = (
                    segment not in view.ever
                    and {
                        "older terms": segment[0] < view.term,
                        "other terms": segment[0] != view.term,
                        "all": True,
                    }[self.rules.orphans]
                )
                if segment in view.dropped or orphan:
                    yield f"{name} deletes {segment}", state._replace(segments=state.segments - {segment})
            yield f"{name} ends", _set(state, index, Collector("idle", gc.rounds + 1))

    def _claimed(self, state: State, end: int, pins: frozenset[Pin]) -> frozenset[Segment]:
        if self.rules.pin_names_segments:
            return frozenset(segment for pin in pins for segment in pin.path)
        edges = catalog(state.log[:end]).edges  # the mutant: a pin names a checkpoint, gc computes its present chain
        chains = [path for pin in pins if pin.checkpoint for path in paths(edges, pin.checkpoint)]
        return frozenset(segment for path in chains for segment in path)


def _name(index: int) -> str:
    return "AB"[index]


def _set(state: State, index: int, process: Process) -> State:
    return state._replace(processes=(*state.processes[:index], process, *state.processes[index + 1 :]))
