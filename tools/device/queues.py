"""Streams, events, and the scheduler that decides when queued work runs. Independent of torch.

A `Stream` runs its jobs one after another. A job may wait for a position of another stream. A `Scheduler` decides
everything else from a seed: some streams run at once, some only when somebody waits for them, the others now and then.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

__all__ = ["Job", "Position", "Queue", "Scheduler"]

_PATIENCE: Final = 20
"""How often an event is queried before it is done: a real device works while the host polls."""

Position: TypeAlias = "tuple[Queue, int]"
"""A queue and a number of its jobs."""


@dataclass(slots=True)
class Job:
    """One piece of work.

    Attributes:
        run: the work; None: there is only something to wait for.
        waits: positions that must be done first, in addition to the earlier jobs of its queue.
    """

    run: Callable[[], None] | None
    waits: tuple[Position, ...] = ()


@dataclass(eq=False)
class Queue:
    """The jobs of one stream.

    Attributes:
        eagerness: with which probability it runs a job whenever the host does something.
        owner: the scheduler that runs it.
        pushed, done: how many jobs it was given, and how many have run.
    """

    eagerness: float
    owner: Scheduler | None = None
    jobs: deque[Job] = field(default_factory=deque)
    pushed: int = 0
    done: int = 0

    @property
    def end(self) -> Position:
        """The position after all present jobs."""
        return self, self.pushed

    @property
    def ready(self) -> bool:
        """Whether its next job may run."""
        return bool(self.jobs) and all(queue.done >= count for queue, count in self.jobs[0].waits)


class Watcher(Protocol):
    """Receives the queued jobs and the positions that the host knows to be done: `races.Order`."""

    def pushed(self, position: Position, waits: Iterable[Position]) -> None:
        """Note that a job was queued."""

    def seen(self, position: Position | None) -> None:
        """Note that the host knows a position to be done; None: everything."""


class Scheduler:
    """Runs queued jobs in an order that a seed decides, and that streams and events permit.

    Attributes:
        lock: held while queues change and while jobs run; reentrant.
        late: nothing runs before somebody waits for it.
    """

    def __init__(self, seed: int, watcher: Watcher | None = None) -> None:
        """Args:
        watcher: notified of jobs and waits.
        seed: 0 runs everything as late as the order permits. Any other seed decides how eager each stream is.
        """
        self.lock = threading.RLock()
        self._watcher = watcher
        self.late = seed == 0
        self._random = random.Random(seed)
        self._queues: list[Queue] = []
        self._reclaims: list[Queue] = []
        self._asked: dict[Position, int] = {}
        self._ticking = False

    def queue(self) -> Queue:
        """A new queue."""
        with self.lock:
            eagerness = 0.0 if self.late else self._random.choice((0.0, 0.0, 0.05, 0.3, 0.8, 1.0))
            made = Queue(eagerness, self)
            self._queues.append(made)
            return made

    def push(self, queue: Queue, run: Callable[[], None] | None, waits: Iterable[Position] = ()) -> Position:
        """Queue a job -> the position that includes it."""
        with self.lock:
            job = Job(run, tuple(waits))
            queue.jobs.append(job)
            queue.pushed += 1
            position = queue.end
            if self._watcher is not None:
                self._watcher.pushed(position, job.waits)
            self.tick()
            return position

    def reclaim(self, run: Callable[[], None], waits: Iterable[Position]) -> None:
        """Run a function once `waits` are done; the seed may delay it."""
        with self.lock:
            self._reclaims.append(Queue(1.0 if self.late else self._random.choice((0.1, 1.0, 1.0)), pushed=1))
            self._reclaims[-1].jobs.append(Job(run, tuple(waits)))
            self._reclaimed()

    def is_done(self, position: Position) -> bool:
        """Whether a position is done. After enough queries the answer is True."""
        with self.lock:
            queue, count = position
            self.tick()
            if queue.done < count:
                self._asked[position] = self._asked.get(position, 0) + 1
                if self._asked[position] >= _PATIENCE:
                    self.run_to(position)
            if queue.done < count:
                return False
            self._asked.pop(position, None)
            self._seen(position)
            return True

    def run_to(self, position: Position) -> int:
        """Run the jobs up to a position, and no more than they need -> how many were not done yet."""
        with self.lock:
            self.tick()
            queue, count = position
            outstanding = max(0, count - queue.done)
            self._run_to(queue, count)
            self._seen(position)
            return outstanding

    def run_all(self) -> int:
        """Run all jobs -> how many were not done yet."""
        with self.lock:
            outstanding = sum(len(queue.jobs) for queue in self._queues)
            while any(queue.jobs for queue in self._queues):
                for queue in self._queues:
                    self._run_to(queue, queue.pushed)
            self._reclaimed(everything=True)
            self._seen(None)
            return outstanding

    def _seen(self, position: Position | None) -> None:
        if self._watcher is not None:
            self._watcher.seen(position)

    def tick(self) -> None:
        """The host did something: the device may run some of its work meanwhile."""
        if self.late or self._ticking:
            return
        self._ticking = True
        try:
            for queue in self._random.sample(self._queues, len(self._queues)):
                while queue.ready and self._random.random() < queue.eagerness:
                    self._run_one(queue)
        finally:
            self._ticking = False

    def _run_to(self, queue: Queue, count: int) -> None:
        # Not recursive: chains of waits may be long.
        stack = [(queue, count)]
        while stack:
            now, wanted = stack[-1]
            if now.done >= wanted:
                stack.pop()
                continue
            missing = [(one, number) for one, number in now.jobs[0].waits if one.done < number]
            if missing:
                stack += missing
            else:
                self._run_one(now)
                self.tick()

    def _run_one(self, queue: Queue) -> None:
        job = queue.jobs.popleft()
        try:
            if job.run is not None:
                job.run()
        finally:
            queue.done += 1
        self._reclaimed()

    def _reclaimed(self, *, everything: bool = False) -> None:
        for queue in list(self._reclaims):
            if queue.ready and (everything or self._random.random() < queue.eagerness):
                self._reclaims.remove(queue)
                job = queue.jobs.popleft()
                assert job.run is not None
                job.run()
