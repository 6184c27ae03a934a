"""Finish the saves of open writers at interpreter exit, and report every save that could not be finished.

A script may end without ``close()``: it uses no ``with``, calls ``sys.exit``, or does not catch an exception. Then
every open writer finishes its saves, as `close` would, *before* the thread pools are shut down. `atexit` hooks run
later than that (measured on Python 3.11 to 3.13). On 3.12 no thread can be started any more at that point, so the
writers' pools start all their threads early (`threads.started_pool`).

Exit takes as long as the medium takes. The user may press Ctrl-C instead of waiting, and reads which steps may be
missing. A writer whose `close` was interrupted by Ctrl-C is not waited for again.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Final

from ckptstore.errors import WriterClosedError
from ckptstore.host.cancellable_calls import abandon_all

__all__ = [
    "ADVICE",
    "SILENT_SECONDS",
    "Finishable",
    "await_end",
    "check",
    "forget",
    "give_up",
    "under_way",
    "watch",
    "watched",
]

ADVICE: Final = "a writer needs the main thread to be alive; join the training thread there"

SILENT_SECONDS: Final = 5.0
"""After this wait a message on stderr says what the process is waiting for."""


class Finishable(ABC):
    """A writer that is finished at interpreter exit. Methods that begin with ``_`` are called only by this module and
    by `host.sigterm`.
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """URL of its store."""

    @abstractmethod
    def _end(self) -> Future[None]:
        """Refuse new saves. Returns a future that is done when every earlier save is."""

    @abstractmethod
    def close(self) -> None:
        """Refuse new saves, and wait for the earlier ones."""

    @abstractmethod
    def _unfinished(self) -> Sequence[int]:
        """The steps of `save_async` that are in flight, ascending."""

    @abstractmethod
    def _unseen(self) -> Sequence[tuple[int, BaseException]]:
        """The steps whose `save_async` failed without anyone having asked for the result, each with its error.

        Returns each of them once.
        """

    @abstractmethod
    def _settle(self) -> None:
        """Write the waiting steps, and record in the log that nothing is missing if the process ends now.

        Raises nothing.
        """


_open: Final[set[Finishable]] = set()
"""Open writers, referenced until they are closed: a collected writer would lose its saves. The set is only changed by
single calls, so that a fork cannot happen halfway through a change."""
_given_up: Final[set[Finishable]] = set()
"""Writers whose `close` was interrupted."""
_begun = False


def watch(writer: Finishable) -> None:
    """Finish `writer` at interpreter exit, unless `forget` is called first."""
    _open.add(writer)


def forget(writer: Finishable) -> None:
    """Stop watching `writer`, because it is closed."""
    _open.discard(writer)
    _given_up.discard(writer)


def watched() -> list[Finishable]:
    """The open writers of this process."""
    return list(_open)


def give_up(writer: Finishable) -> None:
    """Note that `close` was interrupted: the exit does not wait for `writer`, and reports what may be missing."""
    _given_up.add(writer)


def await_end(writer: Finishable, *, interrupted: bool) -> None:
    """Wait until every save of `writer` is done, on behalf of its `close`. Ctrl-C during the wait gives it up.

    Args:
        interrupted: the block was left by Ctrl-C, so a message says what it waits for.
    """
    # Prevents: a second close that does not wait, after Ctrl-C in the first. After an interrupted join, Python before
    # 3.13 takes the thread for ended, and every later join returns at once.
    ended = [writer._end()]
    try:
        if interrupted and wait(ended, SILENT_SECONDS).not_done:
            _tell(writer, "interrupted: closing ends")
        wait(ended)
    except (KeyboardInterrupt, SystemExit):
        give_up(writer)
        raise


def _tell(writer: Finishable, doing: str) -> None:
    """Print what the process waits for, and that Ctrl-C ends the wait."""
    _say(writer, f"{doing} once {_named(writer._unfinished())} written; Ctrl-C gives up")


def interrupted(writer: Finishable, steps: Sequence[int]) -> None:
    """Print that steps are perhaps not saved, because the wait for them was interrupted."""
    _say(writer, f"interrupted: {_named(steps)} perhaps not saved")


def under_way() -> bool:
    """Whether the interpreter is exiting and this module has begun to finish the writers."""
    return _begun


def check() -> None:
    """Raise `WriterClosedError` if the interpreter is exiting: thread pools take no jobs then, and no hook runs."""
    if _begun:
        raise _ending()


def _ending() -> WriterClosedError:
    return WriterClosedError(f"the interpreter is ending: {ADVICE}")


def _finish_all() -> None:
    global _begun
    _begun = True
    # Copied first: other threads may still open and close writers, and a changing set cannot be iterated.
    writers = [writer for writer in list(_open) if writer not in _given_up]
    try:
        _finish(writers)
    except BaseException:
        _given_up.update(writers)
        raise
    finally:
        for writer in list(_given_up):
            if steps := writer._unfinished():
                interrupted(writer, steps)
        if _given_up:
            abandon_all()  # otherwise their threads, which the interpreter joins, would continue to wait


def _finish(writers: Sequence[Finishable]) -> None:
    ends = [writer._end() for writer in writers]  # all of them first: a writer whose medium hangs delays no other
    if ends and wait(ends, SILENT_SECONDS).not_done:
        for writer in writers:
            _tell(writer, "the interpreter ends")
    wait(ends)
    for writer in writers:
        _close(writer)


def _close(writer: Finishable) -> None:
    for step, error in writer._unseen():
        _say(writer, f"step {step} was not saved: {error}")
    try:
        writer.close()
    except Exception as error:  # noqa: BLE001  # continue with the next writer after any error
        _say(writer, f"not closed: {error}")


def _named(steps: Sequence[int]) -> str:
    if not steps:
        return "every save is"
    return f"step {steps[0]} is" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]} ({len(steps)}) are"


def _say(writer: Finishable, text: str) -> None:
    with contextlib.suppress(Exception):  # stderr may be closed, or None
        print(f"ckptstore: {writer.url}: {text}", file=sys.stderr, flush=True)


try:
    import concurrent.futures.thread  # noqa: F401  # first: its hook must run after this module's hook

    # `_register_atexit` is private to CPython. Without it, an atexit hook still reports what it cannot finish.
    getattr(threading, "_register_atexit", atexit.register)(_finish_all)
except RuntimeError as error:  # the script opens its first writer after the main thread has returned
    raise _ending() from error
# Prevents: a forked child that waits for threads of its parent.
os.register_at_fork(after_in_child=_open.clear)
os.register_at_fork(after_in_child=_given_up.clear)
