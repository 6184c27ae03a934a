"""The writer: one term, one thread that persists, every commit acknowledged only when it is durable.

This is the caller's side, for any thread; what the committer's thread does is in `committer`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from operator import itemgetter
from types import TracebackType
from typing import Any, Final, Self, TypeAlias, TypeVar

from ckptstore.errors import UsageError, WriterClosedError, WriterError
from ckptstore.formats.records import CheckpointId
from ckptstore.formats.segment import SegmentDoc
from ckptstore.formats.state import FlatState
from ckptstore.frameworks import bridge
from ckptstore.host import exiting, sigterm
from ckptstore.host.background import Periodic
from ckptstore.host.buffers import Staging
from ckptstore.host.progress import Progress
from ckptstore.host.reentrance import refuse_within
from ckptstore.host.threads import started_pool
from ckptstore.log.change import Change
from ckptstore.log.checkpoints import CheckpointInfo
from ckptstore.log.journal import Journal
from ckptstore.log.refs import step_number
from ckptstore.log.requests import Outcome
from ckptstore.log.term import Term
from ckptstore.restore.stored_base import StoredBase
from ckptstore.write.coded import Coded, Copies
from ckptstore.write.committer import Committer
from ckptstore.write.companion import Companion
from ckptstore.write.deltas import Deltas
from ckptstore.write.fed import FedSaves
from ckptstore.write.filling import Filling
from ckptstore.write.fulls import Fulls
from ckptstore.write.layered import Begun, LayeredSave, Owner, checked_layers
from ckptstore.write.ledger import Failures, Labels, PendingSave, Saves, check_owner
from ckptstore.write.metrics import Measured, Meter
from ckptstore.write.options import WriterOptions
from ckptstore.write.second_tier import Lag, SecondTier
from ckptstore.write.snapshot import Snapshot, SnapshotPool
from ckptstore.write.steps.batcher import Diffs
from ckptstore.write.steps.updates import Explaining, Update, Updates

__all__ = ["Begin", "Writer"]

Begin: TypeAlias = Callable[[str | int | CheckpointInfo, int], tuple[Term, CheckpointInfo | None]]
"""Begins a term that continues from a checkpoint, if the newest is still the one of the given number."""

_T = TypeVar("_T")


class Writer:
    """One term of a store, as ``store.writer()`` opens it. Use it in a ``with``; leaving waits for every save.

    Without that, the interpreter's ordinary end does what leaving would; only a process that is killed loses what is
    on its way.

    Attributes:
        url: the store's.
        term: the number of this term.
        parent: the checkpoint this term continues from: load it before training; None for a new run.
    """

    def __repr__(self) -> str:
        since = "from nothing" if self.parent is None else f"from {self.parent.ref}"
        return f"<Writer of {self.url!r}: term {self.term}, {since}>"

    def __init__(
        self,
        journal: Journal,
        term: Term,
        parent: CheckpointInfo | None,
        options: WriterOptions,
        reopen: Callable[[CheckpointId], StoredBase],
        begin: Begin,
        tier: SecondTier | None = None,
    ) -> None:
        self.url = journal.url
        self._tier = tier
        self._journal = journal
        self._backend = journal.backend
        self._options = options
        self._begin = begin
        self._failures = Failures()
        self._staging = Staging.for_chunks(budget=options.staging_bytes)
        self._background = started_pool(1, "ckptstore-touch")
        self._snapshots = SnapshotPool(options.max_in_flight, self._background.submit, self._backend.segment_bytes)
        cores = os.cpu_count() or 1
        # Payloads under way take no more memory than the staging blocks do. What is not coded has none.
        encoders = max(self._staging.blocks - 1, options.max_in_flight * options.threads if options.plain else 1)
        draft = self._draft(term)
        self._deltas = Deltas(options.deltas, self._backend, draft, self._snapshots, reopen, min(cores, encoders))
        self._blocks = started_pool(options.threads, "ckptstore-write")
        self._with_diffs = options.diffs is not None
        self._coded = Coded(
            Explaining(wanted=self._with_diffs),
            self._snapshots,
            self._blocks,
            with_diffs=self._with_diffs,
            submit=self._submit,
            tend=self._tend,
        )
        self._committer = self._serve(term, parent)
        # One thread commits, and persists what is coded: the log of a term has one author, and order needs no lock.
        self._thread = started_pool(1, "ckptstore-commit")
        self._fulls = self._lanes() if options.plain else None
        self._fed = self._fed_saves()
        # Else what is coded has a turn of its own, for which a save waits with nothing in hand.
        self._needs_callers = self._fulls is not None or self._fed is not None
        self._meter = Meter(options.on_metrics)
        self._process = os.getpid()
        self._ended: Future[None] | None = None
        self._lock = threading.Lock()
        self._polls: Periodic | None = None
        self._layer_pool: ThreadPoolExecutor | None = None  # copies layers, behind nothing else; from the first `begin`
        self._begun: Begun | None = None
        self._companion: Companion | None = None
        if options.poll_seconds is not None:
            self._polls = Periodic(options.poll_seconds, self._poll_beside, "requests")
            self._polls.start()
        exiting.watch(self)
        if options.diffs is not None and options.diffs.flush_on_sigterm:
            sigterm.watch(self)

    def _upkeep(self) -> None:
        self._committer.housekeeping()  # whichever it is by then

    def _lanes(self) -> Fulls:
        fulls = Fulls(
            self._options.max_in_flight,
            self._options.threads,
            self._options.memory,
            commit=self._thread,
            tend=self._upkeep,
            background=self._background.submit,
            segment_bytes=self._backend.segment_bytes,
        )
        if self.parent is not None and (self._options.memory is not None or self._options.max_in_flight > 1):
            # Both are for `save_async` alone: who only calls `save` shall not find a state's memory taken.
            fulls.prepare(self.parent.nbytes)
        return fulls

    def _fed_saves(self) -> FedSaves | None:
        if self._options.memory is None or self._options.plain:
            return None
        fed = FedSaves(
            self._options.memory,
            with_diffs=self._with_diffs,
            submit=self._submit,
            tend=self._tend,
            background=self._background.submit,
        )
        if self.parent is not None:
            self._snapshots.expect(self.parent.nbytes)
            fed.feeding.prepare(self.parent.nbytes)
        return fed

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
        committer = Committer(
            term,
            Saves(term.number, parent, self._failures),
            self._deltas,
            diffs,
            snapshots=self._snapshots,
            staging=self._staging,
            blocks=self._blocks,
            later=self._submit,
        )
        if self._tier is not None:
            committer.follow(self._tier)
        return committer

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
            updates: what the optimizers did since the save before (`training.OptimizerStep`), for step diffs, which
                only a writer with `diffs` makes. With a `DiffOptions.batch` above 1, everything that waits is written.
            progress: called as bytes are copied, from other threads; the total is the state's bytes.

        Raises:
            UnsupportedStateError: something in `state` cannot be stored; names its key path. Nothing was written.
            StepOrderError: the step exists, or is not above the parent's. Nothing was written.
            UsageError: `metadata` or `tags` cannot be stored; or a signal handler calls this while the same thread is
                inside `save`, `save_async` or `begin`. Nothing was written.
            StorageError: the medium failed. The checkpoint does not exist; the writer may go on.
            FencedError: a newer term exists. This writer is finished.
            CommitUnknownError: the checkpoint may or may not exist. This writer is finished.
        """
        refuse_within(self, _SAVING)
        step = step_number(step)
        labels = Labels.of(metadata, tags)
        self._coded.explaining.remark_unused(updates)
        began = time.monotonic()
        committer, flat = self._admit(state, step)
        measured = self._meter.begin(flat, step, began)
        try:
            if self._fed is None:
                info = self._saved(committer, flat, step, labels, updates, progress)
            else:
                found = self._found(committer, flat, step, updates)
                fed = self._fed.save(committer, flat, found, step, labels, measured, now=True, progress=progress)
                info = self._fed.result(committer, fed, step)
        except BaseException as error:
            measured.ended(None, error)
            raise
        else:
            measured.ended(info)
        finally:
            measured.returned()
        return info

    def _saved(
        self,
        committer: Committer,
        flat: FlatState,
        step: int,
        labels: Labels,
        updates: Updates | None,
        progress: Progress | None,
    ) -> CheckpointInfo:
        interrupted = threading.Event()
        future: Future[CheckpointInfo] | None = None
        try:
            if self._fulls is not None:
                future = self._fulls.save(
                    committer, flat, step, labels=labels, progress=progress, interrupted=interrupted
                )
                return future.result()
            future = self._coded.save(committer, flat, step, labels, updates, progress, interrupted)
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

        Waits while `max_in_flight` earlier saves are not durable yet, and while `memory` is spent (`on_metrics` is told
        how long). An error that nobody asked for with `result` is raised by the next call, or on leaving the ``with``.

        Raises:
            as `save`; what concerns the medium comes from `PendingSave.result`.
        """
        refuse_within(self, _SAVING)
        step = step_number(step)
        labels = Labels.of(metadata, tags)
        self._coded.explaining.remark_unused(updates)
        began = time.monotonic()
        committer, flat = self._admit(state, step)
        measured = self._meter.begin(flat, step, began)
        try:
            if self._fulls is not None:
                full = self._fulls.begin(committer, flat, step, labels, measured)
                pending = PendingSave(step, full.done, lambda: committer.saves.seen(step), cancel=full.cancel)
                return pending._followed_by(self._tier)
            if self._fed is not None:
                found = self._found(committer, flat, step, updates)
                fed = self._fed.save(committer, flat, found, step, labels, measured)
                return PendingSave(
                    step,
                    fed.done,
                    lambda: committer.saves.seen(step),
                    self._coded.hurry(committer, step),
                    fed.cancel,
                )._followed_by(self._tier)
            # What is coded waits for its turn in the committer's thread.
            copies = self._copied(committer, flat, step, updates, measured)
            return self._coded.hand_over(committer, copies, step, labels, measured)._followed_by(self._tier)
        except BaseException as error:
            measured.failed(error)
            raise
        finally:
            measured.returned()

    def adopt(
        self,
        snapshot: Snapshot,
        step: int,
        *,
        metadata: Mapping[str, Any] | None = None,
        tags: str | Sequence[str] = (),
        updates: Sequence[Update] = (),
        gradients: Snapshot | None = None,
        began: float | None = None,
        waited: float = 0.0,
    ) -> PendingSave:
        """Make durable what somebody else has copied, laid out as its segments will be (`agent`): without a copy.

        Waits for nothing: how many are in flight is for whoever owns the memory to bound. It may be used again once
        `Snapshot.free` is called, which for a base of deltas is much later than `Snapshot.land`.

        Args:
            snapshot: the state; unchanged until it is free.
            step, metadata, tags: as for `save`.
            updates: as for `save`, looked up already; they may refer to what `gradients` holds.
            gradients: what owns the memory of the gradients.
            began, waited: since when training has waited for the copy (``time.monotonic()``), and how many seconds of
                that for earlier saves: for `on_metrics`. None: it has not.

        Raises:
            as `save_async`. The memory is the caller's again then: `land` and `free` it.
        """
        refuse_within(self, _SAVING)
        step = step_number(step)
        labels = Labels.of(metadata, tags)
        began = time.monotonic() if began is None else began
        committer, flat = self._admit(snapshot.flat, step)
        measured = self._meter.begin(flat, step, began)
        measured.waited = waited
        try:
            if self._fulls is not None:
                claim = self._fulls.adopt(committer, snapshot, step, labels, measured)
                return PendingSave(step, claim.done, lambda: committer.saves.seen(step), cancel=claim.cancel)
            copies = Copies(snapshot, updates, gradients)
            return self._coded.hand_over(committer, copies, step, labels, measured)
        except BaseException as error:
            measured.failed(error)
            raise
        finally:
            measured.returned()

    def prepare(self, state: Any) -> None:
        """Say what `save_async` will be given, so that it finds its memory ready. Returns at once, and writes nothing.

        Memory that nobody has used yet costs several times what copying to it does, so the first `save_async` of a run
        keeps training waiting for longer than the others. Call this when the state is complete (the optimizer's moments
        are there) and something else is to be done still: the memory is touched in the background. A second time does
        nothing.

        Args:
            state: as for `save`; only its tensors' names, types and shapes matter.

        Raises:
            UnsupportedStateError: something in `state` cannot be stored.
            WriterClosedError, FencedError: as `save`.
        """
        self._check_open()
        flat = state if isinstance(state, FlatState) else bridge.flattened(state)
        if self._fulls is not None:
            self._fulls.prepare_for(flat)
            return
        self._snapshots.prepare(flat)
        if self._fed is not None:
            self._fed.feeding.prepare(sum(source.nbytes for source in flat.tensors.values()))

    def _found(self, committer: Committer, flat: FlatState, step: int, updates: Updates | None) -> Sequence[Update]:
        try:
            return self._coded.explaining.found(updates, flat)
        except BaseException as error:
            committer.saves.release(step, error)
            raise

    def _copied(
        self, committer: Committer, flat: FlatState, step: int, updates: Updates | None, measured: Measured
    ) -> Copies:
        try:
            return self._coded.copy(flat, updates, measured)
        except BaseException as error:
            committer.saves.release(step, error)
            if isinstance(error, RuntimeError):
                self._check_open()  # closed by another thread, and its pool with it
            raise

    def begin(self, state: Any, step: int, layers: Mapping[str, Sequence[str]], *, direct: bool = False) -> LayeredSave:
        """Begin a save whose snapshot is filled layer by layer, as layers are updated (LightCheck, section III-B).

        `training.LayerwiseSnapshots` does this for torch's optimizers. One at a time: it is finished or abandoned
        before the next save.

        Args:
            state: as for `save_async`; the tensors of `layers` may still change, each until it is `ready`. Of others
                only dtype and shape are looked at here.
            step: as for `save`.
            layers: names of tensors (`FlatState.tensors`) by the name of the layer that they belong to.
            direct: copy straight into mapped segments of a medium that has them (``pmem://``), through no host memory.
                Only without `deltas` and `diffs`.

        Waits while `max_in_flight` earlier snapshots are not durable yet.

        Raises:
            as `save_async`.
            UsageError: a tensor is in two layers, or not in the state; the medium cannot be copied into.
            StorageError: `direct`, and the medium failed or is full.
        """
        refuse_within(self, _SAVING)
        step = step_number(step)
        committer, flat = self._admit(state, step)

        try:
            checked_layers(flat, layers)
            if self._layer_pool is None:
                self._layer_pool = started_pool(self._options.threads, "ckptstore-layers")
            if direct:
                snapshot = self._coded.mapped(committer, self._deltas, flat, step, self.url)
            else:
                snapshot = self._reserved(flat)
        except BaseException as error:
            committer.saves.release(step, error)
            raise
        owner = self._owner(committer, snapshot, step)
        begun = LayeredSave(step, flat, layers, snapshot, self._layer_pool, owner)
        self._begun = Begun(begun)
        return begun

    def _owner(self, committer: Committer, snapshot: Snapshot, step: int) -> Owner:
        """What a snapshot that is filled by layers is given back to, finished or not."""

        def give_up(error: BaseException | None = None) -> None:
            snapshot.land()
            snapshot.free()
            committer.saves.release(step, error)

        def hand_over(now: FlatState, labels: Labels, updates: Updates | None, filling: Filling) -> PendingSave:
            self._begun = None
            measured = self._meter.begin(now, step, time.monotonic())
            try:
                try:
                    self._check_open()
                    changes = self._coded.copied_updates(now, updates)
                except BaseException as error:
                    filling.stop()
                    give_up(error)
                    raise
                copies = Copies(snapshot, *changes, filling)
                return self._coded.hand_over(committer, copies, step, labels, measured)._followed_by(self._tier)
            except BaseException as error:
                measured.failed(error)
                raise
            finally:
                measured.returned()

        return Owner(hand_over, give_up, self._check_open)

    def _reserved(self, flat: FlatState) -> Snapshot:
        if self._fed is not None:
            raise UsageError("begin: a snapshot that is filled layer by layer is a whole state; leave out memory=")
        return self._snapshots.reserve(flat)

    def wait(self) -> None:
        """Return when everything given so far is durable: what is in flight, and what waits for its batch, which is
        written now.

        Raises:
            StorageError, FencedError, CommitUnknownError: what stopped a `save_async` of which nobody has been told
                yet, with a note of every other one; no later call raises it again.
            WriterClosedError: the writer is closed; `close` has waited, and raised.
        """
        if self._needs_callers:
            refuse_within(self, _SAVING)
        self._told(self._committer.flush_in_time)
        self._failures.raise_unseen()

    def _settle(self) -> None:
        """Write what waits, and note in the log that nothing is missing if the process ends now (`host.sigterm`).

        Raises nothing that concerns the steps: their saves do.
        """
        self._submit(self._committer.flush_and_close).result()

    def poll(self) -> None:
        """Answer now what other processes ask for (`Store.merge`, `tag`, `retire` ... beside this writer), and fold the
        log if that is due. A writer does it by itself after every save, and every `poll_seconds`.

        What goes wrong fails no save: it is warned of, once, or the next save says so.

        Raises:
            WriterClosedError: the writer is closed.
        """
        if self._needs_callers:
            refuse_within(self, _SAVING)
        self._submit(self._committer.housekeeping).result()

    def _accompany(self, companion: Companion) -> None:
        """Somebody works beside the saves until this is closed; each save's metrics say whether it was at work."""
        self._companion = companion
        self._meter.beside = companion.active

    def _busy(self) -> bool:
        """Whether a save is on its way, other than those that only wait for their batch."""
        return self._begun is not None or self._meter.under_way > self._committer.waiting

    def _commit_beside(self, term: int, change: Change) -> Outcome:
        """Commit, between two saves, what was made for `term` in this process. Raises as `Committer.take_in`."""
        committer = self._committer
        return self._submit(lambda: committer.take_in(term, change)).result()

    def lag(self) -> Lag | None:
        """How far the store's second tier is behind; None: it has none.

        Raises `CorruptLogError`, `StorageError`: the store's own log cannot be read.
        """
        return None if self._tier is None else self._tier.lag()

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
        if self._needs_callers:
            refuse_within(self, _SAVING)
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
        if self._needs_callers:
            refuse_within(self, _SAVING)
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
            UsageError: `ref` is no REF; the present term goes on.
            CheckpointNotFoundError: there is none of that name; the present term goes on.
            FencedError: a newer term exists, which is not fenced by this. This writer is finished.
            StorageError: the medium failed; if a term has been opened all the same, the next save says so.
            and what a `save_async` raised unseen, before anything is done.
        """
        refuse_within(self, _SAVING)
        if ref is None:  # Prevents: a term that continues from nothing, which fences the present one.
            raise UsageError(
                "rollback takes a checkpoint to go back to; to begin from nothing open a writer with parent=None"
            )
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
        if self._companion is not None:
            self._companion.close()  # before the end: it may be waiting for a commit of its own
        # Prevents: a second close, after Ctrl-C in the first, that waits no more. A join that is interrupted makes
        # Python (before 3.13) take the thread for ended, and every later one returns at once.
        wait([self._end()])
        if self._polls is not None:
            self._polls.stop()
        if self._fulls is not None:
            self._fulls.close()
        self._thread.shutdown()
        if self._fed is not None:
            self._fed.close()
        self._blocks.shutdown()
        if self._begun is not None:
            self._begun.abandon()
        if self._layer_pool is not None:
            self._layer_pool.shutdown()
        self._deltas.close()
        self._snapshots.close()
        self._background.shutdown(cancel_futures=True)
        self._meter.close()
        if self._tier is not None:
            self._tier.close()
        exiting.forget(self)
        self._failures.raise_unseen()

    def _end(self) -> Future[None]:
        """Take no save any more -> done when every earlier one is, and the term is closed (`host.exiting`, too)."""
        with self._lock:
            if self._ended is None:
                # Under one lock: a step submitted after that would wait for its batch for ever.
                if self._fulls is not None:
                    self._fulls.end(WriterClosedError(self._closed()))
                self._ended = self._in_turn(self._committer.finish)
            return self._ended

    def _unfinished(self) -> list[int]:
        """The steps of `save_async` that are on their way, ascending (`host.exiting`)."""
        return self._committer.saves.pending()

    def _unseen(self) -> list[tuple[int, BaseException]]:
        """The steps whose `save_async` failed and nobody has asked for, each with what stopped it; once."""
        return sorted(self._failures.take(), key=itemgetter(0))  # several at once fail in any order

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
        if self._begun is not None:
            self._begun.settle()
        self._failures.raise_unseen()
        if self._tier is not None:
            self._tier.admit()
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
        check_owner(self._process, self.term)

    def _submit(self, work: Callable[[], _T]) -> Future[_T]:
        """Have the committer's thread do `work` after all that was given before."""
        self._check_process()
        with self._lock:
            if self._ended is None:
                return self._in_turn(work)
        raise WriterClosedError(self._closed())

    def _in_turn(self, work: Callable[[], _T]) -> Future[_T]:
        return self._thread.submit(work) if self._fulls is None else self._fulls.after(work)

    def _tend(self) -> Future[None] | None:
        """Upkeep of the log, once what the committer's thread has to do before is done; None: the writer is closed."""
        with self._lock:  # if it was closed by another thread, that is no reason to fail a save
            return self._thread.submit(self._committer.housekeeping) if self._ended is None else None

    def _poll_beside(self) -> None:
        try:
            if (tended := self._tend()) is not None:
                tended.result()
                return
        except (WriterError, RuntimeError):  # closed meanwhile, or the interpreter is going
            pass
        assert self._polls is not None
        self._polls.stop()


_SAVING: Final = frozenset(method.__code__ for method in (Writer.save, Writer.save_async, Writer.begin))
"""Calls that wait for others while they hold something that those may need."""
