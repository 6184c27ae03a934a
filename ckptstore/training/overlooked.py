"""What a training script does that its `Checkpointer` cannot save or restore as it is meant: each is said once.

A wrong optimizer, a loader that is passed by, a schedule that was not given, a metric that is called otherwise: nothing
of it is an error at the call where it happens, and all of it is lost time in the run that is resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from ckptstore.host.caller_warnings import DeterminismWarning, warn
from ckptstore.training.batches import CountedBatches
from ckptstore.training.captured import Captured
from ckptstore.training.settings import UnsavedStepWarning

__all__ = ["Overlooked"]

_IDLE: Final = 100
"""Calls without an optimizer's step after which that is remarked upon: more micro-batches than anybody accumulates."""
_STRANGE: Final = 3
"""As many calls, if parameters changed before each of them: no accumulation of gradients does that."""
_BATCHES: Final = 3
"""Steps without a batch of the loader after which that is remarked upon."""
_METRICS: Final = 100
"""Steps whose metrics lack the one of ``keep_best`` after which that is remarked upon; else it is on closing."""
_SAMPLE: Final = 4
"""Parameters that are looked at; an optimizer's step changes all that have gradients."""


class Overlooked:
    """Looks on as steps are done. Warns `UnsavedStepWarning` and `DeterminismWarning`."""

    def __init__(self, captured: Captured, best: str | None) -> None:
        """
        Args:
            best: the metric of ``keep_best``; None: there is none.
        """
        self._captured = captured
        self._best = best
        self._rated = best is None
        self._names: set[str] = set()
        self._moved = self._idle = self._strange = self._metrics = 0
        self._said_idle = False
        trained = [one for model in captured.models for one in model.parameters() if one.requires_grad]
        # Shards are written whenever they are gathered, whoever steps.
        self._parameters = [] if captured.sharding else trained[:: max(1, len(trained) // _SAMPLE)]
        self._versions = self._versions_now()

    def stepped(self, moved: bool) -> None:
        """A call of `Checkpointer.step`. `moved`: an optimizer that was given has stepped since the last one."""
        before, self._versions = self._versions, self._versions_now()
        if moved:
            self._moved += 1
            self._idle = self._strange = 0
            if self._moved == 1:
                self._check_schedule()
            if self._moved == _BATCHES:
                self._check_loader()
            return
        self._idle += 1
        self._strange = self._strange + 1 if self._versions != before else 0
        if self._idle == _IDLE or (self._strange == _STRANGE and not self._said_idle):
            self._remark_idle()

    def measured(self, metrics: Mapping[str, Any] | None) -> None:
        """The metrics of a step that is saved."""
        if self._rated or self._best is None or not metrics:
            return
        self._names.update(map(str, metrics))
        self._metrics += 1
        if self._best in metrics:
            self._rated = True
            if not _is_number(metrics[self._best]):
                said = type(metrics[self._best]).__name__
                warn(f"keep_best: {self._best!r} is no number but {said}; none of these is ranked", UnsavedStepWarning)
        elif self._metrics == _METRICS:
            self._remark_metric()

    def ended(self) -> None:
        """Training is over: what there was too little of to be sure about."""
        if self._idle > 1 and not self._moved and not self._said_idle:
            self._remark_idle()
        if not self._rated and self._metrics:
            self._remark_metric()

    def _remark_idle(self) -> None:
        self._said_idle = True
        warn(
            f"none of the last {self._idle} steps was saved, because no optimizer that the Checkpointer was given has "
            "stepped: were they made anew, or are others used?",
            UnsavedStepWarning,
        )

    def _remark_metric(self) -> None:
        self._rated = True
        warn(
            f"keep_best: no step's metrics have {self._best!r}, so none is the best; they have "
            + ", ".join(map(repr, sorted(self._names))),
            UnsavedStepWarning,
        )

    def _check_schedule(self) -> None:
        """torch's schedules leave ``initial_lr`` in an optimizer's groups."""
        captured = self._captured
        groups = [group for optimizer in captured.optimizers for group in optimizer.param_groups]
        if captured.may_have_schedule or not any("initial_lr" in group for group in groups):
            return
        warn(
            "the optimizer's groups have an initial_lr, as a schedule leaves it, but scheduler= was not given: in a "
            "resumed run the schedule would begin anew",
            DeterminismWarning,
        )

    def _check_loader(self) -> None:
        loader = self._captured.loader
        if isinstance(loader, CountedBatches) and loader.untouched:
            warn(
                "loader= was given, but nothing iterates over Checkpointer.loader, which counts its batches: a resumed "
                "run would get other ones. Write `for batch in checkpointer.loader`",
                DeterminismWarning,
            )

    def _versions_now(self) -> list[int]:
        try:
            return [one._version for one in self._parameters]
        except RuntimeError:  # inference tensors do not count
            self._parameters = []
            return []


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return hasattr(value, "__float__") and not isinstance(value, bool)
