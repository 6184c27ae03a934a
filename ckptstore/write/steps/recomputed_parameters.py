"""One parameter's step that the host computes again: its slots, its exact arithmetic, and the proof that it is right.

The step is taken in the arithmetic of `formats.optim`, in one of the variants of its rule. Then each weight that was
rounded otherwise is moved to the neighbour that its remainder names, and the digests are computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard

import numpy as np
import numpy.typing as npt

from ckptstore.errors import CkptError
from ckptstore.formats import digest, optim, remainders
from ckptstore.formats.states.state import FlatState, TensorSource
from ckptstore.frameworks import bridge
from ckptstore.host.buffers import Bytes
from ckptstore.write.steps.updates import LateGradient, Update, arrived

__all__ = ["Marks", "ParameterStep", "SentParameter", "is_dense", "rule_of", "variants_of"]

_ROOTS: Final = "roots"
"""A variant beside those of the rules: with the square roots of torch on this machine, which are not always rounded to
nearest. Optimizers that are not fused compute so on the CPU."""
_TILE: Final = 1 << 15
"""Numbers of which torch computes roots in the thread that asks."""

_Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Marks:
    """Remainders of one slot of a parameter: in the tensor of this name, from this number on."""

    name: str
    first: int


@dataclass(slots=True)
class SentParameter:
    """A parameter whose step is computed again.

    Attributes:
        place: of its update among those of the step.
        slots: those that are computed; the others are copied, because the host computed them otherwise before.
        count: numbers of each slot.
        carried: the name of its gradient among what is sent; None: the update has it, or needs none.
        marks: its remainders, by slot.
    """

    place: int
    update: Update
    slots: tuple[int, ...]
    count: int
    carried: str | None
    marks: dict[int, Marks] = field(default_factory=dict)

    @property
    def leader(self) -> str:
        """The name of its weight."""
        return self.update.slots[0]


class ParameterStep:
    """One parameter's step, and the memory that it is computed in."""

    def __init__(
        self,
        row: SentParameter,
        base: FlatState | None,
        state: FlatState,
        update: Update,
        arrived_tensors: Mapping[str, TensorSource],
    ) -> None:
        self.row = row
        self._old = [] if base is None else [_bytes(base.tensors[name]) for name in update.slots]
        self._new = [_bytes(state.tensors[name]) for name in update.slots]
        self._copied = [slot for slot in range(len(update.slots)) if slot not in row.slots]
        self._marks = {slot: (_bytes(arrived_tensors[one.name]), one.first) for slot, one in row.marks.items()}
        self._update = update
        self._carried = None if row.carried is None else arrived_tensors[row.carried]

    def new(self, slot: int) -> Bytes:
        """The memory of a slot."""
        return self._new[slot]

    def take(self, variant: str, start: int, stop: int) -> list[int]:
        """Compute the numbers from `start` to `stop` -> the shares of the slots' digests."""
        before = [old[4 * start : 4 * stop].view("<u4") for old in self._old]
        parts = [new[4 * start : 4 * stop].view("<u4") for new in self._new]
        for slot in self._copied:  # it is there already
            parts[slot] = np.empty_like(parts[slot])
        for old, new in zip(before, parts, strict=True):
            new[:] = old
        if not self._update.stays:
            gradient = self._gradient(start, stop)
            if gradient is not None:
                with contextlib.suppress(CkptError):  # the digests tell
                    _advance(self._update, variant, parts, before[0], gradient)
            for slot, (packed, first) in self._marks.items():
                digits = remainders.unpack(packed, first + start, first + stop)
                remainders.settle(parts[slot], digits, *_parts_of_sum(self._update, variant, slot, before[slot], parts))
        return [digest.partial(part, start) for part in parts]

    def _gradient(self, start: int, stop: int) -> _Array | None:
        gradient = self._carried if self._carried is not None else arrived(self._update.gradient)
        if gradient is None:
            return None
        if isinstance(gradient, optim.SparseGradient):
            return gradient.part(start, stop).dense()
        item = optim.ITEMSIZES[gradient.dtype]
        return optim.numbers_of_image(gradient.dtype, _bytes(gradient)[item * start : item * stop])

    def different(self, sums: Sequence[int], digests: Mapping[str, int]) -> list[int]:
        """The slots whose digests differ from those that the device computed."""
        nbytes = 4 * self.row.count
        return [
            slot
            for slot in self.row.slots
            if digest.combine(sums[slot], nbytes=nbytes) != digests[self._update.slots[slot]]
        ]

    def is_near(self, guess: Bytes, slot: int) -> bool:
        """Whether each pattern of `guess` is that of the slot or next to it."""
        words = self._new[slot].view("<i4").astype(np.int64) - guess.view("<i4")
        return bool((np.abs(words) <= 1).all())

    @property
    def is_narrow(self) -> bool:
        """Whether the gradient was sent as bf16."""
        return self._carried is not None and self._carried.dtype == "BF16"

    @property
    def could_be_narrow(self) -> bool:
        """Whether the gradient, which was sent in fp32, is bf16."""
        if self._carried is None or self._carried.dtype != "F32":
            return False
        words = _bytes(self._carried).view("<u4")
        return not (words[:1024] & 0xFFFF).any() and not (words & 0xFFFF).any()


