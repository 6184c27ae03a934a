"""What a training script does that its `Checkpointer` cannot save or restore as it is meant: each is said once.

A wrong optimizer, a loader that is passed by, a schedule that was not given, a metric that is called otherwise: nothing
of it is an error at the call where it happens, and all of it is lost time in the run that is resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final

import torch

from ckptstore.errors import UsageError
from ckptstore.formats import metadata
from ckptstore.formats.ranking import number
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
"""Saved steps after which a metric whose name is almost that of ``keep_best`` is remarked upon, not only at the end."""
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
        self._steps = _Steps(captured)
        self._best = None if best is None else _Best(best)
        self._moved = 0

    def stepped(self, moved: bool) -> None:
        """A call of `Checkpointer.step`. `moved`: an optimizer that was given has stepped since the last one."""
        self._steps.stepped(moved)
        if moved:
            self._moved += 1
            if self._moved == 1:
                _check_schedule(self._captured)
            if self._moved == _BATCHES:
                _check_loader(self._captured.loader)

    def measured(self, metrics: Mapping[str, Any] | None) -> None:
        """The metrics of a step that is saved, on the rank that says what they are."""
        if self._best is not None and metrics:
            self._best.measured(metrics)

    def ended(self) -> None:
        """Training is over: what there was too little of to be sure about."""
        self._steps.ended()
        if self._best is not None:
            self._best.ended()


class _Steps:
    """Whether it is the given optimizers that move the model."""

    def __init__(self, captured: Captured) -> None:
        trained = [one for model in captured.models for one in model.parameters() if one.requires_grad]
        # Shards, and what FSDP1 flattens, are written whenever they are gathered, whoever steps.
        if captured.sharding or any(type(one).__name__ == "FlatParameter" for one in trained):
            trained = []
        self._parameters = trained[:: max(1, len(trained) // _SAMPLE)]
        self._versions = self._versions_now()
        self._idle = self._strange = 0
        self._said = False

    def stepped(self, moved: bool) -> None:
        before, self._versions = self._versions, self._versions_now()
        if moved:
            self._idle = self._strange = 0
            return
        self._idle += 1
        self._strange = self._strange + 1 if self._versions != before else 0
        if self._idle == _IDLE or self._strange == _STRANGE:
            self._remark()

    def ended(self) -> None:
        if self._idle == self._strange > 1:  # as ever, and all the time
            self._remark()

    def _remark(self) -> None:
        if self._said:
            return
        self._said = True
        warn(
            f"none of the last {self._idle} steps was saved, because no optimizer that the Checkpointer was given has "
            "stepped: were they made anew, or are others used?",
            UnsavedStepWarning,
        )

    def _versions_now(self) -> list[int]:
        try:
            return [one._version for one in self._parameters]
        except RuntimeError:  # inference tensors do not count
            self._parameters = []
            return []


class _Best:
    """Whether steps have the metric by which the best is found."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._names: set[str] = set()
        self._saved = 0
        self._seen = False

    def measured(self, metrics: Mapping[str, Any]) -> None:
        if self._seen:
            return
        self._saved += 1
        value = metrics.get(self._name)
        if value is None:  # as validation is, of which most steps have none
            self._names.update(str(name) for name in metrics if name != self._name)
            if self._saved == _METRICS and get_close_matches(self._name, self._names, n=1):
                self._remark()
            return
        self._seen = True
        if not _is_ranked(self._name, value):
            warn(
                f"keep_best: {self._name!r} is no number but {type(value).__name__}; steps where it is that are not "
                "ranked",
                UnsavedStepWarning,
            )

    def ended(self) -> None:
        if not self._seen and self._names:
            self._remark()

    def _remark(self) -> None:
        self._seen = True
        there = ", ".join(map(repr, sorted(self._names)))
        warn(
            f"keep_best: no step that this run saved has {self._name!r} among its metrics ({there}), so none of them "
            "can be the best",
            UnsavedStepWarning,
        )


def _is_ranked(name: str, value: Any) -> bool:
    """Whether `formats.ranking` finds a number in what is stored of it."""
    try:
        stored = value.item() if isinstance(value, torch.Tensor) else value
        return number(metadata.checked({name: stored}), name) is not None
    except (UsageError, RuntimeError, ValueError):
        return True  # what cannot be stored at all is refused by the save


def _check_schedule(captured: Captured) -> None:
    """torch's schedules leave ``initial_lr`` in an optimizer's groups, and wrap its ``step``."""
    for optimizer in captured.optimizers:
        scheduled = hasattr(optimizer.step, "_wrapped_by_lr_sched")
        if scheduled and any("initial_lr" in group for group in optimizer.param_groups):
            if not captured.may_have_schedule:
                warn(
                    "a schedule changes the optimizer's learning rate, but scheduler= was not given: in a resumed run "
                    "the schedule would begin anew",
                    DeterminismWarning,
                )
            return


def _check_loader(loader: Any) -> None:
    if isinstance(loader, CountedBatches) and loader.untouched:
        warn(
            "loader= was given, but nothing iterates over Checkpointer.loader, which counts its batches: a resumed run "
            "would get other ones. Write `for batch in checkpointer.loader`",
            DeterminismWarning,
        )
