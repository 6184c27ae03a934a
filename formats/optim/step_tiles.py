"""Taking a step on a parameter's whole state, tile by tile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ckptstore.formats.codecs import BLOCK
from ckptstore.formats.optim.arithmetic import FLOAT, PATTERN, Floats, Patterns, exactly, floats, tiles
from ckptstore.formats.optim.step_settings import Rule

Array: TypeAlias = npt.NDArray[Any]
BLOCK_NUMBERS = BLOCK // 4
"""Numbers of a block: 1 MiB of each tensor of the state."""


def advance(rule: Rule, state: Sequence[Array], gradient: Array) -> None:
    """Take one optimizer step in place.

    Args:
        rule: the step's arithmetic (``AdamW(…).rule(Step(…))``).
        state: contiguous fp32 arrays (or their uint32 patterns), one for each of ``rule.slots``, of equal length. A
            tensor may be cut anywhere, and parts given to as many threads; parts of several tensors of one group may
            be laid end to end.
        gradient: what backward left, before loss scale and clipping are undone: fp32 (or uint32 patterns), fp16, or
            bf16 (ml_dtypes' or uint16 patterns). Not changed.

    Raises:
        ValueError: arrays of other sizes or dtypes.
        CkptError: this thread's arithmetic is not IEEE's (``arithmetic.exactly``).
    """
    parts = slots_of(rule, state)
    count = len(parts[0])
    if gradient.size != count:
        raise ValueError(f"a gradient of {gradient.size} numbers for a state of {count}")
    flat = np.ascontiguousarray(gradient).reshape(-1)
    with exactly():
        for tile in tiles(count):
            work = floats("gradient", tile.stop - tile.start)
            widen(flat[tile], work)
            rule.apply([part[tile] for part in parts], work)


def slots_of(rule: Rule, state: Sequence[Array]) -> list[Floats]:
    """The state's arrays as flat fp32 views. Raises ``ValueError`` unless they are what the rule works on."""
    if len(state) != len(rule.slots):
        raise ValueError(f"{len(state)} arrays for the slots {', '.join(rule.slots)}")
    parts = [as_floats(array) for array in state]
    if len({len(part) for part in parts}) > 1:
        raise ValueError(f"the slots {', '.join(rule.slots)} have {[len(part) for part in parts]} numbers")
    return parts


def as_floats(array: Array) -> Floats:
    """A flat fp32 view of contiguous memory that holds fp32 numbers or their patterns."""
    if array.dtype not in (FLOAT, PATTERN):
        raise ValueError(f"optimizer state is fp32 (or uint32 patterns of it), not {array.dtype}")
    if not array.flags.c_contiguous:
        raise ValueError("optimizer state has to be contiguous")
    return cast(Floats, array.reshape(-1).view(FLOAT))


def widen(values: Array, out: Floats) -> None:
    """Gradients as fp32, exactly: fp32 or its patterns, fp16, bf16 or its patterns (uint16)."""
    kind = values.dtype
    if kind in (FLOAT, PATTERN):
        np.copyto(patterns_of(out), values.view(PATTERN))
    elif kind == np.float16:
        np.copyto(out, values)
    elif kind.name in ("bfloat16", "uint16"):
        np.left_shift(values.view("<u2"), 16, out=patterns_of(out), dtype=PATTERN)
    else:
        raise ValueError(f"gradients are fp32, fp16 or bf16, not {kind}")


def patterns_of(values: Floats) -> Patterns:
    """The bit patterns of fp32 numbers, as a view."""
    return cast(Patterns, values.view(PATTERN))
