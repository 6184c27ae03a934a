"""Part ``log``: slots, terms, folds and deletion, under lost, late and duplicated creates and listings that lie.

The medium creates a slot if it is absent, one at a time. The first record created in slot n, once n slots had been
created, is history. Writers open and commit; readers READ; folds appear, and folds and slots disappear, at any time.

Invariants: everything acknowledged is history; terms go up and a fenced writer adds nothing; a READ ends with the
history at one instant between its begin and its end; a process that stops as fenced was fenced; and a reader alone on a
quiet store reaches the end of the log, whichever of the two newest folds it begins from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tools.protocol.explore import ViolationError

__all__ = ["LogModel", "LogRules"]


class Rec(NamedTuple):
    """A record: ``O``PEN of a term by someone, or that term's ``C``OMMIT number `commit`."""

    kind: str
    term: int
    who: str
    commit: int = -1

    def __str__(self) -> str:
        return f"OPEN {self.term} by {self.who}" if self.kind == "O" else f"COMMIT {self.who}.{self.commit}"


@dataclass(frozen=True)
class LogRules:
    """Bounds of the search, and the rules of the protocol, each of which a mutant breaks."""

    writers: int = 2
    readers: int = 1
    opens: tuple[int, ...] = (1, 1, 1)  # how often each writer may open
    commits: tuple[int, ...] = (2, 2)  # of each writer
    slots: int = 5
    folds: int = 3  # at most, besides "no fold"
    every: int = 2  # K
    reads: int = 1  # per reader; a later one may begin from the view of the one before
    views: bool = False  # an opener that lost the race begins again from its view
    faults: int = 1  # creates that lose their answer, arrive late or arrive twice
    # -- the rules
    verify_open: bool = True
    keep_opens: bool = True
    keep_anchors: bool = True
    anchor_before_deletion: bool = True
    delete_up_to: Literal["second", "newest"] = "second"
    validate_read: bool = True
    check_terms: bool = True
    read_back: Literal["compare", "take for success", "take for fence"] = "compare"
    resend_identical: bool = True
    ask_anchor_before_lost: bool = True
    anchors_are_no_damage: bool = True


class Reading(NamedTuple):
    """One READ in progress.

    `at`: list | get | peek (slot `next` is absent: does the one after it exist?) | again (it does: is `next` still
    absent?) | lost (so it was deleted, or the medium lost it) | stray (a record that cannot follow) | validate.
    """

    at: str
    folds: frozenset[int]  # there when the listing began
    begun: int  # length of the history when the read began
    next: int = 0
    term: int = 0
    wrong: bool = False  # it took a record for history that is not


class Process(NamedTuple):
    """A writer or a reader. `phase`: idle | read | open | open? | verify | own | ack | commit? | stopped.

    `opens` counts a reader's READs. An idle process with a `slot` has its own view that ends there.
    """

    phase: str
    opens: int = 0
    commits: int = 0
    slot: int = 0
    term: int = 0
    reading: Reading | None = None


class State(NamedTuple):
    """The whole state. `folds` holds the slots that folds go through; -1, "no fold", is always there."""

    slots: tuple[Rec | None, ...]
    history: tuple[Rec, ...]
    folds: frozenset[int]
    processes: tuple[Process, ...]
    net: frozenset[tuple[int, Rec]]
    faults: int
    acknowledged: frozenset[Rec]


Steps = Iterator[tuple[str, State]]


