"""What a tensor is to the optimizer: a weight, a first or second moment, a gradient, or something else.

Names decide where they say something; otherwise values do: what is never negative and tiny is a second moment.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from ckptstore.analysis.series import Read, TensorType
from ckptstore.errors import UsageError
from ckptstore.formats import dtypes
from ckptstore.reports.tensor_numbers import doubles, is_integer

__all__ = ["CLASSES", "Classified", "TensorClass", "by_name", "by_values", "classify", "parse_overrides"]

TensorClass: TypeAlias = Literal["weight", "first_moment", "second_moment", "gradient", "other"]
CLASSES: Final[tuple[TensorClass, ...]] = get_args(TensorClass)

_LOOKED_AT: Final = 1 << 14
"""Bytes read at the beginning and in the middle of a tensor whose name says nothing."""
_TINY: Final = 1e-3
_SPLIT: Final = re.compile(r"[./:/\s]+")
_SECOND: Final = re.compile(
    r"(max_)?exp_avg_sq(_row|_col)?|exp_inf|square_avg|second_moment\w*|moment2|nu|acc_delta|sum|variance", re.I
)
_FIRST: Final = re.compile(r"exp_avg|first_moment\w*|moment1|momentum(_buffer)?|grad_avg|mu", re.I)
_GRADIENT: Final = re.compile(r"grads?|gradients?", re.I)
_OTHER: Final = re.compile(
    r"running_(mean|var)|num_batches_tracked|step|rng\w*|inv_freq|\w*_rng_state|scaler|lr_scheduler|"
    r"position_ids|attn_mask",
    re.I,
)
_WEIGHT: Final = re.compile(r"weights?|bias|kernel|embeddings?|gamma|beta|\w+_(weight|bias)|(q|k|v|o)_proj", re.I)
_MODEL: Final = re.compile(r"model|module|models|params|parameters|master|state_dict|network|net|ema", re.I)
_OPTIMIZER: Final = re.compile(r"optim\w*|opt(_state)?", re.I)


@dataclass(frozen=True, slots=True)
class Classified:
    """A class, and what decided it: ``name``, ``values`` or ``override``."""

    kind: TensorClass
    by: Literal["name", "values", "override"]


def parse_overrides(texts: Iterable[str]) -> list[tuple[str, TensorClass]]:
    """``GLOB=CLASS`` -> pairs. Raises `UsageError`."""
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
    """The class of every tensor.

    Args:
        tensors: names and types.
        read: reads the checkpoint in which values are looked at: at most 32 KiB of each tensor without a telling name.
        overrides: (glob, class); the last that matches wins.

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
            optimizer = any(_OPTIMIZER.fullmatch(part) for part in _SPLIT.split(name))
            found[name] = Classified(by_values(_look(name, tensor, read), optimizer=optimizer), "values")
    return found


def by_name(name: str, tensor: TensorType) -> TensorClass | None:
    """What the name and the dtype say; None for nothing.

    ``v.`` and ``m.`` in front (or directly below the optimizer) may be moments, but also a value projection: values
    decide.
    """
    parts = [part for part in _SPLIT.split(name) if part]
    if tensor.dtype == "BOOL" or is_integer(dtypes.get(tensor.dtype)) or not tensor.shape:
        return "other"
    patterns: tuple[tuple[re.Pattern[str], TensorClass], ...] = (
        (_SECOND, "second_moment"),
        (_FIRST, "first_moment"),
        (_GRADIENT, "gradient"),
        (_OTHER, "other"),
    )
    model = _MODEL.fullmatch(parts[0]) is not None
    for pattern, kind in patterns:
        # Inside a model a module may be called anything: only what no module is called counts there.
        where = parts[-1:] if model else parts
        if any(pattern.fullmatch(part) for part in where):
            return kind
    optimizer = any(_OPTIMIZER.fullmatch(part) for part in parts)
    if optimizer or parts[0].lower() in ("m", "v"):
        return None
    return "weight" if model or _WEIGHT.fullmatch(parts[-1]) else None


def by_values(values: npt.NDArray[np.float64], *, optimizer: bool = False) -> TensorClass:
    """What values look like.

    Args:
        values: some of the tensor's.
        optimizer: the name places the tensor among an optimizer's, so that signed values are a first moment.
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
