"""A job that trains, saves, fails and restores: goodput by measured costs.

A job of any number of workers trains in step. After a failure all workers roll back to the newest restorable
checkpoint, as in elastic frameworks, and PCcheck's comparison. *Goodput* is iterations that count in the end, per
second; iterations that are trained again do not count.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from tools.goodput.traces import Failure

__all__ = ["Outcome", "Way", "formula", "simulated", "stalled"]


@dataclass(frozen=True, slots=True)
class Way:
    """A way to save, with what it costs. Seconds.

    Attributes:
        name: for tables.
        interval: iterations from one save to the next.
        stall: what one save costs the loop, waits for earlier saves included.
        durable: from the save until a failure of any kind cannot lose it; infinity: it never gets there.
        restore: to load a durable checkpoint, so that training continues; the start of the job is not part of it.
        every: iterations between states that survive where no machine is lost (memory of an agent or a peer, a local
            disk); 0: there are none.
        near: as `durable`, for these. `near_restore`: as `restore`.
        peers: these states are in another worker's memory: they survive the loss of a machine, unless the peer of one
            is lost as well.
    """

    name: str
    interval: int
    stall: float
    durable: float
    restore: float
    every: int = 0
    near: float = 0.0
    near_restore: float = 0.0
    peers: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to.

    Attributes:
        seconds: of the run.
        useful: iterations that count.
        again: iterations that were trained again.
        stalls, recovery: seconds that saves cost the loop; that starts and restores took.
        failures: how many.
        iteration: seconds of one without saves.
    """

    seconds: float
    useful: int
    again: int
    stalls: float
    recovery: float
    failures: int
    iteration: float

    @property
    def goodput(self) -> float:
        """Useful iterations a second, relative to a job without saves and without failures."""
        return self.useful * self.iteration / self.seconds

    @property
    def wasted(self) -> float:
        """The part of the time that did not train an iteration that counts."""
        return 1 - self.goodput


def stalled(interval: int, iteration: float, durable: float, in_flight: int, own: float = 0.0) -> float:
    """Seconds that one save costs a loop with `in_flight` places: its own, and waiting for a place (PCcheck, 3.4)."""
    return max(own, durable / in_flight - interval * iteration)


def formula(way: Way, iteration: float, seconds: float, failures: int) -> float:
    """PCcheck's goodput (5.2.3), relative to an ideal job: with the mean recovery of Eq. (4) for every failure."""
    each = iteration + way.stall / way.interval
    span = way.interval * each
    again = (span + min(way.durable, seconds)) / 2
    progress = max(0.0, seconds - failures * (way.restore + again))
    return progress / each / seconds * iteration


def simulated(
    way: Way,
    iteration: float,
    seconds: float,
    failures: Iterable[Failure],
    *,
    restart: float = 0.0,
    begin: float = 0.0,
    seed: int = 1,
) -> Outcome:
    """Let a job run for some time.

    Args:
        iteration: seconds of one without saves.
        restart: until a failed job runs again, before it restores: a new machine, processes, collectives.
        begin: until its first life trains.
    """
    chance = random.Random(seed)
    job = _Job(way, iteration + way.stall / way.interval, begin=begin)
    count = 0
    for failure in failures:
        if failure.at >= seconds:
            break
        count += 1
        job.fail(failure.at, near=_survives(way, failure, chance), restart=restart)
    job.train(seconds)
    return Outcome(seconds, job.step, job.again, job.stalls, job.recovery, count, iteration)


@dataclass(slots=True)
class _Job:
    """A running job.

    Attributes:
        way: how it saves.
        each: seconds of an iteration, with what saves cost.
        step: the newest. `kept`: the newest that no failure can lose.
        begin: when the present life began, or will begin, to train.
        again, stalls, recovery: see `Outcome`.
    """

    way: Way
    each: float
    step: int = 0
    kept: int = 0
    begin: float = 0.0
    again: int = 0
    stalls: float = 0.0
    recovery: float = 0.0

    def train(self, until: float) -> float:
        """Train until a time -> for how long."""
        spent = max(0.0, until - self.begin)
        trained = int(spent / self.each)
        self.stalls += (self.step + trained) // self.way.interval * self.way.stall
        self.stalls -= self.step // self.way.interval * self.way.stall
        self.step += trained
        return spent

    def fail(self, at: float, *, near: bool, restart: float) -> None:
        """Fail at a time, and roll back. `near`: what was in memory survived."""
        way, first = self.way, self.step
        self.recovery -= max(0.0, self.begin - at)  # it was still restoring
        spent = self.train(at)
        durable = self._newest(self.kept, first, spent, way.interval, way.durable)
        close = self._newest(first, first, spent, way.every, way.near) if near else 0
        self.again += self.step - max(durable, close)
        load = way.near_restore if close > durable else way.restore if durable else 0.0
        self.step, self.kept = max(durable, close), durable
        self.begin = at + restart + load
        self.recovery += restart + load

    def _newest(self, before: int, first: int, spent: float, every: int, until: float) -> int:
        """The newest safe step, after training from `first` on for some time; `before` is safe."""
        safe = (spent - until) / self.each
        if not every or safe < 0:
            return before
        found = (first + int(safe + 1e-9)) // every * every
        return found if found > first else before


def _survives(way: Way, failure: Failure, chance: random.Random) -> bool:
    """Whether the states in memory are there after a failure."""
    if not way.every:
        return False
    if not failure.lost:
        return True
    if not way.peers or failure.lost >= failure.workers:
        return False
    gone = set(chance.sample(range(failure.workers), failure.lost))
    return not any((worker + 1) % failure.workers in gone for worker in gone)
