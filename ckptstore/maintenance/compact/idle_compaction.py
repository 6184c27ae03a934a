"""Compacts a store in a writer's idle time, in a thread of the writer's process that makes the moves of ``compact``.

The thread pauses while a save is in progress: after each piece of work, a chunk of 16 MiB at most, it checks whether
one is. The writer itself commits each move, as an ordinary record between two saves. A kill at any instant leaves what
a killed ``compact`` leaves.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from ckptstore.errors import UsageError, WriterClosedError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.host import background_threads
from ckptstore.host.bandwidth import Bandwidth
from ckptstore.host.caller_warnings import warn
from ckptstore.host.option_checks import seconds, whole
from ckptstore.host.progress import Advance
from ckptstore.log.change import CatalogChange
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import read
from ckptstore.log.requests import Outcome
from ckptstore.maintenance.compact.compaction import make_moves, planned_moves
from ckptstore.maintenance.compact.compaction_report import CompactMove
from ckptstore.maintenance.compact.moves import CompactLimits
from ckptstore.write.local_writer import LocalWriter

__all__ = ["CompactOptions", "CompactPass", "begin"]

_LOOK: Final = 0.02
"""Seconds between two checks whether the writer is idle again."""


@dataclass(frozen=True, slots=True)
class CompactPass:
    """The result of one pass of compaction in a writer's idle time.

    Attributes:
        moves: the result of each move; see `Store.compact`.
        seconds: from its plan to its end.
        stood_still: how many of `seconds` it waited for saves.
        error: the error that ended it early; None: it was complete. A failed pass is repeated.
    """

    moves: tuple[CompactMove, ...]
    seconds: float
    stood_still: float
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class CompactOptions:
    """How a writer compacts its store in its idle time (`Store.writer`'s `compact`).

    Attributes:
        bandwidth: maximum bytes of state decoded, encoded and read back per second; None: no limit.
        every: seconds from the end of one pass to the start of the next. A pass without a change since the last one
            only reads the log.
        max_depth, max_restore_seconds, target_bytes: as for `Store.compact`.
        on_pass: called with each pass that had something to do, in the thread that did it. Its exceptions do no harm.

    Raises:
        UsageError: an attribute is invalid.
    """

    bandwidth: int | None = 64 << 20
    every: float = 60.0
    max_depth: int | None = None
    max_restore_seconds: float | None = None
    target_bytes: int | None = None
    on_pass: Callable[[CompactPass], object] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.bandwidth is not None:
            whole("bandwidth", self.bandwidth, 1)
        if seconds("every", self.every, above=True) is None:
            raise UsageError("every: a number of seconds is needed")
        if self.on_pass is not None and not callable(self.on_pass):
            raise UsageError(f"on_pass: {self.on_pass!r}; it takes a function of one CompactPass")
        self.limits()

    def limits(self) -> CompactLimits:
        """Return the limits to reach. Raises `UsageError`."""
        return CompactLimits(self.max_depth, self.max_restore_seconds, self.target_bytes)


def begin(journal: Journal, writer: LocalWriter, options: CompactOptions) -> None:
    """Start compacting a writer's store in its idle time, until the writer is closed."""
    idle = _IdleCompactor(journal, writer, options)
    writer.accompany(idle)
    idle.start()


class _IdleCompactor:
    """The companion that compacts. See `write.background_task.Companion`."""

    def __init__(self, journal: Journal, writer: LocalWriter, options: CompactOptions) -> None:
        self._journal = journal
        self._writer = writer
        self._options = options
        self._stop = threading.Event()
        self._waiting = threading.Lock()
        self._at_work = False
        self._stood_still = 0.0
        self._seen = -1
        self._said: set[str] = set()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        with contextlib.suppress(RuntimeError):  # no thread could be started: saves continue without compaction
            self._thread = background_threads.start(self._run, "compact")

    def active(self) -> bool:
        return self._at_work

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._options.every):
            began, self._stood_still = time.monotonic(), 0.0
            moves: tuple[CompactMove, ...] = ()
            error: Exception | None = None
            try:
                moves = self._pass()
            except WriterClosedError:
                return
            except Exception as found:  # noqa: BLE001  # no error may harm a save; the pass is repeated
                error = found
                self._warn_once(found)
            finally:
                self._at_work = False
            if moves or error is not None:
                self._report(CompactPass(moves, time.monotonic() - began, self._stood_still, error))

    def _pass(self) -> tuple[CompactMove, ...]:
        self._wait_for_saves()
        if (end := read(self._journal).catalog.next_seq) == self._seen:
            return ()
        self._at_work = True
        _, _, planned = planned_moves(self._journal, self._options.limits())
        moves: tuple[CompactMove, ...] = ()
        if planned.moves:
            author = _WriterAuthor(self._journal, self._writer)
            moves = make_moves(self._journal, author, planned, self._held_back)
            # Its own records are not a reason for another pass, but saves in the meantime are.
            end += sum(move.result == "done" for move in moves)
        self._seen = end
        return moves

    def _held_back(self, advance: Advance) -> Advance:
        """Wrap a progress callback so that it waits for the bandwidth, and for saves."""
        rate = self._options.bandwidth
        bandwidth = None if rate is None else Bandwidth(rate, sleep=self._sleep)

        def told(nbytes: int) -> None:
            if bandwidth is not None:
                bandwidth.take(nbytes)
            self._wait_for_saves()
            advance(nbytes)

        return told

    def _sleep(self, duration: float) -> None:
        self._stop.wait(duration)  # closing interrupts the wait

    def _wait_for_saves(self) -> None:
        """Return when no save is in progress. Raises `WriterClosedError` when the writer closes."""
        with self._waiting:  # one thread waits for the writer, the others wait for the lock
            began = time.monotonic()
            while not self._stop.is_set() and self._writer.busy():
                self._stop.wait(_LOOK)
            self._stood_still += time.monotonic() - began
        if self._stop.is_set():
            raise WriterClosedError("the writer is being closed: the compaction in progress is given up")

    def _warn_once(self, error: Exception) -> None:
        """Warn of an error, once."""
        if (why := f"{type(error).__name__}: {error}") not in self._said:
            self._said.add(why)
            warn(f"{self._journal.url}: compaction while the writer was idle failed: {why}")

    def _report(self, done: CompactPass) -> None:
        if self._options.on_pass is None:
            return
        try:
            self._options.on_pass(done)
        except Exception as error:  # noqa: BLE001  # no error in the callback may harm a save
            warn(f"on_pass raised {type(error).__name__}: {error}")


class _WriterAuthor:
    """The author of the changes: the writer itself (`log.change_committer.ChangeCommitter`)."""

    owned: int | None = None  # the writer may build on the bases of the newest checkpoint, so they are left alone

    def __init__(self, journal: Journal, writer: LocalWriter) -> None:
        self._journal = journal
        self._writer = writer

    def commit(self, term: int, what: str, change: CatalogChange) -> Outcome:  # noqa: ARG002  # a log record needs no words
        return self._writer.commit_beside(term, change)

    def catalog(self) -> Catalog:
        return read(self._journal).catalog
