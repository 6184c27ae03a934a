"""Describes the update of a parameter by an optimizer's step, for the writer of step diffs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from ckptstore.errors import UsageError
from ckptstore.formats.states.state import FlatState, TensorSource
from ckptstore.host.caller_warnings import UnexplainedStepWarning, warn
from ckptstore.write.capture.snapshot import Snapshot, SnapshotPool

if TYPE_CHECKING:
    from ckptstore.formats.optim import Optimizer, SparseGradient, Step

__all__ = [
    "Explaining",
    "Found",
    "Hold",
    "LateGradient",
    "Update",
    "Updates",
    "arrived",
    "dense_gradients",
    "looked_up",
    "with_copies",
    "with_sparse_copies",
]


@dataclass(frozen=True, slots=True)
class LateGradient:
    """A sparse gradient that a device still sends. The thread that compresses the step waits for it. Training does not.

    Attributes:
        size: numbers in the parameter.
        read: waits, and returns the gradient; None: it turned out not to be sparse. It may be called again.
    """

    size: int
    read: Callable[[], SparseGradient | None]

    def part(self, start: int, stop: int) -> LateGradient:
        """The gradient of the numbers from ``start`` to ``stop``."""

        def read() -> SparseGradient | None:
            whole = self.read()
            return None if whole is None else whole.part(start, stop)

        return LateGradient(min(stop, self.size) - start, read)


@dataclass(frozen=True, slots=True)
class Update:
    """One step of one parameter.

    The writer does not trust it: what the step does not explain is stored beside it. So wrong values cost bytes, but
    never change a bit.

    Attributes:
        slots: names of tensors of the state, all fp32 and of one shape: the weight, then the optimizer's tensors for it
            in the order of `formats.optim.Rule.slots` (``exp_avg``, ``exp_avg_sq``, ...).
        optimizer: the settings of the parameter's group.
        step: the numbers of this step.
        gradient: the gradient that the optimizer consumed, before loss scale and clipping of `step` are applied: a
            tensor of the parameter's size (fp32, bf16, fp16, or int8 and fp8 with a `Step.scale`), or its largest
            entries (indices into the flattened parameter), which may still be on their way, or None if it is not
            available. It must not change until the save has read it.
        carried: the same, a tensor on a device, if it is not to be stored: from it the host may compute the new state,
            which then need not leave the device (`write.steps.recomputed_steps`).
        still: the optimizer had no gradient for the parameter, so the host may expect that nothing has changed.
    """

    slots: tuple[str, ...]
    optimizer: Optimizer
    step: Step
    gradient: TensorSource | SparseGradient | LateGradient | None = None
    carried: TensorSource | None = None
    still: bool = False

    @property
    def stays(self) -> bool:
        """Whether the step should have changed nothing."""
        return self.still or self.step.skipped


Hold: TypeAlias = Callable[[Callable[[], None]], None]


class Found(list[Update]):
    """The updates that were found in a state.

    Attributes:
        left_out: a text on updates that were not found, and why; None: all were found.
        reasons: the reasons in that text, without numbers that differ from step to step.
        hold: takes a function that the optimizers call before their next step changes the state; None: they cannot.
    """

    def __init__(
        self,
        updates: Iterable[Update],
        left_out: str | None = None,
        reasons: Iterable[str] = (),
        hold: Hold | None = None,
    ) -> None:
        super().__init__(updates)
        self.hold = hold
        self.left_out = left_out
        self.reasons = frozenset(reasons) or frozenset(() if left_out is None else (left_out,))


Updates: TypeAlias = Sequence[Update] | Callable[[FlatState], Sequence[Update]]
"""The updates of a step, or a function that finds them in the flattened state."""


def looked_up(updates: Updates, flat: FlatState) -> Sequence[Update]:
    """The updates of a step. Raises `UsageError` if the argument or its result is not a sequence of updates."""
    found = updates(flat) if callable(updates) else updates
    if not isinstance(found, Sequence) or not all(isinstance(update, Update) for update in found):
        raise UsageError(
            f"updates: {type(updates).__name__}; expected a description of what the optimizer did, as in "
            "updates=training.OptimizerStep(optimizer)"
        )
    return found


class Explaining:
    """Looks up the updates of a writer's steps, and warns once for each reason why a step is not explained.

    Attributes:
        wanted: whether steps are stored as step diffs.
    """

    def __init__(self, *, wanted: bool) -> None:
        self.wanted = wanted
        self._said: set[str] = set()

    def found(self, updates: Updates | None, flat: FlatState) -> Sequence[Update]:
        """The updates of a step; none if steps are not stored as step diffs. Raises as `looked_up`."""
        self.remark_unused(updates)
        if updates is None or not self.wanted:
            return ()
        found = looked_up(updates, flat)
        if isinstance(found, Found) and found.left_out is not None:
            self.say(found.left_out, found.reasons)
        return found

    def say(self, text: str, reasons: Iterable[str] = ()) -> None:
        """Warn with `text`, unless all of its reasons were given before.

        Args:
            reasons: why a step is not explained; if empty, the text itself is the reason.
        """
        new = (frozenset(reasons) or {text}) - self._said
        if new:
            self._said |= new
            warn(text, UnexplainedStepWarning)

    def remark_unused(self, updates: Updates | None) -> None:
        """Warn if `updates` are passed to a writer that does not use them."""
        if updates is None or self.wanted:
            return
        self.say(
            "updates= is ignored, and every step is stored whole or as a delta: step diffs need a writer with "
            "diffs=DiffOptions(...)"
        )


def arrived(gradient: TensorSource | SparseGradient | LateGradient | None) -> TensorSource | SparseGradient | None:
    """A gradient; waits for a `LateGradient`."""
    return gradient.read() if isinstance(gradient, LateGradient) else gradient


def with_sparse_copies(updates: Sequence[Update]) -> list[Update]:
    """The updates with copies of their sparse gradients; other gradients are read in place."""
    taken = list(updates)
    if not taken:
        return taken
    from ckptstore.formats.optim import SparseGradient

    for number, update in enumerate(taken):
        gradient = update.gradient
        if isinstance(gradient, SparseGradient):
            copy = SparseGradient(gradient.indices.copy(), gradient.values.copy(), gradient.size)
            taken[number] = replace(update, gradient=copy)
    return taken


def dense_gradients(updates: Sequence[Update]) -> FlatState:
    """The gradients that `with_copies` copies, by the number of their update."""
    if not updates:
        return FlatState(None, {})
    from ckptstore.formats.optim import SparseGradient

    dense: dict[str, TensorSource] = {
        str(number): update.gradient
        for number, update in enumerate(updates)
        if update.gradient is not None and not isinstance(update.gradient, SparseGradient | LateGradient)
    }
    return FlatState(None, dense)


def with_copies(
    updates: Sequence[Update],
    snapshots: SnapshotPool,
    pool: ThreadPoolExecutor,
    *,
    queued: bool = False,
    also: Mapping[str, TensorSource] = MappingProxyType({}),
) -> tuple[list[Update], Snapshot | None]:
    """The updates with copied gradients, and the snapshot that owns the copies (`queued`: see `SnapshotPool.copy`).

    Args:
        also: other tensors that are copied with them, whose names are not numbers.
    """
    taken = with_sparse_copies(updates)
    gradients = dense_gradients(taken)
    if not gradients.tensors and not also:
        return taken, None
    copied = snapshots.copy(FlatState(None, {**gradients.tensors, **also}), pool, queued=queued)
    for name in gradients.tensors:
        taken[int(name)] = replace(taken[int(name)], gradient=copied.flat.tensors[name])
    return taken, copied
