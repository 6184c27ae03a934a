"""Commits changes to the log of one term, with drops, retirements, tags and upkeep. One thread writes a term."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ckptstore.errors import (
    CkptError,
    CommitUnknownError,
    FencedError,
    NotFoundError,
    StepOrderError,
    UsageError,
    WriterError,
)
from ckptstore.formats.history.catalog import CLOSED
from ckptstore.formats.history.checkpoint_ref import Ref
from ckptstore.formats.history.records import object_of
from ckptstore.host.caller_warnings import warn
from ckptstore.log import fold_writer, refs, requests
from ckptstore.log.change import CatalogChange
from ckptstore.log.checkpoint_info import CheckpointInfo, describe_checkpoint
from ckptstore.log.term import Term
from ckptstore.write.retainer import Retainer

if TYPE_CHECKING:
    from ckptstore.write.second_tier import SecondTier

__all__ = ["Commits"]

_MANY_DROPPED: Final = 1024
"""With fewer dropped segments, a listing that shows which of them are deleted costs more than it saves."""
_SWEPT: Final = 4096
"""The most ids of deleted segments in one record."""


class Commits:
    """The base class of committers, of one process or of many ranks.

    Attributes:
        log: the term.
        ended: why nothing more can be committed; any thread may read it.
        missing: whether a step failed after the last saved one.
        retainer: applies the store's retention rules.
    """

    def __init__(self, log: Term) -> None:
        self.log = log
        self.ended: WriterError | None = None
        self.missing = False
        self.retainer = Retainer(lambda: log.catalog)
        self._tier: SecondTier | None = None
        self._folds = fold_writer.FoldThread(log)
        self._abandoned: list[str] = []  # any thread appends; the committer's thread removes what it has dropped
        self._complaints: set[str] = set()
        self._sweep_at = _MANY_DROPPED

    def follow(self, tier: SecondTier) -> None:
        """From now on, copy each commit to a second tier, and retire a checkpoint only when that tier has it."""
        self._tier = tier
        self.retainer.settled = tier.has

    def abandon(self, segments: Sequence[str]) -> None:
        """Have the next commit drop segments of this term that were begun and will never be committed."""
        self._abandoned.extend(segments)

    def commit(self, change: CatalogChange) -> None:
        """Commit a change in this term. The commit also drops abandoned segments, and retires what no rule keeps."""
        drops = tuple(self._abandoned)
        self.log.journal.check_present()
        try:
            if self._tier is not None:
                self._tier.check()
            self._send(self._with_retirements(change), change, drops)
        except BaseException as error:
            self.retainer.look_again()  # it counted checkpoints that were not committed
            if isinstance(error, FencedError | CommitUnknownError):
                self.ended = error
            elif self.log.dead is not None and isinstance(error, Exception):
                self.ended = self.log.dead  # the term was given up while the request for the slot was in progress
                raise self.log.dead from error
            raise
        self.retainer.committed()
        del self._abandoned[: len(drops)]
        if change.checkpoints:
            self.missing = False
        if self._tier is not None:
            self._tier.committed()

    def _with_retirements(self, change: CatalogChange) -> CatalogChange:
        if not change.checkpoints:
            return change
        try:
            return self.retainer.with_retirements(change)
        except CkptError as error:
            self._complain(error)
            return change

    def _send(self, whole: CatalogChange, change: CatalogChange, drops: tuple[str, ...]) -> None:
        try:
            self.log.commit(replace(whole, drops=(*whole.drops, *drops)).record(self.log.number))
        except (UsageError, NotFoundError) as error:
            if whole is change or isinstance(error, StepOrderError):
                raise
            # A save must not fail because another checkpoint cannot be retired. Nothing was sent.
            self.retainer.look_again()
            self._complain(error)
            self.log.commit(replace(change, drops=(*change.drops, *drops)).record(self.log.number))

    def note_end(self) -> None:
        """Note in the log that the term may end here without losing a step, if that is true and not noted yet."""
        opened = self.log.catalog.terms[self.log.number]
        if self.ended is None and not self.missing and opened.extra.get(CLOSED) is not True:
            with contextlib.suppress(CkptError):
                self.commit(CatalogChange(extra={CLOSED: True}))

    def name(self, tag: str, ref: Ref) -> CheckpointInfo:
        """Give a checkpoint a tag."""
        refs.check_new_tag(tag)
        entry = refs.resolve(self.log.catalog, ref)
        self.commit(CatalogChange(tags={tag: entry.node}))
        return describe_checkpoint(self.log.catalog, entry)

    def unname(self, tag: str) -> None:
        """Remove a tag."""
        refs.resolve(self.log.catalog, Ref(tag=tag))
        self.commit(CatalogChange(tags={tag: None}))

    def tend(self, prepare: Callable[[], None] = lambda: None) -> None:
        """Answer requests and begin a fold, after the save was acknowledged. An error in either fails no save.

        Args:
            prepare: called before a request is answered.
        """
        if self.ended is not None:
            return
        try:
            if requests.handle(self.log, prepare=prepare):
                self.retainer.look_again()
            if (change := self.retainer.rest()) is not None:
                with self.log.journal.backend.upkeep():
                    self.commit(change)
            if (change := self._swept()) is not None:
                self.commit(change)
        except (FencedError, CommitUnknownError) as error:
            self.ended = error  # the next save says so
        except CkptError as error:
            self._complain(error)
        else:
            self._complain(self._folds.begin())
            if (why := self.retainer.unknown()) is not None:
                self._complain(UsageError(why))
            if (what := self.retainer.pinned()) is not None:
                url = self.log.journal.url
                warn(f"{url}: {what}; `ckpt compact {url} --gc` rewrites those, and frees the space")

    def retire_rest(self) -> None:
        """Retire the checkpoints that no rule keeps after a term's last batch: no later save would do it."""
        if self.ended is not None:
            return
        try:
            if (change := self.retainer.rest()) is not None:
                self.commit(change)
        except CkptError as error:
            self._complain(error)

    def _swept(self) -> CatalogChange | None:
        """A change that removes dropped segments of this term from the log if they are deleted by now.

        Prevents: a catalog, and folds, that grow with every save of a run that retires.
        """
        dropped = self.log.catalog.dropped
        if len(dropped) < self._sweep_at:
            return None
        place = f"seg/{self.log.number:010}/"
        there = {found[1] for key in self.log.journal.backend.list(place) if (found := object_of(key)) is not None}
        gone = sorted(dropped - there)[:_SWEPT]
        self._sweep_at = max(_MANY_DROPPED, 2 * (len(dropped) - len(gone)))
        return CatalogChange(swept=tuple(gone)) if gone else None

    def finish_folds(self) -> None:
        """Wait for a fold in progress."""
        self._complain(self._folds.finish())

    def _complain(self, error: Exception | None) -> None:
        """Warn of an error of upkeep, once: upkeep is tried again after every save."""
        if error is not None and (why := str(error)) not in self._complaints:
            self._complaints.add(why)
            warn(f"{self.log.journal.url}: upkeep of the log failed, which by itself fails no save: {why}")
