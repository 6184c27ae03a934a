"""An agent that is given no more waits for the others' word: within one bound, and what happens meanwhile shortens it.

The trainers of a job end one after the other: one by an exception, the others when whoever has started them sees that,
or when a collective gives up. So an agent waits as long as it would for a successor; its trainer does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

__all__ = ["ShutdownWait", "shutdown_wait_of"]

_RESTARTED: Final = 60.0
"""Seconds for the others' trainers to be gone, where a successor of this one's says that the job was started again."""
_HELD: Final = 2.0
"""Seconds that a trainer which closes its writer is held by the others': most jobs end on all ranks at once."""
_TOLD: Final = 20.0
"""Seconds after SIGTERM: schedulers send it to all of a job, and kill what is left half a minute later."""
_FIRST_PAUSE: Final = 0.001
_LONGEST_PAUSE: Final = 0.1


class ShutdownWait:
    """One agent's wait for the words of others, all of them together.

    Attributes:
        wanted: whether a successor of the trainer waits for this agent.
        held_up: called once, when the trainer has waited long enough.
        spent: seconds that were waited.
    """

    def __init__(
        self, seconds: float, restarted: float, told: Callable[[], bool] = lambda: False, after: float = _TOLD
    ) -> None:
        """
        Args:
            seconds: in all, from the first wait on.
            restarted: seconds from the moment on at which `wanted` is true.
            told: whether the agent was told to end.
            after: seconds from that on.
        """
        self.wanted: Callable[[], bool] = lambda: False
        self.held_up: Callable[[], None] | None = None
        self.spent = 0.0
        self._seconds = seconds
        self._began: float | None = None
        self._until = 0.0
        self._shorter = [(told, after), (self._is_wanted, restarted)]

    def wait(self, done: Callable[[], bool], ended: Callable[[], None], *, at_least: float = 0.0) -> bool:
        """Whether `done` came true in time; it is asked once at least.

        Args:
            ended: asked at every look; a reason to stop waiting at once is raised by it.
            at_least: seconds that are given in any case.
        """
        began = time.monotonic()
        if self._began is None:
            self._began, self._until = began, began + self._seconds
        pause = _FIRST_PAUSE
        try:
            while not done():
                ended()
                now = time.monotonic()
                if now - self._began >= _HELD and self.held_up is not None:
                    self.held_up()
                    self.held_up = None
                if now >= max(self._shortened(now), began + at_least):
                    return False
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            return True
        finally:
            self.spent += time.monotonic() - began

    def _is_wanted(self) -> bool:
        return self.wanted()

    def _shortened(self, now: float) -> float:
        for one in self._shorter.copy():
            happened, seconds = one
            if happened():
                self._shorter.remove(one)
                self._until = min(self._until, now + seconds)
        return self._until


def shutdown_wait_of(timeout: float, linger: float = 0.0, told: Callable[[], bool] = lambda: False) -> ShutdownWait:
    """How long the agent of one of many ranks waits for the others when it is given no more.

    Args:
        timeout: seconds that ranks wait for each other (`RankOptions`).
        linger: seconds that it waits for a successor.
        told: whether it was told to end.
    """
    restarted = min(timeout / 2, _RESTARTED)  # whose other ranks wait for that successor
    return ShutdownWait(max(linger, restarted), restarted, told)
