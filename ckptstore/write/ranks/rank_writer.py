"""The writer of one rank: it stores this rank's share of each state, and returns what all ranks committed.

Two threads work for it. One writes shares and hands them in, step after step (`share_writer`). The other waits for the
commits (`commit_coordinator`); on rank 0 it gathers the parts and commits them. A save waits for other ranks if a
tensor was added, removed or reshaped (`rank_agreement`), and while `max_in_flight` earlier saves are not durable on all
ranks.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeAlias

from ckptstore.errors import CkptError, WriterClosedError
from ckptstore.formats.history.checkpoint_ref import Ref, step_number, text_of
from ckptstore.formats.states.state import FlatState
from ckptstore.host import interpreter_exit, sigterm
from ckptstore.host.background_threads import Periodic
from ckptstore.host.caller_warnings import warns_last
from ckptstore.host.progress import Progress
from ckptstore.host.signal_reentry import codes_of, refuse_within
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.write.ranks.rank_agreement import agreeing_anew
from ckptstore.write.ranks.rank_resources import RankResources
from ckptstore.write.ranks.rank_save import RankSave
from ckptstore.write.ranks.rank_term import RankTerm
from ckptstore.write.ranks.rank_work import RankWork
from ckptstore.write.ranks.share_snapshot import prepare
from ckptstore.write.saves.in_flight import Place
from ckptstore.write.saves.ledger import Labels, Metadata, PendingSave, check_owner
from ckptstore.write.stage import Bounded, Copies
from ckptstore.write.steps.updates import Explaining, Updates
from ckptstore.write.writer import Writer

__all__ = ["GoBack", "RankWriter"]

GoBack: TypeAlias = Callable[[RankResources, str, BaseException | None, int], RankTerm]
"""Begins a term that continues from a checkpoint, together with all other ranks, if the term of the given number is the
newest and no rank has an error."""


class RankWriter(Writer):
    """One rank's side of a term that many ranks write, as ``store.writer(group=...)`` opens it on each of them.

    All ranks save the same steps in the same order. A save waits for the other ranks if they have to agree.

    Attributes:
        rank, size: the number of this rank, and of all ranks.
    """

    def __repr__(self) -> str:
        since = "from scratch" if self.parent is None else f"from {self.parent.ref}"
        return f"<RankWriter of {self.url!r}: rank {self.rank} of {self.size}, term {self.term}, {since}>"

    def __init__(self, resources: RankResources, rank_term: RankTerm, go_back: GoBack) -> None:
        """Use `opening.open_rank_writer`."""
        options = resources.options
        self.rank, self.size = resources.group.rank, resources.group.size
        self._resources = resources
        self._go_back = go_back
        self._explaining = Explaining(wanted=options.diffs is not None)
        self._ended: Future[None] | None = None
        self._lock = threading.Lock()
        self._process = os.getpid()
        # Prevents: two callers that each copy into memory that the other one waits for, while one thread writes.
        self._turn = threading.Lock() if options.plain else contextlib.nullcontext()
        self._polls: Periodic | None = None
        self._work = RankWork(resources, rank_term)
        if rank_term.committer is not None and options.poll_seconds is not None:
            self._polls = Periodic(options.poll_seconds, self._poll_beside, "requests")
            self._polls.start()
        interpreter_exit.watch(self)
        if options.diffs is not None and options.diffs.flush_on_sigterm:
            sigterm.watch(self)

    @property
    def url(self) -> str:
        """The store's URL."""
        return self._resources.journal.url

    @property
    def term(self) -> int:
        """The number of this term."""
        return self._work.rank_term.number

    @property
    def parent(self) -> CheckpointInfo | None:
        """The checkpoint this term continues from, the same on all ranks; None for a new run."""
        return self._work.rank_term.parent

    def _save(
        self, state: Any, step: int | None, labels: Labels, updates: Updates | None, progress: Progress | None
    ) -> CheckpointInfo:
        """See `Writer.save`. The shares of all ranks are durable when this returns."""
        return agreeing_anew(lambda: self._save_once(state, step, labels, updates, progress))

    def _save_once(
        self, state: Any, step: int | None, labels: Labels, updates: Updates | None, progress: Progress | None
    ) -> CheckpointInfo:
        began = time.monotonic()
        one = self._begin(state, step, labels, updates, progress, began)
        written: Future[None] | None = None
        try:
            written = self._hand_over(one)
            self._work.hurry(one.step)  # if rank 0 does not wait for it
            return one.done.result()
        finally:
            # After Ctrl-C the other thread may still read the caller's tensors, which the caller will change: wait.
            with contextlib.suppress(BaseException):
                if written is not None:
                    written.result()
            one.measured.returned()

    def _save_async(self, state: Any, step: int | None, labels: Labels, updates: Updates | None) -> PendingSave:
        """See `Writer.save_async`."""
        began = time.monotonic()
        return self._begun_async(self._begin(state, step, labels, updates, None, began, asynchronous=True))

    def _begun_async(self, one: RankSave) -> PendingSave:
        work = self._work
        try:
            self._hand_over(one)
        finally:
            one.measured.returned()
        return one.pending(lambda: self._hurry(work, one.step), None)

    @warns_last
    def take_over(
        self,
        given: Copies,
        step: int,
        *,
        metadata: Metadata | None = None,
        tags: str | Sequence[str] = (),
    ) -> PendingSave:
        """Do `save_async` without a copy, for a state that another component (`agent`) has copied.

        Waits for the other ranks as `save_async` does, but not for a place in flight: the owner of the memory limits
        how many saves are in flight.

        Args:
            given: the state, with its updates; it does not change until it is let go.
            step, metadata, tags: as for `save_async`.

        Raises:
            as `save_async`. The memory then belongs to the caller again: `Stage.let_go`.
        """
        refuse_within(self, self._WAIT)
        labels, began = Labels.of(metadata, tags), time.monotonic()
        updates = (given.updates or None) if self._explaining.wanted else None  # no warning that they are not used
        return self._begun_async(self._begin(given, step_number(step), labels, updates, None, began, asynchronous=True))

    def forgo(self, step: int | None, error: CkptError, *, replace: bool = False) -> None:
        """Report that this rank has no state of a step that the other ranks save: the step fails at once on all ranks.

        The other ranks raise `FailedRankError` with the reason, and need not wait until `RankOptions.timeout` is over.
        Nothing is committed, and the next step may be saved. On rank 0 it is the same.

        Args:
            step, replace: what the other ranks pass to `save` or `save_async`. None: the next step.
            error: why.

        Raises:
            StepOrderError, WriterError: as `save_async`; with `replace` also as `rollback`.
        """
        self._check_open()
        if replace and step is not None:
            self._make_way(step)
        rank_term = self._work.rank_term
        rank_term.saves.check(step)
        step = rank_term.saves.take(step)
        one = RankSave(rank_term.saves, step, rank_term.exchange(step), asynchronous=True)
        self._flawed(one, error, time.monotonic())

    def conclude(self, step: int) -> None:
        """Report that this rank saves no step above `step`: the others need not wait for its part of one."""
        self._work.rank_term.conclude(step)

    def _poll(self) -> None:
        """See `Writer.poll`."""
        self._check_open()
        self._work.tend()

    def _wait(self) -> None:
        """See `Writer.wait`."""
        self._check_open()
        self._drain()
        self._resources.failures.raise_unseen()

    def _tag(self, name: str, ref: str) -> CheckpointInfo:
        """See `Writer.tag`."""
        self._check_open()
        self._work.only_rank_0("changes tags")
        named = self._work.name(name, Ref.parse(ref))
        assert named is not None
        return named

    def _untag(self, name: str) -> None:
        """See `Writer.untag`."""
        self._check_open()
        self._work.only_rank_0("changes tags")
        self._work.name(name, None)

    def _make_way(self, step: int) -> None:
        """See `Writer._make_way`. All ranks decide alike: once its outcome is known, a step is taken on all or none."""
        self._check_open()
        if self._work.rank_term.saves.newest_is(step):
            self._drain()
        if self._work.rank_term.saves.newest_is(step):  # it has not failed
            self._rollback(f"{step}@{self.term}")
        self._work.rank_term.saves.allow_replacing(step)

    def _rollback(self, ref: str | int | CheckpointInfo) -> CheckpointInfo:
        """See `Writer.rollback`.

        The new term begins only when every rank is there and has written all its earlier saves.
        """
        self._check_open()
        text, unseen = text_of(ref), None
        self._drain()
        self._work.settle_all()  # Prevents: a warning of lost steps, if the checkpoint is the newest.
        try:
            self._resources.failures.raise_unseen()
        except BaseException as error:  # noqa: BLE001  # the other ranks are told, then it is raised
            unseen = error
        rank_term = self._go_back(self._resources, text, unseen, self.term)
        assert rank_term.parent is not None  # a term that continues from a checkpoint has one
        self._work.give_way(WriterClosedError(f"term {self.term} is over: {rank_term.parent.ref} was gone back to"))
        self._work = RankWork(self._resources, rank_term)
        return rank_term.parent

    def _drain(self) -> None:
        """Wait for all earlier saves."""
        wait([one.done for one in self._work.drain()])

    # -- the caller's thread

    def _begin(
        self,
        state: Any,
        step: int | None,
        labels: Labels,
        updates: Updates | None,
        progress: Progress | None,
        began: float,
        *,
        asynchronous: bool = False,
    ) -> RankSave:
        """Do everything that needs the caller's state as it is now."""
        self._check_open()
        if not isinstance(state, Copies):  # an agent reports the failure of each save to its trainer by itself
            self._resources.failures.raise_unseen()
        rank_term = self._work.rank_term
        rank_term.saves.check(step)
        step = rank_term.saves.take(step)
        place, waited = None, 0.0
        if asynchronous and not isinstance(state, Copies):
            # Before any message about this step: if an earlier save has failed, no rank begins this one.
            place, waited = self._place(step)
        one = RankSave(rank_term.saves, step, rank_term.exchange(step), labels, progress, asynchronous=asynchronous)
        if place is not None:
            one.enter(place)
        try:
            prepare(self._resources, rank_term, one, state, updates, self._explaining)
        except BaseException as error:
            self._flawed(one, error, began)
            raise
        self._measure(one, began, waited)
        return one

    def _place(self, step: int) -> tuple[Place, float]:
        """Take a place in flight -> the place, and the seconds waited. Raises the unseen error of an earlier save."""
        rank_term = self._work.rank_term
        try:
            return self._resources.places.take()
        except Exception:
            rank_term.saves.release(step, None)
            raise
        except BaseException as error:  # Ctrl-C: the other ranks, which may save this step, need not wait for it
            one = RankSave(rank_term.saves, step, rank_term.exchange(step), asynchronous=True)
            self._flawed(one, error, time.monotonic())
            raise

    def _flawed(self, one: RankSave, error: BaseException, began: float) -> None:
        """Fail a step of which this rank has no share, and tell the other ranks."""
        on_hand = self._resources.options.diffs is not None and self.rank > 0
        rank_term = self._work.rank_term
        rank_term.tell_flaw(one, error, over=not on_hand)
        self._measure(one, began, 0.0, error)
        one.let_go()
        one.flaw = error
        one.fail(error, told=True)
        if self.rank == 0:
            self._work.lost()
        if on_hand:  # rank 0 may expect this step in a batch: the step has to fail there
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._work.submit(one)

    def _measure(self, one: RankSave, began: float, waited: float, error: BaseException | None = None) -> None:
        """Begin to measure this rank's share of a save. With `error` the save has ended."""
        share = one.stage.flat if one.stage is not None and error is None else FlatState(None, {})
        measured = self._resources.meter.begin(share, one.step, began)
        measured.waited = waited
        if error is None:
            one.begin(measured)
            return
        one.measured = measured
        measured.failed(error)
        measured.returned()

    def _hand_over(self, one: RankSave) -> Future[None]:
        """Submit a save to the write thread; under a byte budget, copy it as it is written or compressed.

        Raises:
            whatever copying or submitting raised. The step may be saved again, unless the call was interrupted.
        """
        stage = one.stage
        if not isinstance(stage, Bounded):
            return self._submit(one)
        written: list[Future[None]] = []
        begun = False

        def begin() -> None:
            nonlocal begun
            begun = True
            written.append(self._submit(one))

        try:
            with self._turn:
                stage.run(one, begin)
        except BaseException as error:
            if not begun:
                stage.stop(error)
                begin()  # the write thread tells the other ranks
            if isinstance(error, Exception) and written:
                wait([one.done])  # by then the other ranks have been told, and the step is free to be saved again
            raise
        return written[0]

    def _submit(self, one: RankSave) -> Future[None]:
        with self._lock:
            if self._ended is None:
                return self._work.submit(one)
        error = WriterClosedError(f"the writer of term {self.term} is closed")
        rank_term = self._work.rank_term
        rank_term.tell_flaw(one, error)
        one.let_go()
        one.fail(error, told=True)
        raise error

    def _hurry(self, work: RankWork, step: int) -> None:
        with contextlib.suppress(RuntimeError):  # closed, which flushes; or the interpreter is exiting
            work.hurry(step)

    # -- its end

    @warns_last
    def close(self) -> None:
        """Wait for every save, then end; a second call does nothing. Raises the unseen error of a `save_async`."""
        if self._process != os.getpid():
            return  # a forked process: the threads belong to the parent
        try:
            interpreter_exit.await_end(self, interrupted=self._interrupted)
        finally:
            # Prevents: waiting steps lost to a SIGTERM that comes while closing writes them.
            sigterm.forget(self)
        if self._polls is not None:
            self._polls.stop()
        self._resources.close_threads()
        self._work.release()
        self._resources.close()
        interpreter_exit.forget(self)
        self._resources.failures.raise_unseen()

    def _end(self) -> Future[None]:
        """Refuse later saves -> a future that is done when every earlier save is."""
        with self._lock:
            if self._ended is None:
                ended: Future[None] = Future()
                self._ended = ended

                def settled(future: Future[None]) -> None:
                    if (error := future.exception()) is not None:
                        ended.set_exception(error)
                    else:
                        ended.set_result(None)

                def written(future: Future[Future[None]]) -> None:
                    if (error := future.exception()) is not None:
                        ended.set_exception(error)
                    else:
                        future.result().add_done_callback(settled)

                self._work.finish().add_done_callback(written)
            return self._ended

    def _settle(self) -> None:
        """Write the waiting steps, and note in the log that nothing is missing if the process ends now.

        For `host.sigterm`.
        """
        with self._lock:
            ended = self._ended
        if ended is None:
            self._work.settle_all()
        else:
            wait([ended])  # closing writes them

    def _unfinished(self) -> list[int]:
        """The steps of `save_async` that are not finished, ascending (`host.interpreter_exit`)."""
        return self._work.rank_term.saves.pending()

    def _unseen(self) -> list[tuple[int, BaseException]]:
        """The steps whose `save_async` failed without the error being raised yet (`host.interpreter_exit`)."""
        return self._resources.failures.take()

    def _check_open(self) -> None:
        check_owner(self._process, self.term)
        if self._work.rank_term.stopped is not None:
            raise self._work.rank_term.stopped
        if self._ended is not None:
            raise WriterClosedError(f"the writer of term {self.term} is closed")

    def _poll_beside(self) -> None:
        try:
            self._work.tend()
        except RuntimeError:  # closed meanwhile, or the interpreter is exiting
            assert self._polls is not None
            self._polls.stop()


RankWriter._WAIT = Writer._WAIT | codes_of(RankWriter.take_over)
