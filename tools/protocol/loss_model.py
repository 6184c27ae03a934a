"""Part ``loss``: slots that the medium loses or damages, and an older copy of the store put back under live writers.

Slots are created one at a time and answers are never lost (part ``log`` has that); a READ is one step, and so is an
OPEN with its READ, but for `slow_opens`, which are created any time later. A fold holds what its maker read. Nothing is
deleted by the rules, so an absent slot below another one is always a loss.

The end of the log can be lost without a trace: if everything above is gone, too, nothing is left that proves it. Such
records are *forgotten*. And a slot that is lost below a fold can be created once more, by a writer that the lost record
had fenced: a reader that begins from the fold does not look there; `verify`, which begins from slot 0, does.

Invariants, for every reader, from slot 0 or from any fold: a view without damage holds everything that was acknowledged
in the slots that it looks at and not forgotten; each record that it applies continues the one before; `latest` is the
newest record of the newest term or an error, never an older one; and with writers that look before they commit, no slow
OPENs, and no losses but an older copy, every acknowledged record is in every view from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from tools.protocol.explore import ViolationError

__all__ = ["LossModel", "LossRules"]


@dataclass(frozen=True)
class LossRules:
    """Bounds of the search, and the rules of the protocol, each of which a mutant breaks."""

    writers: int = 2
    opens: tuple[int, ...] = (1, 1)
    commits: tuple[int, ...] = (2, 1)
    slots: int = 5
    losses: int = 2  # slots that vanish
    damages: int = 1  # slots that become unreadable
    copies: int = 1  # how often an older copy is put back
    folds: int = 1
    slow_opens: bool = False
    # -- the rules
    look_above: bool = True
    linked: bool = True
    nonces: bool = True
    folds_carry_last: bool = True
    compare_folds: bool = True
    parents_found: bool = True
    writers_look: bool = True
    refuse_behind_damage: bool = True


class Rec(NamedTuple):
    """A record: ``O``PEN, or its term's COMMIT number `number`. `previous` represents the hash of the slot before."""

    kind: str
    term: int
    nonce: str
    number: int
    parent: Rec | None
    previous: Rec | str | None

    def __str__(self) -> str:
        return f"OPEN {self.term} by {self.nonce}" if self.kind == "O" else f"COMMIT {self.nonce}.{self.number}"


BAD: Final = "unreadable"
_NOTHING: Final = "nothing"
"""The last slot in the folds of a mutant."""
Slot = Rec | str | None


class View(NamedTuple):
    """The result of a READ. `entries` has None for every slot that is damaged, missing, or does not follow."""

    entries: tuple[Rec | None, ...] = ()
    last: Slot = None

    @property
    def damage(self) -> tuple[int, ...]:
        return tuple(seq for seq, record in enumerate(self.entries) if record is None)

    @property
    def newest(self) -> Rec | None:
        """The record that determines the newest term."""
        return max((record for record in self.entries if record), key=lambda record: record.term, default=None)

    def opening(self, term: int) -> int:
        """The slot of the term's OPEN, or -1 if that is damaged."""
        return next((seq for seq, rec in enumerate(self.entries) if rec and rec.term == term and rec.kind == "O"), -1)

    def of_term(self, term: int) -> list[Rec]:
        return [rec for rec in self.entries if rec and rec.term == term and rec.kind == "C"]


class Writer(NamedTuple):
    """`phase`: idle | open | own | stopped. `last`: the slot before its next one, as it knows it (``open``: OPEN)."""

    phase: str = "idle"
    opens: int = 0
    commits: int = 0
    slot: int = 0
    term: int = 0
    nonce: str = ""
    last: Slot = None


class State(NamedTuple):
    """The whole state."""

    slots: tuple[Slot, ...]
    folds: frozenset[View] = frozenset()
    writers: tuple[Writer, ...] = ()
    acknowledged: frozenset[tuple[int, Rec]] = frozenset()
    forgotten: frozenset[tuple[int, Rec]] = frozenset()
    lost: int = 0
    damaged: int = 0
    copied: int = 0


class _UnknownError(Exception):
    """`latest` is unknown."""


Steps = Iterator[tuple[str, State]]


