"""What becomes of a step that is done: whether something has moved, whether it is due, whether it is urgent."""

from __future__ import annotations

from typing import NamedTuple

from ckptstore.errors import MissingRankError
from ckptstore.training.captured import Captured
from ckptstore.training.optimizer_tracker import LossScale, OptimizerTracker
from ckptstore.training.pacing import Pacing
from ckptstore.training.unsaved import Unsaved
from ckptstore.training.urgency import Urgency

__all__ = ["Decided", "Deciding"]


class Decided(NamedTuple):
    """What becomes of one step.

    Attributes:
        moved: an optimizer has stepped since the call before, or was kept from that by the scaler; else there is
            nothing to save.
        urgent: it is to be saved and durable now, whatever `save_every` says.
        due: it is to be saved.
    """

    moved: bool
    urgent: bool
    due: bool


class Deciding:
    """Asks those who have a say, once after every step."""

    def __init__(
        self,
        captured: Captured,
        taken: OptimizerTracker,
        scale: LossScale,
        urgency: Urgency,
        pacing: Pacing,
        unsaved: Unsaved,
    ) -> None:
        """
        Args:
            unsaved: is told of ranks that do not agree on what is urgent.
        """
        self._captured = captured
        self._taken = taken
        self._scale = scale
        self._urgency = urgency
        self._pacing = pacing
        self._unsaved = unsaved

    def after(self, step: int, save: bool | None) -> Decided:
        """A step is done.

        Args:
            save: whether its caller wants it saved; None: what `save_every` says.

        Raises:
            with ``on_error="raise"`` `MissingRankError`: the ranks did not come to an agreement.
        """
        skipped = self._scale.has_fallen()
        moved = self._taken.any or skipped or not self._captured.optimizers
        urgent = self._is_urgent(step, moved)
        due = urgent or (moved and self._pacing.due(step) if save is None else save)
        return Decided(moved, urgent, due)

    def _is_urgent(self, step: int, moved: bool) -> bool:
        try:
            return self._urgency.after(step, moved)
        except MissingRankError as error:
            self._unsaved.failed(error)
            return False
