"""Part ``power``: POSIX names are visible before they are durable. A process that acts on a name settles it first.

Slot 1 adds segment b and drops segment a; slot 2 is the OPEN of the next writer; the fold goes through slot 1; slot 0
is what it lets go. A power cut keeps every unlink (the worst case), every name that was fsynced, and any of the names
that were not. So "if X survives, Y must" is broken as soon as X is visible while Y is not durable.

Invariants: a slot that was acknowledged, or reported to a requester, survives; no slot and no fold outlives the slots
before it; whatever was unlinked because of a name goes only if that name stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tools.protocol.explore import ViolationError

__all__ = ["PowerModel", "PowerRules"]


@dataclass(frozen=True)
class PowerRules:
    """Which processes fsync the folder of names that they have only seen."""

    create_syncs: bool = True  # a create fsyncs log/ before it is confirmed
    read_back_settles: bool = True  # a writer whose create failed after the link, and that reads its slot back
    open_settles: bool = True
    fold_settles: bool = True
    gc_settles: bool = True
    trim_settles: bool = True
    requester_settles: bool = True


class State(NamedTuple):
    """Names: 0 absent, 1 visible, 2 durable. Actors: what they have seen or done."""

    slot1: int = 0
    slot2: int = 0
    fold: int = 0
    acknowledged: bool = False
    told: bool = False
    writer: str = "begin"  # begin | linked | doubt | read back | end
    opener: str = "begin"  # begin | saw | ready | linked
    folder: str = "begin"
    gc: str = "begin"  # begin | saw | ready | unlinked a
    trim: str = "begin"  # begin | saw | ready | unlinked slot 0
    requester: str = "begin"


def _settled(state: State) -> State:
    """fsync of log/: every name that is visible there becomes durable."""
    return state._replace(slot1=2 if state.slot1 else 0, slot2=2 if state.slot2 else 0)


@dataclass(frozen=True)
class PowerModel:
    """The transition system of `rules`."""

    rules: PowerRules

    def initial(self) -> State:
        """Slot 0 and segments a and b are durable."""
        return State()

    def successors(self, state: State) -> Iterable[tuple[str, State]]:
        """Everything that can happen next."""
        self._check(state)
        yield from self._writer(state)
        yield from self._on_slot1(state, "opener", self.rules.open_settles)
        yield from self._on_slot1(state, "folder", self.rules.fold_settles)
        yield from self._on_slot1(state, "gc", self.rules.gc_settles)
        yield from self._on_slot1(state, "requester", self.rules.requester_settles)
        if state.opener == "ready":
            yield "the opener links slot 2", state._replace(opener="linked", slot2=1)
        if state.folder == "ready":
            yield "the folder links the fold", state._replace(folder="linked", fold=1)
        if state.folder == "linked" and state.fold == 1:
            yield "the folder fsyncs fold/", state._replace(fold=2)
        if state.gc == "ready":
            yield "gc unlinks segment a", state._replace(gc="unlinked a")
        if state.requester == "ready":
            yield "the requester is told that slot 1 is committed", state._replace(requester="end", told=True)
        if state.fold and state.trim == "begin":
            ready = state._replace(trim="ready", fold=2 if self.rules.trim_settles else state.fold)
            yield "trim sees the fold" + (" and fsyncs fold/" if self.rules.trim_settles else ""), ready
        if state.trim == "ready":
            yield "trim unlinks slot 0", state._replace(trim="unlinked slot 0")

    def _check(self, state: State) -> None:
        if state.acknowledged and state.slot1 < 2:
            raise ViolationError("power cut: an acknowledged commit is lost")
        if state.told and state.slot1 < 2:
            raise ViolationError("power cut: a commit that the requester was told of is lost")
        if state.slot2 and state.slot1 < 2:
            raise ViolationError("power cut: the OPEN survives, the slot before it is lost")
        if state.fold and state.slot1 < 2:
            raise ViolationError("power cut: the fold survives, the slot it goes through is lost")
        if state.gc == "unlinked a" and state.slot1 < 2:
            raise ViolationError("power cut: the drop is lost, the dropped segment is gone")
        if state.trim == "unlinked slot 0" and state.fold < 2:
            raise ViolationError("power cut: the fold is lost, the slots it replaced are gone")

    def _writer(self, state: State) -> Iterator[tuple[str, State]]:
        if state.writer == "begin":
            yield "the writer links slot 1", state._replace(writer="linked", slot1=1)
        elif state.writer == "linked":
            yield "the writer is killed", state._replace(writer="end")
            yield "the writer's fsync of log/ fails", state._replace(writer="doubt")
            synced = _settled(state) if self.rules.create_syncs else state
            yield "the writer fsyncs log/ and acknowledges", synced._replace(writer="end", acknowledged=True)
        elif state.writer == "doubt":
            settled = _settled(state) if self.rules.read_back_settles else state
            yield "the writer reads slot 1 back and acknowledges", settled._replace(writer="end", acknowledged=True)

    def _on_slot1(self, state: State, actor: str, settles: bool) -> Iterator[tuple[str, State]]:
        """Someone sees slot 1, and fsyncs log/ before it acts on that."""
        if getattr(state, actor) == "begin" and state.slot1:
            seen = _settled(state) if settles else state
            label = f"the {actor} sees slot 1" + (" and fsyncs log/" if settles else "")
            ready: dict[str, Any] = {actor: "ready"}
            yield label, seen._replace(**ready)
