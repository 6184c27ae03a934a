"""Signals that a training loop acts on at its next step: SIGTERM ("end soon") and SIGUSR1 ("save now").

The handler only notes the signal. On SIGTERM the previous handler is restored at once, and a thread flushes the saves
in flight. The previous handler gets the signal when the loop has acted, or after `grace` seconds. In a forked child,
which has no loop, the previous handler gets it at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from ckptstore.host import background_threads

__all__ = ["SignalRequests"]

_NOTICED: Final = (signal.SIGTERM, signal.SIGUSR1)


class SignalRequests:
    """Notes SIGTERM and SIGUSR1 from `install` to `remove`.

    Only the main thread can install handlers; in other threads `install` does nothing.

    Attributes:
        ending: SIGTERM came.
        asked: SIGUSR1 came (or a SIGTERM that was ignored before), and the loop has not acted on it yet.
    """

    def __init__(self, flush: Callable[[], object], grace: float) -> None:
        """
        Args:
            flush: finishes the saves in flight. A thread calls it after SIGTERM.
            grace: seconds in which the loop must act on SIGTERM.
        """
        self.ending = False
        self.asked = False
        self._flush = flush
        self._grace = grace
        self._before: dict[int, Any] = {}
        self._acted = threading.Event()
        self._passed = threading.Lock()
        self._process = os.getpid()

    def install(self) -> None:
        """Install the handlers, if this is the main thread. Handlers that are not Python functions stay."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _NOTICED:
            before = signal.getsignal(number)
            if before is not None and number not in self._before:
                self._before[number] = before
                signal.signal(number, self._on_signal)

    def remove(self) -> None:
        """Restore the previous handlers, except where another handler has replaced this one since."""
        self._acted.set()
        if threading.current_thread() is threading.main_thread():
            for number in list(self._before):
                self._put_back(number)

    def acted(self) -> None:
        """Note that the loop has acted on SIGTERM, and send it to the previous handler.

        By default that ends the process.
        """
        self._acted.set()
        self._hand_on()

    def _put_back(self, number: int) -> None:
        # Compared by equality: each access to a bound method makes a new object.
        if signal.getsignal(number) == self._on_signal:
            signal.signal(number, self._before.pop(number))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if os.getpid() != self._process:
            # A forked child. Prevents: it ends `grace` seconds after SIGTERM, since it waits for a loop of its parent.
            if number == signal.SIGTERM:
                self._put_back(number)
                _call(before, number, frame)
            elif callable(before):  # Prevents: a request to save, sent to the whole job, ends the loader's workers.
                before(number, frame)
            return
        if number == signal.SIGTERM and before is not signal.SIG_IGN:
            if self.ending:  # the signal was sent again, and a handler installed later has called this one
                _call(before, number, frame)
                return
            self.ending = True
            self._put_back(number)  # a second SIGTERM takes effect at once
            background_threads.start(self._wait_and_hand_on, "sigterm", daemon=False)
            return
        self.asked = True
        if callable(before):
            before(number, frame)

    def _wait_and_hand_on(self) -> None:
        with contextlib.suppress(Exception):  # the saves report their own errors
            self._flush()
        self._acted.wait(self._grace)
        self._hand_on()

    def _hand_on(self) -> None:
        if self._passed.acquire(blocking=False):  # once
            os.kill(os.getpid(), signal.SIGTERM)


def _call(before: Any, number: int, frame: FrameType | None) -> None:
    """Run the previous handler directly: sending the signal again would only run the handler that is above."""
    if callable(before):
        before(number, frame)
    elif before is not signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
