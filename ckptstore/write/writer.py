"""The writer: one term, one thread that persists, every commit acknowledged only when it is durable."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from ckptstore.errors import UsageError, WriterClosedError
from ckptstore.formats.reference import text_of
from ckptstore.host.caller_warnings import warns_last
from ckptstore.host.reentrance import refuse_within
from ckptstore.log.checkpoints import CheckpointInfo
from ckptstore.log.term import Term
from ckptstore.write.lifetime import Begin
from ckptstore.write.lost import note_lost
from ckptstore.write.second_tier import Lag
from ckptstore.write.taking import SAVING, Taking

__all__ = ["Begin", "Writer"]

_T = TypeVar("_T")


class Writer(Taking):
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

    @warns_last
    def wait(self) -> None:
        """Return when everything given so far is durable: what is in flight, and what waits for its batch, which is
        written now.

        Raises:
            StorageError, FencedError, CommitUnknownError: what stopped a `save_async` of which nobody has been told
                yet, with a note of every other one; no later call raises it again.
            WriterClosedError: the writer is closed; `close` has waited, and raised.
        """
        if self._path.needs_caller:
            refuse_within(self, SAVING)
        self._told(self._committer.flush_in_time)
        self._failures.raise_unseen()

    @warns_last
    def poll(self) -> None:
        """Answer now what other processes ask for (`Store.merge`, `tag`, `retire` ... beside this writer), and fold the
        log if that is due. A writer does it by itself after every save, and every `poll_seconds`.

        What goes wrong fails no save: it is warned of, once, or the next save says so.

        Raises:
            WriterClosedError: the writer is closed.
        """
        if self._path.needs_caller:
            refuse_within(self, SAVING)
        self._submit(self._committer.housekeeping).result()

    def lag(self) -> Lag | None:
        """How far the store's second tier is behind; None: it has none.

        Raises `CorruptLogError`, `StorageError`: the store's own log cannot be read.
        """
        return None if self._tier is None else self._tier.lag()

    @warns_last
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
        if self._path.needs_caller:
            refuse_within(self, SAVING)
        committer, text = self._committer, text_of(ref)
        return self._told(lambda: committer.tag(name, text))

    @warns_last
    def untag(self, name: str) -> None:
        """Remove a tag; the checkpoint stays.

        Raises:
            CheckpointNotFoundError: there is no such tag.
            StorageError, FencedError, CommitUnknownError: as `save`.
        """
        if self._path.needs_caller:
            refuse_within(self, SAVING)
        committer = self._committer
        self._told(lambda: committer.untag(name))

    def _told(self, work: Callable[[], _T]) -> _T:
        """What the committer's thread makes of `work`; whoever is told here hears of no failure a second time."""
        try:
            return self._submit(work).result()
        except BaseException as error:
            self._failures.seen_error(error)
            raise

    @warns_last
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
        refuse_within(self, SAVING)
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Who ends a run wonders what it waits for.
        self._interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
        try:
            self.close()
        except BaseException as lost:
            if error is None:
                raise
            note_lost(error, self.url, lost)
