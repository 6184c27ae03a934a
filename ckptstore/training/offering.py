"""A step that is done is offered to the saves of the open term, or passed over; who is told of that, what stops it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptstore.host.caller_warnings import warn
from ckptstore.training.deciding import Decided, Deciding
from ckptstore.training.explained import Explained
from ckptstore.training.overlooked import Overlooked
from ckptstore.training.pacing import Pacing
from ckptstore.training.settings import SlowSavesWarning, UnsavedStepWarning
from ckptstore.training.tenure import Tenure
from ckptstore.training.unsaved import Unsaved
from ckptstore.training.urgency import Urgency
from ckptstore.write.ledger import PendingSave

__all__ = ["Offering"]


class Offering:
    """Offers the steps of one run. The script's thread calls it."""

    def __init__(
        self,
        deciding: Deciding,
        pacing: Pacing,
        urgency: Urgency,
        unsaved: Unsaved,
        overlooked: Overlooked,
        explained: Explained,
    ) -> None:
        """
        Args:
            deciding: says what becomes of a step.
            pacing: measures what saves take.
            urgency: is told when an urgent step is durable.
            unsaved: is told what stops a save.
            overlooked: gets each step and save, and warns of what looks wrong in the script.
            explained: gets their metrics.
        """
        self._deciding = deciding
        self._pacing = pacing
        self._urgency = urgency
        self._unsaved = unsaved
        self._overlooked = overlooked
        self._explained = explained

    def after(
        self,
        tenure: Tenure,
        step: int,
        metrics: Mapping[str, Any] | None,
        tags: str | Sequence[str],
        save: bool | None,
    ) -> PendingSave | None:
        """A step is done -> its save; None: it is not saved (see `Checkpointer.step`).

        Args:
            step: its number.
            save: whether its caller wants it saved; None: what `save_every` says.

        Raises:
            with ``on_error="raise"`` whatever stops a save.
        """
        decided = self._deciding.after(step, save)
        moved, urgent, due = decided
        self._overlooked.stepped(moved)
        if moved:  # a call without an optimizer's step takes nothing from the step before
            self._unsaved.last = None if due else metrics or {}
        if self._unsaved.stopped or not moved or not (due or tenure.follows):
            self._pass_over(tenure, step, decided, asked=bool(save or tags))
            return None
        try:
            forced = due and (urgent or save is True or bool(tags))

            pending = self._pacing.save(lambda: self.save(tenure, step, metrics, tags, due=due, forced=forced))
            if urgent and pending is not None:
                assert tenure.saving is not None  # it has just saved
                pending = tenure.saving.durable(pending)
                self._urgency.settled(step)
        except Exception as error:  # noqa: BLE001  # with on_error="warn" whatever it is
            if urgent and tenure.group is not None:
                self._urgency.settled(step)  # the other ranks end, too
            self._lost(tenure, step, error)
            return None
        self._urgency.pass_on()
        self._remark_pace(tenure)
        return pending

    def _lost(self, tenure: Tenure, step: int, error: Exception) -> None:
        """The step at hand is not saved: say so, once, with whatever else was not."""
        lost = [] if tenure.saving is None else tenure.saving.settle()
        if not any(other == step for other, _ in lost):
            lost.append((step, error))
        self._unsaved.lost(lost)

    def _remark_pace(self, tenure: Tenure) -> None:
        saving = tenure.saving
        if saving is not None and tenure.is_first and (slow := saving.slowed_by(self._pacing.slowed)) is not None:
            warn(slow, SlowSavesWarning)

    def save(
        self,
        tenure: Tenure,
        step: int,
        metrics: Mapping[str, Any] | None,
        tags: str | Sequence[str],
        *,
        due: bool = True,
        forced: bool = True,
    ) -> PendingSave | None:
        """Offer a step, and tell of it -> as `Saving.offer`. Raises what that does, and what stopped a save before."""
        assert tenure.saving is not None  # the term is open
        lost = tenure.saving.settle()
        while True:
            if lost:
                self._unsaved.lost(lost)
            try:
                pending = tenure.saving.offer(step, metrics, tags, due=due, forced=forced)
                break
            except Exception as error:
                # Prevents: a step that is lost with one before it, of whose failure its own call was told. It was not
                # begun, so it can be offered again, also where other ranks save it, too.
                lost = tenure.saving.settle()
                if not any(earlier is error for _, earlier in lost):
                    if lost:
                        self._unsaved.lost(lost)
                    raise
        self._overlooked.saved()
        if tenure.is_first:
            self._overlooked.measured(metrics)
        self._explained.draw(metrics or {}, step)
        return pending

    def _pass_over(self, tenure: Tenure, step: int, decided: Decided, *, asked: bool) -> None:
        """A step is not saved, although its caller may have asked for that."""
        if self._unsaved.stopped:
            if decided.urgent:
                self._urgency.settled(step)
        elif decided.moved:
            if tenure.saving is not None:
                tenure.saving.passed(step)
        elif asked:
            warn(
                f"step {step} is not saved, in spite of save= or tags=: no optimizer has stepped since the call before",
                UnsavedStepWarning,
            )
