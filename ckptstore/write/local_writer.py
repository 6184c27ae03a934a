"""The writer of one process: it acknowledges a commit only when the commit is durable."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ckptstore.errors import WriterClosedError
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.log.term import Term
from ckptstore.write.save_calls import SaveCalls
from ckptstore.write.writer_runtime import Begin

if TYPE_CHECKING:
    from ckptstore.write.second_tier import Lag

__all__ = ["Begin", "LocalWriter"]

_T = TypeVar("_T")


class LocalWriter(SaveCalls):
    """A `Writer` of this process alone. One thread at a time commits: the log of a term has one author."""

    takes_copies = True

    @property
    def recomputes(self) -> bool:
        """See `Writer.recomputes`."""
        return self._path.recomputes

    def _wait(self) -> None:
        """See `Writer.wait`."""
        if self._options.diffs is not None:
            self._run_in_committer(self._committer.flush_in_time)
        else:  # no step waits for its batch
            self._check_process()
            if self._ended is not None:
                raise WriterClosedError(self._closed())
            try:
                self._path.settle()
            except RuntimeError as error:  # closed by another thread
                raise WriterClosedError(self._closed()) from error
        self._failures.raise_unseen()

    def _poll(self) -> None:
        """See `Writer.poll`."""
        self._submit(self._committer.housekeeping).result()

    def lag(self) -> Lag | None:
        """See `Writer.lag`."""
        return None if self._tier is None else self._tier.lag()

    def _tag(self, name: str, ref: str) -> CheckpointInfo:
        """See `Writer.tag`."""
        committer = self._committer
        return self._run_in_committer(lambda: committer.tag(name, ref))

    def _untag(self, name: str) -> None:
        """See `Writer.untag`."""
        committer = self._committer
        self._run_in_committer(lambda: committer.untag(name))

    def _run_in_committer(self, work: Callable[[], _T]) -> _T:
        """Run `work` in the committer's thread -> its result. An error raised here is not raised by a later call."""
        try:
            return self._submit(work).result()
        except BaseException as error:
            self._failures.seen_error(error)
            raise

    def _make_way(self, step: int) -> None:
        """See `Writer._make_way`."""
        self._check_open()
        if self._committer.saves.newest_is(step):
            self._wait()
        if self._committer.saves.newest_is(step):  # it has not failed
            self._rollback(f"{step}@{self.term}")
        self._committer.saves.allow_replacing(step)

    def _rollback(self, ref: str | int | CheckpointInfo) -> CheckpointInfo:
        """See `Writer.rollback`."""
        self._check_open()
        self._submit(self._committer.flush_and_close).result()
        self._failures.raise_unseen()
        term, parent = self._begin(ref, self.term)
        self._path.forget()
        assert parent is not None  # a term that continues from a checkpoint has one
        self._submit(lambda: self._succeed(term, parent)).result()
        return parent

    def _succeed(self, term: Term, parent: CheckpointInfo) -> None:
        """Replace the present term by a new one. The committer's thread calls this."""
        self._committer.give_way(WriterClosedError(f"term {self.term} is over: {parent.ref} was gone back to"))
        self._deltas.begin(self._draft(term))
        self._committer = self._serve(term, parent)
