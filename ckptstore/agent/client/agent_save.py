"""The trainer's record of one save that an agent does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait

from ckptstore.write.saves.job import SaveJob
from ckptstore.write.saves.ledger import Labels, Saves

__all__ = ["AgentSave"]


class AgentSave(SaveJob):
    """A save that the agent does or will do. The agent decides whether it is committed, fails or is cancelled."""

    def __init__(self, saves: Saves, step: int, labels: Labels, cancel: Callable[[int], bool]) -> None:
        """
        Args:
            cancel: asks the agent to cancel a step -> whether it did.
        """
        super().__init__(saves, step, labels)
        self._ask = cancel

    def cancel(self) -> bool:
        """See `SaveJob.cancel`. If the agent cancelled the save, `done` has its error when this returns."""
        cancelled = self._ask(self.step)
        if cancelled:
            wait([self.done])  # until the agent's event has arrived
        return cancelled

    def move(self, saves: Saves) -> None:
        """Save it in the next agent's term: the agent died before it had the state. Raises `StepOrderError`."""
        saves.check(self.step)
        saves.take(self.step)
        saves.watch(self.step, self.done)
        self._saves = saves
