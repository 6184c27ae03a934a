"""Runs a writer's drain: a thread that copies the writer's commits to the remote until the writer is closed.

A second thread checks the first one once a second, and warns while training runs: a drain that hangs in a request
cannot report that itself.
"""

from __future__ import annotations

import errno
import logging
import random
import threading
import time
from typing import Final

from ckptstore.errors import CorruptSegmentError, FencedError, RemoteLostError, StorageError, WriterClosedError
from ckptstore.formats.history.records import Node, ref_of
from ckptstore.host import background_threads
from ckptstore.host.caller_warnings import RemoteWarning, warn
from ckptstore.log.log_reader import View, read
from ckptstore.tiers.drain import Drain, DrainResult
from ckptstore.tiers.drain_selection import lag_between
from ckptstore.tiers.remote_silence import RemoteSilence
from ckptstore.write.second_tier import Lag

__all__ = ["BackgroundDrain"]

POLL_SECONDS: Final = 1.0
"""Seconds after which the log is polled even if no commit was reported."""
_NAP: Final = 0.2
PATIENCE: Final = 60.0
"""Seconds that a remote may fail before a save that waits for it is rejected."""
FIRST_PAUSE: Final = 0.25
"""Seconds before the first retry of a failed pass."""
_LONGEST_PAUSE: Final = 30.0
"""Longest pause in seconds before a failed pass is retried; the pause doubles each time."""
SOON: Final = 10.0
"""Seconds that a remote may fail, or not answer, before a warning."""
WATCH: Final = 1.0
"""Seconds between two looks for a problem to warn of."""
_TRANSIENT: Final = (errno.ETIMEDOUT, errno.EIO, errno.EREMOTEIO, errno.EBUSY, errno.EAGAIN, errno.EINTR)
"""Errors of a medium that the next try may not meet."""
_LOG: Final = logging.getLogger("ckptstore.tiers")


