"""The sentences that the command and the report share."""

from __future__ import annotations

import math

from ckptstore.analysis.analyzing import Analysis
from ckptstore.analysis.sampling import CONFIDENCE, Estimate
from ckptstore.write.interval import RestoreBound

__all__ = ["amount", "headline", "percent", "ratio", "restore_line", "sample_line", "what_to_do"]


def amount(nbytes: float) -> str:
    """Bytes in decimal units, three digits: ``41.9 MB``."""
    for size, unit in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= 0.9995 * size:
            value = nbytes / size
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
    return f"{nbytes:.0f} B"


def ratio(estimate: Estimate) -> str:
    """``1.62×``; nothing stored at all is ``free``."""
    if not math.isfinite(estimate.ratio):
        return "free"
    return f"{estimate.ratio:.2f}×" if estimate.ratio < 99.5 else f"{estimate.ratio:,.0f}×"


def percent(estimate: Estimate) -> str:
    """The margin as a share of the estimate: ``0.4 %``; nothing where it is exact, ``?`` where it is unknown."""
    if estimate.margin is None:
        return "?"
    if not estimate.margin or not estimate.fraction:
        return ""
    return f"{100 * estimate.margin / estimate.fraction:.1f} %"


def headline(found: Analysis) -> str:
    """What to do, in one sentence."""
    advice, best = found.advice, found.advice.best
    if not best.interval:
        return f"Store fulls: no delta pays within the restore bound ({amount(advice.full)} per checkpoint)"
    smaller = advice.nbytes / best.mean if best.mean else math.inf
    return f"Deltas with interval T = {best.interval}: {smaller:.2f}× smaller, {amount(best.mean)} per checkpoint"


def restore_line(found: Analysis) -> str:
    """What that costs on restore, and by which codecs."""
    advice, best = found.advice, found.advice.best
    codecs = ", ".join(f"{found.label(one.group)} by {one.method}" for one in advice.groups if one.group in found.major)
    if not best.interval:
        return f"Codecs that are smallest: {codecs}."
    beyond = "" if best.interval <= advice.measured else f" T is beyond the largest gap measured, {advice.measured}."
    return (
        f"Chains of at most {best.deltas} deltas: the dearest restore reads {amount(best.restore)}, "
        f"{best.times:.2f} times a full. {codecs[0].upper()}{codecs[1:]}.{beyond}"
    )


def sample_line(found: Analysis) -> str:
    """What was measured, and how sure it is."""
    if found.exact:
        return "every byte of the compared checkpoints was measured"
    return (
        f"{found.sampled:.1%} of the bytes were measured, in blocks of 1 MiB drawn at random; "
        f"± is half a {CONFIDENCE:.0%} confidence interval"
    )


def what_to_do(found: Analysis) -> str:
    """One sentence that can be followed as it stands."""
    advice, best, options = found.advice, found.advice.best, found.options
    if not best.interval:
        return "What to do: go on storing fulls (a writer without deltas=), for no delta pays within the restore bound."
    arguments = [f"interval={best.interval}"]
    if any(one.method == "sub-context" for one in advice.groups if one.group in found.major):
        arguments.append("policy=SMALL_POLICY")
    if options.bound != RestoreBound():
        arguments.append(f"bound={options.bound!r}")
    if options.compress_fulls:
        arguments.append("compress_fulls=True")
    every = "step" if found.spacing == 1 else f"{found.spacing:,} steps"
    return (
        f"What to do: save every {every}, as here, with store.writer(deltas=DeltaOptions({', '.join(arguments)})): "
        f"{amount(best.mean)} per checkpoint instead of {amount(advice.nbytes)}."
    )
