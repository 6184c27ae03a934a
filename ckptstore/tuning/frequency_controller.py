"""Adapt (1/f, b) step by step to the measured bandwidth and failure rate (LowDiff §VII), without flapping.

At each full the controller compares the waste of its configuration with the minimum for the estimates. It starts to
move when its waste exceeds the minimum by more than `hysteresis`. It moves towards the optimum in steps of at most a
factor of two in each of 1/f and b, and stops there or within a quarter of `hysteresis`. For each configuration, the
model times M is linear in M and in M/W and has no negative term. So its minimum over configurations is concave in them.
After the controller has stopped, the estimate of M or of W must change by more than a factor (1 + h) / (1 + h/4) before
it moves again. In practice the factor is far larger (1.5 at h = 0.02), because the optimum is flat.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from ckptstore.errors import UsageError
from ckptstore.tuning.optimum import Configuration, best
from ckptstore.tuning.wasted_time import Job, Model

__all__ = ["Change", "Controller"]

_STEP: Final = 2.0
"""Maximum factor by which one change moves 1/f or b."""


@dataclass(frozen=True, slots=True)
class Change:
    """One step of the controller.

    Attributes:
        before, after: the configurations.
        target: the best configuration for the current estimates; later changes lead there.
        saves: wasted time of `before` minus that of `target`, as a share of training time.
    """

    before: Configuration
    after: Configuration
    target: Configuration
    saves: float


class Controller:
    """Keeps (1/f, b) near the optimum for its measurements. For one thread; uses no clock, so it can be replayed.

    Args:
        job: the job as known at the start; provides the first estimates.
        start: the first configuration; None: the best for `job`.
        hysteresis: tolerated excess over the minimum (0.02: 2% of the wasted time).
        writes: number of writes in the average of the bandwidth.
        failures: number of failures in the average of the time between failures.

    Example:
        >>> job = Job(8.7e9, 1e9, mtbf=3600, iteration=0.5, load_full=5, merge_batch=0.2)
        >>> controller = Controller(job)
        >>> controller.configuration
        Configuration(interval=5368, batch=46)
        >>> controller.wrote(8.7e9, 87.0)  # ten times slower than estimated
        >>> controller.adapt().after
        Configuration(interval=10736, batch=66)
    """

    def __init__(
        self,
        job: Job,
        *,
        start: Configuration | None = None,
        hysteresis: float = 0.02,
        writes: int = 4,
        failures: int = 8,
    ) -> None:
        if not 0 < hysteresis < math.inf or writes < 1 or failures < 1:
            raise UsageError("hysteresis has to be above 0, writes and failures at least 1")
        job.model().total(*((start.interval, start.batch) if start else (1, 1)))  # raises if `start` is invalid
        self.configuration = best(job.model()) if start is None else start
        self._job = job
        self._hysteresis = hysteresis
        self._write_memory, self._failure_memory = 1 - 1 / writes, 1 / failures
        # The first estimate weighs as much as a full average of writes at the given speed.
        self._written, self._write_seconds = job.full_bytes * writes, job.full_bytes * writes / job.bandwidth
        self._since_failure = 0.0
        self._mtbf = job.mtbf
        self._moving = False

    @property
    def job(self) -> Job:
        """The job with the current estimates."""
        return replace(self._job, bandwidth=self._written / self._write_seconds, mtbf=self._estimated_mtbf())

    def wrote(self, nbytes: float, seconds: float) -> None:
        """Record that a full of `nbytes` took `seconds` to write. Raises `UsageError` unless both are above 0."""
        if not (0 < nbytes < math.inf and 0 < seconds < math.inf):
            raise UsageError(f"{nbytes:g} bytes written in {seconds:g} s: both have to be above 0")
        self._written = self._written * self._write_memory + nbytes
        self._write_seconds = self._write_seconds * self._write_memory + seconds

    def ran(self, seconds: float) -> None:
        """Record `seconds` more of training without a failure. Raises `UsageError` if that is negative."""
        if not 0 <= seconds < math.inf:
            raise UsageError(f"ran for {seconds:g} s: 0 or more is needed")
        self._since_failure += seconds

    def failed(self) -> None:
        """Record a failure, after the time that was passed to `ran`."""
        # Failures with no time between them (a crash loop) count as one iteration apart, because M must not reach 0.
        gap = max(self._since_failure, self._job.iteration)
        self._mtbf += (gap - self._mtbf) * self._failure_memory
        self._since_failure = 0.0

    def adapt(self) -> Change | None:
        """Take one step if it pays -> the change; None: no change. Call it when a full is due: a change acts there."""
        model = self.job.model()
        target, now = best(model), self.configuration
        at_best, at_now = _total(model, target), _total(model, now)
        tolerated = self._hysteresis / 4 if self._moving else self._hysteresis
        after = _towards(now, target)
        self._moving = at_now > at_best * (1 + tolerated) and after != now
        if not self._moving:
            return None
        self.configuration = after
        self._moving = after != target
        return Change(now, after, target, at_now - at_best)

    def _estimated_mtbf(self) -> float:
        """The average time between failures; higher while the current run without a failure is longer."""
        return self._mtbf + max(0.0, self._since_failure - self._mtbf) * self._failure_memory


def _total(model: Model, pair: Configuration) -> float:
    return model.total(pair.interval, pair.batch)


def _towards(now: Configuration, target: Configuration) -> Configuration:
    """Take a straight step in log(1/f), log(b). The model is convex there, so waste falls all the way to the target."""
    x, y = math.log(target.interval / now.interval), math.log(target.batch / now.batch)
    longest = max(abs(x), abs(y))
    if longest <= math.log(_STEP):
        return target
    share = math.log(_STEP) / longest
    # 1 <= b <= 1/f holds at both ends, so also between them, and rounding keeps the order.
    return Configuration(round(now.interval * math.exp(x * share)), round(now.batch * math.exp(y * share)))
