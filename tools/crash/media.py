"""The media of the crash tools: a folder, with or without recycled files, and persistent memory in two modes."""

from __future__ import annotations

import ctypes
import os
from typing import Final

from ckptstore.backends.local_disk import libpmem
from ckptstore.backends.local_disk.libpmem import Libpmem
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.backends.local_disk.pmem import PmemBackend
from ckptstore.backends.local_disk.posix import SYSTEM, Posix
from tools.crash.domain import Domain
from tools.crash.ramfs import RamPosix

__all__ = ["MEDIA", "Assuming", "assuming", "backend_on", "no_library", "obstacle"]

MEDIA: Final = ("folder", "recycled", "pmem", "pmem-msync")
"""In ``recycled`` new segments overwrite deleted ones; in ``folder`` they never do. ``pmem`` is libpmem on memory that
it is told to treat as persistent; on a file system in memory it is a `Domain`."""


class Assuming(Libpmem):
    """The library, set to treat all memory as persistent, like ``PMEM_IS_PMEM_FORCE=1``."""

    def is_pmem(self, memory: memoryview) -> bool:  # noqa: ARG002 - any is
        return True


def assuming() -> Libpmem | None:
    """The real library with that setting. Raises `OSError` where it is not installed."""
    return Assuming(ctypes.CDLL("libpmem.so.1"))


def no_library() -> Libpmem | None:
    """None: use msync throughout."""
    return None


def obstacle(medium: str) -> str | None:
    """Why a medium is not available on a real file system, or None."""
    return "libpmem.so.1 is not installed" if medium == "pmem" and libpmem.load() is None else None


def backend_on(
    medium: str,
    root: str | os.PathLike[str],
    posix: Posix = SYSTEM,
    disk: RamPosix | None = None,
    forgets: frozenset[str] = frozenset(),
) -> LocalBackend:
    """A backend for the store at `root`.

    Args:
        medium: one of `MEDIA`.
        posix: the system calls.
        disk: the file system in memory under them, if there is one.
        forgets: functions that its `Domain` omits, for negative controls.
    """
    if medium in ("folder", "recycled"):
        return LocalBackend(root, posix, recycle="always" if medium == "recycled" else "never")
    if medium == "pmem-msync":
        return PmemBackend(root, posix, library=no_library)
    if disk is None:
        return PmemBackend(root, posix, library=assuming)
    domain = Domain(disk, forgets)
    return PmemBackend(root, posix, library=lambda: domain)
