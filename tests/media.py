"""Put the temporary folders of tests into memory, so that no test waits for a disk; those about disks stay on one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

__all__ = ["MEMORY", "VARIABLE", "is_memory", "needs_disk", "suitable"]

ROOT: Final = Path(__file__).parents[1]
MEMORY: Final = Path("/dev/shm")  # pytest makes a folder of this user in it
VARIABLE: Final = "PYTEST_DEBUG_TEMPROOT"
"""The environment variable that says where pytest makes its temporary folders."""
ON_DISK: Final = (
    "tests/backends/",  # system calls of a disk: O_DIRECT, reserved and recycled blocks, free space
    "tests/doctor/",
    "tests/host/",
    "tests/segments/",
    "tests/write/test_direct.py",
)
"""Files and folders (with a trailing slash) whose tests are about disks."""
_SPACE: Final = 4 << 30
"""Bytes that have to be free, several times what all workers use at once: a test that passed leaves nothing."""


def suitable() -> bool:
    """Whether this machine has shared memory for it: large enough, and programs in it can be run."""
    try:
        status, words = os.statvfs(MEMORY), Path("/proc/meminfo").read_text().split()
    except OSError:
        return False
    free = min(status.f_bavail * status.f_frsize, int(words[words.index("MemAvailable:") + 1]) << 10)
    return free >= _SPACE and not status.f_flag & os.ST_NOEXEC


def is_memory(folder: Path) -> bool:
    """Whether a folder lies in memory."""
    return folder.is_relative_to(MEMORY)


def needs_disk(path: Path) -> bool:
    """Whether the tests of this file are about disks."""
    name = path.relative_to(ROOT).as_posix()
    return any(name.startswith(one) if one.endswith("/") else name == one for one in ON_DISK)
