"""The system calls themselves: crash tests put another `Posix` in their place, so these are looked at one by one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptstore.backends.posix import SYSTEM, write_some


@pytest.mark.parametrize("name", ["fsync", "fdatasync"])
def test_a_sync_reaches_the_system(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = getattr(os, name)

    def call(descriptor: int) -> None:
        synced.append(descriptor)
        real(descriptor)

    monkeypatch.setattr(os, name, call)
    descriptor = SYSTEM.open(str(tmp_path / "file"), os.O_WRONLY | os.O_CREAT)
    getattr(SYSTEM, name)(descriptor)
    SYSTEM.close(descriptor)
    assert synced == [descriptor]
    with pytest.raises(OSError, match="Bad file descriptor"):
        getattr(SYSTEM, name)(descriptor)


def test_writing_nothing_is_an_error_and_an_interruption_is_not() -> None:
    class Stuck:
        def pwrite(self, _fd: int, _data: memoryview, _offset: int) -> int:
            return 0

    class Interrupted:
        def pwrite(self, _fd: int, _data: memoryview, _offset: int) -> int:
            raise InterruptedError

    with pytest.raises(OSError, match="wrote nothing"):
        write_some(Stuck(), 1, memoryview(b"x"), 0)  # type: ignore[arg-type]
    assert write_some(Interrupted(), 1, memoryview(b"x"), 0) == 0  # type: ignore[arg-type]
