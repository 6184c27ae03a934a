"""One life of a job: its processes, what the first of them says, and SIGKILL for all.

    with begun(start, folder) as life:
        life.kill_at(time.monotonic() + 2.0)
        for document in life.says():
            ...

`start` starts one process (`training_worker live`, which says when its model exists, what it has restored, and each
step). A life ends by SIGKILL, or because it is `done`; any other end is an error.
"""

from __future__ import annotations

import contextlib
import json
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias

from tools.bench.storage.rounds import WorkerError

__all__ = ["Life", "Start", "begun"]

Start: TypeAlias = Callable[[int, IO[str]], Any]
"""Starts the process of a rank, with its errors in a file; the process is as one of `subprocess.Popen`."""


class Life:
    """A life. One thread reads what it says; a timer may kill it meanwhile.

    Attributes:
        killed: when it was killed, on the monotonic clock; 0: it was not.
        done: it has said that it is at its end, and ends by itself.
    """

    def __init__(self, processes: Sequence[Any]) -> None:
        self.killed = 0.0
        self.done = False
        self._processes = processes
        self._timer: threading.Timer | None = None

    def says(self) -> Iterator[dict[str, Any]]:
        """What the first process prints, until it ends. A line that the kill has cut is left out."""
        for line in self._processes[0].stdout or ():
            try:
                document = json.loads(line)
            except ValueError:
                return
            yield document

    def kill(self) -> None:
        """Send SIGKILL to every process. A second call does nothing."""
        if not self.killed:
            self.killed = time.monotonic()
            for one in self._processes:
                one.send_signal(signal.SIGKILL)

    def kill_at(self, moment: float) -> None:
        """Kill it at a time of the monotonic clock."""
        self._timer = threading.Timer(moment - time.monotonic(), self.kill)
        self._timer.start()

    def preempt(self) -> None:
        """Send SIGTERM to the first process: it makes its latest step durable, and ends."""
        self._processes[0].send_signal(signal.SIGTERM)

    def end(self) -> list[int]:
        """Wait until every process has ended -> their statuses."""
        if self._timer is not None:
            if any(one.poll() is None for one in self._processes[1:]):
                self._timer.join()  # rank 0 may have ended by itself: the others are killed all the same
            self._timer.cancel()
        return [one.wait() for one in self._processes]


@contextlib.contextmanager
def begun(start: Start, scratch: Path, ranks: int = 1) -> Iterator[Life]:
    """Begin a life, and see to its end.

    Args:
        scratch: an existing folder, for the errors that the processes print.

    Raises:
        WorkerError: it ended neither by SIGKILL nor because it was done.
    """
    with contextlib.ExitStack() as stack:
        trouble = stack.enter_context(tempfile.TemporaryFile("w+", dir=scratch))
        processes = [stack.enter_context(start(rank, trouble)) for rank in range(ranks)]
        for one in processes[1:]:
            threading.Thread(target=one.stdout.read, daemon=True).start()  # so that its pipe is never full
        life = Life(processes)
        try:
            yield life
        except BaseException:
            life.kill()
            raise
        finally:
            statuses = life.end()
        if any(status != -signal.SIGKILL for status in statuses) and (not life.done or any(statuses)):
            trouble.seek(0)
            raise WorkerError(
                (trouble.read().strip().splitlines() or [f"it ended by itself, with status {statuses[0]}"])[-1]
            )
