"""The calls that give a writer a state: blocking, in the background, already copied, or layer by layer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ckptstore.errors import UsageError, WriterClosedError
from ckptstore.formats.history.checkpoint_ref import step_number
from ckptstore.formats.states.state import FlatState
from ckptstore.frameworks import bridge
from ckptstore.host.caller_warnings import warns_last
from ckptstore.host.cancellable_calls import Scope
from ckptstore.host.progress import Progress
from ckptstore.host.signal_reentry import refuse_within
from ckptstore.host.threads import started_pool
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.write.capture.snapshot import Snapshot
from ckptstore.write.committer import Committer
from ckptstore.write.saves.job import SaveJob
from ckptstore.write.saves.ledger import Labels, Metadata, PendingSave
from ckptstore.write.stage import Copies
from ckptstore.write.steps.updates import Update, Updates
from ckptstore.write.writer_runtime import WriterRuntime

if TYPE_CHECKING:
    from ckptstore.write.capture.layerwise_save import LayeredSave

__all__ = ["SaveCalls"]


class SaveCalls(WriterRuntime):
    """The calls of a `Writer` that take a state."""

    def _save(
        self, state: Any, step: int | None, labels: Labels, updates: Updates | None, progress: Progress | None
    ) -> CheckpointInfo:
        """See `Writer.save`."""
        committer, job, flat = self._job(state, step, labels, updates, scope=Scope())
        try:
            with self._give_up_on_error(job):
                self._path.save(committer, job, flat, updates, progress)
            return job.result()
        except BaseException as error:
            job.interrupt(error)
            self._lose_step(committer)
            raise
        finally:
            job.measured.returned()

    def _save_async(self, state: Any, step: int | None, labels: Labels, updates: Updates | None) -> PendingSave:
        """See `Writer.save_async`."""
        committer, job, flat = self._job(state, step, labels, updates)
        try:
            with self._give_up_on_error(job):
                job.measured.waited += self._enter(job)
                self._path.begin(committer, job, flat, updates)
            return self._pending(committer, job)
        finally:
            job.measured.returned()

    @warns_last
    def adopt(
        self,
        snapshot: Snapshot,
        step: int,
        *,
        metadata: Metadata | None = None,
        tags: str | Sequence[str] = (),
        updates: Sequence[Update] = (),
        gradients: Snapshot | None = None,
        began: float | None = None,
        waited: float = 0.0,
    ) -> PendingSave:
        """Make a snapshot durable without a second copy: the caller has copied it in the layout of its segments.

        Waits for nothing: the owner of the memory limits how many saves are in flight. The memory may be reused once
        `Snapshot.free` is called; for a base of deltas, that is much later than `Snapshot.land`.

        Args:
            snapshot: the state; unchanged until it is freed.
            step, metadata, tags: as for `save`.
            updates: as for `save`, looked up already; they may refer to memory of `gradients`.
            gradients: owns the memory of the gradients.
            began, waited: when training began to wait for the copy (``time.monotonic()``), and how many seconds of that
                it waited for earlier saves: for `on_metrics`. None: training did not wait.

        Raises:
            as `save_async`. Then the memory belongs to the caller again, who must `land` and `free` it.
        """
        refuse_within(self, self._WAIT)
        labels = Labels.of(metadata, tags)
        committer, job, _ = self._job(snapshot.flat, step_number(step), labels, None, began=began)
        job.measured.waited = waited
        try:
            with self._give_up_on_error(job):
                self._path.adopt(committer, job, Copies(snapshot, updates, gradients))
            return self._pending(committer, job)
        finally:
            job.measured.returned()

    def prepare(self, state: Any) -> None:
        """See `Writer.prepare`."""
        self._check_open()
        flat = bridge.flattened(state)
        self._wake_for(flat.nbytes)
        self._path.prepare(flat)

    def _begin_layers(self, state: Any, step: int, layers: Mapping[str, Sequence[str]], *, direct: bool) -> LayeredSave:
        """See `Writer.begin`."""
        from ckptstore.write.capture.layerwise_save import LayeredSave, checked_layers

        committer, job, flat = self._admit(state, step, Labels(), None)

        def submit(now: FlatState, labels: Labels, updates: Updates | None) -> PendingSave:
            self._begun = None
            job.labels = labels
            job.begin(self._meter.begin(now, job.step, time.monotonic()))
            try:
                with self._give_up_on_error(job):
                    self._check_open()
                    self._explaining.remark_unused(updates)
                    self._path.adopt(committer, job, Copies(snapshot, *self._path.copied_updates(now, updates)))
                return self._pending(committer, job)
            finally:
                job.measured.returned()

        with self._give_up_on_error(job):
            self._enter(job)
            checked_layers(flat, layers)
            if self._layer_pool is None:
                self._layer_pool = started_pool(self._options.threads, "ckptstore-layers")
            snapshot = self._mapped(flat, step) if direct else self._reserved(flat)
            Copies(snapshot).belongs_to(job)
            begun = LayeredSave(
                job, flat, layers, snapshot, self._layer_pool, submit=submit, check_open=self._check_open
            )
        self._begun = begun.opened
        return begun

    def _mapped(self, flat: FlatState, step: int) -> Snapshot:
        """A snapshot in memory of the medium.

        Raises:
            UsageError: the writer makes deltas or step diffs, or the medium has no mapped segments.
            StorageError: the medium failed or is full.
        """
        if not self._options.plain:
            raise UsageError("direct: deltas and step diffs are compressed from copies in host memory; leave it out")
        committer, found = self._committer, self._deltas.map_full(flat, step)
        if found is None:
            raise UsageError(f"direct: {self.url} has no memory to be copied into, as pmem:// has; leave it out")

        def free() -> None:
            lost = found.abort()  # does nothing to sealed segments
            with contextlib.suppress(WriterClosedError):  # a collector finds them after the term has ended
                self._submit(lambda: committer.abandon(lost))

        return Snapshot(found, lambda: None, free)

    def _reserved(self, flat: FlatState) -> Snapshot:
        if self._options.memory is not None and not self._options.plain:
            raise UsageError("begin: a snapshot that is filled layer by layer is a whole state; leave out memory=")
        return self._snapshots.empty(flat)

    # -- shared by all of these calls

    def _job(
        self,
        state: Any,
        step: int | None,
        labels: Labels,
        updates: Updates | None,
        *,
        scope: Scope | None = None,
        began: float | None = None,
    ) -> tuple[Committer, SaveJob, FlatState]:
        """Check every argument before a byte is written -> the committer of the save's term, the save, and its state.

        Args:
            scope: as for `SaveJob`.
            began: when training began to wait, on the monotonic clock; None: now.
        """
        began = time.monotonic() if began is None else began
        self._explaining.remark_unused(updates)
        committer, job, flat = self._admit(state, step, labels, scope)
        job.begin(self._meter.begin(flat, job.step, began))
        return committer, job, flat

    def _admit(
        self, state: Any, step: int | None, labels: Labels, scope: Scope | None
    ) -> tuple[Committer, SaveJob, FlatState]:
        self._check_open()
        if self._begun is not None:
            self._begun.settle()
        self._failures.raise_unseen()
        if self._tier is not None:
            self._tier.admit()
        committer = self._committer
        saves = committer.saves
        saves.check(step)
        try:
            flat = bridge.flattened(state)
            self._wake_for(flat.nbytes)
        except BaseException:
            self._lose_step(committer)
            raise
        return committer, SaveJob(saves, saves.take(step), labels, scope), flat

    def _enter(self, job: SaveJob) -> float:
        """Wait for a place in flight -> the seconds waited. Raises the error of an earlier save."""
        place, waited = self._places.take()
        job.enter(place)
        return waited

    @contextmanager
    def _give_up_on_error(self, job: SaveJob) -> Iterator[None]:
        """Begin a save within this ``with``. If that fails, the save is given up, unless its commit has begun."""
        try:
            yield
        except BaseException as error:
            if job.give_up(error):
                self._lose_step(self._committer)
            if isinstance(error, RuntimeError):
                self._check_open()  # closed by another thread, and its threads with it
            raise

    def _lose_step(self, committer: Committer) -> None:
        """Note that a step was not saved: a sum of gradients cannot continue without it."""
        if self._options.diffs is not None and self._options.diffs.accumulate == "sum":
            with contextlib.suppress(WriterClosedError, RuntimeError):  # then nothing more is summed
                self._submit(committer.lose_step)

    def _pending(self, committer: Committer, job: SaveJob) -> PendingSave:
        def hurry() -> None:
            if self._options.diffs is not None:
                with contextlib.suppress(WriterClosedError, RuntimeError):  # `close` flushes; the interpreter is ending
                    self._submit(lambda: committer.flush_step(job.step))

        return job.pending(hurry, self._tier)
