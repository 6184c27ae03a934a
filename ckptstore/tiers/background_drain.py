"""The drain of a writer: a thread beside it that brings to the remote what the writer commits, until it is closed.

A second thread looks once a second how the first one does, and warns while training runs: a drain that hangs in a
request can say nothing itself.
"""

from __future__ import annotations

import errno
import logging
import random
import threading
import time
from typing import Final

from ckptstore.errors import CorruptSegmentError, FencedError, RemoteLostError, StorageError, WriterClosedError
from ckptstore.formats.records import Node, ref_of
from ckptstore.host import background_threads
from ckptstore.host.caller_warnings import RemoteWarning, warn
from ckptstore.log.log_reader import View, read
from ckptstore.tiers.drain import Drain, Drained
from ckptstore.tiers.drain_selection import lag_between
from ckptstore.tiers.remote_silence import Quiet
from ckptstore.write.second_tier import Lag

__all__ = ["Draining"]

_LOOK: Final = 1.0
"""Seconds after which the log is looked at even if nobody said that something was committed."""
_NAP: Final = 0.2
PATIENCE: Final = 60.0
"""Seconds for which a remote may fail before a save that waits for it is refused."""
_FIRST_PAUSE: Final = 0.25
_LONGEST_PAUSE: Final = 30.0
"""Seconds before a pass that failed is tried again: twice as many each time."""
SOON: Final = 10.0
"""Seconds for which a remote may fail, or not answer, before it is said."""
_WATCH: Final = 1.0
_PASSING: Final = (errno.ETIMEDOUT, errno.EIO, errno.EREMOTEIO, errno.EBUSY, errno.EAGAIN, errno.EINTR)
"""What a medium fails with that the next try may not meet."""
_LOG: Final = logging.getLogger("ckptstore.tiers")


class Draining:
    """The second tier, as the writer of the first one knows it (`write.second_tier`)."""

    def __init__(self, drain: Drain) -> None:
        """Begin nothing yet."""
        self._drain = drain
        self._changed = threading.Condition()
        self._wanted = True
        self._closing = False
        self._ended = False
        self._fenced: FencedError | None = None
        self._failure: Exception | None = None
        self._lost: RemoteLostError | None = None
        self._left: Drained = Drained()
        self._thread: threading.Thread | None = None
        self._failing: float | None = None  # since when
        self._seen: View | None = None
        self._quiet = Quiet(drain)
        self._said: str | None = None  # what was warned of, while that lasts
        self._watcher = background_threads.Periodic(_WATCH, self._watch, "drain-watch")

    def start(self) -> None:
        """Begin. Raises `RuntimeError` where no thread can be started."""
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
            assert there is not None  # opening drains
            self._seen = read(self._drain.pair.local, self._seen)
            lag = lag_between(self._seen.catalog, there.catalog, damaged=self._drain.damaged)
            if lag.nbytes <= most:
                return
            failing = self._failing
            since = 0.0 if failing is None else time.monotonic() - failing
            if self._lost is not None or since > PATIENCE:
                raise StorageError(
                    errno.EDQUOT,
                    f"not saved: {lag.nbytes} bytes are on this machine alone, {most} may be (lag_bytes), and the "
                    f"remote has been failing for {since:.0f} s: {self._failure}",
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
            while not self._drain.has(node):  # not `had`: success is told of what is certain alone
                self.check()
                if self._lost is not None:
                    raise self._lost
                if ref_of(node) in self._left.damaged:
                    raise CorruptSegmentError(self._left.damage)
                why = f": {self._failure}" if self._failure is not None else ""
                if self._ended:
                    raise WriterClosedError(f"{ref_of(node)} is not in the remote, and the writer is closed{why}")
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"{ref_of(node)} is not in the remote after {timeout} s{why}")
                self._changed.wait(min(0.2, 0.2 if left is None else left))

    def lag(self) -> Lag:
        """How far the remote is behind. Reads the store's log, not the remote's.

        Raises `CorruptLogError`, `StorageError`.
        """
        there = self._drain.remote
        assert there is not None  # opening drains
        failure = self._fenced or self._failure or self._left.damage
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
        here, text = self._drain.pair.local.url, self._left.damage
        if self._lost is not None:
            text = f"{self._lost} What was not brought there is in {here}."
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
            except Exception as error:  # noqa: BLE001 - whatever it is, it is said, fails no save, and is tried again
                self._failure, self._wanted = error, True
                self._failing = self._failing or began
                if isinstance(error, RemoteLostError):
                    self._lost = error
                pause = min(_LONGEST_PAUSE, max(_FIRST_PAUSE, 2 * pause)) * random.SystemRandom().uniform(0.7, 1.0)
                if self._closing:
                    return
            else:
                self._failure, self._failing, self._left, self._said = None, None, done, None
                # A pass looks through the catalog: it takes no more than half of a core, however fast commits come.
                pause = time.monotonic() - began
                if done.over is not None:
                    self._fenced = done.fenced(self._drain.pair)
            with self._changed:
                self._changed.notify_all()
            if self._fenced is not None or self._lost is not None:
                return

    def _watch(self) -> None:
        """Warn, once while it lasts, of what keeps the drain from bringing anything there."""
        text = self._trouble()
        if text is None or self._said is not None:
            return
        self._said = text
        warn(text, RemoteWarning)

    def _trouble(self) -> str | None:
        failure, failing, damage = self._failure, self._failing, self._left.damage
        here, there = self._drain.pair.local.url, self._drain.pair.remote.url
        if self._fenced is not None:  # the next save says so
            return None
        if self._lost is not None:
            return f"{self._lost} Saves go on in {here}."
        if failure is not None and failing is not None:
            since = time.monotonic() - failing
            if since >= SOON or not (isinstance(failure, StorageError) and failure.errno in _PASSING):
                return f"{failure}; what is saved is in {here} alone, and the drain tries again"
            return None
        if (quiet := self._quiet.seconds()) >= SOON:
            return f"{there}: no answer for {quiet:.0f} s; what is saved is in {here} alone until there is one"
        return damage

    def _next(self, pause: float) -> bool:
        """Wait until there is something to do -> whether there is; no: the writer is closed, and nothing is left."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing, pause)
                self._changed.wait_for(lambda: self._wanted or self._closing, _LOOK)
                wanted, self._wanted = self._wanted, False
                if wanted or self._closing:
                    return wanted
            if self._drain.behind() or self._drain.asked():
                return True
            pause = 0.0
