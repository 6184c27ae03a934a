"""The steps of a writer as its caller sees them: which are taken, in flight, or failed without any call raising it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias

from ckptstore.errors import CommitUnknownError, StepOrderError, UsageError, WriterClosedError
from ckptstore.formats.history import metadata as metadata_format
from ckptstore.formats.history.spans import Spans
from ckptstore.host.option_checks import seconds, texts
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.log.refs import check_new_tag
from ckptstore.write.saves.lost_steps import first_of

if TYPE_CHECKING:
    from ckptstore.write.second_tier import SecondTier

__all__ = ["Failures", "Labels", "Metadata", "PendingSave", "Saves", "check_owner"]

_MAX_STEP: Final = 2**53 - 1

Metadata: TypeAlias = Mapping[str, Any] | Callable[[], Mapping[str, Any] | None]
"""The metadata of a save; or a function that returns it, or None, when everything but the COMMIT record is durable."""


@dataclass(frozen=True, slots=True)
class Labels:
    """What the COMMIT record says of a checkpoint besides its state.

    Attributes:
        known: additional members of its entry in the log.
        tags: names that it gets; another checkpoint that had one loses it.
        late: returns the metadata; None: `known` has it already.
    """

    known: Mapping[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    late: Callable[[], Mapping[str, Any] | None] | None = None

    @classmethod
    def of(cls, metadata: Metadata | None, tags: str | Sequence[str] | None) -> Self:
        """Check the arguments of `Writer.save` -> the labels. Raises `UsageError`."""
        names = texts("tags", tags)
        for name in names:
            check_new_tag(name)
        if callable(metadata) and not isinstance(metadata, Mapping):
            return cls({}, names, metadata)
        return cls(_members(metadata), names)

    def extra(self) -> Mapping[str, Any]:
        """The additional members of the entry. Called once, just before the commit; it may wait for a late function.

        Raises:
            UsageError: that function failed, or returned what cannot be stored. So nothing may be committed.
        """
        if self.late is None:
            return self.known
        try:
            said = self.late()
        except Exception as error:
            # Its own error must not look like one of the store: a `FencedError` would end the writer.
            raise UsageError(
                f"metadata: the function failed, so nothing was committed: {type(error).__name__}: {error}"
            ) from error
        return _members(said)

    def check_known(self) -> None:
        """Raise `UsageError` if the metadata is late: another process commits, which cannot call the function."""
        if self.late is not None:
            raise UsageError("metadata: a function; an agent commits in another process, so pass the values themselves")


def _members(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Metadata as members of an entry in the log. Raises `UsageError`."""
    said = {} if metadata is None else metadata_format.checked(metadata)
    return {metadata_format.MEMBER: said} if said else {}


