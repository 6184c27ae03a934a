"""Signals that a loop is to act on at its next step: SIGTERM ("end soon") and SIGUSR1 ("save now").

A handler only notes the signal. What handled it before is put back when SIGTERM comes, and hears of it when the loop
has acted, or when `grace` seconds are over: until then what is on its way is brought to its end, by a thread.
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

__all__ = ["Notices"]

_NOTICED: Final = (signal.SIGTERM, signal.SIGUSR1)


class Notices:
    """Notes SIGTERM and SIGUSR1 from `install` to `remove`. Only the main thread sets handlers; elsewhere none is.

    Attributes:
        ending: SIGTERM came.
        asked: SIGUSR1 came (or a SIGTERM that was ignored before), and nobody has acted on it yet.
    """

    def __init__(self, flush: Callable[[], object], grace: float) -> None:
        """
        Args:
            flush: brings to an end what is on its way; called by a thread when SIGTERM has come.
            grace: seconds that the loop has to act on SIGTERM.
        """
        self.ending = False
        self.asked = False
        self._flush = flush
        self._grace = grace
        self._before: dict[int, Any] = {}
        self._acted = threading.Event()
        self._passed = threading.Lock()

    def install(self) -> None:
        """Take the handlers over, in the main thread; those that are not Python's stay."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _NOTICED:
            before = signal.getsignal(number)
            if before is not None and number not in self._before:
                self._before[number] = before
                signal.signal(number, self._on_signal)

    def remove(self) -> None:
        """Put back what was there, where nobody else has taken this one's place since."""
        self._acted.set()
        if threading.current_thread() is threading.main_thread():
            for number in list(self._before):
                self._put_back(number)

    def acted(self) -> None:
        """The loop has acted on SIGTERM: hand it on to what handled it before, which by default ends the process."""
        self._acted.set()
        self._hand_on()

    def _put_back(self, number: int) -> None:
        # Compared by equality: a bound method is another object each time.
        if signal.getsignal(number) == self._on_signal:
            signal.signal(number, self._before.pop(number))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if number == signal.SIGTERM and before is not signal.SIG_IGN:
            if self.ending:  # it was handed on, and a handler that came later has called this one
                if callable(before):
                    before(number, frame)
                return
            self.ending = True
            self._put_back(number)  # a second signal does not wait
            background_threads.start(self._wait_and_hand_on, "sigterm", daemon=False)
            return
        self.asked = True
        if callable(before):
            before(number, frame)

    def _wait_and_hand_on(self) -> None:
        with contextlib.suppress(Exception):  # the saves say what became of them
            self._flush()
        self._acted.wait(self._grace)
        self._hand_on()

    def _hand_on(self) -> None:
        if self._passed.acquire(blocking=False):  # once
            os.kill(os.getpid(), signal.SIGTERM)
