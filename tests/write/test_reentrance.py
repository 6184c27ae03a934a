"""A signal handler that saves while the thread that it interrupts is inside a save: refused."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore.backends.base import SegmentSink
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.host.arenas import LEAST


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(3000, step, "<f4")}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Segments begin when this is set: until then a save is in flight. It is set after a time anyway."""
    opened = threading.Event()
    begin = LocalBackend.open_sink

    def open_sink(self: LocalBackend, key: str, size_hint: int) -> SegmentSink:
        opened.wait()
        return begin(self, key, size_hint)

    monkeypatch.setattr(LocalBackend, "open_sink", open_sink)
    timer = threading.Timer(100.0, opened.set)  # a test must not wait for ever; no machine stalls for so long
    timer.start()
    yield opened
    timer.cancel()
    opened.set()


Ask = Callable[[ckptstore.Writer], object]
FROM_HANDLERS: dict[str, Ask] = {
    "save": lambda writer: writer.save(state(90), 90),
    "save_async": lambda writer: writer.save_async(state(90), 90),
    "begin": lambda writer: writer.begin(state(90), 90, {}),
    "wait": lambda writer: writer.wait(),
    "tag": lambda writer: writer.tag("x", 1),
    "rollback": lambda writer: writer.rollback(1),
}
SAVES: dict[str, Ask] = {
    "save": lambda writer: writer.save(state(2), 2),
    "save_async": lambda writer: writer.save_async(state(2), 2),
}


# If steps are encoded, `wait` and `tag` can run: the waiting save holds nothing that they need.
CASES = [(inner, False, None) for inner in FROM_HANDLERS] + [
    (inner, True, None) for inner in ("save", "save_async", "begin", "rollback")
]
# With a budget it still has data to copy.
CASES += [(inner, True, LEAST) for inner in FROM_HANDLERS]


@pytest.mark.parametrize("outer", SAVES)
@pytest.mark.parametrize(("inner", "coded", "memory"), CASES)
def test_a_handler_that_calls_the_writer_inside_a_save_gets_the_remedy(
    tmp_path: Path, gate: threading.Event, inner: str, outer: str, coded: bool, memory: int | None
) -> None:
    told: list[BaseException | None] = []

    def handler(_number: int, _frame: FrameType | None) -> None:
        try:
            FROM_HANDLERS[inner](writer)
            told.append(None)
        except ckptstore.CkptError as error:
            told.append(error)
        gate.set()

    store = ckptstore.open(tmp_path / "s")
    diffs = ckptstore.DiffOptions() if coded else None
    with store.writer(poll_seconds=None, diffs=diffs, memory=memory) as writer:
        writer.save_async(state(1), 1)
        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            SAVES[outer](writer)  # waits for the one before, which waits for the gate
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert [type(one) for one in told] == [ckptstore.UsageError]
        assert f"{inner} was called while this thread is inside {outer} of the same writer" in str(told[0])
        assert "set a flag" in str(told[0])
        FROM_HANDLERS["save"](writer)  # outside of a save it may
    assert [info.step for info in store.checkpoints()] == [1, 2, 90]


def test_other_threads_and_other_writers_may(tmp_path: Path, gate: threading.Event) -> None:
    other = ckptstore.open("memory://reentrance-other").writer(poll_seconds=None)
    with ckptstore.open(tmp_path / "s").writer(poll_seconds=None, max_in_flight=2) as writer:
        seen: list[int] = []

        def handler(_number: int, _frame: FrameType | None) -> None:
            seen.append(other.save(state(5), 5).step)
            gate.set()

        before = signal.signal(signal.SIGALRM, handler)
        thread = threading.Thread(target=lambda: writer.save(state(2), 2))
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            writer.save(state(1), 1)
            thread.start()
        finally:
            signal.signal(signal.SIGALRM, before)
        thread.join()
    other.close()
    assert seen == [5]
