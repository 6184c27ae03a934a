"""Part ``tiers``: two machines, each with its own store on its disk, and one remote store of the same run.

A writer acknowledges a commit when its machine has it. A drain brings commits to the remote: segments, then the next
slot with a run of commits, as many as it likes. Writers and drains are killed between any two steps, a create may take
effect after its sender is dead, a machine may lose its disk. A machine's log is a list of OPENs and COMMITs; a READ of
a log is one step. The parts ``log`` and ``loss`` cover errors within one log.

Invariants: the remote has one history (a COMMIT is of the newest OPEN before it, and an OPEN continues from an existing
commit); no drain skips or repeats a commit; everything that a slot of the remote names is there; whatever the remote
acknowledged stays in it; a term has one owner; whatever a machine acknowledged is in the remote, or readable on the
machine while it has its disk; if a machine's writer continues from elsewhere than its last acknowledged commit, a
branch was reported, and it happens only where another process has opened a term meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from tools.protocol.explore import ViolationError

__all__ = ["TiersModel", "TiersRules"]


@dataclass(frozen=True)
class TiersRules:
    """Bounds of the search, and the rules, each of which a mutant breaks."""

    opens: tuple[int, int] = (2, 1)
    commits: tuple[int, int] = (2, 1)
    drains: int = 1  # of each machine: a writer's thread, a daemon beside it
    losses: int = 1  # disks
    late: int = 1  # creates that take effect after their sender was killed
    collect: bool = True
    # -- the rules
    remote_first: bool = True  # OPEN goes to the remote, then to the machine
    drain_before_open: bool = True
    segments_first: bool = True
    in_order: bool = True
    read_back: bool = True  # a process that finds a slot taken checks who took it
    terms_compared: bool = True  # a drain checks whether its term is still the newest
    resume_from_remote: bool = True  # and not from its memory of sent commits
    acknowledge_drained: bool = True
    keep_undrained: bool = True  # gc
    keep_branches: bool = True
    report_branches: bool = True


Nonce = tuple[int, str]
"""A term and its opener."""
Commit = tuple[Nonce, int]


class Rec(NamedTuple):
    """A record: an OPEN that continues from `parent`, or a COMMIT of `numbers` (in a machine's log one)."""

    nonce: Nonce
    numbers: tuple[int, ...] = ()
    parent: Commit | None = None

    @property
    def opens(self) -> bool:
        return not self.numbers

    @property
    def commits(self) -> tuple[Commit, ...]:
        return tuple((self.nonce, number) for number in self.numbers)

    def __str__(self) -> str:
        name = f"{self.nonce[0]}{self.nonce[1]}"
        return f"OPEN {name}" if self.opens else f"COMMIT {name} {','.join(map(str, self.numbers))}"


class Drain(NamedTuple):
    """One drain at work: the slot and record that it will create, and whether segments, or the slot, are in flight."""

    slot: int
    record: Rec
    copied: bool = False
    sent: bool = False


class Machine(NamedTuple):
    """`phase`: idle | opening (`sent` is the OPEN to come) | opened (the remote has it) | own | fenced."""

    log: tuple[Rec, ...] = ()
    missing: frozenset[Commit] = frozenset()  # segments that gc deleted here
    acknowledged: frozenset[Commit] = frozenset()
    reported: frozenset[Commit] = frozenset()
    phase: str = "idle"
    slot: int = 0
    sent: Rec | None = None
    drains: tuple[Drain | None, ...] = ()
    mark: int = 0  # of a mutant: the commits of its log that it remembers to have sent
    opens: int = 0
    commits: int = 0


class State(NamedTuple):
    """The whole state."""

    remote: tuple[Rec, ...] = ()
    data: frozenset[Commit] = frozenset()
    machines: tuple[Machine, ...] = ()
    late: frozenset[tuple[int, Rec]] = frozenset()
    acknowledged: frozenset[Commit] = frozenset()  # by the remote
    losses: int = 0
    lates: int = 0


Steps = Iterator[tuple[str, State]]
_NAMES: Final = "AB"


def _newest(log: tuple[Rec, ...]) -> Rec | None:
    """The OPEN of the newest term."""
    return next((rec for rec in reversed(log) if rec.opens), None)


@functools.cache  # a search asks for those of a few logs again and again
def _commits(log: tuple[Rec, ...]) -> tuple[Commit, ...]:
    return tuple(commit for rec in log for commit in rec.commits)


def _latest(log: tuple[Rec, ...]) -> Commit | None:
    """``latest``: the newest commit of the newest term, or the one that the term continues from."""
    opened = _newest(log)
    if opened is None:
        return None
    return max((one for one in _commits(log) if one[0] == opened.nonce), default=opened.parent)


def _undrained(log: tuple[Rec, ...], remote: tuple[Rec, ...]) -> tuple[Commit, ...]:
    there = set(_commits(remote))
    return tuple(one for one in _commits(log) if one not in there)


@dataclass(frozen=True)
class TiersModel:
    """The transition system of `rules`."""

    rules: TiersRules

    def initial(self) -> State:
        """Nothing anywhere."""
        return State(machines=(Machine(drains=(None,) * self.rules.drains),) * 2)

    def successors(self, state: State) -> Iterable[tuple[str, State]]:
        """Everything that can happen next."""
        _check_remote(state)
        for index, machine in enumerate(state.machines):
            _check_machine(state, machine, _NAMES[index])
        for index in range(2):
            yield from self._write(state, index)
            for number in range(self.rules.drains):
                yield from self._drain(state, index, number)
            yield from self._mishaps(state, index)
        for slot, record in state.late:
            gone = state.late - {(slot, record)}
            lands = slot == len(state.remote)
            after = state._replace(late=gone, remote=(*state.remote, record) if lands else state.remote)
            yield f"a late create of slot {slot} {'lands' if lands else 'is refused'}: {record}", after

    # ---- the writer

    def _write(self, state: State, index: int) -> Steps:
        machine, name = state.machines[index], _NAMES[index]
        if machine.phase in ("idle", "fenced") and machine.opens < self.rules.opens[index]:
            yield from self._read(state, index)
        elif machine.phase == "opening":
            assert machine.sent is not None
            if machine.slot != len(state.remote) and self.rules.remote_first:
                yield f"{name} finds slot {machine.slot} taken", _set(state, index, machine._replace(phase="idle"))
            elif self.rules.remote_first:
                opened = _set(state, index, machine._replace(phase="opened"))
                yield (
                    f"{name} creates the remote's {machine.sent}",
                    opened._replace(remote=(*state.remote, machine.sent)),
                )
            else:
                yield f"{name} opens by itself", _set(state, index, machine._replace(phase="opened"))
        elif machine.phase == "opened":
            yield f"{name} fills its log, and opens", _set(state, index, self._filled(state, machine))
        elif machine.phase == "own" and machine.commits < self.rules.commits[index]:
            opening = _newest(machine.log)
            assert opening is not None
            number = 1 + sum(rec.nonce == opening.nonce and not rec.opens for rec in machine.log)
            record = Rec(opening.nonce, (number,))
            done = machine._replace(
                log=(*machine.log, record),
                acknowledged=machine.acknowledged | set(record.commits),
                commits=machine.commits + 1,
            )
            after = _set(state, index, done)
            if not self.rules.acknowledge_drained:
                after = after._replace(acknowledged=after.acknowledged | set(record.commits))
            yield f"{name} acknowledges {record}", after

    def _read(self, state: State, index: int) -> Steps:
        """READ both, and choose the OPEN. Everything that can be drained is drained first."""
        machine, name = state.machines[index], _NAMES[index]
        ours, theirs = _newest(machine.log), _newest(state.remote)
        left = _undrained(machine.log, state.remote)
        mine = ours is not None and theirs is not None and ours.nonce == theirs.nonce
        if left and mine and self.rules.drain_before_open:
            return
        base = state.remote if self.rules.remote_first else machine.log
        newest = _newest(base)
        record = Rec((1 + (newest.nonce[0] if newest else 0), name), parent=_latest(base))
        reported = machine.reported | (set(left) if self.rules.report_branches else set())
        if left and mine:
            raise ViolationError(
                f"{name} continues behind its acknowledged commit {left}, although no other term was opened"
            )
        chosen = machine._replace(
            phase="opening", slot=len(state.remote), sent=record, reported=reported, opens=machine.opens + 1
        )
        yield f"{name} reads, for {record}", _set(state, index, chosen)

    def _filled(self, state: State, machine: Machine) -> Machine:
        """The machine's log with the terms that it lacks, the parent of the new one, and the new one."""
        assert machine.sent is not None
        log = machine.log if self.rules.keep_branches else ()
        for record in state.remote:
            known = any(rec.opens and rec.nonce == record.nonce for rec in log)
            if record.opens and not known and record != machine.sent:
                log = (*log, record)
            if machine.sent.parent in record.commits and machine.sent.parent not in _commits(log):
                log = (*log, Rec(record.nonce, (machine.sent.parent[1],)))
        return machine._replace(log=(*log, machine.sent), phase="own", sent=None)

    # ---- a drain

    def _drain(self, state: State, index: int, number: int) -> Steps:
        machine, name = state.machines[index], _NAMES[index]
        drain = machine.drains[number]
        who = f"drain {number} of {name}"
        if drain is None:
            yield from self._plan(state, index, number)
            return
        if not drain.copied and (self.rules.segments_first or drain.sent):
            if any(one in machine.missing for one in drain.record.commits):
                return  # gone here: another drain has brought them
            copied = self._with(state, index, number, drain._replace(copied=True))
            yield f"{who} copies segments", copied._replace(data=copied.data | set(drain.record.commits))
            return
        if drain.sent:
            yield f"{who} acknowledges", self._acknowledged(state, index, number, drain)
            return
        if drain.slot == len(state.remote):
            sent = self._with(state, index, number, drain._replace(sent=True))
            yield (
                f"{who} creates slot {drain.slot}: {drain.record}",
                sent._replace(remote=(*state.remote, drain.record)),
            )
        elif not self.rules.read_back:
            yield f"{who} takes slot {drain.slot} for its own", self._acknowledged(state, index, number, drain)
        else:
            yield f"{who} finds slot {drain.slot} taken: reads again", self._with(state, index, number, None)

    def _plan(self, state: State, index: int, number: int) -> Steps:
        machine, name = state.machines[index], _NAMES[index]
        ours, theirs = _newest(machine.log), _newest(state.remote)
        if ours is None or theirs is None:
            return
        left = _undrained(machine.log, state.remote)
        if not self.rules.resume_from_remote:
            left = _commits(machine.log)[machine.mark :]
        if ours.nonce != theirs.nonce and self.rules.terms_compared:
            if left and (machine.phase == "own" or not machine.reported.issuperset(left)):
                over = machine._replace(
                    phase="fenced" if machine.phase == "own" else machine.phase, reported=machine.reported | set(left)
                )
                yield f"drain {number} of {name} finds {theirs}: {left} is a branch", _set(state, index, over)
            return
        mine = tuple(one for one in left if one[0] == ours.nonce)
        if not self.rules.in_order:
            mine = mine[::-1]
        for count in range(1, min(2, len(mine)) + 1):
            record = Rec(ours.nonce, tuple(one[1] for one in mine[:count]))
            marked = machine._replace(mark=machine.mark + count) if not self.rules.resume_from_remote else machine
            planned = Drain(len(state.remote), record)
            after = self._with(_set(state, index, marked), index, number, planned)
            yield f"drain {number} of {name} plans {record}", after

    def _acknowledged(self, state: State, index: int, number: int, drain: Drain) -> State:
        done = self._with(state, index, number, None)
        return done._replace(acknowledged=done.acknowledged | set(drain.record.commits))

    def _with(self, state: State, index: int, number: int, drain: Drain | None) -> State:
        machine = state.machines[index]
        drains = (*machine.drains[:number], drain, *machine.drains[number + 1 :])
        return _set(state, index, machine._replace(drains=drains))

    # ---- losses and kills

    def _mishaps(self, state: State, index: int) -> Steps:
        machine, name = state.machines[index], _NAMES[index]
        if machine.phase not in ("idle", "fenced"):
            killed = _set(state, index, machine._replace(phase="idle", sent=None))
            yield f"the writer of {name} is killed", killed
            if machine.phase == "opening" and machine.sent and state.lates < self.rules.late:
                late = state.late | {(machine.slot, machine.sent)}
                yield (
                    f"the writer of {name} is killed, its OPEN under way",
                    killed._replace(late=late, lates=state.lates + 1),
                )
        for number, drain in enumerate(machine.drains):
            if drain is None:
                continue
            killed = self._with(state, index, number, None)
            yield f"drain {number} of {name} is killed", killed
            if drain.copied and not drain.sent and state.lates < self.rules.late:
                late = state.late | {(drain.slot, drain.record)}
                yield (
                    f"drain {number} of {name} is killed, its slot under way",
                    killed._replace(late=late, lates=state.lates + 1),
                )
        if machine.log and state.losses < self.rules.losses:
            bare = Machine(drains=(None,) * self.rules.drains, opens=machine.opens, commits=machine.commits)
            yield f"{name} loses its disk", _set(state, index, bare)._replace(losses=state.losses + 1)
        if self.rules.collect:
            there = set(_commits(state.remote))
            newest = _latest(machine.log)
            for one in _commits(machine.log):
                drained = one in there or not self.rules.keep_undrained
                if one != newest and drained and one not in machine.missing:
                    gone = machine._replace(missing=machine.missing | {one})
                    yield f"gc of {name} deletes {one}", _set(state, index, gone)


def _check_remote(state: State) -> None:
    """One history, complete and in order."""
    newest: Nonce | None = None
    seen: list[Commit] = []
    for record in state.remote:
        if record.opens:
            if newest is not None and record.nonce[0] <= newest[0]:
                raise ViolationError(f"the remote has {record} after term {newest[0]}: two histories")
            if record.parent is not None and record.parent not in seen:
                raise ViolationError(f"the remote's {record} continues from {record.parent}, which it has not")
            newest = record.nonce
            continue
        if record.nonce != newest:
            raise ViolationError(f"the remote has {record} in term {newest}: two histories")
        for commit in record.commits:
            if commit[1] != 1 + sum(one[0] == commit[0] for one in seen):
                raise ViolationError(f"a drain skipped or repeated something: {commit} after {seen}")
            if commit not in state.data and not any(
                drain is not None and drain.sent and not drain.copied and commit in drain.record.commits
                for machine in state.machines
                for drain in machine.drains
            ):
                raise ViolationError(f"the remote names {commit}, whose segment is not there")
            seen.append(commit)
    lost = state.acknowledged - set(seen)
    if lost:
        raise ViolationError(f"the remote acknowledged {sorted(lost)}, and has lost it")
    for one in seen:
        if one not in state.data and state.acknowledged >= {one}:
            raise ViolationError(f"the remote acknowledged {one} without its segment")


def _check_machine(state: State, machine: Machine, name: str) -> None:
    there = set(_commits(state.remote))
    readable = set(_commits(machine.log)) - machine.missing
    for commit in machine.acknowledged - there:
        if commit not in readable:
            raise ViolationError(f"{name} acknowledged {commit}, and neither tier has it")
        opened = _newest(machine.log)
        if machine.phase == "own" and opened and opened.nonce != commit[0] and commit not in machine.reported:
            raise ViolationError(f"{name} continued without {commit}, and no branch was reported")
    if machine.phase == "own":
        owned = [rec for rec in state.remote if rec.opens]
        opened = _newest(machine.log)
        if opened is not None and opened not in owned:
            raise ViolationError(f"{name} writes in {opened}, which the remote does not have")


def _set(state: State, index: int, machine: Machine) -> State:
    return state._replace(machines=(*state.machines[:index], machine, *state.machines[index + 1 :]))
