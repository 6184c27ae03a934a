"""Open a store for many ranks: rank 0 opens a term, and another one when the ranks roll back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckptstore.errors import ReadOnlyError
from ckptstore.formats.segment_files.segment import SegmentDoc
from ckptstore.frameworks import bridge
from ckptstore.host import interpreter_exit
from ckptstore.log.checkpoint_info import CheckpointInfo, look_up
from ckptstore.log.journal import Journal
from ckptstore.log.term import Term
from ckptstore.write.ranks.messages.key_value_store import Group
from ckptstore.write.ranks.messages.rank_messages import OpenedTerm
from ckptstore.write.ranks.rank_committer import RankCommitter
from ckptstore.write.ranks.rank_options import RankOptions
from ckptstore.write.ranks.rank_resources import RankResources
from ckptstore.write.ranks.rank_term import RankTerm
from ckptstore.write.ranks.rank_writer import RankWriter
from ckptstore.write.ranks.term_bootstrap import join, lead
from ckptstore.write.writer_opening import TermOpener
from ckptstore.write.writer_options import WriterOptions

__all__ = ["open_rank_writer", "to_group"]


def to_group(group: Any) -> Group:
    """Return the ranks of a `torch.distributed` process group as a `Group`; return a `Group` unchanged."""
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
        parent: what the term continues from: see `Store.writer`. Only rank 0's counts.
        options: options of this rank's writer.
        ranks: how the ranks save together.
        environment: what determines the bits of the training processes, if these are other processes (`agent`).

    Raises:
        RankError: a rank did not join, or has another store.
        UsageError: an option is not for ranks.
        and as `Store.writer`, on rank 0.
    """
    interpreter_exit.check()
    opener = TermOpener(options, ranks=group.size, environment=environment)
    meeting = _Meeting(group, ranks, _coding(options))
    if group.rank:
        opening = meeting.join(journal, None, None)
        if journal.backend.read_only:
            raise ReadOnlyError(f"{journal.url}: read-only, rank {group.rank} cannot write to it")
        resources = RankResources(Journal(journal.backend, journal.format), group, options, ranks)
        return RankWriter(resources, _follower_term(resources, opening), meeting.go_back(opener))

    def begin() -> tuple[Term, CheckpointInfo | None]:
        journal.create()
        if journal.backend.read_only:
            raise ReadOnlyError(f"{journal.url}: read-only, cannot open it for writing")
        journal.backend.probe()
        return opener.open(journal, parent)

    term, info, opening = meeting.lead(journal, begin, None)
    resources = RankResources(term.journal, group, options, ranks)
    return RankWriter(resources, _leader_term(resources, term, info, opening), meeting.go_back(opener))


def _coding(options: WriterOptions) -> str:
    names = [name for name, what in (("deltas=", options.deltas), ("diffs=", options.diffs)) if what is not None]
    return " and ".join(names)


def _follower_term(resources: RankResources, opening: OpenedTerm) -> RankTerm:
    info = None if opening.parent is None else look_up(resources.journal, opening.parent.ref)
    return RankTerm(resources, opening, info, None)


def _leader_term(resources: RankResources, term: Term, info: CheckpointInfo | None, opening: OpenedTerm) -> RankTerm:
    draft = SegmentDoc(opening.run, opening.term, "", {}, parents={opening.term: opening.parent})
    return RankTerm(resources, opening, info, RankCommitter(term, draft, resources.ranks))


class _Meeting:
    """Brings the ranks of a group together in a term."""

    def __init__(self, group: Group, ranks: RankOptions, coding: str) -> None:
        self._group = group
        self._timeout = ranks.timeout
        self._coding = coding

    def join(self, journal: Journal, asked: str | None, flaw: BaseException | None) -> OpenedTerm:
        """The side of every rank but 0."""
        return join(self._group, journal, self._timeout, self._coding, asked, flaw)

    def lead(
        self, journal: Journal, begin: Callable[[], tuple[Term, CheckpointInfo | None]], asked: str | None
    ) -> tuple[Term, CheckpointInfo | None, OpenedTerm]:
        """Rank 0's side: `begin` opens the term."""
        begun: list[tuple[Term, CheckpointInfo | None]] = []

        def opened() -> OpenedTerm:
            term, info = begin()
            begun.append((term, info))
            run, slot = term.journal.run, term.next_seq - 1
            return OpenedTerm(run, term.number, term.nonce, slot, term.parent, journal.url, self._coding)

        opening = lead(self._group, self._timeout, opened, asked)
        return *begun[0], opening

    def go_back(self, opener: TermOpener) -> Callable[[RankResources, str, BaseException | None, int], RankTerm]:
        """See `writer.GoBack`."""

        def back(resources: RankResources, ref: str, flaw: BaseException | None, after: int) -> RankTerm:
            if self._group.rank:
                return _follower_term(resources, self.join(resources.journal, ref, flaw))

            def begin() -> tuple[Term, CheckpointInfo | None]:
                if flaw is not None:
                    raise flaw
                return opener.open(resources.journal, ref, after)

            return _leader_term(resources, *self.lead(resources.journal, begin, ref))

        return back
