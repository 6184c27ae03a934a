"""Commit a term of many ranks on rank 0, the only one that writes the log. One thread calls it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ckptstore.errors import DivergedReplicasError, MailboxError, RankMismatchError
from ckptstore.formats.history.records import CheckpointEntry, CheckpointId, Encoding, Node, SegmentEntry
from ckptstore.formats.segment_files.segment import SegmentDoc
from ckptstore.formats.segment_files.segment_steps import SegmentPart, StepEncoding
from ckptstore.formats.states.rank_trees import rank_count
from ckptstore.formats.states.state import FlatState
from ckptstore.host.caller_warnings import DivergedReplicasWarning, warn
from ckptstore.host.crash_points import crash_point
from ckptstore.log.change import CatalogChange
from ckptstore.log.checkpoint_info import CheckpointInfo, describe_checkpoint
from ckptstore.log.term import Term
from ckptstore.segments.packed_segments import shares, write_stream
from ckptstore.segments.plain_segments import write_plain
from ckptstore.segments.write_session import SegmentSession
from ckptstore.write.commits import Commits
from ckptstore.write.policy.orders import Order
from ckptstore.write.ranks.division import Division
from ckptstore.write.ranks.gathered_parts import GatheredState, check_replicas, check_seen, check_united, gather_parts
from ckptstore.write.ranks.messages.key_value_store import ReplyDeadline
from ckptstore.write.ranks.messages.rank_messages import BatchPart, CommitVerdict, RankPart, told
from ckptstore.write.ranks.messages.step_messages import Exchange, attempt_id
from ckptstore.write.ranks.rank_agreement import Agreement, check_kept
from ckptstore.write.ranks.rank_options import RankOptions
from ckptstore.write.saves.ledger import Labels
from ckptstore.write.steps.batch_segments import KIND

__all__ = ["Batched", "RankCommitter"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Batched:
    """A step of a batch, as rank 0 commits it.

    Attributes:
        step: its number.
        time: when the caller saved it, seconds since 1970.
        labels: its metadata and tags.
        whole: the state of all ranks.
        base: the checkpoint that it builds on.
        lossy: the stored state differs from the state that training had.
    """

    step: int
    time: float
    labels: Labels
    whole: GatheredState
    base: CheckpointId
    lossy: bool


class RankCommitter(Commits):
    """Gathers the parts of a step, commits them, and posts the result to all ranks."""

    def __init__(self, log: Term, draft: SegmentDoc, options: RankOptions) -> None:
        """
        Args:
            draft: the header members that all segments of the term share.
        """
        super().__init__(log)
        self._draft = draft
        self._options = options
        self._seen: set[int] = set()  # ranks whose segments were checked
        # What `check_united` has checked: agreement, tensors, and whether any value differed between the ranks.
        self._united: tuple[str, tuple[str, ...], bool] | None = None

    def settle(
        self,
        exchange: Exchange,
        agreement: Agreement,
        session: SegmentSession,
        labels: Labels,
        order: Order,
        *,
        kept: bool,
    ) -> CheckpointInfo:
        """Gather, check and commit a step, and post the result; if it fails, every rank raises the same error.

        Args:
            agreement: which rank writes what.
            order: how the step is stored.
            kept: the agreement is an earlier step's, and all ranks have to use it.
            session: writes the segment with the tree.

        Raises:
            MissingRankError, FailedRankError, RankMismatchError, DivergedReplicasError: a part is missing, or the parts
                do not make one state.
            MailboxError: the other ranks cannot be told.
            and what `Term.commit` and writing raise.
        """

        def commit() -> list[CheckpointInfo]:
            if kept:
                check_kept(exchange, agreement, self._deadline(exchange))
            return [self._commit_parts(exchange, agreement, session, labels, order)]

        return self._commit_and_tell(exchange, commit)[0]

    def _commit_and_tell(self, exchange: Exchange, commit: Callable[[], list[CheckpointInfo]]) -> list[CheckpointInfo]:
        """Call `commit`, and post its result or its error to all ranks -> the result."""
        try:
            self._check_ended()
            infos = commit()
        except BaseException as error:
            self.missing = True
            exchange.post("verdict", CommitVerdict(error=told(error)).packed())
            raise
        crash_point("ranks.committed")
        with contextlib.suppress(MailboxError):  # it is durable even if no rank is told; the next save raises the error
            # Prevents: messages that grow with the square of the ranks. Each rank knows its own segments.
            sent = tuple(replace(info, segments=info.segments[:1]) for info in infos)
            exchange.post("verdict", CommitVerdict(sent).packed())
        crash_point("ranks.told")
        return infos

    def _check_ended(self) -> None:
        if self.ended is not None:
            raise self.ended

    def _deadline(self, exchange: Exchange) -> ReplyDeadline:
        return ReplyDeadline(self._options.timeout, exchange.ended, exchange.size)

    def _commit_parts(
        self, exchange: Exchange, agreement: Agreement, session: SegmentSession, labels: Labels, order: Order
    ) -> CheckpointInfo:
        letters = exchange.every("part", self._deadline(exchange), "hand in its part")
        parts = [RankPart.unpacked(letter, exchange.key("part", rank)) for rank, letter in enumerate(letters)]
        crash_point("ranks.gathered")
        whole = self._whole(parts, agreement, exchange.step)
        self._take_over(whole.abandoned)
        self._look_for({part.rank: part.segments for part in parts})
        return self._commit_whole(whole, exchange, session, labels, order)

    def _whole(self, parts: list[RankPart], agreement: Agreement, step: int) -> GatheredState:
        """Combine the parts of a step into one state, and compare its replicas."""
        division = agreement.division
        assert division is not None  # rank 0's
        whole = gather_parts(parts, division, agreement.id)
        seen = agreement.id, whole.names, rank_count(whole.tree) is not None
        if seen != self._united:  # the check takes as long as gathering: repeat it only when something changed
            check_united(whole.tree, parts)
            self._united = seen
        self._compare(parts, division, step)
        return whole

    def _take_over(self, abandoned: Sequence[str]) -> None:
        """Have the next commit drop the segments that ranks abandoned: this commit or, if it fails, a later one."""
        self.abandon([one for one in abandoned if one not in self._abandoned])

    def _look_for(self, segments: dict[int, tuple[SegmentEntry, ...]]) -> None:
        """Check that rank 0 sees what the other ranks write, once for each rank."""
        if unseen := {rank: own for rank, own in segments.items() if own and rank not in self._seen}:
            check_seen(self.log.journal, unseen)
            self._seen.update(unseen)

    def _compare(self, parts: list[RankPart], division: Division, step: int) -> None:
        if self._options.diverged == "ignore":
            return
        try:
            check_replicas(parts, division, step)
        except DivergedReplicasError as error:
            if self._options.diverged == "raise":
                raise
            warn(f"{error}; those of the lowest rank are saved", DivergedReplicasWarning)

    def _commit_whole(
        self, whole: GatheredState, exchange: Exchange, session: SegmentSession, labels: Labels, order: Order
    ) -> CheckpointInfo:
        moment = time.time()
        step, term = exchange.step, self.log.number
        identity = attempt_id(self.log.nonce, step, exchange.attempt)
        document = replace(
            self._draft,
            segment=identity,
            encodings={step: StepEncoding(term, order.kind, order.base, moment, part=_first(identity, whole.counts))},
            trees={step: whole.tree},
            extra={**self._draft.extra, "ranks": [[step, list(whole.counts)]]},
        )
        (first,), _ = write_plain(session, FlatState(whole.tree, {}), lambda _count: [document])
        segments = (first, *whole.segments)
        entry = CheckpointEntry(term, step, whole.state, moment, len(whole.names), whole.nbytes, labels.extra())
        encoding = Encoding(
            entry.node,
            order.kind,
            order.base,
            tuple(one.id for one in segments),
            lossy=False,
            bytes=sum(one.size for one in segments),
        )
        self.commit(CatalogChange(segments, (entry,), (encoding,), tags=dict.fromkeys(labels.tags, entry.node)))
        return describe_checkpoint(self.log.catalog, entry)

    # -- steps that are written together

    def wholes(self, exchange: Exchange, agreement: Agreement, steps: Sequence[int]) -> list[GatheredState]:
        """Combine what all ranks have compressed of a batch -> the state of all ranks at each step.

        Args:
            exchange: that of the last of `steps`.

        Raises:
            as `settle`.
        """
        self._check_ended()
        letters = exchange.every("share", self._deadline(exchange), "code its share")
        every = [RankPart.unpacked_all(letter, exchange.key("share", rank)) for rank, letter in enumerate(letters)]
        for rank, parts in enumerate(every):
            if len(parts) != len(steps):
                raise RankMismatchError(f"rank {rank} has {len(parts)} steps for a batch, rank 0 {len(steps)}")
        return [self._whole(list(parts), agreement, step) for step, *parts in zip(steps, *every, strict=True)]

    def settle_batch(
        self, exchange: Exchange, batch: Sequence[Batched], session: SegmentSession
    ) -> list[CheckpointInfo]:
        """`settle` for the steps of a batch, whose shares all ranks have written.

        Args:
            exchange: that of its last step.
        """
        return self._commit_and_tell(exchange, lambda: self._commit_batch(exchange, batch, session))

    def _commit_batch(
        self, exchange: Exchange, batch: Sequence[Batched], session: SegmentSession
    ) -> list[CheckpointInfo]:
        letters = exchange.every("part", self._deadline(exchange), "hand in its part")
        parts = [BatchPart.unpacked(letter, exchange.key("part", rank)) for rank, letter in enumerate(letters)]
        crash_point("ranks.gathered")
        self._take_over([one for part in parts for one in part.abandoned])
        self._look_for({part.rank: part.segments for part in parts})
        term = self.log.number
        identity = attempt_id(self.log.nonce, exchange.step, exchange.attempt)
        counts = [tuple(len(part.used[number]) for part in parts) for number in range(len(batch))]
        first = self._trees(identity, batch, counts, session)
        costs = shares(first.size, [0] * len(batch))
        entries, encodings = [], []
        tags: dict[str, Node] = {}
        for number, one in enumerate(batch):
            extra = one.labels.extra()
            entry = CheckpointEntry(
                term, one.step, one.whole.state, one.time, len(one.whole.names), one.whole.nbytes, extra
            )
            used = (identity, *(segment for part in parts for segment in part.used[number]))
            cost = costs[number] + sum(part.costs[number] for part in parts)
            entries.append(entry)
            encodings.append(Encoding(entry.node, KIND, one.base, used, lossy=one.lossy, bytes=cost))
            tags |= dict.fromkeys(one.labels.tags, entry.node)
        segments = (first, *(segment for part in parts for segment in part.segments))
        self.commit(CatalogChange(segments, tuple(entries), tuple(encodings), tags=tags))
        return [describe_checkpoint(self.log.catalog, entry) for entry in entries]

    def _trees(
        self, identity: str, batch: Sequence[Batched], counts: Sequence[tuple[int, ...]], session: SegmentSession
    ) -> SegmentEntry:
        """Write the segment that holds the tree of each step, and no tensor."""
        encodings = {
            one.step: StepEncoding(self.log.number, KIND, one.base, one.time, one.lossy, _first(identity, own))
            for one, own in zip(batch, counts, strict=True)
        }
        document = replace(
            self._draft,
            segment=identity,
            encodings=encodings,
            trees={one.step: one.whole.tree for one in batch},
            extra={
                **self._draft.extra,
                "ranks": [[one.step, list(own)] for one, own in zip(batch, counts, strict=True)],
            },
        )
        return write_stream(session, document, 0, lambda _stream: {one.step: {} for one in batch})


def _first(identity: str, counts: Sequence[int]) -> SegmentPart | None:
    """Which part of a step the segment with its tree is: the first. None: it is the only segment."""
    return SegmentPart(identity, 0, 1 + sum(counts)) if sum(counts) else None