@dataclass(frozen=True)
class LogModel:
    """The transition system of `rules`."""

    rules: LogRules

    def initial(self) -> State:
        """An empty store; no process has done anything."""
        processes = (Process("idle"),) * (self.rules.writers + self.rules.readers)
        return State((None,) * self.rules.slots, (), frozenset([-1]), processes, frozenset(), 0, frozenset())

    def successors(self, state: State) -> Iterable[tuple[str, State]]:
        """Everything that any process, or the medium, can do next."""
        self._check_history(state)
        self._check_progress(state)
        for index in range(len(state.processes)):
            yield from self._move(state, index)
        for seq, record in state.net:
            if state.slots[seq] is None:
                landed = self._put(state, seq, record)
                yield f"a late create of slot {seq} lands: {record}", landed._replace(net=state.net - {(seq, record)})
        yield from self._folds(state)

    # ---- invariants

    def _check_history(self, state: State) -> None:
        if not state.acknowledged.issubset(state.history):
            raise ViolationError("something acknowledged is not in the history")
        if len(set(state.history)) != len(state.history):
            raise ViolationError("a record is in the history twice")
        term, owner = 0, ""
        for record in state.history:
            if record.kind == "O":
                if record.term <= term:
                    raise ViolationError("a term goes back")
                term, owner = record.term, record.who
            elif (record.term, record.who) != (term, owner):
                raise ViolationError("a fenced writer's record is history")

    def _check_progress(self, state: State) -> None:
        """A reader alone on a quiet store reaches the end of the log; the newest fold may be unreadable."""
        if not self.rules.validate_read:
            return
        for fold in sorted(state.folds)[-2:]:
            seq, term = fold + 1, _term(state.history[: fold + 1])
            while seq < self.rules.slots and (record := state.slots[seq]) and _follows(term, record):
                term = max(term, record.term)
                seq += 1
            if seq != len(state.history) and seq < self.rules.slots:
                raise ViolationError(f"a lone reader that begins from fold {fold} is stuck at slot {seq}")

    # ---- the medium

    def _put(self, state: State, seq: int, record: Rec) -> State:
        if seq > len(state.history):
            raise ViolationError(f"slot {seq} is created beyond the head of the log")
        slots = (*state.slots[:seq], record, *state.slots[seq + 1 :])
        return state._replace(
            slots=slots, history=(*state.history, record) if seq == len(state.history) else state.history
        )

    def _never_deleted(self, state: State, seq: int) -> bool:
        """The conclusion from a GET of the anchor above."""
        every = self.rules.every
        anchor = (seq // every + 1) * every
        return seq % every == 0 or anchor >= self.rules.slots or state.slots[anchor] is None

    def _create(self, state: State, index: int, record: Rec, seq: int, success: Process, doubt: Process) -> Steps:
        if seq >= self.rules.slots:
            return
        name = _name(index)
        if state.slots[seq] is not None:
            yield f"{name}'s create of slot {seq} is refused", _set(state, index, doubt)
            return
        created = self._put(state, seq, record)
        yield f"{name} creates slot {seq}: {record}", _set(created, index, success)
        if state.faults < self.rules.faults:
            faulty = state._replace(faults=state.faults + 1, net=state.net | {(seq, record)})
            lost = created._replace(faults=state.faults + 1)
            yield f"{name} creates slot {seq}: {record}; the answer is lost", _set(lost, index, doubt)
            twice = created._replace(faults=faulty.faults, net=faulty.net)
            yield f"{name} creates slot {seq}: {record}; a duplicate is on its way", _set(twice, index, success)
            yield f"{name}'s create of slot {seq} times out, still on its way: {record}", _set(faulty, index, doubt)

    def _folds(self, state: State) -> Steps:
        """A fold of any prefix, by any process, however late; and deletion, in any order, as far as the rules allow."""
        rules, folds = self.rules, sorted(state.folds)
        if len(folds) < rules.folds:
            for seq in range(len(state.history)):
                if seq not in state.folds:
                    yield f"fold {seq} is published", state._replace(folds=state.folds | {seq})
        for fold in folds[:-2]:  # two newer ones exist
            yield f"fold {fold} is deleted", state._replace(folds=state.folds - {fold})
        limit = folds[-1] if rules.delete_up_to == "newest" else folds[-2] if len(folds) > 1 else -1
        for seq in range(limit + 1):
            if state.slots[seq] is None or (rules.keep_opens and state.history[seq].kind == "O"):
                continue
            if rules.keep_anchors and seq % rules.every == 0:
                continue
            anchor = (seq // rules.every + 1) * rules.every
            if rules.anchor_before_deletion and (anchor >= rules.slots or state.slots[anchor] is None):
                continue
            slots = (*state.slots[:seq], None, *state.slots[seq + 1 :])
            yield f"slot {seq} is deleted", state._replace(slots=slots)

    # ---- processes

    def _move(self, state: State, index: int) -> Steps:
        process = state.processes[index]
        if process.phase == "idle":
            yield from self._begin(state, index, process)
        elif process.reading is not None:
            yield from self._read(state, index, process, process.reading)
        elif process.phase in ("open", "open?", "verify"):
            yield from self._open(state, index, process)
        elif process.phase in ("own", "ack", "commit?"):
            yield from self._commit(state, index, process)

    def _begin(self, state: State, index: int, process: Process) -> Steps:
        """READ begins from a listing of the folds, or from an earlier view."""
        name, rules = _name(index), self.rules
        if process.opens >= (rules.opens[index] if index < rules.writers else rules.reads):
            return
        reading = Reading("list", state.folds, len(state.history))
        busy = process._replace(phase="read", slot=0)
        yield f"{name} lists fold/", _set(state, index, busy._replace(reading=reading))
        if process.slot:
            term = _term(state.history[: process.slot])
            reading = Reading("get", frozenset(), len(state.history), process.slot, term)
            yield f"{name} begins from its view", _set(state, index, busy._replace(reading=reading))

    def _read(self, state: State, index: int, process: Process, reading: Reading) -> Steps:
        """READ. The listing is not atomic: a fold that appeared or vanished meanwhile is seen or missed."""
        name, seq = _name(index), reading.next
        again = _set(state, index, process._replace(phase="idle", reading=None))

        def go(label: str, **changes: Any) -> tuple[str, State]:
            return f"{name} {label}", _set(state, index, process._replace(reading=reading._replace(**changes)))

        if reading.at == "list":
            # 1. Take the newest valid fold: any that may be seen, because newer ones may be missed or unreadable.
            for fold in reading.folds | state.folds:
                label = f"begins from fold {fold}" if fold >= 0 else "begins from slot 0"
                yield go(label, at="get", folds=frozenset(), next=fold + 1, term=_term(state.history[: fold + 1]))
        elif reading.at == "get":
            # 2. GET contiguous slots until one is absent.
            record = state.slots[seq] if seq < self.rules.slots else None
            if seq >= self.rules.slots:
                yield f"{name}: the log is full", _set(state, index, Process("stopped"))
            elif record is None:
                yield go(f"finds slot {seq} absent", at="peek")
            elif self.rules.check_terms and not _follows(reading.term, record):
                yield go(f"finds a stray in slot {seq}", at="stray")
            else:
                wrong = reading.wrong or record != state.history[seq]
                yield go(f"reads slot {seq}", next=seq + 1, term=max(reading.term, record.term), wrong=wrong)
        elif reading.at == "stray":
            yield from self._stray(state, index, seq, again)
        elif reading.at == "peek":
            follows = seq + 1 < self.rules.slots and state.slots[seq + 1] is not None
            yield go(
                "finds that the next slot exists" if follows else "finds no next slot",
                at="again" if follows else "validate",
            )
        elif reading.at == "again":
            back = state.slots[seq] is not None
            yield go("finds the slot after all" if back else "finds it absent again", at="get" if back else "lost")
        elif reading.at == "lost":
            if self._never_deleted(state, seq) or not self.rules.ask_anchor_before_lost:
                raise ViolationError(f"{name} takes slot {seq} for lost by the medium, but it was deleted")
            yield f"{name} finds the anchor above {seq}: stale, starts over", again
        elif not self.rules.validate_read or self._never_deleted(state, seq):
            # 3. No anchor above: the view stands.
            yield f"{name}'s view stands: next slot is {seq}", self._viewed(state, index, process, reading)
        else:
            yield f"{name} finds the anchor above {seq}: stale, starts over", again

    def _stray(self, state: State, index: int, seq: int, again: State) -> Steps:
        """A record that cannot follow is a stray, and the view is stale; unless nothing was ever deleted there."""
        anchor = seq % self.rules.every == 0
        if self._never_deleted(state, seq) and not (anchor and self.rules.anchors_are_no_damage):
            raise ViolationError(f"{_name(index)} takes slot {seq} for damaged, but it is as it was written")
        yield f"{_name(index)} starts over", again

    def _viewed(self, state: State, index: int, process: Process, reading: Reading) -> State:
        if reading.wrong:
            raise ViolationError("a view holds a record that is not history")
        if reading.next < reading.begun:
            raise ViolationError(f"a view ends at {reading.next}, but {reading.begun} records existed before the read")
        if index >= self.rules.writers:
            slot = reading.next if process.opens + 1 < self.rules.reads else 0
            return _set(state, index, Process("idle", process.opens + 1, slot=slot))
        owner = process._replace(phase="open", slot=reading.next, term=reading.term + 1, reading=None)
        return _set(state, index, owner)

    def _open(self, state: State, index: int, process: Process) -> Steps:
        """WRITER OPEN, steps 2 and 3."""
        name, seq = _name(index), process.slot
        record = Rec("O", process.term, f"{name}{process.opens}")
        restart = Process("idle", process.opens + 1, process.commits)
        void = restart
        if self.rules.views:
            restart = restart._replace(slot=seq)
        if process.phase == "open":
            # 2. Create log/e = OPEN.
            doubt = process._replace(phase="open?")
            yield from self._create(state, index, record, seq, process._replace(phase="verify"), doubt)
        elif process.phase == "open?":
            if state.slots[seq] == record:
                yield f"{name} reads back slot {seq}: mine", _set(state, index, process._replace(phase="verify"))
                return
            if state.slots[seq] is None:
                yield f"{name} reads back nothing: resends", _set(state, index, process._replace(phase="open"))
            yield f"{name} starts over with a new nonce", _set(state, index, restart)
        elif not self.rules.verify_open or self._never_deleted(state, seq):
            # 3. No anchor above: the OPEN stands.
            owner = Process("own", process.opens, process.commits, seq + 1, process.term)
            yield f"{name} owns term {process.term}", _set(state, index, owner)
        else:
            yield f"{name} finds the anchor above {seq}: its OPEN is void", _set(state, index, void)

    def _commit(self, state: State, index: int, process: Process) -> Steps:
        """COMMIT, steps 2 to 4."""
        name, seq = _name(index), process.slot
        record = Rec("C", process.term, f"{name}{process.opens}", process.commits)
        restart = Process("idle", process.opens + 1, process.commits)
        if process.phase == "own":
            # 2. Create the next slot if absent.
            if process.commits < self.rules.commits[index]:
                acknowledge, doubt = process._replace(phase="ack"), process._replace(phase="commit?")
                yield from self._create(state, index, record, seq, acknowledge, doubt)
        elif process.phase == "ack":
            # 4. Acknowledge.
            following = process._replace(phase="own", slot=seq + 1, commits=process.commits + 1)
            acknowledged = state._replace(acknowledged=state.acknowledged | {record})
            yield f"{name} acknowledges commit {process.commits}", _set(acknowledged, index, following)
        elif self.rules.read_back == "take for success":
            yield f"{name} takes the refusal for its own success", _set(state, index, process._replace(phase="ack"))
        elif self.rules.read_back == "take for fence" or state.slots[seq] not in (record, None):
            # 3. Other bytes: fenced.
            if not any(other.kind == "O" and other.term > process.term for other in state.history):
                raise ViolationError(f"{name} stops as fenced, but no newer term exists")
            yield f"{name} is fenced", _set(state, index, restart)
        elif state.slots[seq] == record:
            # 3. Identical bytes: it was me.
            yield f"{name} reads back slot {seq}: mine", _set(state, index, process._replace(phase="ack"))
        else:
            # 3. Absent: resend identical bytes, or give up and stop.
            yield f"{name} reads back nothing: resends", _set(state, index, process._replace(phase="own"))
            yield f"{name} does not know, and stops", _set(state, index, restart)
            if not self.rules.resend_identical:
                other = process._replace(phase="own", commits=process.commits + 1)
                yield f"{name} does not know; its next save uses the slot", _set(state, index, other)


def _term(history: tuple[Rec, ...]) -> int:
    return max((record.term for record in history), default=0)


def _follows(term: int, record: Rec) -> bool:
    return record.term > term if record.kind == "O" else record.term == term


def _name(index: int) -> str:
    return "ABCDEFG"[index]


def _set(state: State, index: int, process: Process) -> State:
    return state._replace(processes=(*state.processes[:index], process, *state.processes[index + 1 :]))
