"""The interpreter's ordinary end: what was given to writers that nobody closed is finished, or it is said what was not.

A script may end without ``close()``: it has no ``with``, calls ``sys.exit``, or an exception goes uncaught. Then every
open writer finishes what it was given, as closing it would, *before* the thread pools are shut down: `atexit` comes
after that (measured on 3.11 to 3.13). On 3.12 no thread can be started any more by then; the writers' pools have theirs
from the beginning (`workers`).

It takes as long as the medium takes. Whoever does not want to wait presses Ctrl-C, and is told what may be missing. A
writer whose closing was ended by Ctrl-C already is not waited for again.
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

__all__ = ["ADVICE", "SILENT_SECONDS", "Ending", "await_end", "check", "forget", "give_up", "under_way", "watch"]

ADVICE: Final = "a writer needs the main thread to be alive; join the training thread there"

SILENT_SECONDS: Final = 5.0
"""After that people who wait are told what for."""


class Ending(ABC):
    """What is finished when the interpreter ends in the ordinary way: a writer. What begins with ``_`` is for this
    module, and for `host.sigterm`.
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """Its store."""

    @abstractmethod
    def _end(self) -> Future[None]:
        """Take no save any more -> done when every earlier one is."""

    @abstractmethod
    def close(self) -> None:
        """Wait for that."""

    @abstractmethod
    def _unfinished(self) -> Sequence[int]:
        """The steps of `save_async` that are on their way, ascending."""

    @abstractmethod
    def _unseen(self) -> Sequence[tuple[int, BaseException]]:
        """The steps whose `save_async` failed and nobody has asked for, each with what stopped it; once."""

    @abstractmethod
    def _settle(self) -> None:
        """Write what waits, and note in the log that nothing is missing if the process ends now. Raises nothing."""


_open: Final[set[Ending]] = set()
"""Held until they are closed: what one was given would be lost with it. Changed by single calls, which no fork cuts."""
_given_up: Final[set[Ending]] = set()
"""Those for which somebody did not want to wait any longer."""
_begun = False


def watch(writer: Ending) -> None:
    """Finish `writer` when the interpreter ends, unless `forget` comes first."""
    _open.add(writer)


def forget(writer: Ending) -> None:
    """It is closed."""
    _open.discard(writer)
    _given_up.discard(writer)


def give_up(writer: Ending) -> None:
    """Closing it was interrupted: the interpreter's end does not wait for it, and says what may be missing."""
    _given_up.add(writer)


def await_end(writer: Ending, *, interrupted: bool) -> None:
    """What closing a writer waits for. Ctrl-C meanwhile gives it up.

    Args:
        interrupted: by Ctrl-C, so that whoever leaves is told what that waits for.
    """
    # Prevents: a second close, after Ctrl-C in the first, that waits no more. A join that is interrupted makes
    # Python (before 3.13) take the thread for ended, and every later one returns at once.
    ended = [writer._end()]
    try:
        if interrupted and wait(ended, SILENT_SECONDS).not_done:
            _tell(writer, "interrupted: closing ends")
        wait(ended)
    except (KeyboardInterrupt, SystemExit):
        give_up(writer)
        raise


def _tell(writer: Ending, doing: str) -> None:
    """Say what is waited for, and that one need not."""
    _say(writer, f"{doing} once {_named(writer._unfinished())} written; Ctrl-C gives up")


def interrupted(writer: Ending, steps: Sequence[int]) -> None:
    """Say that steps are perhaps not saved, because nobody waits for them any more."""
    _say(writer, f"interrupted: {_named(steps)} perhaps not saved")


def under_way() -> bool:
    """Whether the interpreter is ending, and this module at work."""
    return _begun


def check() -> None:
    """Raise `WriterClosedError` if the interpreter is ending: no thread pool takes jobs any more, and no hook."""
    if _begun:
        raise _ending()


def _ending() -> WriterClosedError:
    return WriterClosedError(f"the interpreter is ending: {ADVICE}")


def _finish_all() -> None:
    global _begun
    _begun = True
    # Copied at once: other threads may still open and close writers, and a set that changes cannot be gone through.
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
            abandon_all()  # else their threads, which the interpreter joins, would wait on


def _finish(writers: Sequence[Ending]) -> None:
    ends = [writer._end() for writer in writers]  # all of them first: one whose medium hangs holds up no other
    if ends and wait(ends, SILENT_SECONDS).not_done:
        for writer in writers:
            _tell(writer, "the interpreter ends")
    wait(ends)
    for writer in writers:
        _close(writer)


def _close(writer: Ending) -> None:
    for step, error in writer._unseen():
        _say(writer, f"step {step} was not saved: {error}")
    try:
        writer.close()
    except Exception as error:  # noqa: BLE001  # the next writer's turn, whatever it is
        _say(writer, f"not closed: {error}")


def _named(steps: Sequence[int]) -> str:
    if not steps:
        return "what was given is"
    return f"step {steps[0]} is" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]} ({len(steps)}) are"


def _say(writer: Ending, text: str) -> None:
    with contextlib.suppress(Exception):  # stderr may be closed, or None
        print(f"ckptstore: {writer.url}: {text}", file=sys.stderr, flush=True)


try:
    import concurrent.futures.thread  # noqa: F401  # first: its own hook has to be called after this module's

    # Without that name (it is CPython's own) an atexit hook would still say what it cannot finish.
    getattr(threading, "_register_atexit", atexit.register)(_finish_all)
except RuntimeError as error:  # the first writer of a script whose main thread has returned
    raise _ending() from error
# Prevents: a child that waits for threads which only its parent has.
os.register_at_fork(after_in_child=_open.clear)
os.register_at_fork(after_in_child=_given_up.clear)
