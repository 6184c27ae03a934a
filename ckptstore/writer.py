"""The writer: one term, one thread that persists, every commit acknowledged only when it is durable.

This is the caller's side, for any thread; what the committer's thread does is in `committing`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from ckptstore import termination, torch_seam
from ckptstore.backends.base import Backend
from ckptstore.checkpoint import CheckpointInfo
from ckptstore.committing import Committer
from ckptstore.deltas import DeltaOptions, Deltas, StoredBase
from ckptstore.diffs import DiffOptions, Diffs
from ckptstore.formats.errors import UsageError, WriterClosedError, WriterError
from ckptstore.formats.records import CheckpointId, FormatFile
from ckptstore.formats.segment import SegmentDoc
from ckptstore.formats.state import FlatState
from ckptstore.log import Term
from ckptstore.reading import Progress
from ckptstore.saves import PendingSave, Saves
from ckptstore.snapshot import Snapshot, SnapshotPool
from ckptstore.staging import DEFAULT_BUDGET, Staging
from ckptstore.updates import Update, Updates, with_copies

__all__ = ["Writer", "WriterOptions"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class WriterOptions:
    """What a writer may use.

    Attributes:
        staging_bytes: host memory between state and medium; at least 32 MiB. Coding deltas may take as much again.
        threads: threads that write blocks; one or two saturate a local disk.
        max_in_flight: snapshots that `Writer.save_async` may hold; each is a copy of the whole state.
        poll_seconds: how often to look for requests of other processes while idle; None: only at commits.
        deltas: how checkpoints are stored as deltas against earlier ones; None: every one is a full.
        diffs: how steps are stored as gradient diffs; None: not at all.
    """

    staging_bytes: int = DEFAULT_BUDGET
    threads: int = 2
    max_in_flight: int = 1
    poll_seconds: float | None = 5.0
    deltas: DeltaOptions | None = None
    diffs: DiffOptions | None = None

    def __post_init__(self) -> None:
        Staging(self.staging_bytes)  # says what is wrong with it, before a term is opened and another one fenced
        if self.threads < 1:
            raise UsageError(f"threads: {self.threads}, at least 1 is needed")
        if self.max_in_flight < 1:
            raise UsageError(f"max_in_flight: {self.max_in_flight}, at least 1 is needed")
        if self.poll_seconds is not None and not self.poll_seconds > 0:
            raise UsageError(f"poll_seconds: {self.poll_seconds}, more than 0 is needed, or None")


class Writer:
    """One term of a store, as ``store.writer()`` opens it. Use it in a ``with``; leaving waits for every save.

    Attributes:
        term: the number of this term.
        parent: the checkpoint this term continues from: load it before training; None for a new run.
    """

    def __init__(
        self,
        backend: Backend,
        format_file: FormatFile,
        term: Term,
        parent: CheckpointInfo | None,
        options: WriterOptions,
        reopen: Callable[[CheckpointId], StoredBase],
    ) -> None:
        self.term = term.number
        self.parent = parent
        self._saves = Saves(term.number, parent)
        staging = Staging(options.staging_bytes)
        self._snapshots = SnapshotPool(options.max_in_flight)
        # Payloads under way take no more memory than the staging blocks do.
        encoders = min(os.cpu_count() or 1, staging.blocks - 1)
        draft = SegmentDoc(format_file.run, term.number, "", {}, parents={term.number: term.parent})
        self._deltas = Deltas(options.deltas, backend, draft, self._snapshots, reopen, encoders)
        self._blocks = ThreadPoolExecutor(options.threads, thread_name_prefix="ckptstore-write")
        diffs: Diffs | None = None
        if options.diffs is not None:
            threads = self._deltas.threads
            diffs = Diffs(options.diffs, backend, draft, self._deltas.encoders, threads)
        self._with_diffs = diffs is not None
        self._committer = Committer(
            term,
            self._saves,
            self._deltas,
            diffs,
            snapshots=self._snapshots,
            staging=staging,
            blocks=self._blocks,
            later=self._submit,
        )
        # One thread persists and commits: the log of a term has one author, and order needs no lock.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckptstore-commit")
        self._process = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self._stop_polling = threading.Event()
        if options.poll_seconds is not None:
            threading.Thread(
                target=self._poll, args=(options.poll_seconds,), name="ckptstore-requests", daemon=True
            ).start()
        if options.diffs is not None and options.diffs.flush_on_sigterm:
            termination.watch(self)

    def save(
        self, state: Any, step: int, *, updates: Updates | None = None, progress: Progress | None = None
    ) -> CheckpointInfo:
        """Make `state` durable as the checkpoint of `step`; it may be loaded by anyone when this returns.

        Args:
            state: nested dict of tensors, numbers, strings, lists, RNG states ..., or a `FlatState` (one that was taken
                apart already); must not change meanwhile.
            step: optimizer steps done, above every step that this term continues from.
            updates: what the optimizers did since the save before (`training.OptimizerStep`), for gradient diffs. With
                a `DiffOptions.batch` above 1, everything that waits is written.
            progress: called with the number of bytes just copied, from another thread.

        Raises:
            UnsupportedStateError: something in `state` cannot be stored; names its key path. Nothing was written.
            StepOrderError: the step exists, or is not above the parent's. Nothing was written.
            StorageError: the medium failed. The checkpoint does not exist; the writer may go on.
            FencedError: a newer term exists. This writer is finished.
            CommitUnknownError: the checkpoint may or may not exist. This writer is finished.
        """
        flat = self._admit(state, step)
        interrupted = threading.Event()
        future: Future[CheckpointInfo] | None = None

        def work() -> CheckpointInfo:
            if not self._with_diffs:
                return self._committer.persist(flat, step, progress=progress, interrupted=interrupted)[0]
            return self._committer.diff_now(flat, self._updates(updates, flat), step, progress, interrupted)

        try:
            future = self._submit(work)
            self._tend()
            return future.result()
        except BaseException as error:
            # Ctrl-C while the other thread still reads the caller's tensors: the caller will change them, so the commit
            # must not happen any more. Wait until the thread has let go of them.
            interrupted.set()
            failure = error if future is None else future.exception()
            if failure is not None:
                self._saves.release(step, failure)
                self._saves.seen(step)
            raise

    def save_async(self, state: Any, step: int, *, updates: Updates | None = None) -> PendingSave:
        """Copy `state` to host memory and make it durable in the background; the state may change when this returns.

        Args:
            state, step: as for `save`.
            updates: as for `save`; gradients are copied, too.

        Waits while `max_in_flight` earlier snapshots are not durable yet. An error that nobody asked for with `result`
        is raised by the next call, or on leaving the ``with``.

        Raises:
            as `save`; what concerns the medium comes from `PendingSave.result`.
        """
        flat = self._admit(state, step)
        gradients: Snapshot | None = None
        try:
            snapshot = self._snapshots.take(flat, self._blocks)
            try:
                moved, gradients = with_copies(self._updates(updates, flat), self._snapshots, self._blocks)
            except BaseException:
                snapshot.land()
                snapshot.free()
                raise
        except BaseException as error:
            self._saves.release(step, error)
            if isinstance(error, RuntimeError):
                self._check_open()  # closed by another thread, and its pool with it
            raise
        unclaimed = threading.Lock()  # whoever takes it decides what becomes of the snapshot
        done: Future[CheckpointInfo] = Future()

        def work() -> None:
            if not unclaimed.acquire(blocking=False):
                return
            kept = False
            try:
                if self._with_diffs:
                    kept = self._committer.diff(snapshot, moved, step, done)
                else:
                    info, kept = self._committer.persist(
                        snapshot.flat, step, interrupted=threading.Event(), snapshot=snapshot
                    )
                    done.set_result(info)
            except BaseException as error:
                self._committer.fail(step, error, done)
                raise
            finally:
                snapshot.land()
                if gradients is not None:
                    gradients.free()
                if not kept:
                    snapshot.free()

        try:
            self._submit(work)
            self._tend()
        except BaseException as error:
            # Prevents: a snapshot that Ctrl-C leaves in flight for ever, for which the next save_async would wait.
            if unclaimed.acquire(blocking=False):
                snapshot.land()
                snapshot.free()
                if gradients is not None:
                    gradients.free()
                self._saves.release(step, error)
            raise
        return PendingSave(step, done, self._saves.seen)

    def flush(self) -> None:
        """Write the steps that wait for their batch, after every `save_async` so far was coded; they are then durable.

        Raises:
            StorageError, FencedError, CommitUnknownError: what stopped them; every step that waited has failed with it,
                and no later call raises it again.
        """
        try:
            self._submit(self._committer.flush).result()
        except BaseException as error:
            self._saves.seen_error(error)
            raise

    def settle(self) -> None:
        """`flush`, and note in the log that nothing is missing if the process ends now. What SIGTERM calls.

        Raises nothing that concerns the steps: their saves do.
        """
        self._submit(self._committer.flush_and_close).result()

    def tag(self, name: str, ref_step: int) -> None:
        """Name the checkpoint of `ref_step` of this term; an existing tag moves.

        Raises:
            as `save`.
        """
        self._submit(lambda: self._committer.commit(tags={name: (self.term, ref_step)})).result()

    def drain(self) -> None:
        """Wait until every `save_async` so far is durable; raises what one of them raised and nobody has seen."""
        self._submit(self._committer.flush_in_time).result()
        self._saves.raise_unseen()

    def close(self) -> None:
        """Wait for every save, then end; a second time does nothing. Raises what a `save_async` raised unseen."""
        if self._process != os.getpid():
            return  # a fork: threads, bases and pins are the parent's
        termination.forget(self)
        with self._lock:
            if not self._closed:
                with contextlib.suppress(RuntimeError):  # the interpreter is going
                    self._thread.submit(self._committer.finish)
                # Under one lock: a step submitted after that would wait for its batch for ever.
                self._closed = True
        self._stop_polling.set()
        # Each of these may be repeated: after Ctrl-C in one of them a second close waits again.
        self._thread.shutdown()
        self._blocks.shutdown()
        self._deltas.close()
        self._saves.raise_unseen()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except BaseException:
            if error is None:
                raise
            # The body's own error is on its way; a lost save must not hide it.

    def _admit(self, state: Any, step: int) -> FlatState:
        """Everything that can be refused is refused here, before a byte is written."""
        self._check_open()
        self._saves.raise_unseen()
        self._saves.check(step)
        flat = state if isinstance(state, FlatState) else torch_seam.flattened(state)
        self._saves.take(step)
        return flat

    def _check_open(self) -> None:
        self._check_process()
        if self._committer.ended is not None:
            raise self._committer.ended
        if self._closed:
            raise WriterClosedError(f"the writer of term {self.term} is closed")

    def _check_process(self) -> None:
        """A fork has none of the threads: without this it would wait for ever."""
        if self._process != os.getpid():
            raise WriterClosedError(f"the writer of term {self.term} belongs to process {self._process}, not its fork")

    def _submit(self, work: Callable[[], _T]) -> Future[_T]:
        self._check_process()
        with self._lock:
            if not self._closed:
                return self._thread.submit(work)
        raise WriterClosedError(f"the writer of term {self.term} is closed")

    def _tend(self) -> None:
        """Upkeep of the log, once what was submitted before is done."""
        with contextlib.suppress(WriterClosedError):  # closed by another thread: that is no reason to fail a save
            self._submit(self._committer.housekeeping)

    def _updates(self, updates: Updates | None, flat: FlatState) -> Sequence[Update]:
        if updates is None or not self._with_diffs:
            return ()
        found = updates(flat) if callable(updates) else updates
        if not isinstance(found, Sequence) or not all(isinstance(update, Update) for update in found):
            raise UsageError(
                f"updates: {type(updates).__name__}; what the optimizer did is wanted, as in "
                "updates=training.OptimizerStep(optimizer)"
            )
        return found

    def _poll(self, seconds: float) -> None:
        while not self._stop_polling.wait(seconds):
            try:
                self._submit(self._committer.housekeeping).result()
            except (WriterError, RuntimeError):  # closed meanwhile, or the interpreter is going
                return
