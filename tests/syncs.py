"""Leaves out the kernel's work in ``fsync`` where no test can see it: only a power cut shows what a sync has saved.

The engine makes every call all the same, with a descriptor that must be open, and the shims by which tests count, delay
or fail a sync (`Posix` and its subclasses) are above these two functions. Power cuts have a disk of their own that
forgets what was not synced (`tools.crash.ramfs`). A sync of a real disk takes milliseconds, and a file of forty tests
made five thousand.

Syncs stay real in the long form, in processes that tests start, and in the files of `REAL`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from tests import division
from tests.forms import LONG

__all__ = ["choose"]

REAL: Final = (
    "tests/backends/",  # the media themselves: what a disk says to a sync, and devices that are full
    "tests/doctor/",  # measures how long a sync takes
    "tests/exchange/test_export.py",  # replaces both functions by its own
)
"""Files and folders (with a trailing slash) whose tests sync to the disk; those of ``make test-rest`` do, too."""

_KERNELS: Final = {"fsync": os.fsync, "fdatasync": os.fdatasync}


def choose(path: Path) -> None:
    """Set what a sync does in this process from now on: for the tests of the file `path`."""
    name = path.relative_to(division.ROOT).as_posix()
    real = LONG or division.in_rest(path) or any(name.startswith(one) for one in REAL)
    for call, kernels in _KERNELS.items():
        setattr(os, call, kernels if real else _nothing)


def _nothing(descriptor: int) -> None:
    """Raise `OSError` if the descriptor is not open, as the kernel would."""
    os.fstat(descriptor)
