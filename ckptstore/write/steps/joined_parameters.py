"""The parameters that one step has moved, as they are compressed: alone, or small ones of the same kind together.

Small parameters with the same settings are concatenated, so that a thousand biases cost as much as one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptstore.formats import optim
from ckptstore.formats.segment_files.layout import chunk_extents
from ckptstore.formats.states.state import FlatState, TensorSource
from ckptstore.host.buffers import Bytes
from ckptstore.write.capture.bounded_capture import Piece, Unit
from ckptstore.write.delta_encoding import Base, Read, host_bytes
from ckptstore.write.steps.unexplained_bytes import Excess
from ckptstore.write.steps.updates import Update, arrived

__all__ = ["WITHOUT_GRADIENT", "Joined", "fitting_updates", "gradient_kind", "join", "numbers_of"]

_SMALL: Final = 1 << 18
"""Parameters whose tensors have at most this many bytes are concatenated."""
_POOL: Final = 4 << 20
"""Bytes of each slot that are concatenated: a unit of work for one thread."""
_TOGETHER: Final = 1 << 14
"""The most parameters that are concatenated: a group is never split, and the entries of a segment are limited."""

WITHOUT_GRADIENT: Final = ("predicted", "predicted/2")
"""Encodings that need no gradient."""

_Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Joined:
    """Parameters that are compressed as one, and their numbers."""

    updates: tuple[Update, ...]
    flat: FlatState
    base: Base

    @property
    def leader(self) -> str:
        """The tensor that names the group and holds the payload of all its tensors."""
        return self.updates[0].slots[0]

    @property
    def width(self) -> int:
        """The number of slots of each parameter."""
        return len(self.updates[0].slots)

    @property
    def extents(self) -> list[tuple[int, int]]:
        """(start, length) in bytes of each chunk of each slot; concatenated parameters are one chunk."""
        if len(self.updates) > 1:
            return [(0, sum(self.flat.tensors[update.slots[0]].nbytes for update in self.updates))]
        return list(chunk_extents(self.flat.tensors[self.leader].nbytes))

    def new(self, slot: int, start: int, length: int, read: Read = host_bytes) -> list[Bytes]:
        """The bytes of one slot, parameter by parameter."""
        return self._parts(slot, start, length, lambda name, at, count: read(self.flat.tensors[name], at, count))

    def old(self, slot: int, start: int, length: int) -> list[Bytes]:
        """The bytes of one slot in the base, parameter by parameter."""
        return self._parts(slot, start, length, self.base.read)

    def _parts(self, slot: int, start: int, length: int, read: Callable[[str, int, int], Bytes]) -> list[Bytes]:
        if len(self.updates) == 1:
            return [read(self.updates[0].slots[slot], start, length)]
        return [read(name, 0, self.flat.tensors[name].nbytes) for name in (up.slots[slot] for up in self.updates)]

    def gradient(self, start: int, length: int, read: Read = host_bytes) -> optim.Gradient | None:
        """The gradient of the numbers of a chunk (`start` and `length` in bytes of fp32)."""
        first = arrived(self.updates[0].gradient)
        if first is None:
            return None
        if isinstance(first, optim.SparseGradient):
            if len(self.updates) == 1:
                return first.part(start // 4, (start + length) // 4)
            return _sparse_end_to_end([arrived(update.gradient) for update in self.updates])
        cut = len(self.updates) == 1
        parts = [_numbers(arrived(update.gradient), start, length, cut, read) for update in self.updates]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def excess(self, stored: int | None) -> Excess | None:
        """The excess of a payload of `stored` bytes for all of these parameters; None: there is none.

        Args:
            stored: None: the payload would be larger than the tensors.
        """
        numbers = sum(self.flat.tensors[update.slots[0]].nbytes for update in self.updates) // 4
        return Excess.of(self.leader, len(self.updates), self.width, numbers, stored)

    def unit(self, encoding: optim.Encoding, extent: tuple[int, int], room: Mapping[str, Bytes]) -> Unit:
        """The unit that `code_chunk` reads.

        Args:
            room: the memory to which each tensor is copied once it is compressed.
        """
        start, length = extent
        pieces = []
        for update in self.updates:
            for name in update.slots:
                source = self.flat.tensors[name]
                at, count = (start, length) if len(self.updates) == 1 else (0, source.nbytes)
                pieces.append(Piece(source, at, count, room[name][at : at + count]))
            gradient = None if encoding in WITHOUT_GRADIENT else arrived(update.gradient)
            if gradient is not None and not isinstance(gradient, optim.SparseGradient):
                at, count = _range(gradient, start, length, len(self.updates) == 1)
                pieces.append(Piece(gradient, at, count))
        return Unit(self.leader, tuple(pieces))


def fitting_updates(updates: Sequence[Update], flat: FlatState, base: Base) -> Iterator[Update]:
    """The updates whose tensors exist before and after the step, are fp32 of one shape, and are in no other update.

    Waits for gradients that a device still sends: what this returns has no `LateGradient`.
    """
    taken: set[str] = set()
    for update in updates:
        specs = {
            None if source is None else (source.dtype, tuple(source.shape))
            for source in (flat.tensors.get(name) for name in update.slots)
        }
        first = next(iter(specs), None)
        if len(specs) != 1 or first is None or first[0] != "F32" or 0 in first[1]:
            continue
        if any(base.spec(name) != first for name in update.slots) or not taken.isdisjoint(update.slots):
            continue
        if len(set(update.slots)) != len(update.slots) or len(update.slots) != len(_slots_of(update)):
            continue
        taken.update(update.slots)
        gradient = arrived(update.gradient)
        if not _fits(gradient, flat.tensors[update.slots[0]].nbytes // 4):
            gradient = None
        yield update if gradient is update.gradient else replace(update, gradient=gradient)


def _slots_of(update: Update) -> tuple[str, ...]:
    return update.optimizer.rule(update.step, update.optimizer.variants[0]).slots


def _fits(gradient: TensorSource | optim.SparseGradient | None, count: int) -> bool:
    """Whether it is a gradient of `count` numbers."""
    if gradient is None or isinstance(gradient, optim.SparseGradient):
        return gradient is None or gradient.size == count
    return optim.ITEMSIZES.get(gradient.dtype, 0) * count == gradient.nbytes


def gradient_kind(update: Update) -> str:
    """How the gradient of an update is stored: its dtype, or that of its entries; "" if it has none."""
    gradient = arrived(update.gradient)
    if gradient is None:
        return ""
    if isinstance(gradient, optim.SparseGradient):
        return f"sparse {gradient.values.dtype.str}"
    return gradient.dtype


def join(updates: Iterator[Update], flat: FlatState, base: Base) -> Iterator[Joined]:
    """Group parameters to compress as one: small ones of the same kind together."""
    pools: dict[Any, tuple[list[Update], int]] = {}
    for update in updates:
        nbytes = flat.tensors[update.slots[0]].nbytes
        if nbytes > _SMALL:
            yield Joined((update,), flat, base)
            continue
        key = (update.optimizer, update.step, len(update.slots), gradient_kind(update))
        members, filled = pools.get(key, ([], 0))
        if members and (filled + nbytes > _POOL or len(members) == _TOGETHER):
            yield Joined(tuple(members), flat, base)
            members, filled = [], 0
        members.append(update)
        pools[key] = (members, filled + nbytes)
    for members, _ in pools.values():
        yield Joined(tuple(members), flat, base)


def _range(gradient: TensorSource, start: int, length: int, cut: bool) -> tuple[int, int]:
    """Start and length in bytes of a chunk's numbers (`start` and `length`: bytes of fp32), or of all without `cut`."""
    item = optim.ITEMSIZES[gradient.dtype]
    return (start * item // 4, length * item // 4) if cut else (0, gradient.nbytes)


def _numbers(
    gradient: TensorSource | optim.SparseGradient | None, start: int, length: int, cut: bool, read: Read = host_bytes
) -> _Array:
    """The numbers of a dense gradient; see `_range`."""
    assert gradient is not None
    assert not isinstance(gradient, optim.SparseGradient)
    return optim.numbers_of_image(gradient.dtype, read(gradient, *_range(gradient, start, length, cut)))


def numbers_of(gradient: TensorSource | None) -> npt.NDArray[np.float32]:
    """A copy of a dense gradient in fp32."""
    values = _numbers(gradient, 0, 0, False)
    out = np.empty(len(values), "<f4")
    optim.widen(values, out)
    return out


def _sparse_end_to_end(gradients: Sequence[TensorSource | optim.SparseGradient | None]) -> optim.SparseGradient:
    indices, values = [], []
    at = 0
    for gradient in gradients:
        assert isinstance(gradient, optim.SparseGradient)
        indices.append(gradient.indices.astype(np.int64) + at)
        values.append(gradient.values)
        at += gradient.size
    return optim.SparseGradient(np.concatenate(indices), np.concatenate(values), at)