def _bytes(source: TensorSource) -> Bytes:
    view = source.view()
    assert view is not None  # snapshots are host memory
    return view


def variants_of(update: Update) -> tuple[str, ...]:
    """The arithmetics in which a device may have taken a step, the likeliest first."""
    found = update.optimizer.variants
    return (*found, _ROOTS) if isinstance(rule_of(update, found[0]), optim.AdamRule) else found


def _advance(update: Update, variant: str, state: Sequence[_Array], weight: _Array, gradient: _Array) -> None:
    """Take a step in place.

    Args:
        weight: the old one.
    """
    if variant != _ROOTS:
        optim.advance(rule_of(update, variant), state, gradient)
        return
    rule = rule_of(update, update.optimizer.variants[0])
    assert isinstance(rule, optim.AdamRule)
    optim.advance(rule, state, gradient)
    for start in range(0, len(weight), _TILE):
        tile = slice(start, start + _TILE)
        new, first, second = (state[slot][tile].view("<f4") for slot in (0, 1, -1))
        state[0][tile] = weight[tile]
        optim.move_by_roots(rule, new, first, bridge.roots(second))


def _parts_of_sum(
    update: Update, variant: str, slot: int, old: _Array, new: Sequence[_Array]
) -> tuple[_Array, remainders.Changes | None]:
    """What a step adds up to a slot: the bit patterns of what is exact, and what returns the changes, if it is known.

    Args:
        old: the old slot. `new`: the new slots.
    """
    rule = rule_of(update, update.optimizer.variants[0] if variant == _ROOTS else variant)
    if slot or not isinstance(rule, optim.AdamRule):
        return old, None
    adam, addend = rule, old
    if adam.shrink != 1.0:
        with np.errstate(all="ignore"):
            addend = (old.view("<f4") * np.float32(adam.shrink)).view("<u4")

    def changes(indices: npt.NDArray[np.intp]) -> npt.NDArray[np.float32]:
        first, second = new[1][indices].view("<f4"), new[-1][indices].view("<f4")
        with np.errstate(all="ignore"):
            roots = bridge.roots(second) if variant == _ROOTS else np.sqrt(second)
            return optim.changes(adam, first, roots)

    return addend, changes


def rule_of(update: Update, variant: str) -> optim.Rule:
    """The rule of a step in a variant of its optimizer's arithmetic."""
    return update.optimizer.rule(update.step, variant)


def is_dense(gradient: object) -> TypeGuard[TensorSource]:
    """Whether it is a tensor."""
    return gradient is not None and not isinstance(gradient, optim.SparseGradient | LateGradient)
