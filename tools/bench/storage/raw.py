"""Measures the disk's limit: one buffer to one file and back, without any format.

Blocks of 16 MiB. Direct transfers keep two blocks in flight from two threads, as the engine does.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.bench.storage.pagecache import fsync

BLOCK = 16 << 20
ALIGN = 4096
THREADS = 2


def padded(size: int) -> int:
    """`size` rounded up to whole blocks of the disk."""
    return -(-size // ALIGN) * ALIGN


def aligned_buffer(size: int) -> mmap.mmap:
    """Page-aligned private memory of at least `size` bytes, not yet touched."""
    return mmap.mmap(-1, padded(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _in_blocks(transfer: Callable[[memoryview, int], int], data: memoryview) -> None:
    def move(offset: int) -> None:
        block = data[offset : offset + BLOCK]
        done = 0
        while done < len(block):
            count = transfer(block[done:], offset + done)
            if not count:
                raise OSError("the file ended before the buffer did")
            done += count

    with ThreadPoolExecutor(THREADS) as threads:
        for _ in threads.map(move, range(0, len(data), BLOCK)):
            pass


def write_buffered(path: Path, data: memoryview) -> None:
    """Write through the page cache, then fsync."""
    with path.open("wb", buffering=0) as file:
        for offset in range(0, len(data), BLOCK):
            file.write(data[offset : offset + BLOCK])
        os.fsync(file.fileno())
    fsync(path.parent)


def write_direct(path: Path, data: memoryview) -> None:
    """Allocate a new file, write past the page cache, fsync. `data` must be a multiple of `ALIGN`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o644)
    try:
        os.posix_fallocate(descriptor, 0, len(data))
        _in_blocks(lambda block, offset: os.pwrite(descriptor, block, offset), data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    fsync(path.parent)


def overwrite_direct(path: Path, data: memoryview) -> None:
    """Write past the page cache over a file that is already this long, then fdatasync."""
    descriptor = os.open(path, os.O_WRONLY | os.O_DIRECT)
    try:
        _in_blocks(lambda block, offset: os.pwrite(descriptor, block, offset), data)
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


def read_buffered(path: Path) -> mmap.mmap:
    """Read the file through the page cache into new memory."""
    buffer = aligned_buffer(path.stat().st_size)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        offset = 0
        while count := file.readinto(view[offset : offset + BLOCK]):
            offset += count
    return buffer


def read_direct(path: Path) -> mmap.mmap:
    """Read the file past the page cache into new memory; its length must be a multiple of `ALIGN`."""
    buffer = aligned_buffer(path.stat().st_size)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        _in_blocks(lambda block, offset: os.preadv(descriptor, [block], offset), memoryview(buffer))
    finally:
        os.close(descriptor)
    return buffer
