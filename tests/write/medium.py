"""A medium in memory whose writes wait until a test releases them, and the states of saves in flight."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore.backends.base import SegmentSink
from ckptstore.backends.memory import MemoryBackend

MIB = 1 << 20


def weights(value: int, units: int = 1) -> dict[str, Any]:
    """A state of so many units of 16 MiB (or a small one) in which every number shows its step."""
    size = 4 * MIB if units > 1 else 1000
    return {f"w{number}": np.full(size, value + number, np.float32) for number in range(units)}


class Medium:
    """A memory store whose segments are written when the test permits it, in the order in which they were begun.

    Attributes:
        begun: is set for the n-th segment when its first block is written.
        may: permits the n-th segment's blocks to be written.
        fails: the n-th segment's blocks cannot be written.
        blocks: how many blocks were written.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, segments: int, *, held: bool = True) -> None:
        self.begun = [threading.Event() for _ in range(segments)]
        self.may = [threading.Event() for _ in range(segments)]
        self.fails: set[int] = set()
        self.delay = 0.0
        self.opened = 0
        self.blocks = 0
        if not held:
            self.release()
        original = MemoryBackend.open_sink
        lock = threading.Lock()
        medium = self

        class Sink(SegmentSink):
            def __init__(self, inner: SegmentSink, number: int) -> None:
                self.inner = inner
                self.number = number

            def write(self, offset: int, data: memoryview) -> None:
                medium.begun[self.number].set()
                assert medium.may[self.number].wait(60)
                time.sleep(medium.delay)
                if self.number in medium.fails:
                    raise ckptstore.StorageError(28, f"no space for segment {self.number}")
                self.inner.write(offset, data)
                with lock:
                    medium.blocks += 1

            def seal(self, size: int) -> None:
                self.inner.seal(size)

            def abort(self) -> None:
                self.inner.abort()

        def open_sink(backend: MemoryBackend, key: str, size_hint: int) -> SegmentSink:
            with lock:
                medium.opened += 1
                return Sink(original(backend, key, size_hint), medium.opened - 1)

        monkeypatch.setattr(MemoryBackend, "open_sink", open_sink)

    def release(self) -> None:
        for one in self.may:
            one.set()


def check(store: ckptstore.Store, *steps: int, units: int = 1) -> None:
    assert [info.step for info in store.checkpoints()] == list(steps)
    for step in steps:
        loaded = store.load(step, framework="numpy")
        for name, array in weights(step, units).items():
            assert np.array_equal(loaded[name], array)
    assert ckptstore.verify(store).ok


@contextmanager
def taken(writer: ckptstore.Writer, medium: Medium) -> Iterator[None]:
    """A writer's only slot is taken in the ``with``: by a save of step 1, which the medium delays for that time."""
    sync = threading.Thread(target=writer.save, args=(weights(1), 1))
    sync.start()
    try:
        assert medium.begun[0].wait(120)
        yield
    finally:
        medium.release()
        sync.join(120)


def run(script: str) -> str:
    """The output of a separate process."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
