"""Classify tensors by their role for the optimizer: weight, first or second moment, gradient, or something else.

A name that shows the role decides; otherwise the values do: tiny values that are never negative are a second moment.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from ckptstore.analysis.series import Read, TensorType
from ckptstore.errors import UsageError
from ckptstore.formats import dtypes
from ckptstore.formats.tensor_classes import CLASSES, TensorClass, class_by_name, of_an_optimizer
from ckptstore.reports.tensor_numbers import doubles

__all__ = ["CLASSES", "Classified", "TensorClass", "by_name", "by_values", "classify", "parse_overrides"]

_LOOKED_AT: Final = 1 << 14
"""Bytes read at the beginning and in the middle of a tensor whose name does not show its role."""
_TINY: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Classified:
    """A class, and what determined it: ``name``, ``values`` or ``override``."""

    kind: TensorClass
    by: Literal["name", "values", "override"]


def parse_overrides(texts: Iterable[str]) -> list[tuple[str, TensorClass]]:
    """Parse ``GLOB=CLASS`` -> pairs. Raises `UsageError`."""
    found: list[tuple[str, TensorClass]] = []
    for text in texts:
        glob, _, name = text.rpartition("=")
        kind = next((one for one in CLASSES if one == name.strip().lower()), None)
        if not glob or kind is None:
            raise UsageError(f"--class {text!r}: give GLOB=CLASS, where CLASS is one of {', '.join(CLASSES)}")
        found.append((glob, kind))
    return found


def classify(
    tensors: Mapping[str, TensorType], read: Read, overrides: Sequence[tuple[str, TensorClass]] = ()
) -> dict[str, Classified]:
    """Determine the class of every tensor.

    Args:
        tensors: names and types.
        read: reads the checkpoint whose values are examined: at most 32 KiB of each tensor whose name shows no role.
        overrides: (glob, class); the last match wins.

    Raises:
        UsageError: an override matches no tensor.
    """
    for glob, _ in overrides:
        if not fnmatch.filter(tensors, glob):
            raise UsageError(f"--class {glob!r} matches no tensor; names are like {next(iter(tensors))!r}")
    found: dict[str, Classified] = {}
    for name, tensor in tensors.items():
        chosen = [kind for glob, kind in overrides if name == glob or fnmatch.fnmatchcase(name, glob)]
        if chosen:
            found[name] = Classified(chosen[-1], "override")
        elif (kind := by_name(name, tensor)) is not None:
            found[name] = Classified(kind, "name")
        else:
            kind = by_values(_look(name, tensor, read), optimizer=of_an_optimizer(name))
            found[name] = Classified(kind, "values")
    return found


def by_name(name: str, tensor: TensorType) -> TensorClass | None:
    """The class from name and dtype; None if they do not show it (`class_by_name`)."""
    return class_by_name(name, tensor.dtype, tensor.shape)


def by_values(values: npt.NDArray[np.float64], *, optimizer: bool = False) -> TensorClass:
    """The class from sample values.

    Args:
        values: some of the tensor's values.
        optimizer: the name shows that the tensor belongs to an optimizer, so that signed values are a first moment.
    """
    finite = values[np.isfinite(values)]
    if not len(finite) or not finite.any():
        return "first_moment" if optimizer else "weight"
    if finite.min() >= 0 and np.median(finite) < _TINY and np.quantile(finite, 0.9) < 10 * _TINY:
        return "second_moment"
    return "first_moment" if optimizer else "weight"


def _look(name: str, tensor: TensorType, read: Read) -> npt.NDArray[np.float64]:
    length = min(_LOOKED_AT, tensor.nbytes)
    middle = (tensor.nbytes - length) // 2 // 16 * 16
    dtype = dtypes.get(tensor.dtype)
    starts = {0, middle} if tensor.nbytes > length else {0}
    return np.concatenate([doubles(dtype, read(name, start, length)) for start in sorted(starts)])
