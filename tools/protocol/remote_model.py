"""Part ``remote``: a remote that is pruned while it is drained to, copied to, filled in from, and continued elsewhere.

One machine has the store, saves, drains, and keeps less than the remote or more. Another one opens a term in the
remote. A prune of the remote asks the draining process, or takes over its newest term; gc deletes there. A checkpoint
may be damaged here before it is drained, and then be filled in from there. Checkpoint 2 of a term is a delta on 1, 3 a
full. The parts ``tiers``, ``prune`` and ``store`` cover errors between OPENs, of the newest checkpoint, and with pins.

Invariants: whatever the remote promises can be restored there; no checkpoint that was retired there is promised there
again; the machine's rules retire nothing that the remote never promised; nothing that the remote had is called a
branch, unless its term is known to lack something from there on; a filled-in checkpoint equals the saved one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from tools.protocol.explore import ViolationError
from tools.protocol.remote_catalog import Catalog, Checkpoint, Nonce, Rec, base_of, catalog, needed, retirements

__all__ = ["RemoteModel", "RemoteRules"]


@dataclass(frozen=True)
class RemoteRules:
    """Bounds of the search, and the rules, each of which a mutant breaks."""

    saves: int = 3  # of this machine, all its terms together
    opens: int = 1  # terms that it opens later, in both tiers
    alone: int = 0  # terms that it opens without the remote
    drains: int = 1
    elsewhere: int = 1  # saves of another machine; 0: there is none
    prunes: int = 1
    take_over: bool = True  # whether a prune may open a term itself
    damages: int = 0
    lets_go: int = 1  # checkpoints that the machine's own rules retire
    part: bool = False  # whether the remote may begin as a copy of a part
    # -- the rules
    reached_told: bool = True  # an OPEN has the last step of the term before it
    lacks_minded: bool = True  # by the process that writes that, and by the one that checks what was there
    lacks: Literal["first", "last", "never"] = "first"  # a left-out step is noted before anything above it is there
    nonces: bool = True  # checkpoints are compared by more than their names
    never_again: bool = True  # checkpoints that were retired there are not brought there again
    bases_there: bool = True  # checkpoints whose base is gone there are left out
    read_anew: bool = True  # by a process that finds a slot taken
    requests_checked: bool = True
    part_told: bool = True  # a copy of a part notes what it lacks
    part_trusted: bool = False  # checkpoints and numbers of such a term are treated as promised there
    gc_spares_newest: bool = True  # segments that were brought to the newest term, and are not named yet
    fill_compares: bool = True


class Here(NamedTuple):
    """The machine's store."""

    terms: tuple[Nonce, ...]
    promised: frozenset[Checkpoint] = frozenset()
    damaged: frozenset[Checkpoint] = frozenset()
    reported: frozenset[Checkpoint] = frozenset()  # as a branch
    saves: int = 0
    opens: int = 0
    alone: int = 0
    let_go: int = 0
    damages: int = 0
    step: int = 0  # of the newest term


class Drain(NamedTuple):
    """A drain at work: the slot and the record that it will create, and whether segments are there."""

    slot: int
    record: Rec
    brought: bool = False
    request: Rec | None = None


class Other(NamedTuple):
    """A process that opens a term in the remote. `phase`: idle | opening | own | done. `left`: saves; of a prune:
    times."""

    phase: str = "idle"
    slot: int = 0
    record: Rec | None = None
    left: int = 0


class State(NamedTuple):
    """The whole state."""

    log: tuple[Rec, ...]
    here: Here
    drains: tuple[Drain | None, ...]
    other: Other
    pruner: Other
    data: frozenset[Checkpoint] = frozenset()  # segments in the remote
    requests: frozenset[Rec] = frozenset()
    doomed: frozenset[Checkpoint] = frozenset()  # segments that a collector is about to delete
    # Checkpoints that the remote has promised, and not merely as a base of a copy.
    ever: frozenset[Checkpoint] = frozenset()
    filling: Checkpoint | None = None  # of the remote
    damaged: Checkpoint | None = None  # for which that is


Steps = Iterator[tuple[str, State]]
_FIRST: Final[Nonce] = (1, "A")


