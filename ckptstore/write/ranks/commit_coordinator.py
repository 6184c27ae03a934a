"""Run the commit thread of a rank: rank 0 gathers the parts of each step and commits them; other ranks wait for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ckptstore.errors import AgentLostError, CommitUnknownError, FencedError, MailboxError, WriterError
from ckptstore.host.caller_warnings import warn
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.write.policy.order_policy import OrderPolicy
from ckptstore.write.ranks.messages.key_value_store import ReplyDeadline
from ckptstore.write.ranks.messages.rank_messages import CommitVerdict
from ckptstore.write.ranks.messages.step_messages import Exchange
from ckptstore.write.ranks.rank_committer import Batched
from ckptstore.write.ranks.rank_diffs import RankDiffs
from ckptstore.write.ranks.rank_resources import RankResources
from ckptstore.write.ranks.rank_save import RankSave
from ckptstore.write.ranks.rank_term import RankTerm, unknown
from ckptstore.write.resident_bases import ResidentBases

__all__ = ["CommitCoordinator"]

_FAREWELL = 10.0
"""Seconds that rank 0 waits at its end for the others to read the last results: it may host the key-value store."""


class _WaitingError(Exception):
    """A step that is being compressed, or waits for its batch, has to be committed before a request is granted.

    It builds on checkpoints that the request may drop.
    """


class CommitCoordinator:
    """The work of the commit thread, one save after the other."""

    def __init__(
        self,
        resources: RankResources,
        rank_term: RankTerm,
        policy: OrderPolicy,
        bases: ResidentBases | None,
        diffs: RankDiffs | None,
    ) -> None:
        """
        Args:
            policy: receives the cost of fulls and deltas.
            bases: the bases of deltas; None: there are no deltas.
            diffs: compresses step diffs; None: there are none.
        """
        self._policy = policy
        self._resources = resources
        self._rank_term = rank_term
        self._bases = bases
        self._diffs = diffs
        if rank_term.committer is not None:
            rank_term.committer.retainer.bases = policy.bases
        self.busy: Callable[[], bool] = lambda: False
        """Whether a step is being compressed, or waits for its batch."""
        self.flush_later: Callable[[], object] = lambda: None
        """Submits the waiting steps to be written soon."""

    def settle(self, one: RankSave) -> bool:
        """Commit a step on rank 0; on another rank wait for the result -> whether its snapshot stays in memory."""
        self._rank_term.built(one.step)
        one.exchange = one.exchange.using(self._rank_term.commit_box)
        try:
            info = (
                self._await_verdict(one.exchange, [one])[0] if self._rank_term.committer is None else self._commit(one)
            )
        except BaseException as error:  # noqa: BLE001  # the callers that wait for the step are told
            self._lost(one.begun, error)
            self._rank_term.failed(one, error)
            return False
        self._rank_term.committed(one.dropped)
        one.done.set_result(info)  # it is durable: no later error may fail it
        kept = self._keep(one, info)
        self._tend()
        return kept

    def settle_batch(self, batch: Sequence[RankSave], batched: Sequence[Batched]) -> None:
        """`settle` for the steps of a batch; only rank 0 uses `batched`."""
        last = batch[-1]
        self._rank_term.built(last.step)
        exchange = last.exchange.using(self._rank_term.commit_box)
        committer = self._rank_term.committer
        infos: Sequence[CheckpointInfo]
        try:
            if committer is None:
                infos = self._await_verdict(exchange, batch)
            else:
                self._rank_term.answered.append(exchange)
                begun: list[str] = []
                try:
                    infos = committer.settle_batch(exchange, batched, self._resources.session(begun.append))
                except BaseException:
                    last.begun += tuple(begun)
                    raise
        except BaseException as error:  # noqa: BLE001  # the callers that wait for the steps are told
            self._lost(last.begun, error)
            for one in batch:
                self._rank_term.failed(one, error)
            return
        assert self._diffs is not None
        self._diffs.written(infos[-1])
        self._rank_term.committed(last.dropped)
        if len(infos) < len(batch):
            infos = [infos[-1]] * len(batch)  # the gradients of all steps were summed
        for one, info in zip(batch, infos, strict=True):
            one.coded = None  # a caller that keeps the save keeps no memory
            one.done.set_result(info)
        self._tend()

    def _lost(self, begun: tuple[str, ...], error: BaseException) -> None:
        """Note that a step was not committed: its segments are dropped later, and nothing builds on it."""
        if isinstance(error, FencedError | CommitUnknownError):
            self._rank_term.stopped = error  # this term drops nothing more
        else:
            self._rank_term.abandon(begun)
        self.restart()

    def restart(self) -> None:
        """Give up every base: the next checkpoint is a full."""
        self._policy.forget_bases()
        if self._bases is not None:
            self._bases.clear()
        if self._diffs is not None:
            self._diffs.restart()

    def give_place(self) -> None:
        """Free the bases before a full that is copied in units: nothing builds on them, and it needs their memory."""
        if self._bases is not None:
            self._bases.clear()
        if self._diffs is not None:
            self._diffs.restart()

    def _keep(self, one: RankSave, info: CheckpointInfo) -> bool:
        """Keep this rank's share of a committed checkpoint, if the next one may build on it -> whether its snapshot is.

        If there are bases or step diffs, the write thread waits for this before it lets the share go.
        """
        seconds = time.monotonic() - one.began
        self._policy.took(info.stored, seconds)
        self._policy.committed(one.how, info.id, info.stored, info.nbytes)
        stage, kept = one.stage, False
        try:
            if self._bases is not None:
                assert stage is not None
                kept = self._bases.settle(one.how, info.id, stage.flat, stage.snapshot)
            if self._diffs is not None:
                assert stage is not None
                snapshot = None if kept else stage.snapshot
                if snapshot is None:  # the memory belongs to training or to another base
                    snapshot = self._resources.snapshots.copy(stage.flat, self._resources.workers.pool)
                self._diffs.begin(info, snapshot, seconds)
                kept = True
        except Exception as error:  # noqa: BLE001  # no memory, or a controller's error: no reason to fail the save
            self.restart()  # the next delta fails here, all ranks are told, and a full follows
            text = f"{info.ref} cannot be kept as a base by rank {one.exchange.rank}"
            warn(f"{text}, so the next save is a full: {type(error).__name__}: {error}")
        return kept

    def _commit(self, one: RankSave) -> CheckpointInfo:
        """Rank 0: gather the parts of a step and commit it."""
        committer = self._rank_term.committer
        assert committer is not None
        assert one.agreement is not None
        self._rank_term.answered.append(one.exchange)
        begun: list[str] = []
        try:
            session = self._resources.session(begun.append)
            with one.space.committing():
                info = committer.settle(one.exchange, one.agreement, session, one.labels, one.how, kept=one.kept)
        except BaseException:
            one.begun += tuple(begun)
            raise
        if self._bases is None and self._diffs is None:
            self._rank_term.plain.add(one.exchange.prefix)
        return info

    def _await_verdict(self, exchange: Exchange, batch: Sequence[RankSave]) -> list[CheckpointInfo]:
        """On another rank: wait for the result of rank 0 -> the committed checkpoints. Raises rank 0's error.

        Args:
            batch: the steps; if their gradients were summed, the last one was committed.
        """
        deadline = ReplyDeadline(2 * self._resources.ranks.timeout, ranks=exchange.size)
        try:
            letter = exchange.first([exchange.key("verdict")], deadline)
            if letter is not None:
                verdict = CommitVerdict.unpacked(letter, exchange.key("verdict"))
                exchange.see()
        except MailboxError as error:
            raise unknown(exchange.step, str(error)) from error
        if letter is None:
            raise unknown(exchange.step, f"no answer within {deadline.seconds:g} s")
        if verdict.error is not None:
            raise verdict.error
        made = batch[-len(verdict.infos) :]
        return [
            replace(info, segments=(*info.segments, *one.segments))
            for one, info in zip(made, verdict.infos, strict=True)
        ]

    # -- upkeep, by rank 0

    def housekeeping(self) -> None:
        """Answer requests and begin a fold. Steps that wait for their batch are written before a request is granted."""
        committer = self._rank_term.committer
        if committer is None:
            return
        try:
            committer.tend(self._check_idle)
        except _WaitingError:
            self.flush_later()

    def _check_idle(self) -> None:
        if self.busy() or self._rank_term.building is not None:
            raise _WaitingError

    def _tend(self) -> None:
        if self._rank_term.committer is not None:
            self.housekeeping()
            with contextlib.suppress(MailboxError):
                self._rank_term.sweep(self._rank_term.commit_box)

    def finish(self) -> None:
        """Do the last work of a term."""
        committer, box = self._rank_term.committer, self._rank_term.commit_box
        if committer is None:
            return
        committer.retire_rest()
        committer.note_end()
        committer.finish_folds()
        seconds, group = min(_FAREWELL, self._resources.ranks.timeout), self._resources.group
        with contextlib.suppress(MailboxError, AgentLostError):  # a lost rank cannot read the results
            ReplyDeadline(seconds, group.ended, group.size).wait(lambda: self._rank_term.sweep(box))
            self._rank_term.clear(box)

    def give_way(self, error: WriterError) -> None:
        """End this term, because another one takes its place."""
        self._rank_term.stopped = error
        self.restart()
        committer = self._rank_term.committer
        if committer is not None:
            committer.ended = error
            committer.finish_folds()
            with contextlib.suppress(MailboxError):
                self._rank_term.clear(self._rank_term.commit_box)
