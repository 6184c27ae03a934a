"""Apply an optimizer step to a parameter's whole state, tile by tile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ckptstore.formats.codecs import BLOCK
from ckptstore.formats.kernel_choice import hot
from ckptstore.formats.optim.arithmetic import FLOAT, PATTERN, Floats, Patterns, exactly, floats, tiles
from ckptstore.formats.optim.step_settings import Rule

Array: TypeAlias = npt.NDArray[Any]
BLOCK_NUMBERS = BLOCK // 4
"""Numbers in a block: 1 MiB of each tensor of the state."""


def advance(rule: Rule, state: Sequence[Array], gradient: Array) -> None:
    """Take one optimizer step in place.

    Args:
        rule: the step's arithmetic (``AdamW(…).rule(Step(…))``).
        state: contiguous fp32 arrays (or their uint32 patterns), one for each of ``rule.slots``, of equal length. A
            tensor may be cut anywhere, and its parts processed by several threads. Parts of several tensors of one
            group may be concatenated.
        gradient: the gradient after backward, before the loss scale is undone and before clipping: fp32 (or uint32
            patterns), fp16, or bf16 (ml_dtypes' or uint16 patterns). It is not changed.

    Raises:
        ValueError: the arrays have the wrong sizes or dtypes.
        CkptError: this thread's arithmetic does not follow IEEE 754 (``arithmetic.exactly``).
    """
    parts = slots_of(rule, state)
    count = len(parts[0])
    if gradient.size != count:
        raise ValueError(f"the gradient has {gradient.size} numbers, the state {count}; they must be equal")
    flat = np.ascontiguousarray(gradient).reshape(-1)
    with exactly():
        take_step(rule, parts, flat)


@hot("ckptstore.formats.optim.compiled_steps", reads=["gradient"])
def take_step(rule: Rule, state: list[Floats], gradient: Array) -> None:
    """Take one step in place, within ``exactly``; see :func:`advance`."""
    for tile in tiles(len(gradient)):
        work = floats("gradient", tile.stop - tile.start)
        widen(gradient[tile], work)
        rule.apply([part[tile] for part in state], work)


def slots_of(rule: Rule, state: Sequence[Array]) -> list[Floats]:
    """The state's arrays as flat fp32 views. Raises ``ValueError`` if they do not match the rule's slots."""
    if len(state) != len(rule.slots):
        raise ValueError(f"state: {len(state)} arrays; pass one for each of the slots {', '.join(rule.slots)}")
    parts = [as_floats(array) for array in state]
    if len({len(part) for part in parts}) > 1:
        raise ValueError(
            f"the slots {', '.join(rule.slots)} have {[len(part) for part in parts]} numbers; they must be equal"
        )
    return parts


def as_floats(array: Array) -> Floats:
    """A flat fp32 view of a contiguous array of fp32 numbers or their patterns. Raises ``ValueError`` for others."""
    if array.dtype not in (FLOAT, PATTERN):
        raise ValueError(f"optimizer state must be fp32 (or its uint32 patterns), not {array.dtype}")
    if not array.flags.c_contiguous:
        raise ValueError("optimizer state must be contiguous")
    return cast(Floats, array.reshape(-1).view(FLOAT))


def widen(values: Array, out: Floats) -> None:
    """Convert a gradient to fp32 exactly. It is fp32 or its patterns (uint32), fp16, bf16 or its patterns (uint16).

    Raises ``ValueError`` for other dtypes.
    """
    kind = values.dtype
    if kind in (FLOAT, PATTERN):
        np.copyto(patterns_of(out), values.view(PATTERN))
    elif kind == np.float16:
        np.copyto(out, values)
    elif kind.name in ("bfloat16", "uint16"):
        np.left_shift(values.view("<u2"), 16, out=patterns_of(out), dtype=PATTERN)
    else:
        raise ValueError(f"gradients must be fp32, fp16 or bf16, not {kind}")


def patterns_of(values: Floats) -> Patterns:
    """The bit patterns of fp32 numbers, as a view."""
    return cast(Patterns, values.view(PATTERN))
