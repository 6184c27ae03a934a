"""Write the titles of the report's plots: each states the plot's result."""

from __future__ import annotations

import math

from ckptstore.analysis.analysis import Analysis
from ckptstore.analysis.methods import SHOWN
from ckptstore.analysis.report_plots import speed
from ckptstore.analysis.sampling import Estimate
from ckptstore.analysis.sentences import ratio
from ckptstore.formats.byte_text import size
from ckptstore.formats.codecs import word_size

__all__ = [
    "codecs_title",
    "gaps_title",
    "intervals_title",
    "prefixes_title",
    "shipping_title",
    "speeds_title",
    "training_title",
    "why_not_soonest",
]


def codecs_title(found: Analysis) -> str:
    """The recommended codec of each class, and its ratio at the gap of the plot."""
    cells = {(one.group, one.method): one.estimate for one in found.summaries if one.gap in (None, found.gap)}
    best = [one for one in found.advice.groups if one.group in found.major]
    said = "; ".join(
        f"{found.label(one.group)}: {_smaller(cells.get((one.group, one.method), one.estimate))} by {one.method}"
        for one in best[:3]
    )
    return said[:1].upper() + said[1:]


def _smaller(estimate: Estimate) -> str:
    return f"{ratio(estimate)} smaller" if math.isfinite(estimate.ratio) else "nothing to store"


def training_title(found: Analysis) -> str:
    """How the ratio of the largest class changes over training."""
    number = _largest(found)
    chosen = next(one for one in found.advice.groups if one.group == number)
    points = [one for one in found.over_training(number, chosen.method) if one.estimate.fraction]
    if len(points) < 2:
        return "Over training"
    first, last = points[0].estimate, points[-1].estimate
    way = "grows" if last.ratio > first.ratio * 1.02 else "falls" if last.ratio < first.ratio / 1.02 else "stays"
    course = f"from {ratio(first)} to {ratio(last)}" if way != "stays" else f"at {ratio(last)}"
    return f"Over training, what {chosen.method} saves on {found.label(number)} {way} {course}"


def gaps_title(found: Analysis) -> str:
    """Bits per value of the largest class at the smallest and at the largest gap."""
    number = _largest(found)
    cells = {one.gap: one for one in found.summaries if one.group == number and one.method == "sub"}
    there = [gap for gap in found.gaps if gap in cells]
    if len(there) < 2:
        return "How a delta grows with its gap"
    bits = 8 * word_size(found.groups[number].dtype)
    near, far = (bits * cells[gap].estimate.fraction for gap in (there[0], there[-1]))
    before = "the checkpoint before" if there[0] == 1 else f"the one {there[0]:,} before"
    return (
        f"A delta of {found.label(number)} takes {near:.1f} bits per value against {before}, {far:.1f} against the one "
        f"{there[-1]:,} before"
    )


def intervals_title(found: Analysis) -> str:
    """The recommended interval, and whether it stores the least of all."""
    best = found.advice.best
    least = min(found.advice.alternatives, key=lambda one: one.mean)
    if not best.interval:
        return "No interval pays: " + (
            "fulls alone store least" if best.mean <= least.mean else "none stores 0.1 % less than fulls alone"
        )
    rank = "stores least" if best.mean <= least.mean else f"stores as little as T = {least.interval} within 0.1 %"
    return f"T = {best.interval} {rank}: {size(best.mean)} per checkpoint, fulls and deltas together"


def shipping_title(found: Analysis) -> str:
    """The links on which compressing before sending is faster than sending raw."""
    links = list(dict.fromkeys(one.link for one in found.shipping))
    times = {(one.link, one.method): one.serial for one in found.shipping}
    if pays := [speed(link) for link in links if times[link, "recommended"] < times[link, "raw"]]:
        return f"Compressing before sending pays at {', '.join(pays)}"
    # The recommendation stores the fewest bytes. Another method may encode faster, and so be sent sooner.
    sooner = {link for (link, _), time in times.items() if time < times[link, "raw"]}
    if others := [speed(link) for link in links if link in sooner]:
        return f"Compressing before sending pays at {', '.join(others)}, but not as recommended"
    return "Sending raw is fastest on every link"


def why_not_soonest(found: Analysis) -> str:
    """Sentences about methods that are sent sooner than the recommended ones; empty if there are none."""
    sooner: dict[str, list[str]] = {}
    for link in dict.fromkeys(one.link for one in found.shipping):
        rows = {one.method: one for one in found.shipping if one.link == link}
        quickest = min(rows.values(), key=lambda one: one.serial)
        if quickest.serial < 0.99 * rows["recommended"].serial:
            sooner.setdefault(quickest.method, []).append(speed(link))
    if not sooner:
        return ""
    where = "; ".join(f"{method} at {', '.join(links)}" for method, links in sooner.items())
    said = f" The recommended codecs store least; something else is sent soonest: {where}."
    if any(SHOWN[one.method].context for one in found.advice.groups if one.group in found.major):
        said += " If sending must keep up with saving, omit policy=SMALL_POLICY: codecs without context are faster."
    return said


def speeds_title(found: Analysis) -> str:
    """Encoding and decoding speed of the recommended codecs together."""
    advice = found.advice
    return f"The recommended codecs encode {_rate(advice.encode)} and decode {_rate(advice.decode)} on one core"


def prefixes_title(found: Analysis) -> str:
    """How many of the 512 prefixes of 9 bits occur in the class with the fewest."""
    last = max((one.index for one in found.prefixes), default=0)
    counts = [
        (one.distinct, found.label(one.group))
        for one in found.prefixes
        if one.group in found.major and (one.index, one.bits) == (last, 9)
    ]
    if not counts:
        return "Prefixes of sign and exponent"
    few, label = min(counts)
    return f"Of 512 prefixes of sign and exponent, {label} have {few:,}"


def _largest(found: Analysis) -> int:
    return max(found.major, key=lambda number: found.groups[number].nbytes)


def _rate(value: float) -> str:
    return f"{value / 1e9:.2f} GB/s" if value < 1e15 else "at any speed"
