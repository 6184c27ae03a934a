"""One term as one rank sees it: the state that the caller's thread, the write thread and the commit thread share."""

from __future__ import annotations

import contextlib

from ckptstore.errors import CkptError, CommitUnknownError, MailboxError, RankMismatchError, WriterError
from ckptstore.formats.segment import SegmentDoc
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
        opening: what rank 0 has opened.
        parent: the checkpoint that it continues from.
        committer: of rank 0; None: this is another.
        draft: what all segments of the term say of themselves.
        saves: its steps, as their savers know them.
        agreed: who writes what, as agreed last; None: it has to be agreed.
        families: tensors that updates have shown to belong together.
        abandoned: segments that this rank began and that no commit has.
        answered: of rank 0: steps of which all are told, and perhaps not all have heard.
        stopped: why this rank can save nothing more.
        building: of rank 0: the step, or the last one of a batch, that is made, builds on what the log has, and is not
            committed yet; None: none is. The thread that writes says so; the one that settles, or whoever gives that
            step up, says that it is over (`built`).
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
        """The term's."""
        return self.opening.term

    @property
    def base(self) -> str:
        """What all keys of the term begin with."""
        return f"ckptstore/{self.opening.run}/{self.number}"

    def exchange(self, step: int) -> Exchange:
        """The letters of the next attempt at a step, for the thread of its caller."""
        group = self._resources.group
        attempt = self._attempts.get(step, 0)
        return Exchange(self._mailbox, self.base, step, attempt, group.rank, group.size, group.ended, self._silence)

    def tell_flaw(self, one: RankSave, error: BaseException, *, over: bool = True) -> None:
        """This rank does not do its part of a step: tell the others, and count the attempt.

        Args:
            over: it asks for no letter of the step any more, so that they may be removed.
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
        """A step builds on nothing any more that is not committed. Any thread; another step goes on being made."""
        if self.building == step:
            self.building = None

    def conclude(self, step: int) -> None:
        """Say that this rank is given no step above `step` any more: nobody need wait for its part of one."""
        with contextlib.suppress(MailboxError):  # then nobody waits for it, either
            self._mailbox.set(f"{self.base}/over/{self._resources.group.rank}", str(step).encode())
            self._mailbox.set(f"{self.base}/over", b"1")

    def failed(self, one: RankSave, error: BaseException) -> None:
        """A step was not saved, as all ranks hear: count the attempt, and tell whoever waits for it here."""
        self._attempts[one.step] = one.exchange.attempt + 1
        if isinstance(error, RankMismatchError):
            self.agreed = None
        self.tell(one, error)

    def tell(self, one: RankSave, error: BaseException) -> None:
        """Whoever waits for a step hears that it failed; if nobody does, the next call raises it."""
        if one.done.done():
            return
        if (committer := self.committer) is not None:
            tell_what_holds_space(error, lambda: committer.log.catalog, committer.log.journal.backend)
        one.fail(error, told=one.told)

    def abandon(self, segments: tuple[str, ...] | list[str]) -> None:
        """What was begun in vain: a later commit drops it."""
        self.abandoned += [segment for segment in segments if segment not in self.abandoned]

    def committed(self, dropped: tuple[str, ...]) -> None:
        """What a commit has dropped need not be dropped again."""
        self.abandoned = [segment for segment in self.abandoned if segment not in dropped]

    def hand_in(self, exchange: Exchange, letter: bytes) -> None:
        """Send this rank's part of a step; from now on nobody here knows what becomes of it until rank 0 says so."""
        try:
            exchange.post("part", letter, exchange.rank)
            exchange.arrived()
        except MailboxError as error:
            if self.committer is not None:
                raise  # nobody else commits
            # It may have come through, and then rank 0 may commit it.
            raise unknown(exchange.step, str(error)) from error

    def sweep(self, mailbox: Mailbox) -> bool:
        """Rank 0: remove the letters of steps of which every rank has heard -> whether none is left."""
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
        """Rank 0: remove all letters of the term, whoever has heard of them."""
        for exchange in self.answered:
            exchange.using(mailbox).clear()
        for rank in range(self._resources.group.size):
            mailbox.delete(f"{self.base}/at/{rank}")


def unknown(step: int, why: str) -> CommitUnknownError:
    """Nobody here can know whether a step was committed."""
    return CommitUnknownError(
        f"step {step} may or may not have been saved: rank 0, which commits, cannot be heard: {why}; open the store "
        "again to find out"
    )
