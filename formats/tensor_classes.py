"""Guesses a tensor's role for the optimizer from its name and dtype: a weight, a moment, a gradient, something else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias, get_args

from ckptstore.formats import dtypes

__all__ = ["CLASSES", "TensorClass", "class_by_name", "of_an_optimizer"]

TensorClass: TypeAlias = Literal["weight", "first_moment", "second_moment", "gradient", "other"]
CLASSES: Final[tuple[TensorClass, ...]] = get_args(TensorClass)

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


def of_an_optimizer(name: str) -> bool:
    """Tell whether the name places the tensor inside an optimizer."""
    return any(_OPTIMIZER.fullmatch(part) for part in _SPLIT.split(name))


def class_by_name(name: str, dtype: str, shape: Sequence[int]) -> TensorClass | None:
    """Return the class by name, logical dtype (``"BF16"``) and shape; None if they do not tell.

    ``v.`` and ``m.`` at the start (or directly below the optimizer) may be moments, but also a value projection: then
    the values decide.
    """
    parts = [part for part in _SPLIT.split(name) if part] or [name]
    if dtypes.is_integer(dtypes.get(dtype)) or not shape:
        return "other"
    patterns: tuple[tuple[re.Pattern[str], TensorClass], ...] = (
        (_SECOND, "second_moment"),
        (_FIRST, "first_moment"),
        (_GRADIENT, "gradient"),
        (_OTHER, "other"),
    )
    model = _MODEL.fullmatch(parts[0]) is not None
    for pattern, kind in patterns:
        # Inside a model a module may have any name: only the last part, which is not a module's name, counts there.
        where = parts[-1:] if model else parts
        if any(pattern.fullmatch(part) for part in where):
            return kind
    if of_an_optimizer(name) or parts[0].lower() in ("m", "v"):
        return None
    return "weight" if model or _WEIGHT.fullmatch(parts[-1]) else None
