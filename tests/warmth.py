"""Scripts of tests as processes that begin warm (`tools.warm`): one nursery for each worker of pytest, made when asked.

A test that is about how an interpreter begins, about what is imported, or about memory starts a cold one.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.warm import Script, Warm

__all__ = ["close", "nursery", "run", "start"]

# Threads of OpenMP that wait for each other shall sleep: by default they spin, and where more processes train than
# there are cores they did little else (4.2 s of a core for a test that takes 0.5). It is read when torch is imported:
# here, after this (conftest.py imports it), and in every process that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

_AT_FIRST = dict(os.environ)
"""Before any test has changed it for itself."""


@functools.cache
def nursery() -> Warm:
    """The one of this process. It has imported torch, so each script saves the seconds that this takes."""
    return Warm(env=_AT_FIRST)


def close() -> None:
    """End it, if there is one, and what it has started."""
    if nursery.cache_info().currsize:
        nursery().close()
        nursery.cache_clear()


def start(command: Sequence[str], *, cwd: Path | None = None, **streams: Any) -> Script:
    """Begin a script as `subprocess.Popen` does: in this process's folder, with its environment of now."""
    return nursery().start(command, cwd=cwd or Path.cwd(), env=os.environ, **streams)


def run(
    command: Sequence[str], *, cwd: Path | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """A script from its beginning to its end -> its status, and what it wrote."""
    return nursery().run(command, cwd=cwd or Path.cwd(), env=os.environ, timeout=timeout)
