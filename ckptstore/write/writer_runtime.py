"""What a writer owns while it is open: threads, memory, and a committer for each of its terms.

This is the caller's side, for any thread; the work of the committer's thread is in `committer`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from ckptstore.errors import WriterClosedError, WriterError
from ckptstore.formats.history.records import CheckpointId
from ckptstore.formats.history.retention_forecast import Chains
from ckptstore.formats.history.space_limits import space_of
from ckptstore.formats.segment_files.segment import SegmentDoc
from ckptstore.host import interpreter_exit, sigterm
from ckptstore.host.background_threads import Periodic
from ckptstore.host.buffers import Staging
from ckptstore.host.caller_warnings import warns_last
from ckptstore.host.threads import WORTH_THREADS, SleepingPool
from ckptstore.log.change import CatalogChange
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.log.journal import Journal
from ckptstore.log.requests import Outcome
from ckptstore.log.term import Term
from ckptstore.write.background_task import Companion
from ckptstore.write.capture.snapshot import SnapshotPool
from ckptstore.write.capture.unit_copy import StagedMemory
from ckptstore.write.commit_turn import CommitTurn
from ckptstore.write.committer import Committer
from ckptstore.write.deltas import Deltas
from ckptstore.write.full_saves import FullSaves
from ckptstore.write.policy.order_policy import OrderPolicy
from ckptstore.write.retainer import short_of_space, tight
from ckptstore.write.save_path import SavePath
from ckptstore.write.saves.in_flight import Places
from ckptstore.write.saves.ledger import Failures, Saves, check_owner
from ckptstore.write.saves.save_metrics import Meter
from ckptstore.write.steps.updates import Explaining
from ckptstore.write.writer import Writer
from ckptstore.write.writer_options import WriterOptions

if TYPE_CHECKING:
    from ckptstore.restore.stored_base import StoredBase
    from ckptstore.write.capture.layerwise_save import OpenSave
    from ckptstore.write.second_tier import SecondTier
    from ckptstore.write.steps.batcher import Diffs

__all__ = ["Begin", "WriterRuntime"]

Begin: TypeAlias = Callable[[str | int | CheckpointInfo, int], tuple[Term, CheckpointInfo | None]]
"""Begins a term that continues from a checkpoint, if the given number is still that of the newest term."""

_T = TypeVar("_T")


class WriterRuntime(Writer):
    """The threads, memory and state that every part of a `LocalWriter` uses."""

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
        self._tier = tier
        self._journal = journal
        self._backend = journal.backend
        self._options = options
        self._begin = begin
        self._failures = Failures()
        self._staging = Staging.for_chunks(budget=options.staging_bytes)
        self._background = SleepingPool(1, "ckptstore-touch")
        self._places = Places(options.max_in_flight, self._failures)
        self._snapshots = SnapshotPool(
            options.max_in_flight,
            self._background.submit,
            self._backend.segment_bytes,
            kept=int(options.keeps_copies),
        )
        self._deltas = self._delta_chains(term, reopen)
        self._blocks = SleepingPool(options.threads, "ckptstore-write")
        self._awake = False
        self._explaining = Explaining(wanted=options.diffs is not None)
        self._committer = self._serve(term, parent)
        self._backend.limit_space(self._limit, self._retire_for_space)
        self._bound = self._backend.bound
        # One thread at a time commits; that of the turn writes deltas and step diffs.
        self._turn = CommitTurn()
        self._path = self._save_path()
        if parent is not None:
            self._expect(parent.nbytes)
        self._meter = Meter(options.on_metrics)
        self._process = os.getpid()
        self._ended: Future[None] | None = None
        self._lock = threading.Lock()
        self._polls: Periodic | None = None
        self._layer_pool: ThreadPoolExecutor | None = None  # copies layers and nothing else; from the first `begin`
        self._begun: OpenSave | None = None
        self._companion: Companion | None = None
        if options.poll_seconds is not None:
            self._polls = Periodic(options.poll_seconds, self._poll_beside, "requests")
            self._polls.start()
        interpreter_exit.watch(self)
        if options.diffs is not None and options.diffs.flush_on_sigterm:
            sigterm.watch(self)

    @property
    def url(self) -> str:
        """The URL of the store."""
        return self._journal.url

    @property
    def term(self) -> int:
        """The number of this term."""
        return self._term

    @property
    def parent(self) -> CheckpointInfo | None:
        """The checkpoint this term continues from."""
        return self._parent

    @property
    def _needs_caller(self) -> bool:
        return self._path.needs_caller

    def _delta_chains(self, term: Term, reopen: Callable[[CheckpointId], StoredBase]) -> Deltas:
        chains = Chains(
            lambda: self._committer.log.catalog.keep,
            lambda: short_of_space(self._committer.log.catalog, self._backend.free_bytes),
            self._tight,
        )
        options = self._options
        policy = OrderPolicy(options.deltas, options.diffs, chains)
        return Deltas(
            options.deltas, self._backend, self._draft(term), self._snapshots, reopen, self._encoders(), policy
        )

    def _limit(self, full: int) -> tuple[int, str] | None:
        """The store's limit on space, and its rule; None: no rule limits it. See `backends.space_bound.Limit`."""
        limit = space_of(self._committer.log.catalog.keep)
        return None if limit is None else (limit.bytes_for(full), limit.rule)

    def _retire_for_space(self) -> None:
        """Retire what no rule keeps: a tag may have been removed since the last commit."""
        if self._turn.mine:
            self._committer.retire_rest()
            return
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._turn.submit(self._committer.retire_rest).result()

    def _tight(self) -> bool:
        """Whether the limit on space leaves no room for a longer chain."""
        bound = self._backend.bound
        limit = None if bound is None else bound.nbytes()
        if bound is None or limit is None or not bound.full:
            return False
        return tight(self._committer.log.catalog, limit, bound.full, self._committer.waiting_nbytes)

    def _encoders(self) -> int:
        """How many threads compress: payloads in progress take no more memory than the staging blocks."""
        # Uncompressed saves have no payloads.
        plain = self._options.max_in_flight * self._options.threads if self._options.plain else 1
        return min(os.cpu_count() or 1, max(self._staging.blocks - 1, plain))

    def _upkeep(self) -> None:
        self._committer.housekeeping()  # of the term that is current when this runs

    def _save_path(self) -> SavePath:
        """The save path that these options need."""
        options = self._options
        if options.plain:
            return FullSaves(
                options.max_in_flight,
                self._backend.begin_save,
                options.threads,
                StagedMemory(
                    options.memory, options.max_in_flight, self._background.submit, self._backend.segment_bytes
                ),
                turn=self._turn,
                tend=self._upkeep,
            )
        # Plain fulls need neither these modules nor what they import.
        from ckptstore.write.capture.bounded_capture import Feeding
        from ckptstore.write.compressed_saves import CompressedSaves

        feeding = None if options.memory is None else Feeding(options.memory, self._background.submit)
        recomputing: Recomputing | None = None
        if options.diffs is not None and options.diffs.recompute:
            from ckptstore.write.steps.recomputed_steps import Recomputing

            recomputing = Recomputing(self._deltas.workers)
        return CompressedSaves(
            self._explaining,
            self._snapshots,
            self._blocks,
            turn=self._turn,
            tend=self._tend,
            feeding=feeding,
            recomputing=recomputing,
        )

    def _expect(self, nbytes: int) -> None:
        """Touch memory in the background for a state of about `nbytes` bytes, which will be saved."""
        options = self._options
        self._wake_for(nbytes)
        # Only `save_async` copies plain fulls: a caller of `save` alone must not pay for the memory of a whole state.
        if not options.plain or options.memory is not None or options.max_in_flight > 1:
            self._path.expect(nbytes)

    def _wake_for(self, nbytes: int) -> None:
        """Start the threads that copy, hash and write, if a state of `nbytes` bytes is large enough to need them.

        Raises:
            RuntimeError: the system cannot start that many threads.
        """
        if nbytes >= WORTH_THREADS and not self._awake:
            self._background.wake()
            self._blocks.wake()
            self._deltas.workers.wake()
            self._path.wake()
            self._awake = True

    def _draft(self, term: Term) -> SegmentDoc:
        """The fields that all segments of a term share."""
        return SegmentDoc(self._journal.run, term.number, "", {}, parents={term.number: term.parent})

    def _serve(self, term: Term, parent: CheckpointInfo | None) -> Committer:
        """Make the committer of a term. The terms of a writer share everything else."""
        self._term = term.number
        self._parent = parent
        diffs: Diffs | None = None
        if self._options.diffs is not None:
            from ckptstore.write.steps.batcher import Diffs

            diffs = Diffs(self._options.diffs, self._draft(term), self._deltas.workers, self._deltas.policy)
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

    # -- work for the committer's thread

    def _check_open(self) -> None:
        self._check_process()
        if self._committer.ended is not None:
            raise self._committer.ended
        if self._ended is not None:
            raise WriterClosedError(self._closed())

    def _closed(self) -> str:
        why = f" because the interpreter is ending: {interpreter_exit.ADVICE}" if interpreter_exit.under_way() else ""
        return f"the writer of term {self.term} is closed{why}"

    def _check_process(self) -> None:
        """Refuse a fork: it has none of the threads, and would wait forever."""
        check_owner(self._process, self.term)

    def _submit(self, work: Callable[[], _T]) -> Future[_T]:
        """Run `work` in the committer's thread, after all work submitted before."""
        self._check_process()
        with self._lock:
            if self._ended is None:
                return self._path.after(work)
        raise WriterClosedError(self._closed())

    def _tend(self) -> Future[None] | None:
        """Queue upkeep of the log behind the work of the committer's thread; None: the writer is closed."""
        with self._lock:  # a close by another thread must not fail a save
            return self._turn.submit(self._committer.housekeeping) if self._ended is None else None

    def _poll_beside(self) -> None:
        try:
            if (tended := self._tend()) is not None:
                tended.result()
                return
        except (WriterError, RuntimeError):  # the writer was closed, or the interpreter is ending
            pass
        assert self._polls is not None
        self._polls.stop()

    # -- background work

    def accompany(self, companion: Companion) -> None:
        """Attach background work until this is closed; the metrics of each save say whether it was active."""
        self._companion = companion
        self._meter.beside = companion.active

    def busy(self) -> bool:
        """Whether a save is in flight; saves that only wait for their batch do not count."""
        return self._begun is not None or self._meter.under_way > self._committer.waiting

    def commit_beside(self, term: int, change: CatalogChange) -> Outcome:
        """Commit, between two saves, a change made for `term` in this process. Raises as `Committer.take_in`."""
        committer = self._committer
        return self._submit(lambda: committer.take_in(term, change)).result()

    # -- the end

    def _settle(self) -> None:
        """Write waiting steps, and note in the log that no step is lost if the process ends now (`host.sigterm`).

        Raises no error of a step: the save of that step does.
        """
        try:
            self._submit(self._committer.flush_and_close).result()
        except WriterClosedError:
            if self._ended is None:
                raise
            wait([self._ended])  # closing writes them

    @warns_last
    def close(self) -> None:
        """See `Writer.close`."""
        if self._process != os.getpid():
            return  # a fork: threads, bases and pins belong to the parent process
        if self._companion is not None:
            self._companion.close()  # before the end: it may be waiting for its own commit
        try:
            interpreter_exit.await_end(self, interrupted=self._interrupted)
        finally:
            # Prevents: waiting steps lost to a SIGTERM that comes while closing writes them.
            sigterm.forget(self)
        if self._polls is not None:
            self._polls.stop()
        self._path.close()
        self._turn.shutdown()
        self._blocks.shutdown()
        if self._begun is not None:
            self._begun.abandon()
        if self._layer_pool is not None:
            self._layer_pool.shutdown()
        self._deltas.close()
        self._snapshots.close()
        self._background.shutdown(cancel_futures=True)
        if self._backend.bound is self._bound:  # no other writer of this backend has set its own
            self._backend.limit_space(None)
        self._meter.close()
        if self._tier is not None:
            self._tier.close()
        interpreter_exit.forget(self)
        self._failures.raise_unseen()

    def _end(self) -> Future[None]:
        """Accept no more saves -> a future that is done when every earlier save is, and the term is closed."""
        with self._lock:
            if self._ended is None:
                # Under one lock: a step submitted after that would wait forever for its batch.
                self._path.end(WriterClosedError(self._closed()))
                self._ended = self._path.after(self._committer.finish)
            return self._ended

    def _unfinished(self) -> list[int]:
        """The steps of `save_async` that are in flight, ascending (`host.interpreter_exit`)."""
        return self._committer.saves.pending()

    def _unseen(self) -> list[tuple[int, BaseException]]:
        """The steps whose `save_async` failed without any call raising it, each with its error; returned once."""
        return sorted(self._failures.take(), key=itemgetter(0))  # concurrent saves fail in any order
