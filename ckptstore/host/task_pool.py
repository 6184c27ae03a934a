"""A thread pool for tasks that produce further tasks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

__all__ = ["Task", "sweep"]

Task = Callable[[], Iterable["Task"]]
"""Does its work and returns the tasks that follow from it."""


def sweep(tasks: Iterable[Task], threads: int, name: str) -> None:
    """Run `tasks`, and all tasks that follow from them, in `threads` threads.

    The tasks that follow from one run before the next of `tasks` is begun. So at most `threads` of `tasks` are under
    way, and only few of them hold resources (an open file, a description) at a time.

    Raises:
        BaseException: the first error of a task. No task begins after it, and none runs any more when it is raised.
    """
    _Sweep(iter(tasks)).run(threads, name)


class _Sweep:
    def __init__(self, source: Iterable[Task]) -> None:
        self._source = iter(source)
        self._found: deque[Task] = deque()
        self._errors: list[BaseException] = []
        self._busy = 0
        self._changed = threading.Condition()

    def run(self, threads: int, name: str) -> None:
        workers = [threading.Thread(target=self._work, name=f"{name}_{number}") for number in range(threads)]
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        except BaseException as error:  # Ctrl-C in this thread: the workers must not continue for minutes
            self._fail(error)
            for worker in workers:
                if worker.ident is not None:
                    worker.join()
            raise
        if self._errors:
            raise self._errors[0]

    def _work(self) -> None:
        while (task := self._next()) is not None:
            try:
                more = list(task())
            except BaseException as error:  # noqa: BLE001  # raised again by `run`
                self._fail(error)
                more = []
            with self._changed:
                self._found.extend(more)
                self._busy -= 1
                self._changed.notify_all()

    def _next(self) -> Task | None:
        with self._changed:
            while True:
                if self._errors:
                    return None
                task = self._found.popleft() if self._found else next(self._source, None)
                if task is not None:
                    self._busy += 1
                    return task
                if not self._busy:
                    return None
                self._changed.wait()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._errors.append(error)
            self._changed.notify_all()
