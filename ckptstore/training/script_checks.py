"""Warns, once for each, of mistakes in a training script that make its checkpoints incomplete or wrong.

Examples are a wrong optimizer, a loader that is bypassed, a missing schedule, a misspelled metric. None of them raises
an error when it happens, and each of them costs time in the resumed run.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckptstore.errors import UsageError
from ckptstore.formats.history import metadata
from ckptstore.formats.history.rule_rankings import number
from ckptstore.frameworks.torch_tensors import counted_changes
from ckptstore.host.caller_warnings import DeterminismWarning, warn
from ckptstore.training.capture.script_state import ScriptState
from ckptstore.training.loaders.counted_batches import CountedBatches
from ckptstore.training.settings import UnsavedStepWarning

__all__ = ["ScriptChecks"]

_IDLE: Final = 100
"""Calls without an optimizer's step before a warning: more micro-batches than a script accumulates."""
_STRANGE: Final = 3
"""Calls before a warning if parameters changed before each of them: accumulating gradients does not do that."""
_BATCHES: Final = 3
"""Steps without a batch of the loader before a warning."""
_EARLY: Final = 2
"""Consecutive steps with gradients newer than the optimizer's before a warning."""
_ORDERLY: Final = 4
"""Steps after which the order is no longer checked: a script does not change it."""
_METRICS: Final = 100
"""Saved steps before a warning of a metric whose name is similar to that of ``keep_best``; else it comes at the end."""
_SAMPLE: Final = 4
"""Parameters that are checked: an optimizer's step changes all that have gradients."""


class ScriptChecks:
    """Checks each step. Issues `UnsavedStepWarning` and `DeterminismWarning`."""

    def __init__(self, captured: ScriptState, best: str | None) -> None:
        """
        Args:
            best: the metric of ``keep_best``; None: there is none.
        """
        self._captured = captured
        self._steps = _Steps(captured)
        self._hooked = _Hooked()
        self._order = _Order(captured, self._hooked)
        strange = not (captured.optimizers or captured.may_have_schedule)
        self._strangers = _Strangers(captured, self._hooked) if strange else None
        self._best = None if best is None else _BestMetric(best)
        self._loader = _Loader(captured.loader)
        self._moved = 0

    def stepped(self, moved: bool) -> None:
        """`Checkpointer.step` was called. `moved`: one of the script's optimizers has stepped since the last call."""
        self._hooked.tell()
        self._steps.stepped(moved)
        if moved:
            self._moved += 1
            self._order.stepped()
            if self._moved == 1:
                _check_schedule(self._captured)
        self._loader.stepped(moved)

    def saved(self) -> None:
        """The step was saved."""
        self._loader.saved(self._captured.random)

    def measured(self, metrics: Mapping[str, Any] | None) -> None:
        """Check the metrics of a saved step, on the rank that stores them."""
        if self._best is not None and metrics:
            self._best.measured(metrics)

    def ended(self) -> None:
        """Training is over: warn of what was not certain before."""
        self._steps.ended()
        self.left()
        if self._best is not None:
            self._best.ended()

    def left(self) -> None:
        """Remove all hooks from torch."""
        self._hooked.tell()
        self._order.remove()
        if self._strangers is not None:
            self._strangers.remove()


class _Hooked:
    """Collects what optimizer hooks find. The next `Checkpointer.step` warns of it (`DeterminismWarning`).

    Prevents: a warning that is an error, raised in the script's ``optimizer.step()``. Later hooks would not run, and
    the step would never be saved.
    """

    def __init__(self) -> None:
        self._seen: list[str] = []

    def say(self, text: str) -> None:
        self._seen.append(text)

    def tell(self) -> None:
        seen, self._seen = self._seen, []
        for text in seen:
            warn(text, DeterminismWarning)


class _Order:
    """Whether `Checkpointer.step` is called after ``optimizer.step()``, not between it and ``backward()``.

    In the wrong place each checkpoint lacks a step whose batch and random numbers it counts as used: a resumed run
    would never take that step. The sign is gradients that are newer than those that the optimizer consumed, and that
    it consumes next. (It does not consume the gradients of a validation that runs backward.)
    """

    def __init__(self, captured: ScriptState, hooked: _Hooked) -> None:
        self._hooked = hooked
        self._consumed: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self._suspects: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._early = self._steps_seen = 0
        given = [] if captured.sharding else captured.optimizers  # reading shards would be a collective
        self._hooks = [one.register_step_post_hook(self._after) for one in given]

    def stepped(self) -> None:
        if self._early == _EARLY:
            self.remove()  # not in the hook itself: torch iterates over its hooks then
        if not self._hooks:
            return
        self._steps_seen += 1
        marks, self._consumed = self._consumed.values(), {}
        newer = bool(marks) and all(map(_is_newer, marks))
        self._suspects = [
            (one, one.grad, counted_changes(one.grad)) for one, _, _ in marks if newer and one.grad is not None
        ]
        if not newer:
            self._early = 0
        if self._steps_seen == _ORDERLY:
            self.remove()

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._consumed, self._suspects = {}, []

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._early == _EARLY:
            return
        if suspects := self._suspects:
            self._suspects = []
            same = all(one.grad is grad and counted_changes(grad) == version for one, grad, version in suspects)
            self._early = self._early + 1 if same else 0
            if self._early == _EARLY:
                self._hooked.say(
                    "step was called between backward() and optimizer.step(): what is saved lacks a step whose batch "
                    "is counted, so a resumed run leaves it out. Call it after optimizer.step() and scheduler.step()",
                )
        trained = (one for group in optimizer.param_groups for one in group["params"] if one.grad is not None)
        smallest = min(trained, key=torch.Tensor.numel, default=None)
        if smallest is not None and smallest.grad is not None:
            self._consumed[id(optimizer)] = (smallest, smallest.grad, counted_changes(smallest.grad))


