"""Choose the bytes to measure, and estimate the error of measuring only a part.

The unit is what codecs encode separately: a block of 1 MiB of one tensor (its last block may be shorter), or tensors
below 64 KiB, concatenated. Blocks are drawn by simple random sampling without replacement. Every checkpoint uses the
same blocks, so that codecs, gaps and steps are compared on the same numbers. The stored share of all bytes is estimated
by the ratio of sums (Cochran, Sampling Techniques, chapter 6), with the standard error of that estimator.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ckptstore.analysis.series import Read, TensorType
from ckptstore.analysis.tensor_roles import CLASSES, Classified, TensorClass
from ckptstore.formats.codecs import BLOCK, plan_pools
from ckptstore.host.buffers import Bytes

__all__ = ["CONFIDENCE", "Estimate", "SampleGroup", "SamplePiece", "SampleUnit", "Sums", "group_tensors", "read_unit"]

CONFIDENCE: Final = 0.95
_FEWEST: Final = 8
"""Minimum number of blocks drawn from a group: fewer do not show how much blocks differ."""
_STUDENT: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True, slots=True)
class SamplePiece:
    """A range of a tensor's bytes."""

    name: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class SampleUnit:
    """Bytes that are encoded separately: one piece, or tiny tensors end to end."""

    pieces: tuple[SamplePiece, ...]

    @property
    def nbytes(self) -> int:
        """Logical bytes."""
        return sum(piece.length for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """Tensors of one class and dtype.

    Attributes:
        kind: class.
        dtype: logical dtype.
        tensors: their names.
        nbytes: their logical bytes.
        blocks: total number of units.
        units: the units to measure, in access order.
        decided: what determined the class -> number of tensors.
    """

    kind: TensorClass
    dtype: str
    tensors: tuple[str, ...]
    nbytes: int
    blocks: int
    units: tuple[SampleUnit, ...]
    decided: Mapping[str, int]

    @property
    def sampled(self) -> int:
        """Logical bytes of the units."""
        return sum(unit.nbytes for unit in self.units)


def group_tensors(
    tensors: Mapping[str, TensorType], classes: Mapping[str, Classified], budget: int | float | None
) -> list[SampleGroup]:
    """Group tensors by class and dtype, cut them into units, and draw a sample.

    Args:
        tensors: the tensors to measure.
        classes: class of each tensor.
        budget: bytes to draw from each group, or a share of it (a float up to 1); None: all.

    Returns:
        Groups in the order of `CLASSES`, the largest dtype first.
    """
    members: dict[tuple[TensorClass, str], list[str]] = {}
    for name, tensor in tensors.items():
        members.setdefault((classes[name].kind, tensor.dtype), []).append(name)
    groups = []
    for (kind, dtype), names in members.items():
        units = _cut(names, tensors)
        nbytes = sum(unit.nbytes for unit in units)
        decided: dict[str, int] = {}
        for name in names:
            decided[classes[name].by] = decided.get(classes[name].by, 0) + 1
        drawn = _draw(units, nbytes, budget, f"{kind} {dtype}")
        groups.append(SampleGroup(kind, dtype, tuple(names), nbytes, len(units), drawn, decided))
    return sorted(groups, key=lambda group: (CLASSES.index(group.kind), -group.nbytes, group.dtype))


def _cut(names: Sequence[str], tensors: Mapping[str, TensorType]) -> list[SampleUnit]:
    pools = plan_pools((name, 0, tensors[name].nbytes) for name in names)
    pooled = {member.name for pool in pools for member in pool.members}
    units = [
        SampleUnit((SamplePiece(name, start, min(BLOCK, tensors[name].nbytes - start)),))
        for name in names
        if name not in pooled
        for start in range(0, tensors[name].nbytes, BLOCK)
    ]
    return units + [
        SampleUnit(tuple(SamplePiece(member.name, 0, member.nbytes) for member in pool.members)) for pool in pools
    ]


def _draw(units: Sequence[SampleUnit], nbytes: int, budget: int | float | None, seed: str) -> tuple[SampleUnit, ...]:
    if budget is None:
        return tuple(units)
    wanted = budget * nbytes if isinstance(budget, float) else budget
    count = max(_FEWEST, math.ceil(wanted * len(units) / nbytes))
    if count >= 0.8 * len(units):  # nearly all: then measure all, without an error
        return tuple(units)
    # The seed depends only on the population, so the same checkpoints give the same numbers every time.
    chosen = random.Random(zlib.crc32(f"{seed} {len(units)}".encode())).sample(range(len(units)), count)
    return tuple(units[index] for index in sorted(chosen))


def read_unit(unit: SampleUnit, read: Read) -> Bytes:
    """The bytes of a unit."""
    if len(unit.pieces) == 1:
        return read(unit.pieces[0].name, unit.pieces[0].start, unit.pieces[0].length)
    return np.concatenate([read(piece.name, piece.start, piece.length) for piece in unit.pieces])


@dataclass(frozen=True, slots=True)
class Estimate:
    """The stored share of each byte, and its uncertainty.

    Attributes:
        fraction: stored bytes over logical bytes.
        margin: half the width of the 95 % confidence interval of `fraction`; 0 if every byte was measured; None if too
            little was measured to estimate it.
    """

    fraction: float
    margin: float | None

    @property
    def ratio(self) -> float:
        """Logical over stored bytes; infinite if nothing is stored."""
        return 1 / self.fraction if self.fraction else math.inf

    @property
    def interval(self) -> tuple[float, float] | None:
        """The confidence interval of `ratio`."""
        if self.margin is None:
            return None
        low, high = self.fraction + self.margin, self.fraction - self.margin
        return 1 / low if low else math.inf, 1 / high if high > 0 else math.inf


@dataclass(slots=True)
class Sums:
    """Running sums over measured units: logical bytes x, stored bytes y, and processor seconds."""

    count: int = 0
    logical: float = 0.0
    stored: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    stored_squares: float = 0.0
    encode: float = 0.0
    decode: float = 0.0

    def add(self, logical: int, stored: float, encode: float = 0.0, decode: float = 0.0) -> None:
        """Add one unit."""
        self.count += 1
        self.logical += logical
        self.stored += stored
        self.squares += logical * logical
        self.products += logical * stored
        self.stored_squares += stored * stored
        self.encode += encode
        self.decode += decode

    def estimate(self, blocks: int) -> Estimate:
        """The estimate for a group with `blocks` units."""
        fraction = self.stored / self.logical
        if self.count >= blocks:
            return Estimate(fraction, 0.0)
        if self.count < 2:
            return Estimate(fraction, None)
        residual = self.stored_squares - 2 * fraction * self.products + fraction**2 * self.squares
        spread = math.sqrt(max(0.0, residual) / (self.count - 1))
        mean = self.logical / self.count
        error = math.sqrt((1 - self.count / blocks) / self.count) * spread / mean
        return Estimate(fraction, _student(self.count - 1) * error)


def _student(freedom: int) -> float:
    """The 97.5 % quantile of Student's distribution."""
    return _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96 + 2.5 / freedom
