"""Calls that may hang for a minute, on behalf of threads that a signal has to reach at once.

A signal's handler runs in the main thread, between two lines of Python: never while that thread waits in a library's
call. So such calls are carried out by daemon threads (*carriers*), and who wants the answer waits in Python. Ctrl-C
then ends the wait, and the call is left alone: it answers, times out, or ends with the process.

Jobs of a pool that the main thread waits for belong to its *scope*: when that wait is interrupted, those that wait for
carriers are, too. Threads that nobody waits for (a writer's) belong to the process: what they do is done to its end,
unless the process ends and its user has given up waiting for that (`abandon_all`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from ckptstore.host import background_threads

__all__ = ["Scope", "abandon_all", "carried", "nap", "scope_here", "within"]

_T = TypeVar("_T")
_IDLE: Final = 16
"""Carriers that stay when they have nothing to do."""


class AbandonedError(Exception):
    """The call was given up, because whoever wanted it was interrupted."""


class Scope:
    """What is done for one wait of the main thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[threading.Event] = set()
        self._over = threading.Event()

    @property
    def abandoned(self) -> bool:
        """Whether nobody waits any more."""
        return self._over.is_set()

    def abandon(self) -> None:
        """Whoever waits for a carrier in this scope, or for time to pass, gets `AbandonedError` now."""
        with self._lock:
            self._over.set()
            for event in self._waiting:
                event.set()

    def wait(self, event: threading.Event) -> None:
        """Wait for an event or the end."""
        with self._lock:
            if self.abandoned:
                return
            self._waiting.add(event)
        event.wait()
        with self._lock:
            self._waiting.discard(event)

    def nap(self, seconds: float) -> None:
        """Let time pass."""
        if self._over.wait(seconds):
            raise AbandonedError


_here = threading.local()
_process_wide = Scope()


def scope_here() -> Scope | None:
    """The scope of the present thread's work; of the main thread a new one, unless it has one."""
    found: Scope | None = getattr(_here, "scope", None)
    if found is None and threading.current_thread() is threading.main_thread():
        return Scope()
    return found


def within(scope: Scope | None, call: Callable[[], _T]) -> Callable[[], _T]:
    """`call`, to be made in another thread, for the same wait."""
    if scope is None:
        return call

    def inside() -> _T:
        before = getattr(_here, "scope", None)
        _here.scope = scope
        try:
            return call()
        finally:
            _here.scope = before

    return inside


def nap(seconds: float) -> None:
    """Let time pass; less where the wait that this is for is interrupted."""
    (scope_here() or _process_wide).nap(seconds)


def abandon_all() -> None:
    """Whoever waits for a carrier, or for time to pass, and for no wait of the main thread, gets `AbandonedError` now.

    For a process that ends: what its threads wait for would keep it from that.
    """
    _process_wide.abandon()


class _Job:
    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.ended = threading.Event()
        self.answered = False
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:  # noqa: BLE001 - raised again by who waits
            self.error = error
        self.answered = True
        self.ended.set()


_lock = threading.Lock()
_idle: list[SimpleQueue[_Job]] = []


def carried(call: Callable[[], _T]) -> _T:
    """What `call` returns or raises. It may still be under way when this is interrupted, and may have its effect.

    Where there is no carrier to be had, the call is simply made.
    """
    scope = scope_here() or _process_wide
    if scope.abandoned:
        raise AbandonedError
    job = _Job(call)
    try:
        _handed(job)
    except RuntimeError:  # no thread is to be had, or the interpreter is ending
        return call()
    scope.wait(job.ended)
    if not job.answered:
        raise AbandonedError
    try:
        if job.error is not None:
            raise job.error
        result: _T = job.result
        return result
    finally:
        del job  # an error and its traceback would keep each other


def _forget() -> None:
    """In a child after a fork, which has none of the carriers, nor whoever held a lock."""
    global _lock, _process_wide
    _lock, _process_wide = threading.Lock(), Scope()
    _idle.clear()


os.register_at_fork(after_in_child=_forget)


def _handed(job: _Job) -> None:
    with _lock:
        queue = _idle.pop() if _idle else None
    if queue is None:
        queue = SimpleQueue()
        background_threads.start(lambda: _carry(queue), "carrier")
    queue.put(job)


def _carry(queue: SimpleQueue[_Job]) -> None:
    while True:
        job = queue.get()
        job.run()
        del job
        with _lock:
            if len(_idle) >= _IDLE:
                return
            _idle.append(queue)
