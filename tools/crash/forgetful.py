"""A local backend that omits one of its syncs: a negative control for every tool that cuts the power.

Each name of `SITES` is one place where the backend makes something durable. The tools must catch a `ForgetfulBackend`
that omits it: real cuts (`tools.crash.powercut`) where that file system shows the omission, enumeration
(`tools.crash.states`, `tools.crash.killcuts`) always.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.backends.local_disk.posix import SYSTEM, Posix
from tools.crash.faults import FaultyPosix

__all__ = ["SITES", "ForgetfulBackend", "ForgetfulPosix", "site_of"]

SITES: Final = {
    "slot bytes": "fsync of the temporary file in create: without it the name may be there before the bytes",
    "slot name": "fsync of log/ or fold/ in create: without it an acknowledged slot has no name",
    "segment bytes": "fdatasync (and msync) in seal: without it a committed segment lacks blocks or its length",
    "segment name": "fsync of seg/<term>/ in seal: without it a committed segment has no name",
    "old header": "fdatasync of a recycled file's cleared header: without it the old header may be over new data",
    "recycled data": "fdatasync of a recycled file's data before its header: without it that may be over old data",
    "folder names": "fsync of the parents of new folders, and of FORMAT's name: without it whole folders are lost",
    "settle": "fsync before acting on an object that was only seen: without it the act outlives the object",
}
"""Name -> the omitted sync, and the effect of a power cut then."""


def site_of(path: str, root: str) -> str | None:
    """Which of `SITES` an fsync of `path` belongs to, for the store at `root`; None: none of them."""
    if not path.startswith(f"{root}/"):
        return "folder names"  # the root itself and the folders above it
    first, _, rest = path.removeprefix(f"{root}/").partition("/")
    name = path.rpartition("/")[2]
    if name.startswith(".tmp-") or path.endswith("/FORMAT"):
        return "slot bytes"
    if name.endswith(".safetensors"):
        return "segment bytes"
    if first in ("log", "fold") and not rest:
        return "slot name"
    if first == "seg":
        return "segment name" if rest else "folder names"
    return None


class ForgetfulPosix(FaultyPosix):
    """Wraps `inner`; syncs of one site report success and do nothing."""

    def __init__(self, inner: Posix, root: str, site: str) -> None:
        super().__init__(inner)
        self._root = root
        self._site = site
        self._paths: dict[int, str] = {}
        self._recycled: dict[int, int] = {}
        self.settling = False

    def open(self, path: str, flags: int, dir_fd: int | None = None) -> int:
        descriptor = super().open(path, flags, dir_fd)
        self._paths[descriptor] = path if dir_fd is None else f"{self._paths[dir_fd]}/{path}".removesuffix("/.")
        self._recycled.pop(descriptor, None)
        if flags & os.O_WRONLY and not flags & (os.O_CREAT | os.O_DIRECT):
            self._recycled[descriptor] = 0
        return descriptor

    def site(self, fd: int) -> str | None:
        """Which of `SITES` the next sync of `fd` belongs to."""
        if fd in self._recycled and self._recycled[fd] < 2:
            return ("old header", "recycled data")[self._recycled[fd]]  # the seal follows
        return "settle" if self.settling else site_of(self._paths[fd], self._root)

    def path(self, fd: int) -> str:
        """The path with which `fd` was opened."""
        return self._paths[fd]

    def _sync(self, call: Callable[[int], None], name: str, fd: int) -> None:
        site = self.site(fd)
        if fd in self._recycled:
            self._recycled[fd] += 1
        if site != self._site:
            super()._sync(call, name, fd)

    def msync(self, memory: memoryview) -> None:
        if self._site != "segment bytes":  # nothing else is mapped
            super().msync(memory)


class ForgetfulBackend(LocalBackend):
    """The store at `path` without one of `SITES`.

    Attributes:
        forgetful: its system calls.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        site: str,
        posix: Posix = SYSTEM,
        *,
        direct: bool = True,
        recycle: str | None = None,
    ) -> None:
        if site not in SITES:
            raise ValueError(f"no site {site!r}; known: {', '.join(SITES)}")
        self.forgetful = ForgetfulPosix(posix, os.fspath(path), site)
        super().__init__(path, self.forgetful, direct=direct, recycle=recycle)

    def settle(self, prefix: str) -> None:
        """See `Backend.settle`. All its syncs belong to the site ``settle``, whatever their folder."""
        self.forgetful.settling = True
        try:
            super().settle(prefix)
        finally:
            self.forgetful.settling = False
