"""`Follower`: polls a run, and yields each new checkpoint complete and verified."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ckptstore.errors import CheckpointNotFoundError, CorruptSegmentError, UsageError
from ckptstore.exchange.export import export_resident
from ckptstore.following import ancestry
from ckptstore.following.follower_targets import TargetState, refuse_foreign, resident_from_file
from ckptstore.following.polling import Polling, check_polling
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import Node, ref_of
from ckptstore.host.buffers import Bytes
from ckptstore.host.threads import default_threads
from ckptstore.log import refs
from ckptstore.log.checkpoint_info import CheckpointInfo, describe_checkpoint
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import View
from ckptstore.log.log_watch import LogWatch
from ckptstore.restore.load import LoadOptions, rebuild, restore_with
from ckptstore.restore.open_checkpoint import OpenCheckpoint
from ckptstore.restore.resident_checkpoint import RESIDENT, ResidentCheckpoint
from ckptstore.restore.resident_load import BytesRead, lacking, load_resident

if TYPE_CHECKING:
    from ckptstore.host.progress import Progress

__all__ = ["FollowOptions", "Followed", "Follower"]


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
        check_polling(self.poll, self.timeout)
        if self.into is not None and self.out is not None:
            raise UsageError("into= and out=: one follower fills tensors or replaces a file; open two")
        if self.rank is not None and self.out is not None:
            raise UsageError("rank= and out=: a file has the tensors of all ranks; leave rank= out, or save the states")
        self.loading  # noqa: B018  # invalid options are rejected now

    @property
    def loading(self) -> LoadOptions:
        """The options with which the tensors are built. The bytes have been verified before."""
        return LoadOptions(
            self.framework, self.into, self.select, self.device, verify=False, threads=self.threads, rank=self.rank
        )


@dataclass(frozen=True, slots=True)
class Followed:
    """A checkpoint that was yielded.

    Attributes:
        info: the checkpoint.
        state: the state, or the selected part; its tensors are those of ``into=``, or new ones. None with ``out=``.
        base: REF of the checkpoint in memory from which it was built; None: it was read from the store alone.
        plan: kinds of the encodings that were read, in order: ``full``, ``delta``, ``gradient``.
        skipped: number of checkpoints between the previous one and this one that were not yielded.
        branched: it does not continue from the previous one: the run went back, or was forked.
        fork: if so, the REF at which the lines fork; None: they have nothing in common.
        bytes_read: bytes of segments that were read.
        requests: number of requests to an object store since the previous poll; None if they cost nothing.
        seconds: from the poll that found it until it was yielded.
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
    """The checkpoint to yield next."""

    node: Node
    skipped: int
    branched: bool
    fork: str | None