class BackgroundDrain:
    """The second tier, as the writer of the first one sees it (`write.second_tier`)."""

    def __init__(self, drain: Drain) -> None:
        """Start nothing yet."""
        self._drain = drain
        self._changed = threading.Condition()
        self._wanted = True
        self._closing = False
        self._ended = False
        self._fenced: FencedError | None = None
        self._failure: Exception | None = None
        self._lost: RemoteLostError | None = None
        self._result: DrainResult = DrainResult()
        self._thread: threading.Thread | None = None
        self._failing: float | None = None  # time of the first failure
        self._seen: View | None = None
        self._quiet = RemoteSilence(drain)
        self._warned: str | None = None  # the last warning, while its cause lasts
        self._watcher = background_threads.Periodic(WATCH, self._watch, "drain-watch")

    def start(self) -> None:
        """Start the threads. Raises `RuntimeError` if no thread can be started."""
        self._thread = background_threads.start(self._run, "drain")
        self._watcher.start()

    def check(self) -> None:
        """See `SecondTier.check`."""
        if self._fenced is not None:
            raise self._fenced

    def admit(self) -> None:
        """See `SecondTier.admit`."""
        most = self._drain.pair.lag_bytes
        while most is not None:
            self.check()
            there = self._drain.remote
            assert there is not None  # opening the term drains first
            self._seen = read(self._drain.pair.local, self._seen)
            lag = lag_between(self._seen.catalog, there.catalog, damaged=self._drain.damaged)
            if lag.nbytes <= most:
                return
            failing = self._failing
            since = 0.0 if failing is None else time.monotonic() - failing
            if self._lost is not None or since > PATIENCE:
                raise StorageError(
                    errno.EDQUOT,
                    f"not saved: {lag.nbytes} bytes are only on this machine, the limit is {most} (lag_bytes), and "
                    f"the remote has been failing for {since:.0f} s: {self._failure}",
                    self._drain.pair.local.url,
                )
            with self._changed:
                self._changed.wait(_NAP)

    def committed(self) -> None:
        """See `SecondTier.committed`."""
        with self._changed:
            self._wanted = True
            self._changed.notify_all()

    def has(self, node: Node) -> bool:
        """See `SecondTier.has`."""
        return self._drain.had(node)

    def wait(self, node: Node, timeout: float | None) -> None:
        """See `SecondTier.wait`."""
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._drain.has(node):  # not `had`: only what is certain is reported as success
                self.check()
                if self._lost is not None:
                    raise self._lost
                if ref_of(node) in self._result.damaged:
                    raise CorruptSegmentError(self._result.damage)
                why = f": {self._failure}" if self._failure is not None else ""
                if self._ended:
                    raise WriterClosedError(f"{ref_of(node)} is not in the remote, and the writer is closed{why}")
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"{ref_of(node)} is not in the remote after {timeout} s{why}")
                self._changed.wait(min(0.2, 0.2 if left is None else left))

    def lag(self) -> Lag:
        """How far the remote is behind. Reads the log of the store, not that of the remote.

        Raises `CorruptLogError`, `StorageError`.
        """
        there = self._drain.remote
        assert there is not None  # opening the term drains first
        failure = self._fenced or self._failure or self._result.damage
        return lag_between(read(self._drain.pair.local).catalog, there.catalog, str(failure) if failure else None)

    def close(self) -> None:
        """See `SecondTier.close`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._watcher.stop()
        self._watcher.join()
        here, text = self._drain.pair.local.url, self._result.damage
        if self._lost is not None:
            text = f"{self._lost} Everything that is not there yet is in {here}."
        elif self._failure is not None:
            text = f"{self._failure}; what the remote lacks is in {here}: the next writer drains it, or `ckpt sync`"
        if text is not None and self._fenced is None:
            warn(text, RemoteWarning)

    def _run(self) -> None:
        pause = 0.0
        while self._next(pause):
            began = time.monotonic()
            try:
                done = self._drain.once(lambda: not self._closing)
            except Exception as error:  # noqa: BLE001 - any error is reported, fails no save, and the pass is retried
                self._failure, self._wanted = error, True
                self._failing = self._failing or began
                if isinstance(error, RemoteLostError):
                    self._lost = error
                pause = min(_LONGEST_PAUSE, max(FIRST_PAUSE, 2 * pause)) * random.SystemRandom().uniform(0.7, 1.0)
                if self._closing:
                    return
            else:
                self._failure, self._failing, self._result, self._warned = None, None, done, None
                # A pass scans the catalog: it takes at most half of a core, however fast commits come.
                pause = time.monotonic() - began
                if done.over is not None:
                    self._fenced = done.fenced(self._drain.pair)
            with self._changed:
                self._changed.notify_all()
            if self._fenced is not None or self._lost is not None:
                return

    def _watch(self) -> None:
        """Warn, once while it lasts, of what keeps the drain from making progress."""
        text = self._problem()
        if text is None or self._warned is not None:
            return
        self._warned = text
        warn(text, RemoteWarning)

    def _problem(self) -> str | None:
        failure, failing, damage = self._failure, self._failing, self._result.damage
        here, there = self._drain.pair.local.url, self._drain.pair.remote.url
        if self._fenced is not None:  # the next save raises it
            return None
        if self._lost is not None:
            return f"{self._lost} Saves continue in {here}."
        if failure is not None and failing is not None:
            since = time.monotonic() - failing
            if since >= SOON or not (isinstance(failure, StorageError) and failure.errno in _TRANSIENT):
                return f"{failure}; new checkpoints are only in {here}, and the drain tries again"
            return None
        if (quiet := self._quiet.seconds()) >= SOON:
            return f"{there}: no answer for {quiet:.0f} s; new checkpoints are only in {here} until it answers"
        return damage

    def _next(self, pause: float) -> bool:
        """Wait until there is work -> True; False: the writer is closed, and nothing is left to drain."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing, pause)
                self._changed.wait_for(lambda: self._wanted or self._closing, POLL_SECONDS)
                wanted, self._wanted = self._wanted, False
                if wanted or self._closing:
                    return wanted
            if self._drain.behind() or self._drain.asked():
                return True
            pause = 0.0