class PendingSave:
    """A save in flight, as `Writer.save_async` returns it. It has the methods of a `Future`.

    Attributes:
        step: the step that is saved.
    """

    def __init__(
        self,
        step: int,
        future: Future[CheckpointInfo],
        seen: Callable[[], None],
        hurry: Callable[[], None] = lambda: None,
        cancel: Callable[[], bool] = lambda: False,
        tier: SecondTier | None = None,
    ) -> None:
        """
        Args:
            seen: called when a call has reported that it failed.
            hurry: has it written now, if it waits for its batch.
            cancel: gives it up, if that is still possible.
            tier: the second tier, to which the store copies it, for `result`.
        """
        self.step = step
        self._future = future
        self._seen = seen
        self._hurry = hurry
        self._cancel = cancel
        self._tier = tier
        self._process = os.getpid()

    def __repr__(self) -> str:
        if not self.done():
            return f"<PendingSave of step {self.step}: on its way>"
        error = self._future.exception()
        what = "durable" if error is None else "cancelled" if self.cancelled() else f"failed: {error!r:.200}"
        return f"<PendingSave of step {self.step}: {what}>"

    def when_done(self, call: Callable[[bool], None], /) -> None:
        """Call `call` once, with whether it is durable: as soon as that is known, or now if it is known already.

        The thread that persists calls it: it must be quick, and must not wait for a save (`cancel` waits, too). An
        exception in it is only logged. A failure still counts as not raised. This call itself waits for nothing, and
        does not hurry a step that waits for its batch.
        """
        self._future.add_done_callback(lambda done: call(not done.cancelled() and done.exception() is None))

    def hurry(self) -> None:
        """Have it written now, if it waits for its batch. Returns at once."""
        if not self._future.done() and self._process == os.getpid():
            self._hurry()

    def done(self) -> bool:
        """Whether it is durable or has failed."""
        return self._future.done()

    def cancel(self) -> bool:
        """Give it up, unless it is being committed, is durable, or has failed -> whether it is cancelled.

        Its memory is freed, the bytes written for it are dropped, and its step may be saved again. A step stored as a
        step diff cannot be cancelled: the next one is compressed against it. With an agent, this waits until devices
        have copied the saves before it.
        """
        if self._process != os.getpid():
            return False
        return self._cancel()

    def cancelled(self) -> bool:
        """Whether `cancel` has given it up."""
        return self._future.done() and isinstance(self._future.exception(), CancelledError)

    def result(self, timeout: float | None = None, *, tier: Literal["local", "remote"] = "local") -> CheckpointInfo:
        """Wait until it is durable. If it waits for its batch, the batch is written now, as by `Writer.wait`.

        Args:
            timeout: seconds; None: no limit.
            tier: ``local``: in the store, so that it survives the process and a power cut. ``remote``: in the store's
                second tier as well (`open(remote=)`), so that it survives the loss of the machine.

        Raises:
            UsageError: ``remote``, and the store has no second tier; or `timeout` is not a valid time.
            TimeoutError: it is not durable within `timeout` seconds; the save continues.
            StorageError, FencedError, CommitUnknownError: the error that stopped it.
            concurrent.futures.CancelledError: it was cancelled.
            WriterClosedError: this is a fork of the process that saves, and cannot learn the outcome.
        """
        if tier not in ("local", "remote"):
            raise UsageError(f"tier={tier!r}: 'local' or 'remote'")
        if tier == "remote" and self._tier is None:
            raise UsageError("the store has no second tier: open it with remote=")
        timeout = _patience(timeout)
        end = None if timeout is None else time.monotonic() + timeout
        if (error := self.exception(timeout)) is not None:
            raise error
        info = self._future.result()
        if tier == "remote" and self._tier is not None:
            self._tier.wait((info.term, info.step), None if end is None else max(0.0, end - time.monotonic()))
        return info

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as `result` does -> the error that stopped it, which no later call raises again; None: it is durable.

        Raises:
            TimeoutError, WriterClosedError: as `result`.
        """
        timeout = _patience(timeout)
        if not self._future.done():
            if self._process != os.getpid():
                raise WriterClosedError(
                    f"step {self.step} is saved by process {self._process}, not by its fork, which cannot wait for it"
                )
            self._hurry()
            wait([self._future], timeout)
        if not self._future.done():
            raise TimeoutError(f"step {self.step} is not durable after {timeout} s")
        error = self._future.exception()
        if error is not None:
            self._seen()
        return error


def check_owner(process: int, term: int) -> None:
    """Raise `WriterClosedError` in a fork of `process`, which writes `term`: a fork has no threads to do the work."""
    if process != os.getpid():
        raise WriterClosedError(f"the writer of term {term} belongs to process {process}, not to its fork")


def _patience(timeout: float | None) -> float | None:
    """The seconds to wait; a negative time becomes 0. Raises `UsageError` if it is not a valid time."""
    return seconds("timeout", max(timeout, 0.0) if isinstance(timeout, int | float) else timeout)


class Failures:
    """The steps of a writer whose failure no call has raised yet, by (term, step). Thread-safe."""

    def __init__(self) -> None:
        self._unseen: dict[tuple[int, int], BaseException] = {}

    def add(self, term: int, step: int, error: BaseException) -> None:
        """Add a failed step. No call has raised its error yet."""
        self._unseen[term, step] = error

    def seen(self, term: int, step: int) -> None:
        """Remove a step: a call has reported its failure."""
        self._unseen.pop((term, step), None)

    def seen_error(self, error: BaseException) -> None:
        """Remove every step that `error` stopped: a call has raised it."""
        for term, step in [key for key, other in list(self._unseen.items()) if other is error]:
            self.seen(term, step)

    def take(self) -> list[tuple[int, BaseException]]:
        """Remove and return all steps, in the order of their failures."""
        failures: list[tuple[int, BaseException]] = []
        while self._unseen:
            (_, step), error = self._unseen.popitem()
            failures.append((step, error))
        failures.reverse()
        return failures

    def raise_unseen(self) -> None:
        """Raise the first failure that no call has raised yet. Its notes name every lost step once."""
        failures = self.take()
        if failures:
            raise first_of(failures)


class Saves:
    """The steps of one term. They are taken in ascending order, and may end in any order. Thread-safe.

    Attributes:
        term: the number of the term.
        parent: the checkpoint from which the term continues.
        failures: failures that no call has raised yet, of this term and of earlier terms of the same writer.
    """

    def __init__(self, term: int, parent: CheckpointInfo | None, failures: Failures) -> None:
        self.term = term
        self.parent = parent
        self.failures = failures
        self._taken = Spans()
        self._reached = 0 if parent is None else parent.step  # also by steps that failed
        self._replaces = False
        self._pending: dict[int, Future[CheckpointInfo]] = {}
        self._lock = threading.Lock()

    def newest_is(self, step: int) -> bool:
        """Whether `step` is the highest step that is saved or in flight."""
        with self._lock:
            return self._taken.highest == step

    def allow_replacing(self, step: int) -> None:
        """Allow that `step` is taken once although the parent has it. Does nothing if the parent has another step."""
        if self.parent is not None and step == self.parent.step:
            self._replaces = True

    def check(self, step: int | None) -> None:
        """Raise `StepOrderError` if no checkpoint of this term may have this step, or no later one may."""
        if step is None:
            return
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= _MAX_STEP:
            raise StepOrderError(f"step {step!r}: a whole number from 0 to 2^53 - 1 is needed")
        if self.parent is not None and step < self.parent.step + (not self._replaces):
            again = "to replace that checkpoint pass replace=True; " if step == self.parent.step else ""
            raise StepOrderError(
                f"step {step} is not above step {self.parent.step}, from which term {self.term} continues "
                f"({self.parent.ref}); {again}to go back further call writer.rollback(<an earlier checkpoint>), or "
                "open a writer with parent=<an earlier checkpoint>"
            )
        with self._lock:
            self._check_order(step)

    def take(self, step: int | None) -> int:
        """Take `step`, so that no other save may -> the step.

        Args:
            step: None: the next one, above the parent's and above all that were ever taken. A step that failed is not
                taken again: of many ranks, some learn of a failure later than others, and all must take the same step.

        Raises:
            StepOrderError: it is not above all steps taken before, or there is none above them.
        """
        with self._lock:
            if step is None:
                step = self._reached + 1
                if step > _MAX_STEP:
                    raise StepOrderError(f"step {_MAX_STEP} was saved: there is no step above it")
            self._check_order(step)
            self._replaces = False
            self._taken.add(step)
            self._reached = max(self._reached, step)
            return step

    def _check_order(self, step: int) -> None:
        """Prevents: a run that went back, but resumes from what it had abandoned, which is still the highest step."""
        highest = self._taken.highest
        if highest is None or step > highest:
            return
        what = "exists already" if step in self._taken else f"is not above step {highest}, which was saved"
        again = "; to replace it pass replace=True" if step == highest else ""
        raise StepOrderError(
            f"step {step} {what} in term {self.term}{again}; to go back call writer.rollback(<an earlier checkpoint>), "
            "or open a writer with parent=<an earlier checkpoint>"
        )

    def watch(self, step: int, done: Future[CheckpointInfo]) -> None:
        """Count `step` as in flight until `done` resolves."""
        self._pending[step] = done
        done.add_done_callback(lambda _: self._pending.pop(step, None))

    def pending(self) -> list[int]:
        """The steps in flight, ascending."""
        return sorted(self._pending.copy())

    def release(self, step: int, error: BaseException | None) -> None:
        """Allow a failed step to be saved again, unless it may have been committed."""
        if isinstance(error, CommitUnknownError):
            return
        with self._lock:
            self._taken.discard(step)
        self.allow_replacing(step)  # it was allowed before

    def fail(self, step: int, error: BaseException, done: Future[CheckpointInfo]) -> None:
        """Fail a step whose saver does not know yet: `done` or `failures` reports the error."""
        self.release(step, error)
        # Before any caller can get the result: a caller that sees the error there removes it here.
        self.failures.add(self.term, step, error)
        done.set_exception(error)

    def seen(self, step: int) -> None:
        """Note that a call has reported the failure of `step`."""
        self.failures.seen(self.term, step)