@dataclass(frozen=True)
class RemoteModel:
    """The transition system of `rules`."""

    rules: RemoteRules

    def initial(self) -> State:
        """A term in both tiers, and nothing in it."""
        other, pruner = Other(left=self.rules.elsewhere), Other(left=self.rules.prunes)
        return State((Rec("open", _FIRST),), Here((_FIRST,)), (None,) * self.rules.drains, other, pruner)

    def successors(self, state: State) -> Iterable[tuple[str, State]]:
        """Everything that can happen next."""
        _check(state)
        yield from self._save(state)
        for number in range(self.rules.drains):
            yield from self._drain(state, number)
        yield from self._elsewhere(state)
        yield from self._prune(state)
        yield from self._collect(state)
        yield from self._fill(state)
        if self.rules.part and len(state.log) == 1 and len(state.here.terms) == 1 and not any(state.drains):
            yield from self._copy_of_a_part(state)

    # ---- the machine's knowledge of the remote

    def _theirs(self, there: Catalog, checkpoint: Checkpoint) -> Checkpoint | None:
        """The remote's copy of the term; None: it has no such term."""
        nonce, step = checkpoint
        for one in there.terms:
            if one == nonce or (not self.rules.nonces and one[0] == nonce[0]):
                return one, step
        return None

    def _gone(self, there: Catalog, checkpoint: Checkpoint) -> bool:
        """Whether the remote had a checkpoint and has retired it, by its log (`drain_selection.remote_retired`)."""
        found = self._theirs(there, checkpoint)
        if found is None or found in there.promised:
            return False
        nonce, step = found
        lacks = there.lacking(nonce) if self.rules.lacks_minded else None
        if lacks is not None and step >= lacks and not self.rules.part_trusted:
            return False
        if found in there.live:
            return True
        if nonce == there.newest:
            return found in there.retired
        highest = dict(there.reached).get(nonce)
        return highest is not None and step <= highest

    def _had(self, there: Catalog, checkpoint: Checkpoint) -> bool:
        return self._theirs(there, checkpoint) in there.promised or self._gone(there, checkpoint)

    def _reached(self, there: Catalog) -> int | None:
        """The previous term's last step, as an OPEN has it."""
        if not self.rules.reached_told:
            return None
        highest = max((step for nonce, step in there.promised | there.retired if nonce == there.newest), default=None)
        lacks = there.lacking(there.newest)
        if highest is None or lacks is None or not self.rules.lacks_minded:
            return highest
        return min(highest, lacks - 1) if lacks > 1 else None

    # ---- the machine

    def _save(self, state: State) -> Steps:
        here, there = state.here, catalog(state.log)
        if here.saves < self.rules.saves:
            saved = (here.terms[-1], here.step + 1)
            after = here._replace(promised=here.promised | {saved}, saves=here.saves + 1, step=saved[1])
            yield f"A saves {saved}", state._replace(here=after)
        for one in here.promised:
            if one in here.damaged:
                whole = here._replace(damaged=here.damaged - {one})
                yield f"A's {one} is put right", state._replace(here=whole)
            elif here.damages < self.rules.damages:
                hurt = here._replace(damaged=here.damaged | {one}, damages=here.damages + 1)
                yield f"A's {one} is damaged", state._replace(here=hurt)
            if here.let_go < self.rules.lets_go and one != max(here.promised) and self._had(there, one):
                if one not in state.ever:
                    raise ViolationError(f"A lets {one} go, which the remote never had")
                gone = here._replace(promised=here.promised - {one}, let_go=here.let_go + 1)
                yield f"A's rules let {one} go", state._replace(here=gone)
        yield from self._open(state)

    def _open(self, state: State) -> Steps:
        here, there = state.here, catalog(state.log)
        if here.alone < self.rules.alone:
            alone = here._replace(terms=(*here.terms, (here.terms[-1][0] + 1, "A")), alone=here.alone + 1, step=0)
            yield "A opens a term without the remote", state._replace(here=alone)
        missing = tuple(one for one in there.terms if one not in here.terms)
        if here.opens == self.rules.opens or {one[0] for one in missing} & {one[0] for one in here.terms}:
            return  # it cannot follow
        # Everything that can be drained is drained first; the rest is reported.
        if self._over(here, there):
            ready = here.reported >= {one for one in here.promised if not self._had(there, one)}
        else:
            ready = not self._plans(state)
        if ready:
            nonce = (there.newest[0] + 1, "A")
            opened = here._replace(terms=(*here.terms, *missing, nonce), opens=here.opens + 1, step=0)
            record = Rec("open", nonce, number=self._reached(there))
            yield f"A opens {nonce} in both", state._replace(here=opened, log=(*state.log, record))

    def _copy_of_a_part(self, state: State) -> Steps:
        for one in state.here.promised - state.here.damaged:
            base = base_of(one)
            chain = () if base is None else (base,)
            others = [step for _, step in state.here.promised - {one}]
            records = [Rec("lacks", _FIRST, number=min(others))] if others and self.rules.part_told else []
            records += [Rec("add", _FIRST, (*chain, one))]
            records += [Rec("retire", _FIRST, chain)] if chain else []
            made = state._replace(log=(*state.log, *records), data=state.data | {*chain, one}, ever=state.ever | {one})
            yield f"a copy of {one} alone", made

    # ---- drains

    def _drain(self, state: State, number: int) -> Steps:
        drain = state.drains[number]
        if drain is None:
            here, there = state.here, catalog(state.log)
            if self._over(here, there):
                yield from self._reports(state)
                return
            for label, planned in self._plans(state):
                yield f"drain {number} {label}", _at(state, number, planned)
            return
        yield f"drain {number} is killed", _at(state, number, None)
        if drain.record.kind == "add" and not drain.brought:
            brought = _at(state, number, drain._replace(brought=True))
            yield f"drain {number} brings segments", brought._replace(data=brought.data | set(drain.record.checkpoints))
            return
        if drain.slot != len(state.log):
            if self.rules.read_anew or catalog(state.log).newest != drain.record.nonce:
                yield f"drain {number} finds slot {drain.slot} taken: reads again", _at(state, number, None)
            else:
                yield f"drain {number} goes to the next slot", _at(state, number, drain._replace(slot=len(state.log)))
            return
        done = _at(state, number, None)._replace(log=(*state.log, drain.record))
        if drain.request is not None:
            done = done._replace(requests=done.requests - {drain.request})
        yield f"drain {number} creates slot {drain.slot}: {drain.record}", _promised(done, drain.record)

    def _over(self, here: Here, there: Catalog) -> bool:
        """Whether another process has continued the run in the remote without the machine."""
        return there.newest not in here.terms or any(one not in there.terms for one in here.terms[:-1])

    def _reports(self, state: State) -> Steps:
        """A checkpoint that the remote never gets is called a branch."""
        here, there = state.here, catalog(state.log)
        left = {one for one in here.promised if not self._had(there, one)} - here.reported
        for nonce, step in left & state.ever:
            lacks = there.lacking(nonce)
            if lacks is None or step < lacks:
                raise ViolationError(f"{(nonce, step)} is called a branch, and the remote had it")
        if left:
            yield f"A reports {sorted(left)}", state._replace(here=here._replace(reported=here.reported | left))

    def _plans(self, state: State) -> list[tuple[str, Drain]]:
        """The next actions of a pass; empty: nothing is left."""
        here, there, slot = state.here, catalog(state.log), len(state.log)
        newest = here.terms[-1]
        if newest not in there.terms:
            return [("plans A's term", Drain(slot, Rec("open", newest, number=self._reached(there))))]
        good, left_out = self._sorted(here, there, newest)
        found: list[tuple[str, Drain]] = []
        lowest, known = min(left_out, default=None), there.lacking(newest)
        if lowest is not None and (known is None or lowest < known) and self.rules.lacks != "never":
            found = [("notes what it lacks", Drain(slot, Rec("lacks", newest, number=lowest)))]
            if self.rules.lacks == "first" or not good:
                return found
        if good:
            counts = range(1, min(2, len(good)) + 1)
            return [("plans to add", Drain(slot, Rec("add", newest, tuple(good[:count])))) for count in counts]
        for request in sorted(state.requests):
            answer = self._answered(there, request)
            if answer is not None:
                found.append(("answers", Drain(slot, answer, request=request)))
        return found

    def _sorted(self, here: Here, there: Catalog, newest: Nonce) -> tuple[list[Checkpoint], list[int]]:
        """The commits that the remote lacks of the newest term: those to bring, and the steps to leave out."""
        good: list[Checkpoint] = []
        left_out: list[int] = []
        for one in sorted(here.promised):
            if one[0] != newest or one in there.promised or (one in there.retired and self.rules.never_again):
                continue
            base = base_of(one)
            found = base is None or base in there.live or base in good or not self.rules.bases_there
            if one not in here.damaged and found:
                good.append(one)
            else:
                left_out.append(one[1])
        return good, left_out

    def _answered(self, there: Catalog, request: Rec) -> Rec | None:
        """The record of a request to retire; None: it is refused."""
        left = there.promised - set(request.checkpoints)
        sound = there.promised >= set(request.checkpoints) and not needed(left) & set(request.drops)
        if request.nonce != there.newest or not (sound or not self.rules.requests_checked):
            return None
        return request

    # ---- others

    def _elsewhere(self, state: State) -> Steps:
        """Another machine that continues the run, as the remote sees it."""
        other, there = state.other, catalog(state.log)
        if other.phase == "idle" and other.left:
            record = Rec("open", (there.newest[0] + 1, "B"), number=self._reached(there))
            yield "B reads", state._replace(other=Other("opening", len(state.log), record, other.left))
        elif other.phase == "opening" and other.record is not None:
            if other.slot != len(state.log):
                yield "B finds its slot taken", state._replace(other=other._replace(phase="idle"))
            else:
                owner = other._replace(phase="own")
                yield f"B creates {other.record}", state._replace(other=owner, log=(*state.log, other.record))
        elif other.phase == "own" and other.record is not None and other.left:
            if there.newest != other.record.nonce:
                yield "B is fenced", state._replace(other=Other("done"))
                return
            saved = (other.record.nonce, self.rules.elsewhere - other.left + 1)
            record = Rec("add", other.record.nonce, (saved,))
            after = state._replace(
                other=other._replace(left=other.left - 1), log=(*state.log, record), data=state.data | {saved}
            )
            yield f"B saves {saved}", _promised(after, record)

    def _prune(self, state: State) -> Steps:
        pruner, there = state.pruner, catalog(state.log)
        if pruner.phase == "idle" and pruner.left:
            for record in retirements(there):
                asked = state._replace(requests=state.requests | {record}, pruner=pruner._replace(left=pruner.left - 1))
                yield f"a prune asks: {record}", asked
            if self.rules.take_over and there.promised:
                record = Rec("open", (there.newest[0] + 1, "P"), number=self._reached(there))
                opening = Other("opening", len(state.log), record, pruner.left - 1)
                yield "a prune reads, to take over", state._replace(pruner=opening)
        elif pruner.phase == "opening" and pruner.record is not None:
            if pruner.slot != len(state.log):
                yield "a prune finds its slot taken", state._replace(pruner=Other("idle", left=pruner.left))
            else:
                owner = pruner._replace(phase="own")
                yield f"a prune creates {pruner.record}", state._replace(pruner=owner, log=(*state.log, pruner.record))
        elif pruner.phase == "own" and pruner.record is not None:
            over = Other("idle", left=pruner.left)
            yield "a prune is killed", state._replace(pruner=over)
            if there.newest == pruner.record.nonce:
                for record in retirements(there):
                    yield f"a prune creates {record}", state._replace(pruner=over, log=(*state.log, record))

    def _collect(self, state: State) -> Steps:
        """gc of the remote: READ, and later the deletion of unneeded segments."""
        if state.doomed:
            yield "gc deletes", state._replace(data=state.data - state.doomed, doomed=frozenset())
            return
        there = catalog(state.log)
        named = there.promised | there.retired
        strays = {one for one in state.data - named if one[0][0] < there.newest[0] or not self.rules.gc_spares_newest}
        found = (state.data & there.dropped) | strays
        if found:
            yield f"gc finds {sorted(found)}", state._replace(doomed=frozenset(found))

    def _fill(self, state: State) -> Steps:
        """A reader of a damaged checkpoint looks for it in the remote, and brings it back."""
        here, there = state.here, catalog(state.log)
        if state.filling is not None and state.damaged is not None:
            over = state._replace(filling=None, damaged=None)
            if state.filling not in state.data:
                yield "a reader finds the segment gone", over
                return
            if state.filling != state.damaged:
                raise ViolationError(f"{state.filling} was filled in for {state.damaged}")
            yield (
                f"a reader fills {state.damaged} in",
                over._replace(here=here._replace(damaged=here.damaged - {state.damaged})),
            )
            return
        for one in here.damaged & here.promised:
            for found in sorted(there.promised):
                same = found == one if self.rules.fill_compares else (found[0][0], found[1]) == (one[0][0], one[1])
                if same:
                    yield f"a reader looks for {one}", state._replace(filling=found, damaged=one)


def _promised(state: State, record: Rec) -> State:
    """No added checkpoint was ever retired before."""
    if record.kind != "add":
        return state
    again = set(record.checkpoints) & catalog(state.log).retired
    if again:
        raise ViolationError(f"{sorted(again)} is promised in the remote again, which had retired it")
    return state._replace(ever=state.ever | set(record.checkpoints))


def _check(state: State) -> None:
    lost = needed(catalog(state.log).promised) - state.data
    if lost:
        raise ViolationError(f"the remote promises what needs {sorted(lost)}, which is not there")


def _at(state: State, number: int, drain: Drain | None) -> State:
    return state._replace(drains=(*state.drains[:number], drain, *state.drains[number + 1 :]))
