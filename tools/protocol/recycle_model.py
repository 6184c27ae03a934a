"""Part ``recycle``: one file that was segment A, and that two writers would like to overwrite with B and C.

gc makes the dropped A a spare file; a power cut may bring its old name back. Writer 1 writes B, and may be a zombie:
its term is over, and gc takes B's file away, whatever the writer is doing. Writer 2 writes C. A reader of ours, whose
pin was taken for dead, and a foreign reader that knows nothing of the store use A's path. Opening a file is two steps:
the path is looked up, and then the file is opened, however late and whatever its name is by then.

Invariants: a committed segment keeps its name and its bytes. A reader that has read a header finds the bytes that
belong to it as long as it has the file open or mapped, verified or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tools.protocol.explore import ViolationError

__all__ = ["RecycleModel", "RecycleRules"]


@dataclass(frozen=True)
class RecycleRules:
    """The steps before a file is overwritten, and its users."""

    writers_lock: bool = True
    readers_lock: bool = True
    readers_compare: bool = True  # the header with the log's hash of it
    lease: bool = True
    lease_until_cleared: bool = True  # not released before the old header is gone
    one_name: bool = True  # refuse a file that has several names
    own_name: bool = True  # and one whose name is not the one it was given
    names_under_lease: bool = True  # and check when nobody else can open it
    clear: bool = True
    header_last: bool = True
    strangers: bool = True


class State(NamedTuple):
    """The file, and the progress of each process. Writers: see `_STEPS`; readers: begin, resolved, opened, locked,
    reading, end."""

    names: frozenset[str] = frozenset({"old"})
    header: str = "A"
    data: str = "A"
    lock: str = ""  # "1", "2": exclusive; "r": shared
    lease: str = ""
    cut: bool = False
    writer1: str = "begin"
    writer2: str = "begin"
    reader: str = "begin"
    stranger: str = "begin"
    told: str = ""  # the header that the foreign reader has read


_STEPS = (
    "begin",
    "renamed",
    "resolved",
    "opened",
    "locked",
    "leased",
    "checked",
    "cleared",
    "free",
    "writing",
    "written",
)
"""The steps of a writer, in order; then ``sealed``, ``committed`` or ``end``."""
_OPEN = frozenset(_STEPS[3:])


@dataclass(frozen=True)
class RecycleModel:
    """The transition system of `rules`."""

    rules: RecycleRules

    def initial(self) -> State:
        """A is dropped, and its file is there."""
        return State()

    def successors(self, state: State) -> Iterable[tuple[str, State]]:
        """Everything that can happen next."""
        self._check(state)
        names = state.names
        if "old" in names:
            yield "gc makes the file of A a spare file", state._replace(names=names - {"old"} | {"spare"})
        if "1" in names and state.writer1 not in ("begin", "committed"):
            yield "gc takes B's file from a zombie", state._replace(names=names - {"1"} | {"spare"})
        if "old" not in names and not state.cut:
            yield "a power cut brought the old name back", state._replace(names=names | {"old"}, cut=True)
        yield from self._writer(state, "1", "B")
        yield from self._writer(state, "2", "C")
        yield from self._reader(state)
        if self.rules.strangers:
            yield from self._stranger(state)

    def _check(self, state: State) -> None:
        for number, content in (("1", "B"), ("2", "C")):
            if getattr(state, f"writer{number}") == "committed" and (
                number not in state.names or (state.header, state.data) != (content, content)
            ):
                raise ViolationError(f"the committed segment {content} is damaged or gone")
        if state.reader == "reading" and state.data != "A":
            raise ViolationError("a reader of A has other bytes")
        if state.stranger == "reading" and state.data != state.told:
            raise ViolationError("a stranger has one segment's header and another's bytes")

    def _alone(self, state: State, number: str) -> bool:
        other = state.writer2 if number == "1" else state.writer1
        users = state.reader in ("opened", "locked", "reading"), state.stranger in ("opened", "reading")
        return other not in _OPEN and not any(users)

    def _writer(self, state: State, number: str, content: str) -> Iterator[tuple[str, State]]:
        step = getattr(state, f"writer{number}")
        who = f"writer {number}"

        def to(following: str, **changes: Any) -> State:
            return state._replace(**{f"writer{number}": following}, **changes)

        lock, lease = ("" if held == number else held for held in (state.lock, state.lease))
        refused = to("end", names=state.names - {number}, lock=lock, lease=lease)
        alone = not (self.rules.one_name and len(state.names) != 1) and not (
            self.rules.own_name and number not in state.names
        )
        if step == "begin" and "spare" in state.names:
            yield f"{who} renames the spare file", to("renamed", names=state.names - {"spare"} | {number})
        elif step == "renamed":
            early = not self.rules.names_under_lease and not alone
            yield f"{who} looks its name up", refused if early or number not in state.names else to("resolved")
        elif step == "resolved":
            yield f"{who} opens the file", refused if lease else to("opened")
        elif step == "opened":
            free = not state.lock or not self.rules.writers_lock
            yield f"{who} asks for the lock", to("locked", lock=number) if free else refused
        elif step == "locked":
            granted = self._alone(state, number) or not self.rules.lease
            held = number if self.rules.lease and self.rules.lease_until_cleared else lease
            yield f"{who} asks for the lease", to("leased", lease=held) if granted else refused
        elif step == "leased":
            fine = alone or not self.rules.names_under_lease
            yield f"{who} looks at the names", to("checked") if fine else refused
        elif step == "checked":
            yield f"{who} clears the header", to("cleared", header="0" if self.rules.clear else state.header)
        elif step == "cleared":
            yield f"{who} gives the lease back", to("free", lease=lease)
        elif step in ("free", "writing"):
            header = (step == "writing") == self.rules.header_last
            change = {"header": content} if header else {"data": content}
            yield f"{who} writes the {next(iter(change))}", to("writing" if step == "free" else "written", **change)
        elif step == "written":
            there = number in state.names
            yield f"{who} seals and commits", to("committed" if there else "end", lock=lock)

    def _reader(self, state: State) -> Iterator[tuple[str, State]]:
        step = state.reader
        if step == "begin" and "old" in state.names:
            yield "the reader looks A's path up", state._replace(reader="resolved")
        elif step == "resolved":
            yield "the reader opens the file", state._replace(reader="end" if state.lease else "opened")
        elif step == "opened":
            if not self.rules.readers_lock:
                yield "the reader does not lock", state._replace(reader="locked")
            elif state.lock in ("1", "2"):
                yield "the reader is refused the lock", state._replace(reader="end")
            else:
                yield "the reader locks", state._replace(reader="locked", lock="r")
        elif step == "locked":
            right = state.header == "A" or not self.rules.readers_compare
            lock = state.lock if right or state.lock != "r" else ""
            yield "the reader reads the header", state._replace(reader="reading" if right else "end", lock=lock)
        elif step == "reading":
            yield "the reader is done", state._replace(reader="end", lock="" if state.lock == "r" else state.lock)

    def _stranger(self, state: State) -> Iterator[tuple[str, State]]:
        step = state.stranger
        if step == "begin" and "old" in state.names:
            yield "the stranger looks A's path up", state._replace(stranger="resolved")
        elif step == "resolved" and not state.lease:  # else it waits
            yield "the stranger opens the file", state._replace(stranger="opened")
        elif step == "opened":
            follows = "end" if state.header == "0" else "reading"
            yield "the stranger reads the header", state._replace(stranger=follows, told=state.header)
        elif step == "reading":
            yield "the stranger is done", state._replace(stranger="end")
