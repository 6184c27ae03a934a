"""`Follower`: looks at a run again and again, and hands over what is new, whole and verified."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from ckptstore.errors import CheckpointNotFoundError, CorruptSegmentError, UsageError
from ckptstore.exchange.export import export_resident
from ckptstore.following import ancestry
from ckptstore.following.follower_targets import Holder, from_file, refuse_foreign
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.records import Node, ref_of
from ckptstore.host.buffers import Bytes
from ckptstore.host.threads import default_threads
from ckptstore.log import refs
from ckptstore.log.checkpoint_info import CheckpointInfo, describe_checkpoint
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import View
from ckptstore.log.log_watch import Looks
from ckptstore.restore.load import LoadOptions, rebuilt, restoring
from ckptstore.restore.open_checkpoint import Opened
from ckptstore.restore.resident_checkpoint import HELD, HeldState
from ckptstore.restore.resident_load import BytesRead, hold, lacking

if TYPE_CHECKING:
    from ckptstore.host.progress import Progress

__all__ = ["LONGEST", "SHORTEST", "FollowOptions", "Followed", "Follower"]

SHORTEST: Final = 0.01
LONGEST: Final = 86400.0
"""Seconds that can be between two looks."""
_NAP: Final = 0.2
"""Seconds after which one who waits asks whether it shall end."""


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """See `Store.follow`."""

    into: Any = None
    select: str | Sequence[str] | None = None
    framework: Literal["torch", "numpy"] | None = None
    device: Any = None
    rank: int | None = None
    each: bool = False
    poll: float = 2.0
    timeout: float | None = None
    stop: threading.Event | None = None
    threads: int | None = None
    progress: Progress | None = None
    out: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if not _seconds(self.poll) or not SHORTEST <= self.poll <= LONGEST:
            raise UsageError(f"poll: {self.poll!r:.80}; from {SHORTEST:g} to {LONGEST:g} seconds are between two looks")
        if self.timeout is not None and (not _seconds(self.timeout) or not self.timeout >= 0):
            raise UsageError(f"timeout: {self.timeout!r:.80}; a number of seconds, or None, is needed")
        if self.into is not None and self.out is not None:
            raise UsageError("into= and out=: one follower fills tensors or replaces a file; open two")
        if self.rank is not None and self.out is not None:
            raise UsageError("rank= and out=: a file has the tensors of all ranks; leave rank= out, or save what comes")
        self.loading  # noqa: B018  # what cannot be meant is refused now

    @property
    def loading(self) -> LoadOptions:
        """How the tensors are handed over. They have been verified by then."""
        return LoadOptions(
            self.framework, self.into, self.select, self.device, verify=False, threads=self.threads, rank=self.rank
        )


def _seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Followed:
    """A checkpoint that was handed over.

    Attributes:
        info: which one.
        state: the state, or what was selected of it; its tensors are those of ``into=``, if that was given, else the
            caller's own. None with ``out=``.
        base: REF of the checkpoint from which it was made in memory; None: it was read from the store alone.
        plan: kinds of the encodings that were read, in order: ``full``, ``delta``, ``gradient``.
        skipped: newer than the one before, older than this, and not handed over.
        branched: it does not go on from the one before: the run went back, or another run of it forked.
        fork: if so, the REF at which the lines part; None: they have nothing in common.
        bytes_read: bytes of segments that were read.
        requests: sent to an object store since the look before; None where they cost nothing.
        seconds: from the look that found it until it was handed over.
    """

    info: CheckpointInfo
    state: Any
    base: str | None
    plan: tuple[str, ...]
    skipped: int
    branched: bool
    fork: str | None
    bytes_read: int
    requests: int | None
    seconds: float


@dataclass(frozen=True, slots=True)
class _Goal:
    """What is to be handed over next."""

    node: Node
    skipped: int
    branched: bool
    fork: str | None


class Follower:
    """An iterator over the checkpoints of a run as they come; see `Store.follow`.

    One thread iterates; `close` may be called by any. After an error ``next`` goes on: what was held is still whole.
    """

    def __init__(self, journal: Journal, after: str | int | None, options: FollowOptions) -> None:
        """Nothing is read yet."""
        self._options = options
        self._after = after
        self._begun = False
        self._looks = Looks(journal)
        self._costs = journal.backend.costs
        self._closed = threading.Event()
        self._looking = threading.Lock()
        self._held: list[HeldState] = []  # the newest, and what it was made of
        self._spare: list[Bytes] = []
        self._seen: Node | None = None
        self._waiting: deque[_Goal] = deque()

    def __iter__(self) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End: whoever waits in ``next`` gets `StopIteration` soon, and the memory is given back.

        A look that another thread is at goes on to its end, which gives back what it uses.
        """
        self._closed.set()
        self._let_go()

    def _let_go(self) -> None:
        """Give back memory and handles, unless a look is using them: its thread calls this when it has ended."""
        if self._looking.acquire(blocking=False):
            try:
                self._held, self._spare = [], []
                self._looks.close()
            finally:
                self._looking.release()

    @property
    def ended(self) -> bool:
        """Whether `close` was called, or the event `stop` is set."""
        stop = self._options.stop
        return self._closed.is_set() or (stop is not None and stop.is_set())

    def __next__(self) -> Followed:
        """The next checkpoint; waits for it. Raises as `Store.follow` says; `StopIteration`: ended, or timed out."""
        options, began = self._options, time.monotonic()
        while not self.ended:
            if (found := self.look()) is not None:
                return found
            until = time.monotonic() + options.poll
            if options.timeout is not None:
                if time.monotonic() - began >= options.timeout:
                    break
                until = min(until, began + options.timeout)
            while not self.ended and (left := until - time.monotonic()) > 0:
                self._closed.wait(min(left, _NAP))
        raise StopIteration

    def look(self) -> Followed | None:
        """The next checkpoint if there is one already, else None: what ``next`` does without waiting."""
        try:
            with self._looking:
                return self._looked()
        finally:
            if self._closed.is_set():
                self._let_go()

    def _looked(self) -> Followed | None:
        began = time.monotonic()
        before = None if self._costs is None else self._costs.spent
        journal, view = self._looks.look()
        if not self._begun:
            self._begin(journal, view)
            self._begun = True
        goal = self._goal(view.catalog)
        if goal is None:
            return None
        found = self._handed_over(journal, view, goal)
        requests = None if self._costs is None or before is None else (self._costs.spent - before).total
        self._seen = goal.node
        return replace(found, requests=requests, seconds=time.monotonic() - began)

    def _begin(self, journal: Journal, view: View) -> None:
        """Take up where another follower ended; what `into` or the file still has need not be read."""
        after, out = self._after, self._options.out
        if out is not None:
            refuse_foreign(Path(out))
        if out is not None and (found := from_file(Path(out), journal, self._options.select, view)) is not None:
            self._held, self._seen = [found], found.id.node
        if after is None:
            return
        wanted = refs.parsed(view.catalog, after)
        try:
            entry = refs.resolve(view.catalog, wanted)
        except CheckpointNotFoundError:
            if wanted.node is not None:
                return  # it has been retired since: whatever is there is after it
            raise
        self._seen = entry.node
        if self._options.into is not None:
            held = Holder(self._options.into).adopted(
                journal, entry.ref, self._options.select, view, self._options.rank
            )
            self._held = [] if held is None else [held]

    def _goal(self, catalog: Catalog) -> _Goal | None:
        while self._waiting:
            goal = self._waiting.popleft()
            if goal.node in catalog.checkpoints:
                return goal
        newest = catalog.latest()
        if newest is None or newest.node == self._seen:
            return None
        if self._seen is None:
            return _Goal(newest.node, 0, branched=False, fork=None)
        at = ancestry.parting(catalog, self._seen, newest.node)
        branched = at != self._seen
        fork = ref_of(at) if branched and at is not None else None
        nodes = ancestry.between(catalog, self._seen, newest.node)
        if not self._options.each:
            return _Goal(newest.node, len(nodes) - 1, branched, fork)
        self._waiting.extend(_Goal(node, 0, branched=False, fork=None) for node in nodes[1:])
        return _Goal(nodes[0], 0, branched, fork)

    def _handed_over(self, journal: Journal, view: View, goal: _Goal) -> Followed:
        entry = view.catalog.checkpoints[goal.node]
        read = BytesRead()
        plan: tuple[str, ...] = ()
        base: str | None = None
        self._held.sort(key=lambda one: one.id != entry.id or not one.complete)  # the run may go back to the base
        if not self._held or self._held[0].id != entry.id or not self._held[0].complete:
            read, plan, base = self._restored(journal, view, entry.ref)
        held = self._held[0]
        state = None
        if self._options.out is not None:
            export_resident(held, Path(self._options.out), select=self._options.select)
        else:
            try:
                state = rebuilt(held, self._options.loading)
            except UsageError:
                raise  # nothing was overwritten
            except BaseException as error:
                if self._options.into is not None:
                    error.add_note("the tensors of into= are torn: some are of this checkpoint, some of the one before")
                raise
        info = describe_checkpoint(view.catalog, entry)
        counts = (goal.skipped, goal.branched, goal.fork, read.nbytes)
        return Followed(info, state, base, plan, *counts, None, 0.0)

    def _restored(self, journal: Journal, view: View, ref: str) -> tuple[BytesRead, tuple[str, ...], str | None]:
        """Hold the checkpoint `ref`, from what is held if that is the way -> what was read, and from what."""
        options, read = self._options, BytesRead()
        told: list[tuple[tuple[str, ...], str | None]] = []

        def held(found: Opened) -> list[HeldState] | None:
            for reader in found.readers.values():
                read.add(reader.entry.header)
            if lacking(found, options.select, options.rank):
                return None
            base = found.base
            told.append((tuple(edge.kind for edge in found.plan.encodings), None if base is None else base.ref))
            # What this does not build on gives its memory; beside a base the newest does, too.
            kept = self._held[:1] if base is None else [base]
            self._spare += [one.region for one in self._held if all(one is not other for other in kept)]
            self._held = kept
            threads = options.threads or default_threads()
            return hold(found, options.select, self._spare, threads, options.progress, read, options.rank)

        bases = [one for one in self._held if not one.lossy]  # deltas build on the bits that training had
        try:
            new = restoring(journal, ref, held, bases, view)
        except CorruptSegmentError as error:
            if HELD not in str(error):
                raise
            new = None  # memory has changed under our hands: what is held is worth nothing
        if new is None:
            new = restoring(journal, ref, held, (), view)
        assert new is not None  # nothing is lacking without a base
        used = {id(one.region) for one in new}
        idle = [region for region in (*self._spare, *(one.region for one in self._held)) if id(region) not in used]
        self._held, self._spare = new, idle[: 2 - len(new)]
        return read, *told[-1]
