"""One save whose work an agent does, as the trainer sees it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait

from ckptstore.write.job import Job
from ckptstore.write.ledger import Labels, Saves

__all__ = ["AgentSave"]


class AgentSave(Job):
    """A save that the agent has, or will be given: the agent decides whether it is committed, fails or is cancelled."""

    def __init__(self, saves: Saves, step: int, labels: Labels, cancel: Callable[[int], bool]) -> None:
        """
        Args:
            cancel: asks the agent to cancel a step -> whether it has.
        """
        super().__init__(saves, step, labels)
        self._ask = cancel

    def cancel(self) -> bool:
        """See `Job.cancel`. If the agent has cancelled it, `done` is done when this returns."""
        cancelled = self._ask(self.step)
        if cancelled:
            wait([self.done])  # the agent says so in an event, too
        return cancelled

    def move(self, saves: Saves) -> None:
        """The agent died before it had the state: save it in the term of the next agent. Raises `StepOrderError`."""
        saves.check(self.step)
        saves.take(self.step)
        saves.watch(self.step, self.done)
        self._saves = saves
