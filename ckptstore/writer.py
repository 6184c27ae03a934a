"""The writer: one term, one thread that persists, every commit acknowledged only when it is durable."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from ckptstore import folding, requests, termination, torch_seam
from ckptstore.backends.base import Backend
from ckptstore.checkpoint import CheckpointInfo, describe_checkpoint
from ckptstore.deltas import DeltaOptions, Deltas, StoredBase
from ckptstore.diffs import DiffOptions, Diffs
from ckptstore.formats.catalog import CLOSED
from ckptstore.formats.errors import (
    CkptError,
    CommitUnknownError,
    FencedError,
    StepOrderError,
    UsageError,
    WriterClosedError,
    WriterError,
)
from ckptstore.formats.optim import SparseGradient
from ckptstore.formats.records import CheckpointEntry, CheckpointId, CommitRecord, FormatFile
from ckptstore.formats.state import FlatState, TensorSource
from ckptstore.log import Term
from ckptstore.reading import Progress
from ckptstore.snapshot import Snapshot, SnapshotPool
from ckptstore.staging import DEFAULT_BUDGET, Staging
from ckptstore.updates import Update, Updates

__all__ = ["PendingSave", "Writer", "WriterOptions"]

_MAX_STEP: Final = 2**53 - 1
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


class PendingSave:
    """A checkpoint on its way to the medium, as `Writer.save_async` returns it."""

    def __init__(self, step: int, future: Future[CheckpointInfo], seen: Callable[[int], None]) -> None:
        self.step = step
        self._future = future
        self._seen = seen

    def done(self) -> bool:
        """Whether it is durable or has failed."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> CheckpointInfo:
        """Wait until it is durable.

        Raises:
            TimeoutError: not within `timeout` seconds; the save goes on.
            StorageError, FencedError, CommitUnknownError: what stopped it.
        """
        wait([self._future], timeout)
        if not self._future.done():
            raise TimeoutError(f"step {self.step} is not durable after {timeout} s")
        if self._future.exception() is not None:
            self._seen(self.step)
        return self._future.result()


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
        self._backend = backend
        self._format = format_file
        self._log = term
        self._staging = Staging(options.staging_bytes)
        self._snapshots = SnapshotPool(options.max_in_flight)
        # Payloads under way take no more memory than the staging blocks do.
        encoders = min(os.cpu_count() or 1, self._staging.blocks - 1)
        self._deltas = Deltas(options.deltas, backend, format_file, term.number, self._snapshots, reopen, encoders)
        self._blocks = ThreadPoolExecutor(options.threads, thread_name_prefix="ckptstore-write")
        # One thread persists and commits: the log of a term has one author, and order needs no lock.
        self._committer = ThreadPoolExecutor(1, thread_name_prefix="ckptstore-commit")
        self._diffs: Diffs | None = None
        if options.diffs is not None:
            threads = self._deltas.threads
            self._diffs = Diffs(options.diffs, backend, format_file, term.number, self._deltas.encoders, threads)
        self._deadline: threading.Timer | None = None
        self._steps: set[int] = set()
        self._abandoned: list[str] = []
        self._failures: dict[int, BaseException] = {}  # by step: of `save_async`, and not seen by anyone yet
        self._process = os.getpid()
        self._ended: WriterError | None = None  # set by the committer's thread alone, like everything of the log
        self._missing = False  # a step failed after the last that was saved
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
            if self._diffs is None:
                return self._persist(flat, step, progress=progress, interrupted=interrupted)[0]
            return self._diff_now(flat, self._updates(updates, flat), step, progress, interrupted)

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
                self._release_step(step, failure)
                self._forget_failure(step)
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
                moved, gradients = self._take_gradients(self._updates(updates, flat))
            except BaseException:
                snapshot.land()
                snapshot.free()
                raise
        except BaseException as error:
            self._release_step(step, error)
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
                if self._diffs is None:
                    info, kept = self._persist(snapshot.flat, step, interrupted=threading.Event(), snapshot=snapshot)
                    done.set_result(info)
                else:
                    kept = self._diff(snapshot, moved, step, done)
            except BaseException as error:
                self._fail(step, error, done)
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
                self._release_step(step, error)
            raise
        return PendingSave(step, done, self._forget_failure)

    def flush(self) -> None:
        """Write the steps that wait for their batch, after every `save_async` so far was coded; they are then durable.

        Raises:
            StorageError, FencedError, CommitUnknownError: what stopped them; every step that waited has failed with it.
        """
        self._submit(self._flush).result()

    def settle(self) -> None:
        """`flush`, and note in the log that nothing is missing if the process ends now. What SIGTERM calls.

        Raises nothing that concerns the steps: their saves do.
        """
        self._submit(self._flush_and_close).result()

    def tag(self, name: str, ref_step: int) -> None:
        """Name the checkpoint of `ref_step` of this term; an existing tag moves.

        Raises:
            as `save`.
        """
        self._submit(lambda: self._commit(tags={name: (self.term, ref_step)})).result()

    def drain(self) -> None:
        """Wait until every `save_async` so far is durable; raises what one of them raised and nobody has seen."""
        self._submit(self._flush_in_time).result()
        self._raise_failure()

    def close(self) -> None:
        """Wait for every save, then end; a second time does nothing. Raises what a `save_async` raised unseen."""
        if self._process != os.getpid():
            return  # a fork: threads, bases and pins are the parent's
        termination.forget(self)
        with self._lock:
            if not self._closed:
                with contextlib.suppress(RuntimeError):  # the interpreter is going
                    self._committer.submit(self._finish)
                # Under one lock: a step submitted after `_finish` would wait for its batch for ever.
                self._closed = True
        self._stop_polling.set()
        # Each of these may be repeated: after Ctrl-C in one of them a second close waits again.
        self._committer.shutdown()
        self._blocks.shutdown()
        self._deltas.close()
        self._raise_failure()

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

    # -- the caller's thread

    def _admit(self, state: Any, step: int) -> FlatState:
        """Everything that can be refused is refused here, before a byte is written."""
        self._check_open()
        self._raise_failure()
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= _MAX_STEP:
            raise StepOrderError(f"step {step!r}: a whole number from 0 to 2^53 - 1 is needed")
        if self.parent is not None and step <= self.parent.step:
            raise StepOrderError(
                f"step {step} is not above step {self.parent.step}, from which term {self.term} continues "
                f"({self.parent.ref}); to go back further open a writer with parent=<an earlier checkpoint>"
            )
        flat = state if isinstance(state, FlatState) else torch_seam.flattened(state)
        with self._lock:
            if step in self._steps:
                raise StepOrderError(f"step {step} exists already in term {self.term}")
            self._steps.add(step)
        return flat

    def _check_open(self) -> None:
        self._check_process()
        if self._ended is not None:
            raise self._ended
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
                return self._committer.submit(work)
        raise WriterClosedError(f"the writer of term {self.term} is closed")

    def _tend(self) -> None:
        """Upkeep of the log, once what was submitted before is done."""
        with contextlib.suppress(WriterClosedError):  # closed by another thread: that is no reason to fail a save
            self._submit(self._housekeeping)

    def _release_step(self, step: int, error: BaseException | None) -> None:
        """A step that failed for good may be tried again; one that may have been committed may not."""
        if not isinstance(error, CommitUnknownError):
            with self._lock:
                self._steps.discard(step)

    def _forget_failure(self, step: int) -> None:
        self._failures.pop(step, None)

    def _raise_failure(self) -> None:
        """Raise what nobody has seen: the first failure, with a note of every other one."""
        failures: list[tuple[int, BaseException]] = []
        while self._failures:
            failures.append(self._failures.popitem())
        if not failures:
            return
        failures.reverse()
        _, first = failures[0]
        for step, other in failures[1:]:
            first.add_note(f"step {step} was not saved, either: {other}")
        raise first

    def _updates(self, updates: Updates | None, flat: FlatState) -> Sequence[Update]:
        if updates is None or self._diffs is None:
            return ()
        return updates(flat) if callable(updates) else updates

    def _take_gradients(self, updates: Sequence[Update]) -> tuple[list[Update], Snapshot | None]:
        """The updates with copies of their gradients, and what owns the copies' memory."""
        dense: dict[str, TensorSource] = {}
        taken = list(updates)
        for number, update in enumerate(taken):
            gradient = update.gradient
            if isinstance(gradient, SparseGradient):
                copy = SparseGradient(gradient.indices.copy(), gradient.values.copy(), gradient.size)
                taken[number] = replace(update, gradient=copy)
            elif gradient is not None:
                dense[str(number)] = gradient
        if not dense:
            return taken, None
        copied = self._snapshots.copy(FlatState(None, dense), self._blocks)
        for name, source in copied.flat.tensors.items():
            taken[int(name)] = replace(taken[int(name)], gradient=source)
        return taken, copied

    # -- the committer's thread

    def _diff_now(
        self,
        flat: FlatState,
        updates: Sequence[Update],
        step: int,
        progress: Progress | None,
        interrupted: threading.Event,
    ) -> CheckpointInfo:
        """Store a step with everything that waits, from a copy: the next step is coded against it."""
        done: Future[CheckpointInfo] = Future()
        snapshot = self._snapshots.copy(flat, self._deltas.encoders)
        gradients: Snapshot | None = None
        kept = False
        try:
            # Copies, too: gradients that change while they are coded, after a Ctrl-C, would spoil the chain.
            taken, gradients = self._take_gradients(updates)
            if progress is not None:  # what it raises stops the save: so it is asked before anything is written
                progress(sum(source.nbytes for source in flat.tensors.values()))
            if interrupted.is_set():
                raise WriterClosedError(f"step {step} was not saved: interrupted")
            kept = self._diff(snapshot, taken, step, done)
            self._flush()
        finally:
            if gradients is not None:
                gradients.free()
            if not kept:
                snapshot.free()
        return done.result()

    def _diff(self, snapshot: Snapshot, updates: Sequence[Update], step: int, done: Future[CheckpointInfo]) -> bool:
        """Code a step, or store a full if one is due -> whether `snapshot` stays in memory."""
        assert self._diffs is not None
        if self._ended is not None:
            raise self._ended
        if self._diffs.waiting and step < self._diffs.waiting[-1].step:
            self._flush_in_time()  # the steps of a segment ascend
        if not self._diffs.due(self._log.catalog.restorable):
            full = self._diffs.add(snapshot, updates, step, done)
            if full or not self._wait_at_most(self._diffs.options.seconds):
                self._flush_in_time()
            return True
        self._flush_in_time()
        began = time.monotonic()
        info, kept = self._persist(snapshot.flat, step, interrupted=threading.Event(), snapshot=snapshot)
        seconds = time.monotonic() - began
        done.set_result(info)  # it is durable: nothing that follows may say otherwise
        try:
            # A base of deltas lives as long as those need it: then a copy is what the next step is coded against.
            base = self._snapshots.copy(snapshot.flat, self._deltas.encoders) if kept else snapshot
        except (MemoryError, RuntimeError):
            self._diffs.restart()  # the next checkpoint is a full
            return True
        self._diffs.begin(CheckpointId(self.term, step, info.state), base, info.stored, seconds)
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
            self._submit(self._flush_in_time)

    def _flush_in_time(self) -> None:
        """`_flush` for the sake of those who are not waiting for it: they hear of a failure from their saves."""
        with contextlib.suppress(CkptError):
            self._flush()

    def _flush(self) -> None:
        """Write and commit the steps that wait; each of them is done, or has failed."""
        deadline, self._deadline = self._deadline, None
        if deadline is not None:
            deadline.cancel()
        if self._diffs is None or not self._diffs.waiting:
            return
        waiting = list(self._diffs.waiting)
        begun: list[str] = []
        try:
            if self._ended is not None:
                raise self._ended
            written = self._diffs.write(self._staging, self._blocks, begun.append)
            self._commit(segments=written.segments, checkpoints=written.checkpoints, encodings=written.encodings)
        except BaseException as error:
            if not isinstance(error, FencedError | CommitUnknownError):
                self._abandoned += begun
            first, last = waiting[0].step, waiting[-1].step
            error.add_note(f"steps {first} to {last}, which waited for their batch, were not saved")
            self._diffs.restart()
            for one in waiting:
                self._fail(one.step, error, one.done)
            raise
        self._diffs.waiting.clear()
        for one, entry in zip(waiting, written.became, strict=True):
            one.done.set_result(describe_checkpoint(self._log.catalog, entry))

    def _fail(self, step: int, error: BaseException, done: Future[CheckpointInfo]) -> None:
        """A step was not saved. Does nothing to one whose saver knows already, or that is durable."""
        if done.done():
            return
        self._missing = True
        self._release_step(step, error)
        # Before anyone can ask for the result: who then sees the error takes it back.
        self._failures[step] = error
        done.set_exception(error)

    def _finish(self) -> None:
        """The last thing a term does."""
        self._flush_and_close()
        if self._diffs is not None:
            self._diffs.restart()

    def _flush_and_close(self) -> None:
        """Flush, and if steps may wait at all, note that none was lost."""
        self._flush_in_time()
        if self._diffs is not None and self._diffs.options.waits and self._ended is None and not self._missing:
            with contextlib.suppress(CkptError):
                self._commit(extra={CLOSED: True})

    def _persist(
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
            interrupted: set when the caller has stopped waiting and may change the state.
        """
        if self._ended is not None:
            raise self._ended
        begun: list[str] = []
        try:
            written, decision, base = self._deltas.write(
                flat,
                step,
                staging=self._staging,
                pool=self._blocks,
                restorable=self._log.catalog.restorable,
                begun=begun.append,
                progress=progress,
            )
            if interrupted.is_set():
                raise WriterClosedError(f"step {step} was not saved: interrupted")
            used = {segment.id for segment in written.segments}
            self._abandoned += [segment for segment in begun if segment not in used]
            begun = list(used)
            entry = CheckpointEntry(self.term, step, written.state, time.time(), written.tensors, written.nbytes)
            encoding = self._deltas.encoding(written, entry.node, base)
            self._commit(segments=written.segments, checkpoints=(entry,), encodings=(encoding,))
        except (FencedError, CommitUnknownError):
            raise  # this term drops nothing any more
        except BaseException:
            self._abandoned += begun  # the next commit names them in a drop, so that gc may remove what is left
            raise
        info = describe_checkpoint(self._log.catalog, entry)
        return info, self._deltas.committed(decision, entry.id, flat, snapshot, written.stored, interrupted.is_set)

    def _commit(self, **changes: Any) -> None:
        drops = tuple(self._abandoned)
        try:
            self._log.commit(CommitRecord(self.term, nonce=secrets.token_hex(16), drops=drops, **changes))
        except (FencedError, CommitUnknownError) as error:
            self._ended = error
            raise
        del self._abandoned[: len(drops)]
        if changes.get("checkpoints"):
            self._missing = False

    def _housekeeping(self) -> None:
        """Answer requests and fold, after the save was acknowledged. Neither may fail a save."""
        if self._ended is not None:
            return
        try:
            # Prevents: granting a request to drop what a step that waits is coded against.
            requests.handle(self._log, prepare=self._flush_in_time)
            folding.maintain(self._log)
        except (FencedError, CommitUnknownError) as error:
            self._ended = error  # the next save says so
        except CkptError as error:
            with contextlib.suppress(Warning):  # where warnings are errors: this thread has saves to finish
                warnings.warn(f"{self._backend.url}: upkeep of the log failed, saves go on: {error}", stacklevel=1)

    def _poll(self, seconds: float) -> None:
        while not self._stop_polling.wait(seconds):
            try:
                self._submit(self._housekeeping).result()
            except (WriterError, RuntimeError):  # closed meanwhile, or the interpreter is going
                return
