"""Part ``arriving``: media that create a slot in parts, so that readers see it torn before they see it whole.

A is a writer whose OPEN is in slot 0. B reads and opens a term. A reader reads twice, the second time from its view.
Every object appears empty, grows in parts, and is whole at the end; only then may its writer acknowledge it. Time
passes in ticks. A writer that is neither killed nor stopped adds a part within fewer than `STILL` ticks. A stopped
writer adds the next part any time later.

READ consists of single looks, as in `ckptstore.log.partial_objects`: a torn slot is read again after pauses, until it
is whole, has not grown for `STILL` pauses, or its successor was there before it was read again. A reader that gave up a
slot, and then finds its successor, reads it once more. Nothing is lost or deleted here.

Invariants: no slot is treated as damaged while its writer is at work, or when it is whole; no reader waits for a dead
writer, and no dead writer prevents an open; whatever was acknowledged before a READ began is in its view; and whatever
is ever acknowledged in a slot before an OPEN that counts is in the view of that OPEN (its term folds that view).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from tools.protocol.explore import ViolationError

__all__ = ["ArrivingModel", "ArrivingRules"]

STILL: Final = 2
"""Pauses without growth after which a slot is torn for good."""


@dataclass(frozen=True)
class ArrivingRules:
    """Bounds of the search, and the rules of the protocol, each of which a mutant breaks."""

    parts: int = 2  # 0: media that create atomically
    commits: tuple[int, int] = (2, 1)
    opens: int = 1  # of B
    reads: int = 2
    slots: int = 5
    kills: int = 1
    stops: int = 0
    # -- the rules
    waits: bool = True  # a torn newest slot is not damage yet
    passes_over: bool = False  # a torn slot is treated as absent
    gives_up: bool = True
    growth_counts: bool = True  # the pauses are counted from the last growth
    reads_after_successor: bool = True  # a read from before the successor was seen decides nothing
    view_looks: bool = True  # a reader that continues from a view whose last slot was torn looks at that slot
    looks_back: bool = True  # a reader that finds the slot after one that it gave up reads that one again
    open_looks: bool = True  # an OPEN over a torn slot counts only if the slot is unchanged when the OPEN is there
    commit_looks: bool = True  # a commit is acknowledged only if nothing follows it when it is whole


class Rec(NamedTuple):
    """A record: ``O``PEN, or COMMIT number `number`, of one life of a writer. `previous` represents a hash of bytes."""

    kind: str
    term: int
    owner: str
    number: int
    previous: Bytes | None

    def __str__(self) -> str:
        return f"OPEN {self.term} by {self.owner}" if self.kind == "O" else f"COMMIT {self.owner}.{self.number}"


class Bytes(NamedTuple):
    """The bytes of a slot: the first `size` parts of a record."""

    record: Rec
    size: int


class View(NamedTuple):
    """The result of a READ: records, ``torn``, or ``stray`` (whole, and does not continue the log)."""

    entries: tuple[Rec | str, ...] = ()
    last: Bytes | None = None

    @property
    def term(self) -> int:
        return max((record.term for record in self.entries if isinstance(record, Rec)), default=0)


class Look(NamedTuple):
    """One READ. `phase`: idle | get | back | torn | pausing | again | after | done."""

    phase: str = "idle"
    view: View = View()
    seen: Bytes | None = None
    still: int = 0
    sure: bool = False  # the slot before was torn, and still is although this one is there
    known: frozenset[Bytes] = frozenset()  # torn for good, as this process has found before
    begun: frozenset[tuple[int, Rec]] = frozenset()  # the acknowledgements when it began
    carried: int = 0  # slots of the view that it began from
    dead: frozenset[str] = frozenset()  # writers that were dead when it began


class Writer(NamedTuple):
    """`phase`: idle | reads | own | writing | check | end. `idle`: ticks since the last part."""

    phase: str
    life: int = 0
    term: int = 0
    slot: int = 0
    last: Bytes | None = None
    commits: int = 0
    idle: int = 0
    stopped: bool = False
    owns: bool = False  # B, after its OPEN; `look` is what the term began from
    look: Look = Look()


class State(NamedTuple):
    """The whole state. `lives`: writers that were killed."""

    slots: tuple[Bytes | None, ...]
    a: Writer
    b: Writer
    reader: Look = Look()
    reads: int = 0
    acknowledged: frozenset[tuple[int, Rec]] = frozenset()
    dead: frozenset[str] = frozenset()
    stopped: frozenset[str] = frozenset()
    kills: int = 0


Steps = Iterator[tuple[str, State]]


@dataclass(frozen=True)
class ArrivingModel:
    """The transition system of `rules`."""

    rules: ArrivingRules

    def initial(self) -> State:
        """A's OPEN is in slot 0."""
        opened = Bytes(Rec("O", 1, "A0", 0, None), self.rules.parts)
        empty: tuple[Bytes | None, ...] = (None,) * (self.rules.slots - 1)
        return State((opened, *empty), Writer("own", 0, 1, 1, opened), Writer("idle"))

    def successors(self, state: State) -> Iterable[tuple[str, State]]:
        """Everything that can happen next."""
        self._check_owner(state)
        yield from self._write(state, "a")
        yield from self._write(state, "b")
        yield from self._open(state)
        yield from self._reader(state)
        yield from self._tick(state)

    # ---- time

    def _tick(self, state: State) -> Steps:
        if "pausing" not in (state.reader.phase, state.b.look.phase):
            return
        after = state._replace(reader=_woken(state.reader), b=state.b._replace(look=_woken(state.b.look)))
        for name in ("a", "b"):
            writer: Writer = getattr(after, name)
            if writer.phase == "writing" and not writer.stopped and not self._whole(state.slots[writer.slot]):
                if writer.idle + 1 >= STILL:
                    return  # it is at work: it adds a part before
                after = _put(after, name, writer._replace(idle=writer.idle + 1))
        yield "a pause ends", after

    # ---- READ

    def _whole(self, found: Bytes | None) -> bool:
        return found is not None and found.size == self.rules.parts

    def _begin(self, state: State, look: Look, *, since: bool) -> Look:
        view = look.view if since else View()
        torn = view.entries[-1:] == ("torn",) and self.rules.view_looks
        if torn and state.slots[len(view.entries) - 1] != view.last:
            view = View()
        return Look("get", view, None, 0, False, look.known, state.acknowledged, len(view.entries), state.dead)

    def _read(self, state: State, look: Look, who: str) -> Iterator[tuple[str, Look]]:
        """One look of a READ in progress."""
        seq = len(look.view.entries)
        found = state.slots[seq] if seq < self.rules.slots else None
        if look.phase == "get":
            torn = found is not None and not self._whole(found)
            if found is None or (torn and self.rules.passes_over):
                self._check_view(look, who)
                yield f"{who} finds the end at slot {seq}", look._replace(phase="done")
            elif look.view.entries[-1:] == ("torn",) and self.rules.looks_back and not look.sure:
                yield f"{who} finds slot {seq}, after a torn one", look._replace(phase="back")
            elif torn and self.rules.waits and found not in look.known:
                yield f"{who} finds slot {seq} torn", look._replace(phase="torn", seen=found, still=0)
            else:
                yield f"{who} takes slot {seq}", self._taken(state, look, found)
        elif look.phase == "back":
            if state.slots[seq - 1] == look.view.last:
                yield f"{who} finds slot {seq - 1} as it was", look._replace(phase="get", sure=True)
            else:
                anew = look._replace(phase="get", view=View(), carried=0)
                yield f"{who} finds slot {seq - 1} changed: starts over", anew
        elif look.phase == "torn":
            owner = look.seen.record.owner if look.seen else ""
            if look.still >= STILL and owner in state.dead:
                raise ViolationError(f"{who} waits for slot {seq} for ever: its writer is dead")
            if seq + 1 < self.rules.slots and state.slots[seq + 1] is not None:
                if self.rules.reads_after_successor:
                    yield f"{who} sees that slot {seq} has a successor", look._replace(phase="after")
                else:
                    assert look.seen is not None
                    yield f"{who} sees that slot {seq} has a successor", self._taken(state, look, look.seen)
            else:
                yield f"{who} pauses", look._replace(phase="pausing")
        elif look.phase == "after":
            assert found is not None
            yield f"{who} reads slot {seq} again, after its successor", self._taken(state, look, found)
        elif look.phase == "again":
            assert found is not None
            grown = found != look.seen
            still = 0 if grown and self.rules.growth_counts else look.still
            if self._whole(found) or (still >= STILL and self.rules.gives_up):
                yield f"{who} reads slot {seq} again", self._taken(state, look, found)
            else:
                yield f"{who} reads slot {seq} again", look._replace(phase="torn", seen=found, still=min(still, STILL))

    def _taken(self, state: State, look: Look, found: Bytes) -> Look:
        """The slot counts as found: a record, or damage."""
        view, seq = look.view, len(look.view.entries)
        entry: Rec | str = "stray"
        known = look.known
        if not self._whole(found):
            owner, entry = found.record.owner, "torn"
            known |= {found}
            if self._whole(state.slots[seq]):
                raise ViolationError(f"slot {seq} is taken for damaged, and it is whole")
            if owner not in state.dead | state.stopped:
                raise ViolationError(f"slot {seq} is taken for damaged, and its writer is at work")
        elif self._follows(view, found.record):
            entry = found.record
        taken = View((*view.entries, entry), found)
        return look._replace(phase="get", view=taken, seen=None, still=0, sure=False, known=known)

    def _follows(self, view: View, record: Rec) -> bool:
        after_damage = bool(view.entries) and isinstance(view.entries[-1], str)
        continues = after_damage or record.previous == view.last
        if record.kind == "O":
            return continues and record.term > view.term
        return continues if record.term == view.term else after_damage and record.term > view.term

    def _check_owner(self, state: State) -> None:
        b = state.b
        if not b.owns:
            return
        entries = b.look.view.entries
        for seq, record in state.acknowledged:
            if seq < len(entries) and entries[seq] != record:
                raise ViolationError(f"B owns a term whose view lacks {record}, which was acknowledged")

    def _check_view(self, look: Look, who: str) -> None:
        entries = look.view.entries
        for seq, record in look.begun:
            if seq < len(entries) and entries[seq] == record:
                continue
            # A slot that something was opened over stays damaged in views that continue from one of that time.
            if seq < look.carried - 1 and entries[seq] == "torn":
                continue
            raise ViolationError(f"the view of {who} lacks {record}, which was acknowledged before it was read")

    def _reader(self, state: State) -> Steps:
        look = state.reader
        if look.phase in ("idle", "done"):
            if state.reads < self.rules.reads:
                since = look.phase == "done"
                begun = state._replace(reader=self._begin(state, look, since=since), reads=state.reads + 1)
                yield "the reader begins" + (" from its view" if since else ""), begun
            return
        for label, after in self._read(state, look, "the reader"):
            yield label, state._replace(reader=after)

    # ---- WRITER OPEN, by B

    def _open(self, state: State) -> Steps:
        b = state.b
        if b.phase == "idle" and b.life < self.rules.opens:
            yield (
                "B begins to open",
                state._replace(b=b._replace(phase="reads", look=self._begin(state, Look(), since=False))),
            )
        elif b.phase == "reads" and b.look.phase != "done":
            for label, look in self._read(state, b.look, "B"):
                yield label, state._replace(b=b._replace(look=look))
        elif b.phase == "reads":
            end = len(b.look.view.entries)
            if end >= self.rules.slots:
                return
            taken = state.slots[end]
            if taken is not None:
                if taken.record.owner in b.look.dead:
                    raise ViolationError(f"B cannot open: slot {end} is taken, and READ ends before it for ever")
                anew = b._replace(look=self._begin(state, b.look, since=False))
                yield f"B finds slot {end} taken: starts over", state._replace(b=anew)
                return
            record = Rec("O", b.look.view.term + 1, f"B{b.life}", end, b.look.view.last)
            writing = b._replace(phase="writing", term=record.term, slot=end, idle=0)
            yield f"B creates slot {end}: {record}", _slot(_put(state, "b", writing), end, Bytes(record, 0))
        elif b.phase == "check":
            view, end = b.look.view, len(b.look.view.entries)
            torn = bool(view.entries) and view.entries[-1] == "torn"
            if torn and self.rules.open_looks and state.slots[end - 1] != view.last:
                void = b._replace(phase="reads", look=self._begin(state, b.look, since=False))
                yield f"B finds slot {end - 1} changed: its OPEN is void", state._replace(b=void)
                return
            opened = b._replace(phase="own", slot=end + 1, owns=True)
            yield "B has opened a term", _put(state, "b", opened)

    # ---- COMMIT

    def _write(self, state: State, name: str) -> Steps:
        writer: Writer = getattr(state, name)
        who, life = name.upper(), f"{name.upper()}{writer.life}"
        allowed = self.rules.commits[0 if name == "a" else 1]
        if writer.phase == "own" and writer.commits < allowed and writer.slot < self.rules.slots:
            if state.slots[writer.slot] is not None:
                yield f"{who} finds slot {writer.slot} taken: stops", _put(state, name, writer._replace(phase="end"))
            else:
                record = Rec("C", writer.term, life, writer.commits, writer.last)
                created = _slot(state, writer.slot, Bytes(record, 0))
                yield (
                    f"{who} creates slot {writer.slot}: {record}",
                    _put(created, name, writer._replace(phase="writing", idle=0)),
                )
        if writer.phase == "writing":
            yield from self._part(state, name, writer)
        if writer.phase in ("own", "writing", "check") and state.kills < self.rules.kills:
            killed = Writer("idle", writer.life + 1) if name == "b" else Writer("end")
            yield (
                f"{who} is killed",
                _put(state, name, killed)._replace(dead=state.dead | {life}, kills=state.kills + 1),
            )

    def _part(self, state: State, name: str, writer: Writer) -> Steps:
        """A slot grows, or becomes whole, and its creation returns."""
        who, there = name.upper(), state.slots[writer.slot]
        assert there is not None
        if not self._whole(there):
            grown = _slot(state, writer.slot, there._replace(size=there.size + 1))
            yield f"{who} adds a part to slot {writer.slot}", _put(grown, name, writer._replace(idle=0))
            if len(state.stopped) < self.rules.stops and not writer.stopped:
                stopped = state._replace(stopped=state.stopped | {there.record.owner})
                yield f"{who} is stopped", _put(stopped, name, writer._replace(stopped=True))
        elif there.record.kind == "O":
            yield f"{who} has created its OPEN", _put(state, name, writer._replace(phase="check", last=there))
        elif (
            self.rules.commit_looks and writer.slot + 1 < self.rules.slots and state.slots[writer.slot + 1] is not None
        ):
            yield (
                f"{who} finds slot {writer.slot + 1} taken: stops, in doubt",
                _put(state, name, writer._replace(phase="end")),
            )
        else:
            done = writer._replace(phase="own", slot=writer.slot + 1, last=there, commits=writer.commits + 1)
            told = state._replace(acknowledged=state.acknowledged | {(writer.slot, there.record)})
            yield f"{who} acknowledges slot {writer.slot}", _put(told, name, done)


def _woken(look: Look) -> Look:
    return look._replace(phase="again", still=look.still + 1) if look.phase == "pausing" else look


def _slot(state: State, seq: int, data: Bytes) -> State:
    return state._replace(slots=(*state.slots[:seq], data, *state.slots[seq + 1 :]))


def _put(state: State, name: str, writer: Writer) -> State:
    return state._replace(a=writer) if name == "a" else state._replace(b=writer)
