"""Opening a store for many ranks: one term, opened by rank 0; and the next one, when they go back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckptstore.errors import ReadOnlyError
from ckptstore.formats.segment import SegmentDoc
from ckptstore.frameworks import bridge
from ckptstore.host import interpreter_exit
from ckptstore.log.checkpoint_info import CheckpointInfo, look_up
from ckptstore.log.journal import Journal
from ckptstore.log.term import Term
from ckptstore.write.opening import TermOpener
from ckptstore.write.options import WriterOptions
from ckptstore.write.ranks.committing import RankCommitter
from ckptstore.write.ranks.mailbox import Group
from ckptstore.write.ranks.means import Means
from ckptstore.write.ranks.meeting import join, lead
from ckptstore.write.ranks.options import RankOptions
from ckptstore.write.ranks.parts import Opening
from ckptstore.write.ranks.tenure import Tenure
from ckptstore.write.ranks.writer import RankWriter

__all__ = ["open_rank_writer", "to_group"]


def to_group(group: Any) -> Group:
    """The ranks of a `torch.distributed` process group; a `Group` is one already."""
    return group if isinstance(group, Group) else Group(*bridge.process_group(group))


def open_rank_writer(
    journal: Journal,
    parent: str | int | CheckpointInfo | None,
    group: Group,
    options: WriterOptions,
    ranks: RankOptions,
    *,
    environment: Mapping[str, Any] | None = None,
) -> RankWriter:
    """Begin a new term together with the other ranks of a group, once all of them are there.

    Args:
        parent: what the term continues from: see `Store.writer`. Rank 0's counts.
        options: what this rank's writer may use.
        ranks: how the ranks save together.
        environment: what decides the bits of the processes that train, where these are others (`agent`).

    Raises:
        RankError: a rank did not come, or has another store.
        and as `Store.writer`, on rank 0.
    """
    interpreter_exit.check()
    opener = TermOpener(options, ranks=group.size, environment=environment)
    meeting = _Meeting(group, ranks, _coding(options))
    if group.rank:
        opening = meeting.joined(journal, None, None)
        if journal.backend.read_only:
            raise ReadOnlyError(f"{journal.url}: read-only, rank {group.rank} cannot write to it")
        means = Means(Journal(journal.backend, journal.format), group, options, ranks)
        return RankWriter(means, _joined(means, opening), meeting.go_back(opener))

    def begin() -> tuple[Term, CheckpointInfo | None]:
        journal.create()
        if journal.backend.read_only:
            raise ReadOnlyError(f"{journal.url}: read-only, cannot open it for writing")
        journal.backend.probe()
        return opener.open(journal, parent)

    term, info, opening = meeting.led(journal, begin, None)
    means = Means(term.journal, group, options, ranks)
    return RankWriter(means, _led(means, term, info, opening), meeting.go_back(opener))


def _coding(options: WriterOptions) -> str:
    names = [name for name, what in (("deltas=", options.deltas), ("diffs=", options.diffs)) if what is not None]
    return " and ".join(names)


def _joined(means: Means, opening: Opening) -> Tenure:
    info = None if opening.parent is None else look_up(means.journal, opening.parent.ref)
    return Tenure(means, opening, info, None)


def _led(means: Means, term: Term, info: CheckpointInfo | None, opening: Opening) -> Tenure:
    draft = SegmentDoc(opening.run, opening.term, "", {}, parents={opening.term: opening.parent})
    return Tenure(means, opening, info, RankCommitter(term, draft, means.ranks))


class _Meeting:
    """How the ranks of a group come to a term."""

    def __init__(self, group: Group, ranks: RankOptions, coding: str) -> None:
        self._group = group
        self._timeout = ranks.timeout
        self._coding = coding

    def joined(self, journal: Journal, asked: str | None, flaw: BaseException | None) -> Opening:
        """The side of every rank but 0."""
        return join(self._group, journal, self._timeout, self._coding, asked, flaw)

    def led(
        self, journal: Journal, begin: Callable[[], tuple[Term, CheckpointInfo | None]], asked: str | None
    ) -> tuple[Term, CheckpointInfo | None, Opening]:
        """Rank 0's side: `begin` opens the term."""
        begun: list[tuple[Term, CheckpointInfo | None]] = []

        def opened() -> Opening:
            term, info = begin()
            begun.append((term, info))
            run, slot = term.journal.run, term.next_seq - 1
            return Opening(run, term.number, term.nonce, slot, term.parent, journal.url, self._coding)

        opening = lead(self._group, self._timeout, opened, asked)
        return *begun[0], opening

    def go_back(self, opener: TermOpener) -> Callable[[Means, str, BaseException | None, int], Tenure]:
        """See `writer.GoBack`."""

        def back(means: Means, ref: str, flaw: BaseException | None, after: int) -> Tenure:
            if self._group.rank:
                return _joined(means, self.joined(means.journal, ref, flaw))

            def begin() -> tuple[Term, CheckpointInfo | None]:
                if flaw is not None:
                    raise flaw
                return opener.open(means.journal, ref, after)

            return _led(means, *self.led(means.journal, begin, ref))

        return back