@dataclass(frozen=True)
class LossModel:
    """The transition system of `rules`."""

    rules: LossRules

    def initial(self) -> State:
        """An empty store; no process has done anything."""
        return State((None,) * self.rules.slots, writers=(Writer(),) * self.rules.writers)

    def successors(self, state: State) -> Iterable[tuple[str, State]]:
        """Everything that any process, or the medium, can do next."""
        for start in (View(), *state.folds):
            self._check(state, start)
        for index in range(len(state.writers)):
            yield from self._write(state, index)
        yield from self._mishaps(state)
        if len(state.folds) < self.rules.folds:
            view = self._read(state.slots, View())
            settled = view.newest is not None and max(view.damage, default=-1) < view.opening(view.newest.term)
            if settled and view not in state.folds:
                fold = view if self.rules.folds_carry_last else view._replace(last=_NOTHING)
                yield f"a fold through slot {len(view.entries) - 1}", state._replace(folds=state.folds | {fold})

    # ---- READ and latest

    def _read(self, slots: tuple[Slot, ...], start: View) -> View:
        entries, last = list(start.entries), start.last
        there = slots[len(entries) - 1] if entries else None
        if self.rules.compare_folds and isinstance(there, Rec) and there != last != _NOTHING:
            entries[-1] = None  # where the fold ends, the log has another record: one of them is not this store's
        for seq in range(len(entries), len(slots)):
            record = slots[seq]
            above = slots[seq + 1 :] if self.rules.look_above else slots[seq + 1 : seq + 2]
            if record is None and not any(above):
                break
            follows = isinstance(record, Rec) and self._follows(View(tuple(entries), last), record)
            entries.append(record if follows and isinstance(record, Rec) else None)
            last = record
        return View(tuple(entries), last)

    def _follows(self, view: View, record: Rec) -> bool:
        after_damage = bool(view.entries) and view.entries[-1] is None
        if self.rules.linked and not after_damage and view.last != _NOTHING and record.previous != view.last:
            return False
        newest = view.newest
        term = newest.term if newest else 0
        if record.kind == "O":
            return record.term > term
        if record.term == term and newest is not None:
            return not self.rules.nonces or record.nonce == newest.nonce
        return record.term > term and after_damage

    def _latest(self, view: View) -> Rec | None:
        """The latest record. Raises `_UnknownError` where the protocol says CorruptLogError."""
        newest = view.newest
        if newest is None:
            if view.damage:
                raise _UnknownError
            return None
        opening, commits = view.opening(newest.term), view.of_term(newest.term)
        certain = view.entries.index(commits[-1]) if commits else opening
        if self.rules.refuse_behind_damage and any(seq > certain for seq in view.damage):
            raise _UnknownError
        if commits:
            return commits[-1]
        if opening < 0:
            raise _UnknownError
        opened = view.entries[opening]
        if opened is None or opened.parent is None:
            return None
        if opened.parent in view.entries[:opening]:
            return opened.parent
        if self.rules.parents_found:
            raise _UnknownError
        return max((rec for rec in view.entries if rec and rec.kind == "C"), key=lambda rec: rec[1:4:2], default=None)

    # ---- invariants

    def _check(self, state: State, start: View) -> None:
        view = self._read(state.slots, start)
        unseen = len(start.entries) - bool(start.entries and isinstance(state.slots[len(start.entries) - 1], Rec))
        known = state.acknowledged - state.forgotten
        missing = [rec for seq, rec in known if rec not in view.entries and seq >= unseen]
        if missing and not view.damage:
            raise ViolationError(f"a view without damage lacks {missing[0]}, which was acknowledged")
        owners: dict[int, str] = {}
        for before, record in zip((None, *view.entries), view.entries, strict=False):
            if before and record and record.previous != before:
                raise ViolationError(f"a view applies {record} after {before}, which it does not continue")
            if record and owners.setdefault(record.term, record.nonce) != record.nonce:
                raise ViolationError(f"a view applies {record} to the term of {owners[record.term]}")
        try:
            latest = self._latest(view)
        except _UnknownError:
            return
        newest = view.newest
        if newest and newest.kind == "O" and not view.of_term(newest.term) and newest.parent != latest:
            raise ViolationError(f"latest is {latest}, but {newest} continues from {newest.parent}")
        for record in missing:
            if newest and record.nonce == newest.nonce and latest is not None and record.number > latest.number:
                raise ViolationError(f"latest is {latest}, but {record} was acknowledged")

    # ---- the medium

    def _mishaps(self, state: State) -> Steps:
        present = [seq for seq, record in enumerate(state.slots) if isinstance(record, Rec)]
        for seq in present:
            if state.lost < self.rules.losses:
                gone = state._replace(slots=_put(state.slots, seq, None), lost=state.lost + 1)
                yield f"slot {seq} is lost", _forget(gone)
            if state.damaged < self.rules.damages:
                bad = state._replace(slots=_put(state.slots, seq, BAD), damaged=state.damaged + 1)
                yield f"slot {seq} is damaged", bad
        if state.copied < self.rules.copies:
            for seq in present:
                cut = state.slots[:seq] + (None,) * (self.rules.slots - seq)
                folds = frozenset(fold for fold in state.folds if len(fold.entries) <= seq)
                older = state._replace(slots=cut, folds=folds, copied=state.copied + 1)
                yield f"a copy of the first {seq} slots is put back, with {len(folds)} folds", _forget(older)

    # ---- writers

    def _write(self, state: State, index: int) -> Steps:
        writer, name = state.writers[index], "AB"[index]
        if writer.phase == "idle" and writer.opens < self.rules.opens[index]:
            for start in (View(), *state.folds):
                yield from self._open(state, index, start)
        elif writer.phase == "open":
            yield from self._create_open(state, index)
        elif writer.phase == "own":
            if writer.slot < self.rules.slots and writer.commits < self.rules.commits[index]:
                yield from self._commit(state, index)
            restarted = Writer("idle", writer.opens, writer.commits)
            if writer.opens < self.rules.opens[index]:
                yield f"{name} is killed", _set(state, index, restarted)

    def _open(self, state: State, index: int, start: View) -> Steps:
        writer, name = state.writers[index], "AB"[index]
        view = self._read(state.slots, start)
        end, newest = len(view.entries), view.newest
        if end >= self.rules.slots:
            return
        try:
            parent, how = self._latest(view), "opens"
        except _UnknownError:  # refused, unless somebody names a checkpoint
            intact = [record for record in view.entries if record and record.kind == "C"]
            parent, how = (intact[-1] if intact else None), "opens on an explicit parent"
        nonce = f"{name}{writer.opens}"
        record = Rec("O", (newest.term if newest else 0) + 1, nonce, -1, parent, view.last)
        chosen = Writer("open", writer.opens + 1, writer.commits, end, record.term, nonce, record)
        label = f"{name} reads from fold {len(start.entries) - 1}, {how} term {record.term} in slot {end}"
        read = _set(state, index, chosen)
        if self.rules.slow_opens:
            yield label, read
        else:
            yield from ((f"{label}; {then}", created) for then, created in self._create_open(read, index))

    def _create_open(self, state: State, index: int) -> Steps:
        writer, name = state.writers[index], "AB"[index]
        if state.slots[writer.slot] is not None:
            restart = Writer("idle", writer.opens, writer.commits)
            yield f"{name} finds slot {writer.slot} taken: starts over", _set(state, index, restart)
            return
        opened = _set(state, index, writer._replace(phase="own", slot=writer.slot + 1))
        slots = _put(state.slots, writer.slot, writer.last)
        yield f"{name} creates slot {writer.slot}: {writer.last}", opened._replace(slots=slots)

    def _commit(self, state: State, index: int) -> Steps:
        writer, name = state.writers[index], "AB"[index]
        if self.rules.writers_look and state.slots[writer.slot - 1] != writer.last:
            yield f"{name} finds the slot before its own changed: stops", _set(state, index, Writer("stopped"))
            return
        if state.slots[writer.slot] is not None:
            yield f"{name} is fenced", _set(state, index, Writer("stopped"))
            return
        record = Rec("C", writer.term, writer.nonce, writer.commits, None, writer.last)
        owner = writer._replace(commits=writer.commits + 1, slot=writer.slot + 1, last=record)
        slots = _put(state.slots, writer.slot, record)
        after = _set(state, index, owner)._replace(
            slots=slots, acknowledged=state.acknowledged | {(writer.slot, record)}
        )
        if not (self.rules.losses or self.rules.damages or self.rules.slow_opens):
            for start in (View(), *state.folds):
                if record not in self._read(slots, start).entries:
                    raise ViolationError(f"{name} acknowledges {record}, which a reader refuses")
        yield f"{name} acknowledges slot {writer.slot}: {record}", after


def _forget(state: State) -> State:
    """An acknowledged record that is gone with everything above it leaves no proof."""
    top = max((seq for seq, record in enumerate(state.slots) if record is not None), default=-1)
    gone = {(seq, rec) for seq, rec in state.acknowledged if seq > top}
    return state._replace(forgotten=state.forgotten | gone)


def _put(slots: tuple[Slot, ...], seq: int, record: Slot) -> tuple[Slot, ...]:
    return (*slots[:seq], record, *slots[seq + 1 :])


def _set(state: State, index: int, writer: Writer) -> State:
    return state._replace(writers=(*state.writers[:index], writer, *state.writers[index + 1 :]))
