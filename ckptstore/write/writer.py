"""The writer: one term, one thread that persists, every commit acknowledged only when it is durable.

This is the caller's side, for any thread; what the committer's thread does is in `committing`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

from ckptstore.errors import UsageError, WriterClosedError, WriterError
from ckptstore.formats.records import CheckpointId
from ckptstore.formats.segment import SegmentDoc
from ckptstore.formats.state import FlatState
from ckptstore.frameworks import bridge
from ckptstore.host import exiting, sigterm
from ckptstore.host.buffers import DEFAULT_BUDGET, Staging
from ckptstore.host.caller_warnings import UnexplainedStepWarning, warn
from ckptstore.host.progress import Progress
from ckptstore.host.threads import started_pool
from ckptstore.log.checkpoints import CheckpointInfo
from ckptstore.log.journal import Journal
from ckptstore.log.refs import step_number
from ckptstore.log.term import Term
from ckptstore.restore.stored_base import StoredBase
from ckptstore.write.committer import Committer
from ckptstore.write.deltas import DeltaOptions, Deltas
from ckptstore.write.ledger import Failures, Labels, PendingSave, Saves
from ckptstore.write.snapshot import Snapshot, SnapshotPool
from ckptstore.write.steps.batcher import DiffOptions, Diffs
from ckptstore.write.steps.updates import Found, Update, Updates, looked_up, with_copies

__all__ = ["Begin", "Writer", "WriterOptions"]

Begin: TypeAlias = Callable[[str | int | CheckpointInfo, int], tuple[Term, CheckpointInfo | None]]
"""Begins a term that continues from a checkpoint, if the newest is still the one of the given number."""

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
        exiting.check()
        # Says what is wrong with it, before a term is opened and another one fenced.
        Staging.for_chunks(budget=self.staging_bytes)
        if self.threads < 1:
            raise UsageError(f"threads: {self.threads}, at least 1 is needed")
        if self.max_in_flight < 1:
            raise UsageError(f"max_in_flight: {self.max_in_flight}, at least 1 is needed")
        if self.poll_seconds is not None and not self.poll_seconds > 0:
            raise UsageError(f"poll_seconds: {self.poll_seconds}, more than 0 is needed, or None")


@dataclass(frozen=True, slots=True)
class _Copies:
    """What `save_async` has copied, so that training may go on."""

    state: Snapshot
    updates: Sequence[Update]
    gradients: Snapshot | None

    def let_go(self, *, kept: bool) -> None:
        """It is no longer in flight. Give its memory back: all of it, or if the state is `kept`, the gradients'."""
        self.state.land()
        if self.gradients is not None:
            self.gradients.free()
        if not kept:
            self.state.free()


