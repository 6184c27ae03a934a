"""A virtual clock for threads: one runs at a time, and a sleep takes no time.

    world = World()
    world.run([rank0, rank1])  # each in a thread of its own
    world.now                  # virtual seconds

Code that waits by ``time.sleep`` and looks at ``time.monotonic`` runs unchanged: put the world in place of the module
``time`` where that code looks it up. It must not wait in any other way for another thread of the world.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Sequence
from typing import Final

__all__ = ["World"]

_STACK: Final = 512 << 10


class _Task(threading.Thread):
    """A thread, and the lock that it waits for while another one runs."""

    def __init__(self, world: World, number: int, work: Callable[[], object]) -> None:
        super().__init__(name=f"rank-{number}", daemon=True)
        self.number = number
        self.turn = threading.Lock()
        self.turn.acquire()
        self.error: BaseException | None = None
        self._world, self._work = world, work

    def run(self) -> None:
        self.turn.acquire()
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001  # `World.run` raises it
            self.error = error
        finally:
            self._world.ended()


class World:
    """Virtual time.

    Attributes:
        now: seconds.
        switches: how often another thread went on.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.switches = 0
        self._queue: list[tuple[float, int, _Task]] = []
        self._number = 0
        self._met: list[_Task] = []
        self._done = threading.Event()

    def monotonic(self) -> float:
        """Seconds, as of ``time.monotonic``."""
        return self.now

    def rank(self) -> int | None:
        """The number of the calling thread's work; None: it is none of the world's."""
        task = threading.current_thread()
        return task.number if isinstance(task, _Task) else None

    def sleep(self, seconds: float) -> None:
        """Let the others go on, until so much time has passed."""
        task = threading.current_thread()
        if not isinstance(task, _Task):
            return
        self._wait(task, seconds)
        following = self._next()
        if following is not task:
            following.turn.release()
            task.turn.acquire()

    def meet(self, size: int, all_there: Callable[[], object]) -> None:
        """Wait until `size` threads have called this; the last one calls `all_there`. All go on at that time."""
        task = threading.current_thread()
        assert isinstance(task, _Task)
        self._met.append(task)
        if len(self._met) == size:
            all_there()
            for one in self._met:
                self._wait(one, 0.0)
            self._met.clear()
        following = self._next()
        if following is not task:
            following.turn.release()
            task.turn.acquire()

    def _wait(self, task: _Task, seconds: float) -> None:
        self._number += 1
        heapq.heappush(self._queue, (self.now + max(0.0, seconds), self._number, task))

    def _next(self) -> _Task:
        self.now, _, task = heapq.heappop(self._queue)
        self.switches += 1
        return task

    def ended(self) -> None:
        """The calling thread's work is done."""
        if self._queue:
            self._next().turn.release()
        else:
            self._done.set()

    def run(self, work: Sequence[Callable[[], object]]) -> None:
        """Run every work to its end, beginning at the same time. Raises the first error, in their order."""
        before = threading.stack_size(_STACK)
        try:
            tasks = [_Task(self, number, one) for number, one in enumerate(work)]
            for task in tasks:
                task.start()
                self._wait(task, 0.0)
        finally:
            threading.stack_size(before)
        self._done.clear()
        self._next().turn.release()
        self._done.wait()
        for task in tasks:
            task.join()
            if task.error is not None:
                raise task.error
