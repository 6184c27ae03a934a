"""The committer's thread: writes what it is handed, and commits it. The log of a term has one author."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from ckptstore.errors import CkptError, CommitUnknownError, FencedError, WriterClosedError, WriterError
from ckptstore.formats.catalog import CLOSED
from ckptstore.formats.records import CheckpointEntry, CheckpointId
from ckptstore.formats.state import FlatState
from ckptstore.host.buffers import Staging
from ckptstore.host.progress import Progress, Tally
from ckptstore.log import folding, requests
from ckptstore.log.change import Change
from ckptstore.log.checkpoints import CheckpointInfo, describe_checkpoint
from ckptstore.log.term import Term
from ckptstore.segments.session import SegmentSession
from ckptstore.write.deltas import Deltas
from ckptstore.write.ledger import Saves
from ckptstore.write.snapshot import Snapshot, SnapshotPool
from ckptstore.write.steps.batcher import Diffs
from ckptstore.write.steps.updates import Update, with_copies

__all__ = ["Committer"]


class Committer:
    """What one thread of a writer does, one job after the other; all of it is called there and nowhere else.

    Attributes:
        log: the term.
        saves: its steps, as their savers know them.
        ended: why nothing more can be committed; may be read by any thread.
    """

    def __init__(
        self,
        log: Term,
        saves: Saves,
        deltas: Deltas,
        diffs: Diffs | None,
        *,
        snapshots: SnapshotPool,
        staging: Staging,
        blocks: ThreadPoolExecutor,
        later: Callable[[Callable[[], None]], object],
    ) -> None:
        """
        Args:
            blocks: threads that write.
            later: puts a job at the end of this thread's; may be called from any.
        """
        self.log = log
        self.ended: WriterError | None = None
        self._folds = folding.FoldThread(log)
        self.saves = saves
        self._deltas = deltas
        self._diffs = diffs
        self._snapshots = snapshots
        self._staging = staging
        self._blocks = blocks
        self._later = later
        self._deadline: threading.Timer | None = None
        self._abandoned: list[str] = []
        self._missing = False  # a step failed after the last that was saved
        self._complaints: set[str] = set()

    def diff_now(
        self,
        flat: FlatState,
        updates: Sequence[Update],
        step: int,
        progress: Progress | None,
        interrupted: threading.Event,
    ) -> CheckpointInfo:
        """Store a step with everything that waits, from a copy: the next step is coded against it."""
        done: Future[CheckpointInfo] = Future()
        snapshot = self._snapshots.copy(flat, self._deltas.workers.pool)
        gradients: Snapshot | None = None
        kept = False
        try:
            # Copies, too: gradients that change while they are coded, after a Ctrl-C, would spoil the chain.
            taken, gradients = with_copies(updates, self._snapshots, self._blocks)
            # What it raises stops the save: so it is asked before anything is written.
            nbytes = sum(source.nbytes for source in flat.tensors.values())
            Tally(progress, nbytes).advance(nbytes)
            if interrupted.is_set():
                raise WriterClosedError(f"step {step} was not saved: interrupted")
            kept = self.diff(snapshot, taken, step, done)
            self.flush()
        finally:
            if gradients is not None:
                gradients.free()
            if not kept:
                snapshot.free()
        return done.result()

    def diff(self, snapshot: Snapshot, updates: Sequence[Update], step: int, done: Future[CheckpointInfo]) -> bool:
        """Code a step, or store a full if one is due -> whether `snapshot` stays in memory."""
        assert self._diffs is not None
        if self.ended is not None:
            raise self.ended
        if self._diffs.waiting and step < self._diffs.waiting[-1].step:
            self.flush_in_time()  # the steps of a segment ascend
        if not self._diffs.due(self.log.catalog.restorable):
            full = self._diffs.add(snapshot, updates, step, done)
            if full or not self._wait_at_most(self._diffs.options.seconds):
                self.flush_in_time()
            return True
        self.flush_in_time()
        began = time.monotonic()
        info, kept = self.persist(snapshot.flat, step, interrupted=threading.Event(), snapshot=snapshot)
        seconds = time.monotonic() - began
        done.set_result(info)  # it is durable: nothing that follows may say otherwise
        try:
            # A base of deltas lives as long as those need it: then a copy is what the next step is coded against.
            base = self._snapshots.copy(snapshot.flat, self._deltas.workers.pool) if kept else snapshot
        except (MemoryError, RuntimeError):
            self._diffs.restart()  # the next checkpoint is a full
            return True
        self._diffs.begin(CheckpointId(self.log.number, step, info.state), base, info.stored, seconds)
        return True

    def _wait_at_most(self, seconds: float | None) -> bool:
        """Flush in so many seconds, unless that was arranged before -> False: there is no thread to be had for it."""
        if seconds is None or self._deadline is not None:
            return True
        deadline = threading.Timer(seconds, self._at_deadline)
        deadline.daemon = True
        try:
            deadline.start()
        except RuntimeError:
            return False
        self._deadline = deadline
        return True

    def _at_deadline(self) -> None:
        with contextlib.suppress(WriterClosedError, RuntimeError):  # closing flushes; the interpreter is going
            self._later(self.flush_in_time)

    def flush_in_time(self) -> None:
        """`flush` for the sake of those who are not waiting for it: they hear of a failure from their saves."""
        with contextlib.suppress(CkptError):
            self.flush()

    def flush(self) -> None:
        """Write and commit the steps that wait; each of them is done, or has failed."""
        deadline, self._deadline = self._deadline, None
        if deadline is not None:
            deadline.cancel()
        if self._diffs is None or not self._diffs.waiting:
            return
        waiting = list(self._diffs.waiting)
        begun: list[str] = []
        try:
            if self.ended is not None:
                raise self.ended
            written = self._diffs.write(self._session(begun, None))
            self.commit(Change(written.segments, written.checkpoints, written.encodings))
        except BaseException as error:
            if not isinstance(error, FencedError | CommitUnknownError):
                self._abandoned += begun
            first, last = waiting[0].step, waiting[-1].step
            error.add_note(f"steps {first} to {last}, which waited for their batch, were not saved")
            self._diffs.restart()
            for one in waiting:
                self.fail(one.step, error, one.done)
            raise
        self._diffs.waiting.clear()
        for one, entry in zip(waiting, written.became, strict=True):
            one.done.set_result(describe_checkpoint(self.log.catalog, entry))

    def flush_step(self, step: int) -> None:
        """`flush_in_time`, if `step` is among those that wait."""
        if self._diffs is not None and any(one.step == step for one in self._diffs.waiting):
            self.flush_in_time()

    def tag(self, name: str, step: int) -> None:
        """Name the checkpoint of a step of this term. If it waits, it is written first."""
        if self._diffs is not None and any(one.step == step for one in self._diffs.waiting):
            self.flush()
        self.commit(Change(tags={name: (self.log.number, step)}))

    def fail(self, step: int, error: BaseException, done: Future[CheckpointInfo]) -> None:
        """A step was not saved. Does nothing to one whose saver knows already, or that is durable."""
        if done.done():
            return
        self._missing = True
        self.saves.fail(step, error, done)

    def finish(self) -> None:
        """The last thing a term does."""
        self.flush_and_close()
        self._complain(self._folds.finish())
        if self._diffs is not None:
            self._diffs.restart()

    def give_way(self, error: WriterError) -> None:
        """Another term takes the place of this one: what comes too late fails with `error`."""
        self.ended = error
        self.flush_in_time()
        if self._diffs is not None:
            self._diffs.restart()

    def flush_and_close(self) -> None:
        """Flush, and if steps may wait at all, note that none was lost."""
        self.flush_in_time()
        if self._diffs is not None and self._diffs.options.waits and self.ended is None and not self._missing:
            with contextlib.suppress(CkptError):
                self.commit(Change(extra={CLOSED: True}))

    def persist(
        self,
        flat: FlatState,
        step: int,
        *,
        progress: Progress | None = None,
        interrupted: threading.Event,
        snapshot: Snapshot | None = None,
    ) -> tuple[CheckpointInfo, bool]:
        """Write, commit -> what was committed, and whether `snapshot` stays in memory as a base of deltas.

        Args:
            progress: told how many of the state's bytes are done.
            interrupted: set when the caller has stopped waiting and may change the state.
        """
        if self.ended is not None:
            raise self.ended
        begun: list[str] = []
        moment = time.time()
        try:
            session = self._session(begun, progress, sum(source.nbytes for source in flat.tensors.values()))
            written, decision, base = self._deltas.write(flat, step, moment, session, self.log.catalog.restorable)
            if interrupted.is_set():
                raise WriterClosedError(f"step {step} was not saved: interrupted")
            used = {segment.id for segment in written.segments}
            self._abandoned += [segment for segment in begun if segment not in used]
            begun = list(used)
            entry = CheckpointEntry(self.log.number, step, written.state, moment, written.tensors, written.nbytes)
            encoding = self._deltas.encoding(written, entry.node, base)
            self.commit(Change(written.segments, (entry,), (encoding,)))
        except (FencedError, CommitUnknownError):
            raise  # this term drops nothing any more
        except BaseException:
            self._abandoned += begun  # the next commit names them in a drop, so that gc may remove what is left
            raise
        info = describe_checkpoint(self.log.catalog, entry)
        return info, self._deltas.committed(decision, entry.id, flat, snapshot, written.stored, interrupted.is_set)

    def _session(self, begun: list[str], progress: Progress | None, total: int = 0) -> SegmentSession:
        """What segments are written with: the ids of those begun are put to `begun`."""
        advance = Tally(progress, total).advance
        backend = self.log.journal.backend
        return SegmentSession(backend, self._staging, self._blocks, self._deltas.workers, begun.append, advance)

    def commit(self, change: Change) -> None:
        """Commit a change in this term, and what was begun in vain as its drops."""
        drops = tuple(self._abandoned)
        try:
            self.log.commit(replace(change, drops=(*change.drops, *drops)).record(self.log.number))
        except (FencedError, CommitUnknownError) as error:
            self.ended = error
            raise
        del self._abandoned[: len(drops)]
        if change.checkpoints:
            self._missing = False

    def housekeeping(self) -> None:
        """Answer requests and begin a fold, after the save was acknowledged. Neither may fail a save."""
        if self.ended is not None:
            return
        try:
            # Prevents: granting a request to drop what a step that waits is coded against.
            requests.handle(self.log, prepare=self.flush_in_time)
        except (FencedError, CommitUnknownError) as error:
            self.ended = error  # the next save says so
        except CkptError as error:
            self._complain(error)
        else:
            self._complain(self._folds.begin())

    def _complain(self, error: Exception | None) -> None:
        """Say what went wrong, once: it is tried again after every save."""
        if error is not None and (why := str(error)) not in self._complaints:
            self._complaints.add(why)
            with contextlib.suppress(Warning):  # where warnings are errors: this thread has saves to finish
                text = f"{self.log.journal.url}: upkeep of the log failed, which alone fails no save: {why}"
                warnings.warn(text, stacklevel=1)
