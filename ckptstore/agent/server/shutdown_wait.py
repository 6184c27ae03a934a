"""Limits how long an agent, whose trainer gives no more states, waits for the other ranks' agents.

The trainers of a job end one after the other: one raises an exception; the others end when their launcher notices, or
when a collective times out. So an agent waits as long as it would for a successor of its trainer. SIGTERM or a
successor shortens the wait. The trainer itself does not wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

__all__ = ["ShutdownWait", "shutdown_wait_of"]

_RESTARTED: Final = 60.0
"""Seconds for the other trainers to end, once a successor of this agent's trainer shows that the job was restarted."""
_HELD: Final = 2.0
"""Seconds that `close` of a trainer waits for the other trainers: most jobs end on all ranks at once."""
_TOLD: Final = 20.0
"""Seconds after SIGTERM: schedulers send it to the whole job, and SIGKILL half a minute later."""
_FIRST_PAUSE: Final = 0.001
_LONGEST_PAUSE: Final = 0.1


class ShutdownWait:
    """The time that one agent waits for other agents, over all its waits together.

    Attributes:
        wanted: whether a successor of the trainer waits for this agent.
        held_up: called once, when the trainer has waited long enough.
        spent: seconds waited so far.
    """

    def __init__(
        self, seconds: float, restarted: float, told: Callable[[], bool] = lambda: False, after: float = _TOLD
    ) -> None:
        """
        Args:
            seconds: limit of all waits, from the start of the first.
            restarted: limit from the moment that `wanted` is true.
            told: whether the agent has to end.
            after: limit from the moment that `told` is true.
        """
        self.wanted: Callable[[], bool] = lambda: False
        self.held_up: Callable[[], None] | None = None
        self.spent = 0.0
        self._seconds = seconds
        self._began: float | None = None
        self._until = 0.0
        self._shorter = [(told, after), (self._is_wanted, restarted)]

    def wait(self, done: Callable[[], bool], ended: Callable[[], None], *, at_least: float = 0.0) -> bool:
        """Wait until `done` returns true -> False: the time is over. Asks at least once.

        Args:
            ended: called at every look; raises what ends the wait at once.
            at_least: seconds to wait in any case.
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
    """The wait of an agent of one of many ranks.

    Args:
        timeout: seconds that ranks wait for each other (`RankOptions`).
        linger: seconds that the agent waits for a successor of its trainer.
        told: whether the agent has to end.
    """
    restarted = min(timeout / 2, _RESTARTED)  # the successor's other ranks wait for it that long
    return ShutdownWait(max(linger, restarted), restarted, told)
