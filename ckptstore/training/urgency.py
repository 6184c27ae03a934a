"""What makes a step urgent: SIGTERM, SIGUSR1, or a deadline that is near. An urgent step is saved durably at once.

Ranks that save together agree on it (`write.ranks.save_barrier`): all of them save the same step and stop after the
same step, whichever of them received the signal.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from ckptstore.host.signal_requests import SignalRequests
from ckptstore.training.settings import SaveSettings
from ckptstore.write.ranks.messages.key_value_store import Group
from ckptstore.write.ranks.save_barrier import SaveBarrier

__all__ = ["Urgency"]

_SAVE: Final = "save"
_STOP: Final = "stop"
_AHEAD: Final = 2
"""Steps that ranks may still take until all have stopped: the agreed one, and one that others are ahead."""
_FAREWELL: Final = 5.0
"""Seconds that a rank which SIGTERM ends waits until the others know the last step: it may host the mailbox."""
_MARGIN: Final = 1.0
"""Seconds for what is not measured: the end of the process, a medium that is slow once."""


class Urgency:
    """Notes signals, and compares the time that steps and saves take with the deadline."""

    def __init__(self, settings: SaveSettings, flush: Callable[[], object]) -> None:
        """
        Args:
            flush: finishes the saves in flight; see `SignalRequests`.
        """
        left = settings.deadline_seconds
        self._end = None if left is None else time.monotonic() + left
        self._before: float | None = None
        self._longest_step = self._longest_save = 0.0
        self._notices = SignalRequests(flush, settings.grace_seconds)
        self._timeout = settings.rank_timeout
        self._grace = settings.grace_seconds
        self._accord: SaveBarrier | None = None
        self._near = False
        self._due: frozenset[str] = frozenset()
        self._stopping = False

    def install(self) -> None:
        """Handle SIGTERM and SIGUSR1 from now on."""
        self._notices.install()

    def remove(self) -> None:
        """Restore the previous handlers, and leave the other ranks."""
        self._notices.remove()
        self.leave()

    def saved(self, seconds: float) -> None:
        """A save took so long until it was durable."""
        self._longest_save = max(self._longest_save, seconds)

    def join(self, group: Group, run: str, term: int, step: int) -> None:
        """Agree with other ranks from now on, in a term of a run whose last step is `step`."""
        self.leave()
        self._due = frozenset()
        self._accord = SaveBarrier(group, f"ckptstore/{run}/{term}/accord", step, self._asked, self._timeout)
        self._accord.start()

    def leave(self) -> None:
        """Stop agreeing with other ranks."""
        accord, self._accord = self._accord, None
        if accord is not None:
            accord.leave()

    def _asked(self) -> set[str]:
        """What this rank was asked to do and has not done yet."""
        stop = (self._near or self._notices.ending) and not self._stopping
        return ({_STOP} if stop else set()) | ({_SAVE} if self._notices.asked else set())

    @property
    def stopping(self) -> bool:
        """The loop should end: the urgent step is durable, or its save is in flight."""
        if self._accord is not None:
            return self._stopping
        return self._stopping or self._notices.ending

    def after(self, step: int, moved: bool) -> bool:
        """Note that a step is done -> whether to save it durably now.

        Args:
            moved: there is something to save; if not, the next step that has something is the urgent one.

        Raises:
            MissingRankError: the ranks did not agree.
        """
        self._near = self._deadline_is_near(0 if self._accord is None else _AHEAD) or self._near
        if self._accord is not None:
            self._due |= self._accord.after(step)
            return moved and bool(self._due)
        stop = self._near or self._notices.ending
        self._due = frozenset(({_STOP} if stop else set()) | ({_SAVE} if self._notices.asked else set()))
        return bool(self._due)

    def _deadline_is_near(self, ahead: int) -> bool:
        """Whether the next step, and its save, might end too late: twice the longest is allowed.

        Args:
            ahead: steps that may follow before the save.
        """
        now = time.monotonic()
        if self._before is not None:
            self._longest_step = max(self._longest_step, now - self._before)
        self._before = now
        longest = (1 + ahead) * self._longest_step + self._longest_save
        return self._end is not None and now + 2 * longest + _MARGIN >= self._end

    def settled(self, step: int) -> None:
        """The urgent step is durable, or cannot be saved: do not ask for it again."""
        self._notices.asked = False
        self._stopping = self._stopping or _STOP in self._due
        if self._accord is not None:
            self._accord.done()
            if _STOP in self._due:
                self._accord.say_farewell(step, min(self._grace, _FAREWELL) if self._notices.ending else 0.0)
        self._due = frozenset()

    def pass_on(self) -> None:
        """If SIGTERM came and was acted on: pass it on to the previous handler."""
        if self._notices.ending and self._stopping:
            self._notices.acted()