class Writer:
    """One term of a store, as ``store.writer()`` opens it. Use it in a ``with``; leaving waits for every save.

    Without that, the interpreter's ordinary end does what leaving would; only a process that is killed loses what is
    on its way.

    Attributes:
        url: the store's.
        term: the number of this term.
        parent: the checkpoint this term continues from: load it before training; None for a new run.
    """

    def __init__(
        self,
        journal: Journal,
        term: Term,
        parent: CheckpointInfo | None,
        options: WriterOptions,
        reopen: Callable[[CheckpointId], StoredBase],
        begin: Begin,
    ) -> None:
        self.url = journal.url
        self._journal = journal
        self._backend = journal.backend
        self._options = options
        self._begin = begin
        self._failures = Failures()
        self._staging = Staging.for_chunks(budget=options.staging_bytes)
        plain = options.deltas is None and options.diffs is None
        self._snapshots = SnapshotPool(options.max_in_flight, digests=plain)
        # Payloads under way take no more memory than the staging blocks do.
        encoders = min(os.cpu_count() or 1, self._staging.blocks - 1)
        self._deltas = Deltas(options.deltas, self._backend, self._draft(term), self._snapshots, reopen, encoders)
        self._blocks = started_pool(options.threads, "ckptstore-write")
        self._with_diffs = options.diffs is not None
        self._remarked = False  # that steps are not explained
        self._committer = self._serve(term, parent)
        # One thread persists and commits: the log of a term has one author, and order needs no lock.
        self._thread = started_pool(1, "ckptstore-commit")
        self._process = os.getpid()
        self._ended: Future[None] | None = None
        self._lock = threading.Lock()
        self._stop_polling = threading.Event()
        if options.poll_seconds is not None:
            threading.Thread(
                target=self._poll, args=(options.poll_seconds,), name="ckptstore-requests", daemon=True
            ).start()
        exiting.watch(self)
        if options.diffs is not None and options.diffs.flush_on_sigterm:
            sigterm.watch(self)

    def _draft(self, term: Term) -> SegmentDoc:
        """What all segments of a term say of themselves."""
        return SegmentDoc(self._journal.run, term.number, "", {}, parents={term.number: term.parent})

    def _serve(self, term: Term, parent: CheckpointInfo | None) -> Committer:
        """What a term has of its own; everything else the terms of a writer share."""
        self.term = term.number
        self.parent = parent
        diffs: Diffs | None = None
        if self._options.diffs is not None:
            diffs = Diffs(self._options.diffs, self._draft(term), self._deltas.workers)
        return Committer(
            term,
            Saves(term.number, parent, self._failures),
            self._deltas,
            diffs,
            snapshots=self._snapshots,
            staging=self._staging,
            blocks=self._blocks,
            later=self._submit,
        )

    def save(
        self,
        state: Any,
        step: int,
        *,
        metadata: Mapping[str, Any] | None = None,
        tags: str | Sequence[str] = (),
        updates: Updates | None = None,
        progress: Progress | None = None,
    ) -> CheckpointInfo:
        """Make `state` durable as the checkpoint of `step`; it may be loaded by anyone when this returns.

        Args:
            state: nested dict of tensors, numbers, strings, lists, RNG states ..., or a `FlatState` (one that was taken
                apart already); must not change meanwhile.
            step: optimizer steps done, above every step that this term continues from; numpy's integers, too.
            metadata: what is to be known of the checkpoint wherever the store is listed (a loss, a commit, a note): a
                mapping of texts, numbers, booleans, None, lists and mappings, at most 16 KiB as JSON. It is in
                `CheckpointInfo.metadata`.
            tags: a name or names for it, given in the same commit; a tag that exists moves.
            updates: what the optimizers did since the save before (`training.OptimizerStep`), for gradient diffs. With
                a `DiffOptions.batch` above 1, everything that waits is written.
            progress: called as bytes are copied, from other threads; the total is the state's bytes.

        Raises:
            UnsupportedStateError: something in `state` cannot be stored; names its key path. Nothing was written.
            StepOrderError: the step exists, or is not above the parent's. Nothing was written.
            UsageError: `metadata` or `tags` cannot be stored. Nothing was written.
            StorageError: the medium failed. The checkpoint does not exist; the writer may go on.
            FencedError: a newer term exists. This writer is finished.
            CommitUnknownError: the checkpoint may or may not exist. This writer is finished.
        """
        step = step_number(step)
        labels = Labels.of(metadata, tags)
        committer, flat = self._admit(state, step)
        interrupted = threading.Event()
        future: Future[CheckpointInfo] | None = None

        try:
            found = self._updates(updates, flat)

            def work() -> CheckpointInfo:
                if not self._with_diffs:
                    return committer.persist(flat, step, progress=progress, interrupted=interrupted, labels=labels)[0]
                return committer.diff_now(flat, found, step, progress, interrupted, labels)

            future = self._submit(work)
            self._tend()
            return future.result()
        except BaseException as error:
            # Ctrl-C while the other thread still reads the caller's tensors: the caller will change them, so the commit
            # must not happen any more. Wait until the thread has let go of them.
            interrupted.set()
            failure = error if future is None else future.exception()
            if failure is not None:
                committer.saves.release(step, failure)
                committer.saves.seen(step)
            raise

    def save_async(
        self,
        state: Any,
        step: int,
        *,
        metadata: Mapping[str, Any] | None = None,
        tags: str | Sequence[str] = (),
        updates: Updates | None = None,
    ) -> PendingSave:
        """Copy `state` to host memory and make it durable in the background; the state may change when this returns.

        Args:
            state, step, metadata, tags: as for `save`.
            updates: as for `save`; gradients are copied, too.

        Waits while `max_in_flight` earlier snapshots are not durable yet. An error that nobody asked for with `result`
        is raised by the next call, or on leaving the ``with``.

        Raises:
            as `save`; what concerns the medium comes from `PendingSave.result`.
        """
        step = step_number(step)
        labels = Labels.of(metadata, tags)
        committer, flat = self._admit(state, step)
        copies = self._copied(committer, flat, step, updates)
        unclaimed = threading.Lock()  # whoever takes it decides what becomes of the snapshot
        done: Future[CheckpointInfo] = Future()
        committer.saves.watch(step, done)

        def work() -> None:
            if not unclaimed.acquire(blocking=False):
                return
            kept, state = False, copies.state
            try:
                if self._with_diffs:
                    kept = committer.diff(state, copies.updates, step, done, labels)
                else:
                    info, kept = committer.persist(
                        state.flat, step, interrupted=threading.Event(), snapshot=state, labels=labels
                    )
                    done.set_result(info)
            except BaseException as error:
                committer.fail(step, error, done)
                raise
            finally:
                copies.let_go(kept=kept)

        try:
            self._submit(work)
            self._tend()
        except BaseException as error:
            # Prevents: a snapshot that Ctrl-C leaves in flight for ever, for which the next save_async would wait.
            if unclaimed.acquire(blocking=False):
                copies.let_go(kept=False)
                committer.saves.release(step, error)
                done.cancel()
            raise
        return PendingSave(
            step, done, lambda: committer.saves.seen(step), lambda: self._hurry(lambda: committer.flush_step(step))
        )

    def _copied(self, committer: Committer, flat: FlatState, step: int, updates: Updates | None) -> _Copies:
        try:
            snapshot = self._snapshots.take(flat, self._blocks)
            try:
                return _Copies(snapshot, *with_copies(self._updates(updates, flat), self._snapshots, self._blocks))
            except BaseException:
                snapshot.land()
                snapshot.free()
                raise
        except BaseException as error:
            committer.saves.release(step, error)
            if isinstance(error, RuntimeError):
                self._check_open()  # closed by another thread, and its pool with it
            raise

    def wait(self) -> None:
        """Return when everything given so far is durable: what is in flight, and what waits for its batch, which is
        written now.

        Raises:
            StorageError, FencedError, CommitUnknownError: what stopped a `save_async` of which nobody has been told
                yet, with a note of every other one; no later call raises it again.
            WriterClosedError: the writer is closed; `close` has waited, and raised.
        """
        self._told(self._committer.flush_in_time)
        self._failures.raise_unseen()

    def _settle(self) -> None:
        """Write what waits, and note in the log that nothing is missing if the process ends now (`host.sigterm`).

        Raises nothing that concerns the steps: their saves do.
        """
        self._submit(self._committer.flush_and_close).result()

    def tag(self, name: str, ref: str | int | CheckpointInfo = "latest") -> CheckpointInfo:
        """Name a checkpoint, of this term or an earlier one; a tag that exists moves.

        If the checkpoint waits for its batch, that is written first.

        Args:
            name: 1-128 letters, digits and ``_.+/-``, beginning with a letter, digit or ``_``.
            ref: ``latest``, a step, ``STEP@TERM``, ``tag:NAME``, or a checkpoint.

        Returns:
            the checkpoint, with its tags.

        Raises:
            UsageError: no tag name.
            CheckpointNotFoundError: nothing answers to `ref`.
            StorageError, FencedError, CommitUnknownError: as `save`.
        """
        if isinstance(ref, CheckpointInfo):
            ref = ref.ref
        committer, text = self._committer, ref if isinstance(ref, str) else str(step_number(ref))
        return self._told(lambda: committer.tag(name, text))

    def untag(self, name: str) -> None:
        """Remove a tag; the checkpoint stays.

        Raises:
            CheckpointNotFoundError: there is no such tag.
            StorageError, FencedError, CommitUnknownError: as `save`.
        """
        committer = self._committer
        self._told(lambda: committer.untag(name))

    def _told(self, work: Callable[[], _T]) -> _T:
        """What the committer's thread makes of `work`; whoever is told here hears of no failure a second time."""
        try:
            return self._submit(work).result()
        except BaseException as error:
            self._failures.seen_error(error)
            raise

    def rollback(self, ref: str | int | CheckpointInfo) -> CheckpointInfo:
        """Go back: begin a new term that continues from an earlier checkpoint, in place of the present one.

        What was saved since stays in the store, as a branch; what is on its way is finished first. The next checkpoint
        is a full, and its step may be any above that of `ref`. One thread calls it, while no other saves.

        Args:
            ref: ``latest``, a step, ``STEP@TERM``, ``tag:NAME``, or a checkpoint.

        Returns:
            the checkpoint that the new term continues from, to be loaded; `parent` and `term` say so, too.

        Raises:
            CheckpointNotFoundError: there is none of that name; the present term goes on.
            FencedError: a newer term exists, which is not fenced by this. This writer is finished.
            StorageError: the medium failed; if a term has been opened all the same, the next save says so.
            and what a `save_async` raised unseen, before anything is done.
        """
        self._check_open()
        self._submit(self._committer.flush_and_close).result()
        self._failures.raise_unseen()
        term, parent = self._begin(ref, self.term)
        assert parent is not None  # a term that continues from a checkpoint has one
        self._submit(lambda: self._succeed(term, parent)).result()
        return parent

    def _succeed(self, term: Term, parent: CheckpointInfo) -> None:
        """A new term takes the place of the present one. The committer's thread calls it."""
        self._committer.give_way(WriterClosedError(f"term {self.term} is over: {parent.ref} was gone back to"))
        self._deltas.begin(self._draft(term))
        self._committer = self._serve(term, parent)

    def close(self) -> None:
        """Wait for every save, then end; a second time does nothing. Raises what a `save_async` raised unseen."""
        if self._process != os.getpid():
            return  # a fork: threads, bases and pins are the parent's
        sigterm.forget(self)
        self._end()
        self._stop_polling.set()
        # Each of these may be repeated: after Ctrl-C in one of them a second close waits again.
        self._thread.shutdown()
        self._blocks.shutdown()
        self._deltas.close()
        exiting.forget(self)
        self._failures.raise_unseen()

    def _end(self) -> Future[None]:
        """Take no save any more -> done when every earlier one is, and the term is closed (`host.exiting`, too)."""
        with self._lock:
            if self._ended is None:
                # Under one lock: a step submitted after that would wait for its batch for ever.
                self._ended = self._thread.submit(self._committer.finish)
            return self._ended

    def _unfinished(self) -> list[int]:
        """The steps of `save_async` that are on their way, ascending (`host.exiting`)."""
        return self._committer.saves.pending()

    def _unseen(self) -> list[tuple[int, BaseException]]:
        """The steps whose `save_async` failed and nobody has asked for, each with what stopped it; once."""
        return self._failures.take()

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

    def _admit(self, state: Any, step: int) -> tuple[Committer, FlatState]:
        """Everything that can be refused is refused here, before a byte is written."""
        self._check_open()
        self._failures.raise_unseen()
        committer = self._committer
        committer.saves.check(step)
        flat = state if isinstance(state, FlatState) else bridge.flattened(state)
        committer.saves.take(step)
        return committer, flat

    def _check_open(self) -> None:
        self._check_process()
        if self._committer.ended is not None:
            raise self._committer.ended
        if self._ended is not None:
            raise WriterClosedError(self._closed())

    def _closed(self) -> str:
        why = f" because the interpreter is ending: {exiting.ADVICE}" if exiting.under_way() else ""
        return f"the writer of term {self.term} is closed{why}"

    def _check_process(self) -> None:
        """A fork has none of the threads: without this it would wait for ever."""
        if self._process != os.getpid():
            raise WriterClosedError(f"the writer of term {self.term} belongs to process {self._process}, not its fork")

    def _submit(self, work: Callable[[], _T]) -> Future[_T]:
        self._check_process()
        with self._lock:
            if self._ended is None:
                return self._thread.submit(work)
        raise WriterClosedError(self._closed())

    def _hurry(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(WriterClosedError, RuntimeError):  # closing flushes; the interpreter is going
            self._submit(work)

    def _tend(self) -> None:
        """Upkeep of the log, once what was submitted before is done."""
        with contextlib.suppress(WriterClosedError):  # closed by another thread: that is no reason to fail a save
            self._submit(self._committer.housekeeping)

    def _updates(self, updates: Updates | None, flat: FlatState) -> Sequence[Update]:
        if updates is None or not self._with_diffs:
            return ()
        found = looked_up(updates, flat)
        if isinstance(found, Found) and found.left_out is not None and not self._remarked:
            self._remarked = True
            warn(found.left_out, UnexplainedStepWarning)
        return found

    def _poll(self, seconds: float) -> None:
        while not self._stop_polling.wait(seconds):
            try:
                self._submit(self._committer.housekeeping).result()
            except (WriterError, RuntimeError):  # closed meanwhile, or the interpreter is going
                return
