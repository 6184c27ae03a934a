"""Minimize the wasted time: Eq. (10), the continuous optimum, and the best pair of integers.

With x = log(1/f) and y = log(b) every term of the model is convex (exp of a linear form, or log2(1 + exp(x - y))), and
so is the region 1 <= b <= 1/f. So along b, with the best 1/f for each, the wasted time falls and then rises
(docs/tuning.md, which also treats replay that is slower than training). Therefore the searches below are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ckptstore.tuning.wasted_time import Model

__all__ = ["Configuration", "Point", "best", "continuous", "fulls_only", "neighbours", "paper_optimum"]

_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Configuration:
    """A trainer's configuration: a full every `interval` (1/f) iterations, `batch` (b) diffs per write."""

    interval: int
    batch: int


@dataclass(frozen=True, slots=True)
class Point:
    """A point of the (1/f, b) plane; need not be integer."""

    interval: float
    batch: float


def paper_optimum(model: Model) -> Point:
    """Eq. (10): 1/f* and b* where both derivatives (Eq. (9)) vanish; ignores the constraint 1 <= b <= 1/f.

    It covers only Eq. (8): `replay_diff`, `batch_write` and parallel recovery are ignored. `merge_batch` must not be 0.
    """
    # f* = cbrt(R_D W^2 / (4 S^2 M^2)) and b* = cbrt(2 S R_D M / W), with S/W and R_D in iterations.
    product = model.full_write * model.mtbf
    return Point(math.cbrt(4 * product**2 / model.merge_batch), math.cbrt(2 * product * model.merge_batch))


def continuous(model: Model) -> Point:
    """The real (1/f, b) with the minimum wasted time under 1 <= b <= 1/f."""

    def lowest(log_batch: float) -> float:
        batch = math.exp(log_batch)
        return model.total(_interval(model, batch), batch)

    high = 1.0
    while lowest(high + 1) < lowest(high):
        high += 1
    batch = math.exp(_minimum(lowest, 0.0, high + 1))
    return Point(_interval(model, batch), batch)


def best(model: Model) -> Configuration:
    """The integers 1 <= b <= 1/f with the minimum wasted time."""
    start = max(1, round(continuous(model).batch))
    found = _best_interval(model, start)
    for direction in (1, -1):
        batch = start + direction
        # The waste at the best real 1/f for this b is a lower bound. Once it is no better, no b further out is better.
        while batch >= 1 and model.total(_interval(model, batch), batch) < _at(model, found):
            found = min(found, _best_interval(model, batch), key=lambda pair: _at(model, pair))
            batch += direction
    return found


def fulls_only(model: Model) -> Configuration:
    """The best interval without diffs: b = 1/f, half an interval of lost work, Young's sqrt(2 M S/W)."""
    rate = (model.full_write + model.batch_write) * 2 * model.mtbf
    low = max(1, math.floor(math.sqrt(rate)))
    return min((Configuration(n, n) for n in (low, low + 1)), key=lambda pair: _at(model, pair))


def neighbours(model: Model, at: Configuration) -> dict[Configuration, float]:
    """Wasted time (share of training time) near a configuration: half, the same and double of each value, in order."""
    intervals = sorted({max(1, at.interval // 2), at.interval, at.interval * 2})
    batches = sorted({max(1, at.batch // 2), at.batch, at.batch + 1 if at.batch == 1 else at.batch * 2})
    pairs = [Configuration(interval, batch) for interval in intervals for batch in batches if batch <= interval]
    return {pair: _at(model, pair) for pair in pairs}


def _at(model: Model, pair: Configuration) -> float:
    return model.total(pair.interval, pair.batch)


def _interval(model: Model, batch: float) -> float:
    """The real 1/f with the minimum wasted time for a given b, at least b."""
    if model.recovery == "serial":
        # d/dn of (R_D/b + r) n / (2 M) + (S/W) / n
        slope = (model.merge_batch / batch + model.replay_diff) / (2 * model.mtbf)
        return max(batch, math.sqrt(model.full_write / slope))
    # d/dn of (R_D / M) log2((n/b + 1) / 2) + (S/W) / n vanishes where c n^2 = n + b
    c = model.merge_batch / (math.log(2) * model.full_write * model.mtbf)
    return max(batch, (1 + math.sqrt(1 + 4 * c * batch)) / (2 * c))


def _best_interval(model: Model, batch: int) -> Configuration:
    """The integer 1/f with the minimum wasted time for a given b: next to the real one, as waste falls, then rises."""
    low = max(batch, math.floor(_interval(model, batch)))
    return min((Configuration(n, batch) for n in (low, low + 1)), key=lambda pair: _at(model, pair))


def _minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """Golden-section search for the minimum of a function that falls and then rises."""
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > 1e-10:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = function(right)
    # At an end a constraint holds (b = 1): golden sections approach the ends but never reach them.
    return min((low, (low + high) / 2, high), key=function)
