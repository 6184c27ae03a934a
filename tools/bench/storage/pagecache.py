"""The page cache: dropping files from it, filling it, and counting resident pages.

``POSIX_FADV_DONTNEED`` silently keeps dirty pages and pages that any process maps: so files are synced first and
residency is counted with ``mincore`` afterwards.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


def _files(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
    else:
        yield from (path for path in sorted(root.rglob("*")) if path.is_file())


def fsync(path: Path) -> None:
    """Make a file's contents, or a folder's names, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def resident_pages(path: Path) -> tuple[int, int]:
    """(pages in the page cache, all pages) of a file or of all files below a folder."""
    resident = total = 0
    for file in _files(path):
        size = file.stat().st_size
        if not size:
            continue
        pages = -(-size // mmap.PAGESIZE)
        with file.open("rb") as handle, mmap.mmap(handle.fileno(), size, access=mmap.ACCESS_COPY) as mapping:
            # A private mapping that is never touched: it makes no page resident, and ctypes may take its address.
            start = ctypes.c_char.from_buffer(mapping)
            flags = ctypes.create_string_buffer(pages)
            if _libc.mincore(ctypes.addressof(start), size, flags):
                raise OSError(ctypes.get_errno(), "mincore failed", str(file))
            del start
        resident += sum(flag & 1 for flag in flags.raw[:pages])
        total += pages
    return resident, total


def drop(path: Path) -> None:
    """Remove all files below `path` from the page cache.

    Raises:
        RuntimeError: pages stayed resident (tmpfs, or another process maps a file), so that no read would be cold.
    """
    for file in _files(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    resident, total = resident_pages(path)
    if resident:
        raise RuntimeError(f"{resident} of {total} pages stayed in the page cache: nothing read from here is cold")


def warm(path: Path) -> None:
    """Read all files below `path`, so that the page cache holds them.

    Raises:
        RuntimeError: the page cache did not keep them (not enough memory).
    """
    buffer = bytearray(16 << 20)
    for _ in range(3):  # other processes may push a few pages out again
        for file in _files(path):
            with file.open("rb", buffering=0) as handle:
                while handle.readinto(buffer):
                    pass
        resident, total = resident_pages(path)
        if resident == total:
            break
    else:
        raise RuntimeError(f"only {resident} of {total} pages are in the page cache: nothing read from here is warm")


def total_bytes(path: Path) -> int:
    """Lengths of all files below `path`, added."""
    return sum(file.stat().st_size for file in _files(path))