class Follower(Polling[Followed]):
    """An iterator over the checkpoints of a run as they appear; see `Store.follow`.

    One thread iterates; any thread may call `close`. After an error ``next`` continues: the checkpoint in memory is
    still intact.
    """

    def __init__(self, journal: Journal, after: str | int | None, options: FollowOptions) -> None:
        """Read nothing yet."""
        super().__init__(options.poll, options.timeout, options.stop)
        self._options = options
        self._after = after
        self._begun = False
        self._looks = LogWatch(journal)
        self._costs = journal.backend.costs
        self._looking = threading.Lock()
        self._held: list[ResidentCheckpoint] = []  # the newest checkpoint, and its base
        self._spare: list[Bytes] = []
        self._seen: Node | None = None
        self._waiting: deque[_Goal] = deque()

    def close(self) -> None:
        """End the iteration: a waiting ``next`` raises `StopIteration` soon, and the memory is freed.

        If another thread is in the middle of a poll, that poll completes, and frees what it uses.
        """
        self._closed.set()
        self._free()

    def _free(self) -> None:
        """Free memory and handles, unless a poll is using them: its thread calls this at the end."""
        if self._looking.acquire(blocking=False):
            try:
                self._held, self._spare = [], []
                self._looks.close()
            finally:
                self._looking.release()

    def look(self) -> Followed | None:
        """The next checkpoint if there is one already, else None: ``next`` without waiting."""
        try:
            with self._looking:
                return self._poll()
        finally:
            if self._closed.is_set():
                self._free()

    def _poll(self) -> Followed | None:
        began = time.monotonic()
        before = None if self._costs is None else self._costs.spent
        journal, view = self._looks.look()
        if not self._begun:
            self._begin(journal, view)
            self._begun = True
        goal = self._goal(view.catalog)
        if goal is None:
            return None
        found = self._build(journal, view, goal)
        requests = None if self._costs is None or before is None else (self._costs.spent - before).total
        self._seen = goal.node
        return replace(found, requests=requests, seconds=time.monotonic() - began)

    def _begin(self, journal: Journal, view: View) -> None:
        """Continue after another follower; tensors that `into` or the file already has are not read again."""
        after, out = self._after, self._options.out
        if out is not None:
            refuse_foreign(Path(out))
        if (
            out is not None
            and (found := resident_from_file(Path(out), journal, self._options.select, view)) is not None
        ):
            self._held, self._seen = [found], found.id.node
        if after is None:
            return
        wanted = refs.parsed(view.catalog, after)
        try:
            entry = refs.resolve(view.catalog, wanted)
        except CheckpointNotFoundError:
            if wanted.node is not None:
                return  # it has been retired meanwhile: every checkpoint there is newer
            raise
        self._seen = entry.node
        if self._options.into is not None:
            held = TargetState(self._options.into).adopted(
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
        at = ancestry.fork_point(catalog, self._seen, newest.node)
        branched = at != self._seen
        fork = ref_of(at) if branched and at is not None else None
        nodes = ancestry.between(catalog, self._seen, newest.node)
        if not self._options.each:
            return _Goal(newest.node, len(nodes) - 1, branched, fork)
        self._waiting.extend(_Goal(node, 0, branched=False, fork=None) for node in nodes[1:])
        return _Goal(nodes[0], 0, branched, fork)

    def _build(self, journal: Journal, view: View, goal: _Goal) -> Followed:
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
                state = rebuild(held, self._options.loading)
            except UsageError:
                raise  # nothing was overwritten
            except BaseException as error:
                if self._options.into is not None:
                    error.add_note(
                        "the tensors of into= are mixed: some are of this checkpoint, some of the previous one"
                    )
                raise
        info = describe_checkpoint(view.catalog, entry)
        counts = (goal.skipped, goal.branched, goal.fork, read.nbytes)
        return Followed(info, state, base, plan, *counts, None, 0.0)

    def _restored(self, journal: Journal, view: View, ref: str) -> tuple[BytesRead, tuple[str, ...], str | None]:
        """Hold the checkpoint `ref`, built from a held base if that is the best way -> bytes read, kinds, base."""
        options, read = self._options, BytesRead()
        told: list[tuple[tuple[str, ...], str | None]] = []

        def held(found: OpenCheckpoint) -> list[ResidentCheckpoint] | None:
            for reader in found.readers.values():
                read.add(reader.entry.header)
            if lacking(found, options.select, options.rank):
                return None
            base = found.base
            told.append((tuple(edge.kind for edge in found.plan.encodings), None if base is None else base.ref))
            # A held state that this one does not build on gives its memory; besides a base, the newest one does too.
            kept = self._held[:1] if base is None else [base]
            self._spare += [one.region for one in self._held if all(one is not other for other in kept)]
            self._held = kept
            threads = options.threads or default_threads()
            return load_resident(found, options.select, self._spare, threads, options.progress, read, options.rank)

        bases = [one for one in self._held if not one.lossy]  # deltas build on the bits that training had
        try:
            new = restore_with(journal, ref, held, bases, view)
        except CorruptSegmentError as error:
            if RESIDENT not in str(error):
                raise
            new = None  # the held memory was changed: it cannot be used any more
        if new is None:
            new = restore_with(journal, ref, held, (), view)
        assert new is not None  # without a base nothing can be lacking
        used = {id(one.region) for one in new}
        idle = [region for region in (*self._spare, *(one.region for one in self._held)) if id(region) not in used]
        self._held, self._spare = new, idle[: 2 - len(new)]
        return read, *told[-1]
