"""Format the sentences that the command and the report share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from ckptstore.analysis.analysis import Analysis
from ckptstore.analysis.methods import SHOWN
from ckptstore.analysis.sampling import CONFIDENCE, Estimate
from ckptstore.formats import codecs
from ckptstore.formats.byte_text import size
from ckptstore.write.policy.delta_interval import RestoreBound

__all__ = [
    "headline",
    "other_mode",
    "percent",
    "prefix_lines",
    "ratio",
    "restore_line",
    "sample_line",
    "to_copy",
    "what_to_do",
]

PREFIXES: Final = tuple(one.name for one in codecs.Prefix.methods)
"""The methods of the XOR paper for moments."""
STEP_BITS: Final = 27
"""Bits per parameter of a step diff of an fp32 Adam state (docs/optimizer.md: 26 to 27)."""


def ratio(estimate: Estimate) -> str:
    """``1.62×``; ``free`` if nothing is stored."""
    if not math.isfinite(estimate.ratio):
        return "free"
    return f"{estimate.ratio:.2f}×" if estimate.ratio < 99.5 else f"{estimate.ratio:,.0f}×"


def percent(estimate: Estimate) -> str:
    """The margin as a share of the estimate: ``0.4 %``; empty if it is exact, ``?`` if it is unknown."""
    if estimate.margin is None:
        return "?"
    if not estimate.margin or not estimate.fraction:
        return ""
    return f"{100 * estimate.margin / estimate.fraction:.1f} %"


def headline(found: Analysis) -> str:
    """The recommendation in one sentence."""
    advice, best = found.advice, found.advice.best
    if not best.interval:
        return f"Store fulls: no delta pays within the restore bound ({size(advice.full)} per checkpoint)"
    smaller = advice.nbytes / best.mean if best.mean else math.inf
    return f"Deltas with interval T = {best.interval}: {smaller:.2f}× smaller, {size(best.mean)} per checkpoint"


def restore_line(found: Analysis) -> str:
    """The cost of a restore, and the codecs."""
    advice, best = found.advice, found.advice.best
    chosen = ", ".join(f"{found.label(one.group)} by {one.method}" for one in advice.groups if one.group in found.major)
    if not best.interval:
        return f"Codecs that are smallest: {chosen}."
    beyond = "" if best.interval <= advice.measured else f" T is beyond the largest gap measured, {advice.measured}."
    return (
        f"Chains of at most {best.deltas} deltas: the most expensive restore reads {size(best.restore)}, "
        f"{best.times:.2f} times a full. {chosen[0].upper()}{chosen[1:]}.{beyond}"
    )


def sample_line(found: Analysis) -> str:
    """What was measured, and the confidence level."""
    if found.exact:
        return "every byte of the compared checkpoints was measured"
    return (
        f"{found.sampled:.1%} of the bytes were measured, in blocks of 1 MiB drawn at random; "
        f"± is half a {CONFIDENCE:.0%} confidence interval"
    )


def prefix_lines(found: Analysis) -> Iterator[str]:
    """What the XOR paper's dictionaries of prefixes take beside byte planes: a line for each class of moments."""
    for number, group in enumerate(found.groups):
        alone = [one for one in found.summaries if (one.group, one.gap) == (number, None)]
        fractions = {one.method: one.estimate.fraction for one in alone}
        prefixes = [fractions[method] for method in PREFIXES if method in fractions]
        mine, planes = min(prefixes, default=0.0), fractions.get("planes", 0.0)
        if not mine or not planes or not group.kind.endswith("moment"):
            continue
        both = f"{found.label(number)}: prefixes {1 / mine:.3f}×, byte planes {1 / planes:.3f}×"
        if planes <= mine:
            yield f"{both}: planes take {1 - planes / mine:.1%} less"
        else:
            yield f"{both}: Policy(by_class={{{group.kind!r}: ('prefix',)}}) takes {1 - mine / planes:.1%} less"


def what_to_do(found: Analysis) -> str:
    """One sentence that says what to do."""
    advice, best = found.advice, found.advice.best
    if not best.interval:
        return "What to do: keep storing fulls (a writer without deltas=): no delta pays within the restore bound."
    every = "step" if found.spacing == 1 else f"{found.spacing:,} steps"
    return (
        f"What to do: save every {every}, as here, with store.writer(deltas=DeltaOptions({_arguments(found)})): "
        f"{size(best.mean)} per checkpoint instead of {size(advice.nbytes)}."
    )


def _arguments(found: Analysis) -> str:
    advice, options = found.advice, found.options
    arguments = [f"interval={advice.best.interval}"]
    if any(SHOWN[one.method].context for one in advice.groups if one.group in found.major):
        arguments.append("policy=SMALL_POLICY")
    if options.bound != RestoreBound():
        arguments.append(f"bound={options.bound!r}")
    if options.compress_fulls:
        arguments.append("compress_fulls=True")
    return ", ".join(arguments)


def to_copy(found: Analysis) -> list[str]:
    """The lines for the training script, imports first."""
    if not found.advice.best.interval:
        return ["writer = store.writer()"]
    arguments = _arguments(found)
    names = {"DeltaOptions": "ckptstore", "RestoreBound": "ckptstore", "SMALL_POLICY": "ckptstore.formats.codecs"}
    line = f"writer = store.writer(deltas=DeltaOptions({arguments}))"
    return [*(f"from {room} import {name}" for name, room in names.items() if name in line), line]


def other_mode(found: Analysis) -> str | None:
    """A hint that step diffs would be smaller, if every step is saved and the state is Adam's; else None."""
    sizes = {
        kind: sum(group.nbytes for group in found.groups if group.kind == kind and group.dtype == "F32")
        for kind in ("weight", "first_moment", "second_moment")
    }
    moments = sizes["first_moment"]
    if found.spacing != 1 or not moments or moments != sizes["second_moment"] or sizes["weight"] < moments:
        return None
    step = moments / 4 * STEP_BITS / 8
    best = found.advice.best
    if step >= best.mean:
        return None
    return (
        f"Smaller still, if the script says what the optimizer did: step diffs of about {size(step)}, "
        "store.writer(diffs=ckptstore.DiffOptions()) and updates=OptimizerStep(optimizer) with each save."
    )