def _is_newer(mark: tuple[torch.Tensor, torch.Tensor, int]) -> bool:
    """Whether a parameter's gradient is not the consumed one, and was not just set to zero."""
    parameter, consumed, version = mark
    now = parameter.grad
    if now is None or (now is consumed and counted_changes(now) == version):
        return False
    try:
        return bool(now.any())
    except (RuntimeError, NotImplementedError):  # no kernel for this layout
        return False


class _Strangers:
    """Whether an optimizer moves the model although ``optimizer=`` was not passed."""

    def __init__(self, captured: ScriptState, hooked: _Hooked) -> None:
        self._captured = captured
        self._hooked = hooked
        self._found = False
        me = weakref.ref(self)  # torch calls the hook for every optimizer of the process

        def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            strangers = me()
            if strangers is not None:
                strangers.found(optimizer)

        self._hook: Any = register_optimizer_step_post_hook(hook)

    def remove(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def found(self, optimizer: torch.optim.Optimizer) -> None:
        own = {id(one) for model in self._captured.models for one in model.parameters()}
        moved = any(id(one) in own for group in optimizer.param_groups for one in group["params"])
        if self._hook is None or self._found or not moved:
            return
        # Prevents: an error in the script's own step. Removing the hook here would change torch's hooks while it
        # iterates over them.
        self._found = True
        self._hooked.say(
            f"{type(optimizer).__name__} moves the model, but optimizer= was not given: what it keeps (moments, step "
            "counts) is not saved, and a resumed run begins without it",
        )


class _Steps:
    """Whether the script's optimizers are those that move the model."""

    def __init__(self, captured: ScriptState) -> None:
        trained = [one for model in captured.models for one in model.parameters() if one.requires_grad]
        # Shards, and the flat parameters of FSDP1, change whenever they are gathered.
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
        if self._idle == self._strange > 1:  # in every step of the run
            self._remark()

    def _remark(self) -> None:
        if self._said:
            return
        self._said = True
        warn(
            f"none of the last {self._idle} steps was saved, because no optimizer that the Checkpointer was given has "
            "stepped: were they created again, or are other optimizers used?",
            UnsavedStepWarning,
        )

    def _versions_now(self) -> list[int]:
        return list(map(counted_changes, self._parameters))


class _BestMetric:
    """Whether steps have the metric of ``keep_best``."""

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
        if value is None:  # a validation metric is missing in most steps
            self._names.update(str(name) for name in metrics if name != self._name)
            if self._saved == _METRICS and get_close_matches(self._name, self._names, n=1):
                self._remark()
            return
        self._seen = True
        if not _is_ranked(self._name, value):
            what = "NaN" if _is_nan(value) else f"not a number but {type(value).__name__}"
            warn(
                f"keep_best: {self._name!r} is {what}; steps where it is that are not ranked",
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


def _is_nan(value: Any) -> bool:
    try:
        return math.isnan(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False


def _is_ranked(name: str, value: Any) -> bool:
    """Whether `formats.history.rule_rankings` can rank the stored value."""
    try:
        stored = value.item() if isinstance(value, torch.Tensor) else value
        return number(metadata.checked({name: stored}), name) is not None
    except (UsageError, RuntimeError, ValueError):
        return True  # the save itself refuses what cannot be stored


def _check_schedule(captured: ScriptState) -> None:
    """Warn of a schedule without ``scheduler=``: torch's set ``initial_lr`` in the groups, and wrap ``step``."""
    for optimizer in captured.optimizers:
        scheduled = hasattr(optimizer.step, "_wrapped_by_lr_sched")
        if scheduled and any("initial_lr" in group for group in optimizer.param_groups):
            if not captured.may_have_schedule:
                warn(
                    "a schedule changes the optimizer's learning rate, but scheduler= was not given: in a resumed run "
                    "the schedule would start again",
                    DeterminismWarning,
                )
            return


class _Loader:
    """Whether the script iterates over `Checkpointer.loader`; checked again after each resume."""

    def __init__(self, loader: CountedBatches | None) -> None:
        self._loader = loader
        self._untouched = 0

    def stepped(self, moved: bool) -> None:
        if self._loader is None:
            return
        self._loader.saved(None)
        self._loader.remark()
        if not self._loader.untouched:
            self._untouched = 0
            return
        self._untouched += moved
        if self._untouched == _BATCHES:
            self._loader = None
            warn(
                "loader= was given, but nothing iterates over Checkpointer.loader, which counts its batches and keeps "
                "the random generators as they are while a resumed epoch begins: a resumed run would get other batches "
                "or other random numbers. Write `for batch in checkpointer.loader`",
                DeterminismWarning,
            )

    def saved(self, generators: Mapping[str, Any] | None) -> None:
        """The step was saved with these global generators."""
        if self._loader is not None:
            self._loader.saved(generators)
