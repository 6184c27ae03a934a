"""Infer a bf16 gradient from the first moments: mixed precision stores steps without gradients as if it had them.

Under Adam the new first moment determines the gradient up to rounding. A bf16 gradient has 8 bits of mantissa, so
rounding hides it only where it is far smaller than the moment: 9 in 100,000 numbers. A payload of `replayed` then
restores the step exactly, for less than half of what `predicted` takes; the residuals correct what was missed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckptstore.formats.codecs.rounding import to_bfloat16
from ckptstore.formats.optim.adam import AdamRule
from ckptstore.formats.optim.arithmetic import doubles, exactly, floats, tiles
from ckptstore.formats.optim.residuals import missed
from ckptstore.formats.optim.step_settings import Rule
from ckptstore.formats.optim.step_tiles import Array, advance, patterns_of, slots_of

_TRIED = 2048
_FEW = 64  # at most one in so many first moments may be missed


def explains(rule: Rule, old: Sequence[Array], new: Sequence[Array]) -> bool:
    """Whether the inferred gradients of a sample repeat the first moments: then training's are bf16."""
    if not isinstance(rule, AdamRule) or not rule.weight1 or not all(rule.scales):
        return False
    before, after = ([part[:_TRIED] for part in slots_of(rule, state)] for state in (old, new))
    state = [part.copy() for part in before]
    advance(rule, state, gradient(rule, before, after))
    return _FEW * missed(patterns_of(after[1]), patterns_of(state[1])) <= len(after[1])


def gradient(rule: Rule, old: Sequence[Array], new: Sequence[Array]) -> Array:
    """The bf16 gradient (patterns, before scaling) that led from the old state to the new one. ``rule`` is Adam's."""
    assert isinstance(rule, AdamRule)
    (weight, before), after = slots_of(rule, old)[:2], slots_of(rule, new)[1]
    out = np.empty(len(after), "<u2")
    with exactly():
        for tile in tiles(len(after)):
            count = tile.stop - tile.start
            found, moment, single = doubles("product", count), doubles("total", count), floats("change", count)
            np.copyto(found, after[tile])
            np.copyto(moment, before[tile])
            np.subtract(found, moment, out=found)
            np.multiply(found, 1.0 / rule.weight1, out=found)
            np.add(found, moment, out=found)
            if rule.l2:
                np.subtract(found, weight[tile].astype(np.float64) * rule.l2, out=found)
            scale = (-1.0 if rule.maximize else 1.0) / float(np.prod(rule.scales or (1.0,)))
            np.multiply(found, scale, out=found)
            np.copyto(single, found, casting="unsafe")
            to_bfloat16(patterns_of(single), out[tile])
    return out
