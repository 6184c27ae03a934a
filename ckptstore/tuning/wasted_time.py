"""Model the wasted time of a training run as a function of (1/f, b): LowDiff §V-C, Eq. (8), in one unit of time.

Eq. (8) adds ``b/2``, which counts iterations, to load and merge times, which are seconds. Here a `Job` holds measured
quantities (bytes, seconds), and `Job.model` converts it, once, into a `Model` where *every* time is in iterations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from ckptstore.errors import UsageError

__all__ = ["Job", "Model", "Recovery", "Waste"]

Recovery = Literal["serial", "parallel"]


@dataclass(frozen=True, slots=True)
class Waste:
    """The parts of the wasted time, each as a share of training time (0.01: one percent). The sum is Eq. (8) / (N T).

    Attributes:
        lost_work: iterations repeated because their diffs were in a batch that was not yet written.
        load: reading the full after failures.
        replay: applying the diffs to it after failures.
        fulls: writing fulls.
        batches: writing batches of diffs, if that stalls training (Eq. (8) has no such term: 0).
    """

    lost_work: float
    load: float
    replay: float
    fulls: float
    batches: float

    @property
    def total(self) -> float:
        """The total wasted time as a share of training time. Above 1 the run wastes more time than it uses."""
        return self.lost_work + self.load + self.replay + self.fulls + self.batches


@dataclass(frozen=True, slots=True)
class Model:
    """Eq. (8), with every time in iterations.

    Attributes:
        mtbf: M, mean iterations between failures.
        full_write: S/W, stall of training by one full.
        load_full: R_F, reading a full.
        merge_batch: R_D, applying one batch, whatever the number of its diffs (a batch that is a sum is applied once;
            for a concatenation this is the cost of opening each segment).
        replay_diff: applying one diff of a batch, for batches that keep their diffs apart. 0 in Eq. (8).
        batch_write: stall of training by one write of a batch, whatever its size. 0 in Eq. (8).
        recovery: ``serial``: batches are applied one after the other. ``parallel``: merged as a tree, so that n of
            them take log2(1 + n) rounds (LowDiff §VII, parallel recovery).

    Raises:
        UsageError: a value is negative or not finite, or makes the optimum infinite.
    """

    mtbf: float
    full_write: float
    load_full: float
    merge_batch: float
    replay_diff: float = 0.0
    batch_write: float = 0.0
    recovery: Recovery = "serial"

    def __post_init__(self) -> None:
        _check(self, {"mtbf", "full_write"})
        if not self.merge_batch + self.replay_diff > 0:
            raise UsageError("applying diffs costs nothing, so no second full would ever pay: give a merge time (R_D)")
        if self.recovery == "parallel" and (self.replay_diff > 0 or not self.merge_batch > 0):
            raise UsageError("parallel recovery merges whole batches: it has a merge time and no replay time per diff")

    def waste(self, interval: float, batch: float) -> Waste:
        """The wasted time with a full every `interval` (1/f) iterations and `batch` (b) diffs per write.

        Raises:
            UsageError: not 1 <= b <= 1/f.
        """
        if not 1 <= batch <= interval:
            raise UsageError(f"batch = {batch:g} and full_every = {interval:g}: 1 <= batch <= full_every is needed")
        merges = (interval / batch - 1) / 2
        if self.recovery == "serial":
            replay = merges * (self.merge_batch + self.replay_diff * batch)
        else:
            replay = self.merge_batch * math.log2(1 + merges)
        return Waste(
            lost_work=batch / 2 / self.mtbf,
            load=self.load_full / self.mtbf,
            replay=replay / self.mtbf,
            fulls=self.full_write / interval,
            batches=self.batch_write / batch,
        )

    def total(self, interval: float, batch: float) -> float:
        """`Waste.total` of `waste`."""
        return self.waste(interval, batch).total


@dataclass(frozen=True, slots=True)
class Job:
    """A training job in measured units.

    Attributes:
        full_bytes: S, stored bytes of a full.
        bandwidth: W, bytes written per second.
        mtbf: M, mean seconds between failures of the whole job.
        iteration: t, seconds per iteration without checkpoints.
        load_full: R_F, seconds to read a full.
        merge_batch: R_D, seconds to apply one batch. See `Model`.
        replay_diff: seconds to apply one diff of a batch. See `Model`.
        write_latency: seconds that one write of a batch stalls training, whatever its size.
        diff_bytes: stored bytes of one diff, or None; only `bandwidth_share` needs them.
        recovery: see `Model`.

    Raises:
        UsageError: a value is negative or not finite.
    """

    full_bytes: float
    bandwidth: float
    mtbf: float
    iteration: float
    load_full: float
    merge_batch: float
    replay_diff: float = 0.0
    write_latency: float = 0.0
    diff_bytes: float | None = None
    recovery: Recovery = "serial"

    def __post_init__(self) -> None:
        _check(self, {"full_bytes", "bandwidth", "mtbf", "iteration"})

    def model(self) -> Model:
        """The same job with every time in iterations: seconds divided by `iteration`."""
        return Model(
            mtbf=self.mtbf / self.iteration,
            full_write=self.full_bytes / self.bandwidth / self.iteration,
            load_full=self.load_full / self.iteration,
            merge_batch=self.merge_batch / self.iteration,
            replay_diff=self.replay_diff / self.iteration,
            batch_write=self.write_latency / self.iteration,
            recovery=self.recovery,
        )

    def bandwidth_share(self, interval: float) -> float | None:
        """Bytes to write per second of training as a share of the bandwidth; None: unknown. Above 1 writes pile up."""
        if self.diff_bytes is None:
            return None
        return (self.diff_bytes + self.full_bytes / interval) / (self.iteration * self.bandwidth)


def _check(values: Job | Model, positive: set[str]) -> None:
    for field in fields(values):
        value = getattr(values, field.name)
        if field.name == "recovery":
            if value not in ("serial", "parallel"):
                raise UsageError(f"recovery={value!r}: 'serial' or 'parallel'")
        elif value is not None and not math.isfinite(value):
            raise UsageError(f"{field.name}: {value:g} is out of range")
        elif value is not None and (value < 0 or (value == 0 and field.name in positive)):
            bound = "more than 0" if field.name in positive else "0 or more"
            raise UsageError(f"{field.name}: {value:g}, {bound} is needed")
