"""What makes a step urgent: SIGTERM, SIGUSR1, or a deadline that is near. Such a step is saved, and durable at once.

Ranks that save together agree on it (`write.ranks.accord`): all of them save the same step, and are told to stop after
the same step, whichever of them the signal reached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ckptstore.host.signal_requests import SignalRequests
from ckptstore.training.deadline import Deadline
from ckptstore.training.settings import Settings
from ckptstore.write.ranks.accord import Accord
from ckptstore.write.ranks.mailbox import Group

__all__ = ["Urgency"]

_SAVE: Final = "save"
_STOP: Final = "stop"
_AHEAD: Final = 2
"""Steps that ranks may take until all have stopped: the one that was promised, and one that others are ahead."""
_FAREWELL: Final = 5.0
"""Seconds that a rank which SIGTERM ends waits for others to hear of the last step: it may be the mailbox's host."""


class Urgency:
    """Notes signals, and looks at the clock."""

    def __init__(self, settings: Settings, flush: Callable[[], object]) -> None:
        """
        Args:
            flush: brings to an end what is on its way; see `SignalRequests`.
        """
        self.deadline = Deadline(settings.deadline_seconds)
        self._notices = SignalRequests(flush, settings.grace_seconds)
        self._timeout = settings.rank_timeout
        self._grace = settings.grace_seconds
        self._accord: Accord | None = None
        self._near = False
        self._due: frozenset[str] = frozenset()
        self._stopping = False

    def install(self) -> None:
        """Take SIGTERM and SIGUSR1."""
        self._notices.install()

    def remove(self) -> None:
        """Put back who handled them before, and leave the other ranks."""
        self._notices.remove()
        self.leave()

    def join(self, group: Group, run: str, term: int, step: int) -> None:
        """Agree with other ranks from now on, in a term of a run whose last step is `step`."""
        self.leave()
        self._due = frozenset()
        self._accord = Accord(group, f"ckptstore/{run}/{term}/accord", step, self._asked, self._timeout)
        self._accord.start()

    def leave(self) -> None:
        """Agree with nobody any more."""
        accord, self._accord = self._accord, None
        if accord is not None:
            accord.leave()

    def _asked(self) -> set[str]:
        """What this rank is asked for, and has not done."""
        stop = (self._near or self._notices.ending) and not self._stopping
        return ({_STOP} if stop else set()) | ({_SAVE} if self._notices.asked else set())

    @property
    def stopping(self) -> bool:
        """The loop is to end: what was urgent about it is done, or on its way."""
        if self._accord is not None:
            return self._stopping
        return self._stopping or self._notices.ending

    def after(self, step: int, moved: bool) -> bool:
        """A step is done -> whether it is to be saved, and durable at once.

        Args:
            moved: there is something to save; else it is the next step for which that is so.

        Raises:
            MissingRankError: the ranks did not come to an agreement.
        """
        self._near = self.deadline.near(0 if self._accord is None else _AHEAD) or self._near
        if self._accord is not None:
            self._due |= self._accord.after(step)
            return moved and bool(self._due)
        stop = self._near or self._notices.ending
        self._due = frozenset(({_STOP} if stop else set()) | ({_SAVE} if self._notices.asked else set()))
        return bool(self._due)

    def settled(self, step: int) -> None:
        """The step that was urgent is durable, or cannot be saved: do not ask for it again."""
        self._notices.asked = False
        self._stopping = self._stopping or _STOP in self._due
        if self._accord is not None:
            self._accord.done()
            if _STOP in self._due:
                self._accord.say_farewell(step, min(self._grace, _FAREWELL) if self._notices.ending else 0.0)
        self._due = frozenset()

    def pass_on(self) -> None:
        """If SIGTERM came, and was acted on: hand it on to whoever handled it before."""
        if self._notices.ending and self._stopping:
            self._notices.acted()
