"""Hold one rank's state of a term, which the caller's thread, the write thread and the commit thread share."""

from __future__ import annotations

import contextlib

from ckptstore.errors import CkptError, CommitUnknownError, MailboxError, RankMismatchError, WriterError
from ckptstore.formats.segment_files.segment import SegmentDoc
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.write.ranks.division import Family
from ckptstore.write.ranks.messages.key_value_store import Mailbox
from ckptstore.write.ranks.messages.rank_messages import CommitVerdict, OpenedTerm, told
from ckptstore.write.ranks.messages.silent_ranks import SilentRanks
from ckptstore.write.ranks.messages.step_messages import Exchange
from ckptstore.write.ranks.rank_agreement import Agreement
from ckptstore.write.ranks.rank_committer import RankCommitter
from ckptstore.write.ranks.rank_resources import RankResources
from ckptstore.write.ranks.rank_save import RankSave
from ckptstore.write.saves.ledger import Saves
from ckptstore.write.space_advice import tell_what_holds_space

__all__ = ["RankTerm", "unknown"]


class RankTerm:
    """A term that many ranks write.

    Attributes:
        opening: the term as rank 0 opened it.
        parent: the checkpoint that it continues from.
        committer: rank 0's committer; None on other ranks.
        draft: the header members that all segments of the term share.
        saves: its steps, as their callers know them.
        agreed: the last agreement on which rank writes what; None: the ranks have to agree.
        families: tensors that belong together, as updates have shown.
        abandoned: segments that this rank began and that no commit contains.
        answered: on rank 0: steps whose result is posted, and perhaps not yet read by all ranks.
        stopped: why this rank can save nothing more.
        building: on rank 0: the step (of a batch: the last one) that is being made, builds on what the log has, and is
            not committed yet; None: there is none. The write thread sets it; the commit thread, or the code that gives
            the step up, clears it (`built`).
    """

    def __init__(
        self,
        resources: RankResources,
        opening: OpenedTerm,
        parent: CheckpointInfo | None,
        committer: RankCommitter | None,
    ) -> None:
        self.opening = opening
        self.parent = parent
        self.committer = committer
        self.draft = SegmentDoc(opening.run, opening.term, "", {}, parents={opening.term: opening.parent})
        self.saves = Saves(opening.term, parent, resources.failures)
        self.agreed: Agreement | None = None
        self.families: dict[Family, None] = {}
        self.abandoned: list[str] = []
        self.answered: list[Exchange] = []
        self.stopped: WriterError | None = None
        self.building: int | None = None
        self._resources = resources
        self._attempts: dict[int, int] = {}
        self._silence = SilentRanks()
        box = resources.group.mailbox
        self._mailbox, self.write_box, self.commit_box, self.watch_box = (box.clone() for _ in range(4))

    @property
    def number(self) -> int:
        """The term's number."""
        return self.opening.term

    @property
    def base(self) -> str:
        """Prefix of all keys of the term."""
        return f"ckptstore/{self.opening.run}/{self.number}"

    def exchange(self, step: int) -> Exchange:
        """The letters of the next attempt at a step, for the caller's thread."""
        group = self._resources.group
        attempt = self._attempts.get(step, 0)
        return Exchange(self._mailbox, self.base, step, attempt, group.rank, group.size, group.ended, self._silence)

    def tell_flaw(self, one: RankSave, error: BaseException, *, over: bool = True) -> None:
        """Tell the other ranks that this rank does not do its part of a step, and count the attempt.

        Args:
            over: this rank reads no more letters of the step, so they may be removed.
        """
        self.built(one.step)
        self._attempts[one.step] = one.exchange.attempt + 1
        if isinstance(error, RankMismatchError):
            self.agreed = None
        with contextlib.suppress(CkptError):
            if self.committer is None:
                one.exchange.fail(error)
                if over:
                    one.exchange.see()
                return
            self.committer.missing = True
            one.exchange.post("verdict", CommitVerdict(error=told(error)).packed())
            self.answered.append(one.exchange)

    def built(self, step: int) -> None:
        """Note that `step` is no longer being made. Another step stays in `building`. Any thread may call it."""
        if self.building == step:
            self.building = None

    def conclude(self, step: int) -> None:
        """Post that this rank saves no step above `step`: no rank need wait for its part of one."""
        with contextlib.suppress(MailboxError):  # then no rank waits, either
            self._mailbox.set(f"{self.base}/over/{self._resources.group.rank}", str(step).encode())
            self._mailbox.set(f"{self.base}/over", b"1")

    def failed(self, one: RankSave, error: BaseException) -> None:
        """Note that a step failed on all ranks: count the attempt, and tell the caller here."""
        self._attempts[one.step] = one.exchange.attempt + 1
        if isinstance(error, RankMismatchError):
            self.agreed = None
        self.tell(one, error)

    def tell(self, one: RankSave, error: BaseException) -> None:
        """Raise `error` to the caller that waits for a step; if none waits, the next call raises it."""
        if one.done.done():
            return
        if (committer := self.committer) is not None:
            tell_what_holds_space(error, lambda: committer.log.catalog, committer.log.journal.backend)
        one.fail(error, told=one.told)

    def abandon(self, segments: tuple[str, ...] | list[str]) -> None:
        """Note segments that will not be committed: a later commit drops them."""
        self.abandoned += [segment for segment in segments if segment not in self.abandoned]

    def committed(self, dropped: tuple[str, ...]) -> None:
        """Note what a commit has dropped: it need not be dropped again."""
        self.abandoned = [segment for segment in self.abandoned if segment not in dropped]

    def hand_in(self, exchange: Exchange, letter: bytes) -> None:
        """Send this rank's part of a step. From now on only rank 0 knows whether it is committed."""
        try:
            exchange.post("part", letter, exchange.rank)
            exchange.arrived()
        except MailboxError as error:
            if self.committer is not None:
                raise  # no other rank commits
            # The letter may have arrived, and then rank 0 may commit it.
            raise unknown(exchange.step, str(error)) from error

    def sweep(self, mailbox: Mailbox) -> bool:
        """On rank 0: remove the letters of steps whose result every rank has read -> whether none is left."""
        left = []
        for answered in self.answered:
            exchange = answered.using(mailbox)
            if exchange.seen():
                exchange.clear()
            else:
                left.append(exchange)
        self.answered = left
        return not left

    def clear(self, mailbox: Mailbox) -> None:
        """Rank 0: remove all letters of the term, even those that a rank has not read."""
        for exchange in self.answered:
            exchange.using(mailbox).clear()
        for rank in range(self._resources.group.size):
            mailbox.delete(f"{self.base}/at/{rank}")


def unknown(step: int, why: str) -> CommitUnknownError:
    """The error for a step of which this rank cannot know whether it was committed."""
    return CommitUnknownError(
        f"step {step} may or may not have been saved: rank 0, which commits, cannot be reached: {why}; open the store "
        "again to find out"
    )
