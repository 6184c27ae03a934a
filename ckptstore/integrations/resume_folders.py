"""Temporary folders that a framework reads when it resumes. They end with the process that made them.

A folder's lock file is locked as long as its process lives. So a process that was killed leaves a folder that the next
one recognizes and removes, even if both are in containers that share the place.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Final

__all__ = ["ResumeFolder"]

_PREFIX: Final = "ckptstore-resume-"
_LOCK: Final = "lock"


class ResumeFolder:
    """A temporary folder, removed by `remove`, when this object is collected, or at the normal end of the process.

    Attributes:
        path: the folder. It is private to this user.
    """

    def __init__(self, parent: str | os.PathLike[str] | None = None) -> None:
        """Make it, and remove those of processes that have ended.

        Args:
            parent: where; None: the system's place for temporary files (``TMPDIR``).
        """
        place = Path(parent if parent is not None else tempfile.gettempdir())
        place.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(place)
        made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=place))
        descriptor = os.open(made / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Prevents: another process that takes the lock first and removes the folder.
        self.path = made.rename(place / made.name.removeprefix("."))
        self._end = weakref.finalize(self, _remove, self.path, descriptor, os.getpid())

    def remove(self) -> None:
        """Remove it. A second call does nothing."""
        self._end()


def _remove(path: Path, descriptor: int, process: int) -> None:
    if os.getpid() != process:  # a fork, for example a loader's worker, ends
        return
    shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)


def _remove_abandoned(place: Path) -> None:
    for folder in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
