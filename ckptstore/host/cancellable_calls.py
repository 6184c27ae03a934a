"""Run calls that may hang for a minute in other threads, so that Ctrl-C can interrupt the caller at once.

A signal handler runs in the main thread, between two bytecode instructions, and never while that thread waits inside a
library call. So daemon threads (*carriers*) make such calls, and the caller waits for the result in Python. Ctrl-C ends
the wait. The call itself continues: it returns, times out, or ends with the process.

Pool jobs that the main thread waits for belong to its *scope*. When that wait is interrupted, their waits for carriers
are interrupted, too. Threads that no other thread waits for (a writer's) belong to the process: they finish their work,
unless the process exits and its user has stopped waiting for it (`abandon_all`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from ckptstore.host import background_threads

__all__ = ["Scope", "abandon_all", "cancellable", "current_scope", "in_scope", "nap"]

_T = TypeVar("_T")
_IDLE: Final = 16
"""Most carriers that are kept when idle."""


class AbandonedError(Exception):
    """The wait for a call was given up, because the waiting scope was interrupted."""


class Scope:
    """The work that one wait of the main thread depends on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[threading.Event] = set()
        self._over = threading.Event()

    @property
    def abandoned(self) -> bool:
        """Whether the wait was interrupted."""
        return self._over.is_set()

    def abandon(self) -> None:
        """Raise `AbandonedError` in every thread of this scope that waits for a carrier or sleeps in `nap`."""
        with self._lock:
            self._over.set()
            for event in self._waiting:
                event.set()

    def wait(self, event: threading.Event) -> None:
        """Wait for `event` or for `abandon`."""
        with self._lock:
            if self.abandoned:
                return
            self._waiting.add(event)
        event.wait()
        with self._lock:
            self._waiting.discard(event)

    def nap(self, seconds: float) -> None:
        """Sleep for `seconds`. Raises `AbandonedError` if the scope is abandoned."""
        if self._over.wait(seconds):
            raise AbandonedError


_thread = threading.local()
_process_wide = Scope()


def current_scope() -> Scope | None:
    """The scope of the current thread. The main thread gets a new one if it has none; other threads may have None."""
    found: Scope | None = getattr(_thread, "scope", None)
    if found is None and threading.current_thread() is threading.main_thread():
        return Scope()
    return found


def in_scope(scope: Scope | None, call: Callable[[], _T]) -> Callable[[], _T]:
    """Wrap `call` so that it runs in `scope`, for use in another thread."""
    if scope is None:
        return call

    def inside() -> _T:
        before = getattr(_thread, "scope", None)
        _thread.scope = scope
        try:
            return call()
        finally:
            _thread.scope = before

    return inside


def nap(seconds: float) -> None:
    """Sleep for `seconds`. Raises `AbandonedError` if the thread's scope is abandoned."""
    (current_scope() or _process_wide).nap(seconds)


def abandon_all() -> None:
    """Raise `AbandonedError` in every thread outside a scope that waits for a carrier or sleeps in `nap`.

    For a process that exits: waiting threads would keep it from exiting.
    """
    _process_wide.abandon()


class _CarriedCall:
    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.ended = threading.Event()
        self.answered = False
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            self.error = error
        self.answered = True
        self.ended.set()


_lock = threading.Lock()
_idle: list[SimpleQueue[_CarriedCall]] = []


def cancellable(call: Callable[[], _T]) -> _T:
    """Make `call` in a carrier. Returns or raises what it does.

    If this is interrupted, the call continues and may still have its effect. If no carrier thread can be started, the
    call is made in this thread.

    Raises:
        AbandonedError: the scope was abandoned.
    """
    scope = current_scope() or _process_wide
    if scope.abandoned:
        raise AbandonedError
    job = _CarriedCall(call)
    try:
        _submit(job)
    except RuntimeError:  # no thread can be started, or the interpreter is exiting
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
        del job  # otherwise the error and its traceback would keep each other alive


def _forget() -> None:
    """Reset the state in a forked child, which has neither the carriers nor the threads that held locks."""
    global _lock, _process_wide
    _lock, _process_wide = threading.Lock(), Scope()
    _idle.clear()


os.register_at_fork(after_in_child=_forget)


def _submit(job: _CarriedCall) -> None:
    with _lock:
        queue = _idle.pop() if _idle else None
    if queue is None:
        queue = SimpleQueue()
        background_threads.start(lambda: _run_carrier(queue), "carrier")
    queue.put(job)


def _run_carrier(queue: SimpleQueue[_CarriedCall]) -> None:
    while True:
        job = queue.get()
        job.run()
        del job
        with _lock:
            if len(_idle) >= _IDLE:
                return
            _idle.append(queue)
