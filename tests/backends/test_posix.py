"""The system calls themselves: crash tests replace `Posix`, so each call is tested here."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from ckptstore.backends.local_disk import posix
from ckptstore.backends.local_disk.posix import SYSTEM, write_some
from tests.backends import inside

PAGE = mmap.PAGESIZE


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


def test_msync_and_populate_reach_the_system_for_whole_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = SYSTEM.open(str(tmp_path / "file"), os.O_RDWR | os.O_CREAT)
    SYSTEM.ftruncate(descriptor, 3 * PAGE)
    memory = SYSTEM.map_shared(descriptor, 0, 2 * PAGE, sync=False)
    with monkeypatch.context() as patched:
        calls = inside.libc_calls(patched)
        begin = posix.address_of(memory)
        SYSTEM.msync(memory[PAGE + 7 : PAGE + 9])
        SYSTEM.populate(memory[5:])
    assert calls == [("msync", (begin + PAGE, 9, 4)), ("madvise", (begin, 2 * PAGE, 23))]
    memory[PAGE + 7 : PAGE + 9] = b"ab"
    assert os.pread(descriptor, 2, PAGE + 7) == b"ab"
    SYSTEM.ftruncate(descriptor, PAGE)
    with pytest.raises(OSError, match="Bad address"):
        SYSTEM.populate(memory)
    with pytest.raises(OSError, match="cut short"):
        SYSTEM.map_shared(descriptor, PAGE, PAGE, sync=False)
    SYSTEM.unmap(memory)
    with pytest.raises(ValueError, match="released"):
        memory[0]
    SYSTEM.close(descriptor)


def test_memory_that_is_unmapped_goes_with_the_last_view_of_it(tmp_path: Path) -> None:
    descriptor = SYSTEM.open(str(tmp_path / "file"), os.O_RDWR | os.O_CREAT)
    SYSTEM.ftruncate(descriptor, PAGE)
    memory = SYSTEM.map_shared(descriptor, 0, PAGE, sync=False)
    view = memory[10:20]
    SYSTEM.unmap(memory)
    view[:] = b"0123456789"
    assert os.pread(descriptor, 10, 10) == b"0123456789"
    view.release()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    SYSTEM.close(descriptor)


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
