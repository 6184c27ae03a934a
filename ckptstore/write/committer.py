"""The committer's thread: writes states and commits them. The log of a term has one author."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptstore.errors import (
    CkptError,
    CommitUnknownError,
    FencedError,
    NotFoundError,
    UsageError,
    WriterClosedError,
    WriterError,
)
from ckptstore.formats.history.checkpoint_ref import Ref
from ckptstore.formats.history.records import CheckpointEntry, CheckpointId
from ckptstore.formats.states.state import FlatState
from ckptstore.formats.step_text import named_steps
from ckptstore.host import background_threads
from ckptstore.host.buffers import Staging
from ckptstore.host.progress import Progress, Tally
from ckptstore.log.change import CatalogChange
from ckptstore.log.checkpoint_info import CheckpointInfo, describe_checkpoint
from ckptstore.log.requests import Outcome
from ckptstore.log.term import Term
from ckptstore.segments.write_session import SegmentSession
from ckptstore.write.capture.snapshot import Snapshot, SnapshotPool
from ckptstore.write.commits import Commits
from ckptstore.write.deltas import Deltas
from ckptstore.write.policy.orders import Order
from ckptstore.write.saves.job import SaveJob
from ckptstore.write.saves.ledger import Labels, Saves
from ckptstore.write.space_advice import tell_what_holds_space
from ckptstore.write.stage import Copies, Stage
from ckptstore.write.steps.updates import Update, with_copies

if TYPE_CHECKING:
    from ckptstore.write.capture.bounded_capture import Feed
    from ckptstore.write.delta_encoding import ArrivingState
    from ckptstore.write.steps.batcher import Diffs

__all__ = ["Committer", "Made", "may_mean"]


@dataclass(frozen=True, slots=True)
class Made:
    """A checkpoint whose segments are durable and that no log record names yet.

    Attributes:
        change: the content of its COMMIT.
        segments: ids of its segments.
    """

    entry: CheckpointEntry
    change: CatalogChange
    segments: tuple[str, ...]


class Committer(Commits):
    """The work of the committer's thread, one job at a time. Other threads may call only `make` and `abandon`.

    Attributes:
        saves: the steps of the term, as the savers see them.
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
            later: appends a job to the queue of this thread; any thread may call it.
        """
        super().__init__(log)
        self.retainer.bases = deltas.bases
        self.saves = saves
        self._deltas = deltas
        self._diffs = diffs
        self._snapshots = snapshots
        self._staging = staging
        self._blocks = blocks
        self._later = later
        self._deadline: Callable[[], None] | None = None  # cancels the deadline

    def store(self, job: SaveJob, stage: Stage, progress: Progress | None = None) -> bool:
        """Store a state as a full, a delta or a step diff -> whether `stage.snapshot` stays in memory as a base.

        A step diff may wait for its batch, unless the call that saves it waits until it is durable.

        Args:
            progress: receives the number of bytes of the state that are done.
        """
        stage.arrive()
        if self._diffs is None:
            return self._store_delta(job, stage, progress)
        own = stage.snapshot is None and stage.feed is None
        kept = (self._store_copied if own else self._store_step)(job, stage, progress)
        if job.scope is not None:
            self.flush()
        return kept

    def _store_delta(self, job: SaveJob, stage: Stage, progress: Progress | None) -> bool:
        try:
            info, kept = self._commit(job, stage.flat, stage.snapshot, progress, stage.feed)
        except BaseException:
            if stage.feed is not None:
                self._deltas.torn()
            raise
        job.done.set_result(info)
        return kept and stage.snapshot is not None  # an arriving state is in memory of the deltas

    def _store_copied(self, job: SaveJob, stage: Stage, progress: Progress | None) -> bool:
        """Copy a step from training's own tensors and store it: the next step is compressed against the copy."""
        snapshot = self._snapshots.copy(stage.flat, self._deltas.workers.pool)
        copies, kept = Copies(snapshot), False
        try:
            # Gradients are copied, too: if they changed during compression, after a Ctrl-C, the chain would be damaged.
            copies = Copies(snapshot, *with_copies(stage.updates, self._snapshots, self._blocks))
            kept = self._store_step(job, copies, progress)
        finally:
            copies.let_go(kept=kept)
        return False

    def _store_step(self, job: SaveJob, stage: Stage, progress: Progress | None) -> bool:
        # An exception of `progress` stops the save: so call it before anything is written.
        Tally(progress, stage.flat.nbytes).advance(stage.flat.nbytes)
        if job.interrupted:
            raise WriterClosedError(f"step {job.step} was not saved: interrupted")
        if stage.feed is not None:
            return self._add_arriving(stage, stage.feed, job)
        assert stage.snapshot is not None
        return self._add(stage.snapshot, stage.updates, job)

    def _add(self, snapshot: Snapshot, updates: Sequence[Update], job: SaveJob) -> bool:
        """Compress a step, or store a full if one is due -> True: `snapshot` stays in memory."""
        diffs = self._in_order(job)
        order = diffs.order(self.log.catalog.restorable, job.step)
        if order is not None:
            full = diffs.add(snapshot, updates, job, order)
            if full or not self._wait_at_most(diffs.options.seconds):
                self.flush_in_time()
            return True
        self.flush_in_time()
        return self._add_full(snapshot, job)

    def _in_order(self, job: SaveJob) -> Diffs:
        """The step diffs of the term, ready to append the one of `job`."""
        assert self._diffs is not None
        if self.ended is not None:
            raise self.ended
        if self._diffs.waiting and job.step < self._diffs.waiting[-1].step:
            self.flush_in_time()  # the steps of a segment ascend
        return self._diffs

    def _add_full(self, snapshot: Snapshot, job: SaveJob) -> bool:
        """Store a full that step diffs build on -> True: `snapshot` stays in memory."""
        assert self._diffs is not None
        began = time.monotonic()
        info, kept = self._commit(job, snapshot.flat, snapshot)
        seconds = time.monotonic() - began
        job.done.set_result(info)  # it is durable: a later error must not fail this save
        try:
            # If deltas keep the snapshot as their base, the next step is compressed against a copy of it instead.
            base = self._snapshots.copy(snapshot.flat, self._deltas.workers.pool) if kept else snapshot
        except (MemoryError, RuntimeError):
            self._diffs.restart()  # the next checkpoint is a full
            return True
        self._diffs.begin(CheckpointId(self.log.number, job.step, info.state), base, info.stored, seconds)
        return True

    def _add_arriving(self, stage: Stage, feed: Feed, job: SaveJob) -> bool:
        """As `_add`, for a step that arrives unit by unit: it replaces the previous step in memory."""
        from ckptstore.write.delta_encoding import ArrivingState
        from ckptstore.write.steps.batcher import BecomesFullError

        diffs = self._in_order(job)
        order = diffs.order(self.log.catalog.restorable, job.step)
        room = None if order is None else diffs.room(feed.flat)
        if order is None or room is None:
            self.flush_in_time()
            diffs.restart()  # frees the memory of the previous step for the full
            stage.snapshot = feed.whole(lambda: self._snapshots.copy(feed.flat, self._blocks))
            return self._add_full(stage.snapshot, job)
        try:
            if order.last and not diffs.waiting:
                job.done.set_result(self._stream(ArrivingState(feed, room), stage.updates, job))
                return False
            full = diffs.add_arriving(ArrivingState(feed, room), stage.updates, job, order)
        except BecomesFullError as error:
            stage.snapshot = error.snapshot
            self.flush_in_time()
            return self._add_full(error.snapshot, job)
        if full or not self._wait_at_most(diffs.options.seconds):
            self.flush_in_time()
        return False

    def _stream(self, arriving: ArrivingState, updates: Sequence[Update], job: SaveJob) -> CheckpointInfo:
        """Write and commit a step diff as it is compressed."""
        from ckptstore.write.steps.batcher import BecomesFullError

        assert self._diffs is not None
        begun: list[str] = []
        try:
            with self._space():
                written = self._diffs.stream(self._session(begun, None), arriving, updates, job)
            self.commit(CatalogChange(written.segments, written.checkpoints, written.encodings, tags=written.tags))
        except BaseException as error:
            if not isinstance(error, FencedError | CommitUnknownError):
                self._abandoned.extend(begun)
            if not isinstance(error, BecomesFullError):
                self._diffs.restart()
            raise
        return describe_checkpoint(self.log.catalog, written.became[0])

    def _wait_at_most(self, seconds: float | None) -> bool:
        """Flush in `seconds` seconds, unless a deadline is set already -> False: no thread can be started for it."""
        if seconds is None or self._deadline is not None:
            return True
        try:
            self._deadline = background_threads.after(seconds, self._at_deadline)
        except RuntimeError:
            return False
        return True

    def _at_deadline(self) -> None:
        with contextlib.suppress(WriterClosedError, RuntimeError):  # `close` flushes; the interpreter is ending
            self._later(self.flush_in_time)

    def flush_in_time(self) -> None:
        """`flush`, without raising: the saves of the waiting steps report a failure."""
        with contextlib.suppress(CkptError):
            self.flush()

    def flush(self) -> None:
        """Write and commit the waiting steps. Then each of them is done or has failed."""
        cancel, self._deadline = self._deadline, None
        if cancel is not None:
            cancel()
        if self._diffs is None or not self._diffs.waiting:
            return
        waiting = list(self._diffs.waiting)
        begun: list[str] = []
        try:
            if self.ended is not None:
                raise self.ended
            with self._space():
                written = self._diffs.write(self._session(begun, None))
            self.commit(CatalogChange(written.segments, written.checkpoints, written.encodings, tags=written.tags))
        except BaseException as error:
            if not isinstance(error, FencedError | CommitUnknownError):
                self._abandoned.extend(begun)
            if len(waiting) > 1:
                steps = named_steps(one.step for one in waiting)
                error.add_note(f"{steps}, which waited for their batch, were not saved")
            self._diffs.restart()
            for one in waiting:
                self.fail(one.job, error)
            raise
        self._diffs.waiting.clear()
        for one, entry in zip(waiting, written.became, strict=True):
            one.job.done.set_result(describe_checkpoint(self.log.catalog, entry))

    def lose_step(self) -> None:
        """Note that a step failed before it reached this thread. If gradients are summed, the next save is a full."""
        if self._diffs is not None:
            self._diffs.lose_step()

    def flush_step(self, step: int) -> None:
        """Call `flush_in_time` if `step` waits for its batch."""
        if self._diffs is not None and any(one.step == step for one in self._diffs.waiting):
            self.flush_in_time()

    def tag(self, name: str, ref: str) -> CheckpointInfo:
        """Tag a checkpoint. Waiting steps are written first if `ref` may name one of them."""
        wanted = Ref.parse(ref, self.log.catalog.tags)
        if self._diffs is not None and any(may_mean(wanted, one.step, one.job.labels) for one in self._diffs.waiting):
            self.flush()
        return self.name(name, wanted)

    def untag(self, name: str) -> None:
        """Remove a tag, which may be a tag of a waiting step."""
        if self._diffs is not None and any(name in one.job.labels.tags for one in self._diffs.waiting):
            self.flush()
        self.unname(name)

    def fail(self, job: SaveJob, error: BaseException, *, told: bool = False) -> None:
        """Fail the save of a step. Does nothing if it was given up or is durable.

        Args:
            told: as for `SaveJob.fail`.
        """
        if job.done.done() or not job.take():
            return
        if not told and job.scope is None:
            self.missing = True
        try:
            self.complete(error)
        finally:
            job.fail(error, told=told)

    def complete(self, error: BaseException) -> None:
        """Add to the error of a full medium how much space retired checkpoints take."""
        tell_what_holds_space(error, lambda: self.log.catalog, self.log.journal.backend)

    def take_in(self, term: int, change: CatalogChange) -> Outcome:
        """Commit a change that was made for `term` during the saves -> the outcome."""
        if self.ended is not None:
            raise self.ended
        if term != self.log.number:
            return Outcome("void", f"term {self.log.number} began meanwhile")
        self.flush_in_time()  # Prevents: dropping the base that a waiting step is compressed against.
        live, reason = self.log.catalog.segments, ""
        if gone := [segment for segment in change.drops if segment not in live]:
            reason = f"segment {gone[0]}, which it drops, is not live"
        try:
            if not reason:
                self.commit(change)
        except (UsageError, NotFoundError) as error:
            reason = str(error)
        except (FencedError, CommitUnknownError):
            raise
        except BaseException:
            self._abandoned.extend(segment.id for segment in change.segments)
            raise
        self.retainer.look_again()
        if reason:
            self._abandoned.extend(segment.id for segment in change.segments)
        return Outcome("refused" if reason else "accepted", reason)

    @property
    def waiting(self) -> int:
        """How many steps wait for their batch. Any thread may ask."""
        return 0 if self._diffs is None else len(self._diffs.waiting)

    @property
    def waiting_nbytes(self) -> int:
        """Bytes of the compressed steps that wait for their batch."""
        return 0 if self._diffs is None else self._diffs.waiting_nbytes

    def finish(self) -> None:
        """End the term."""
        self.flush_and_close()
        self.note_end()  # readers of the log see that the term was closed, not killed
        self.finish_folds()
        if self._diffs is not None:
            self._diffs.restart()

    def give_way(self, error: WriterError) -> None:
        """End this term because another one replaces it: later calls fail with `error`."""
        self.ended = error
        self.flush_in_time()
        if self._diffs is not None:
            self._diffs.restart()

    def flush_and_close(self) -> None:
        """Flush. If steps can wait for a batch, note in the log that none was lost."""
        self.flush_in_time()
        self.retire_rest()
        if self._diffs is not None and self._diffs.options.waits:
            self.note_end()

    def make(
        self, flat: FlatState, job: SaveJob, *, writers: ThreadPoolExecutor, progress: Progress | None = None
    ) -> Made:
        """Write a full and make it durable. Any threads may do so at once, but only if no deltas are made.

        Args:
            writers: threads that write; nothing else uses them meanwhile.
            progress: receives the number of bytes of the state that are done.
        """
        return self._write(flat, job, writers, progress)[0]

    def publish(self, made: Made, job: SaveJob) -> CheckpointInfo:
        """Commit the checkpoint that was made of a job.

        Raises:
            WriterClosedError: the job was given up.
        """
        try:
            if self.ended is not None:
                raise self.ended  # the log would refuse it, too, without this reason
            if not job.take():  # called last, when nothing else can stop the commit
                raise WriterClosedError(f"step {made.entry.step} was not saved: interrupted")
            self.commit(made.change)
        except (FencedError, CommitUnknownError):
            raise  # this term can drop nothing any more
        except BaseException:
            self._abandoned.extend(made.segments)
            raise
        return describe_checkpoint(self.log.catalog, made.entry)

    def _commit(
        self,
        job: SaveJob,
        flat: FlatState,
        snapshot: Snapshot | None,
        progress: Progress | None = None,
        feed: Feed | None = None,
    ) -> tuple[CheckpointInfo, bool]:
        """Write and commit a full or a delta -> the checkpoint, and whether `snapshot` stays in memory as a base."""
        with self._space():
            made, order, stored = self._write(flat, job, self._blocks, progress, feed)
        info = self.publish(made, job)
        kept = self._deltas.committed(order, made.entry.id, flat, snapshot, stored, lambda: job.interrupted)
        return info, kept

    @contextlib.contextmanager
    def _space(self) -> Iterator[None]:
        """What this thread writes within counts for one save, until it is on the medium."""
        space = self.log.journal.backend.begin_save()
        try:
            with space.within():
                yield
        finally:
            space.end()

    def _write(
        self,
        flat: FlatState,
        job: SaveJob,
        writers: ThreadPoolExecutor,
        progress: Progress | None,
        feed: Feed | None = None,
    ) -> tuple[Made, Order, int]:
        """Make a checkpoint durable -> the checkpoint, how it was stored, and in how many bytes."""
        if self.ended is not None:
            raise self.ended
        begun: list[str] = []
        moment, step, labels = time.time(), job.step, job.labels
        try:
            session = self._session(begun, progress, flat.nbytes, writers)
            written, order = self._deltas.write(flat, step, moment, session, self.log.catalog.restorable, feed)
            used = {segment.id for segment in written.segments}
            self._abandoned.extend([segment for segment in begun if segment not in used])
            begun = list(used)
            tensors, nbytes = written.tensors, written.nbytes
            entry = CheckpointEntry(self.log.number, step, written.state, moment, tensors, nbytes, labels.extra())
            encoding = self._deltas.encoding(written, entry.node, order)
            tags = dict.fromkeys(labels.tags, entry.node)
            change = CatalogChange(written.segments, (entry,), (encoding,), tags=tags)
            return Made(entry, change, tuple(begun)), order, written.stored
        except BaseException:
            self._abandoned.extend(begun)  # the next commit drops them, so that gc may remove what is left
            raise

    def _session(
        self, begun: list[str], progress: Progress | None, total: int = 0, writers: ThreadPoolExecutor | None = None
    ) -> SegmentSession:
        """A session that writes segments, and appends the id of each segment that it begins to `begun`."""
        advance = Tally(progress, total).advance
        backend = self.log.journal.backend
        return SegmentSession(
            backend, self._staging, writers or self._blocks, self._deltas.workers, begun.append, advance
        )

    def housekeeping(self) -> None:
        """Answer requests and begin a fold, after the save was acknowledged. Neither may fail a save."""
        # Prevents: granting a request to drop the base that a waiting step is compressed against.
        self.tend(self.flush_in_time)


def may_mean(ref: Ref, step: int, labels: Labels) -> bool:
    """Whether a REF may name a step that is not in the catalog yet: by its number, tag or metric, or as ``latest``."""
    return ref.is_latest or ref.best is not None or ref.step == step or ref.tag in labels.tags
