"""Decide whether a process that recorded its identity has ended, which is only certain on its own host.

A PID alone does not identify a process: other hosts and containers use the same numbers, and numbers are reused. So an
identity also has the boot id of the kernel, the namespaces, and the start time of the process. The reader compares them
with its own. If any of them differs or is missing, the answer is unknown.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

__all__ = ["has_ended", "identity"]

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES: Final = ("pid", "time")
"""The namespaces of PIDs, and of the clock that the kernel uses for start times."""
_HERE: Final = ("host", "boot", "namespaces")
_STATE, _THREADS, _BEGAN = 0, 17, 19  # fields of /proc/PID/stat after the process's name


def identity() -> dict[str, Any]:
    """The identity of this process, for `has_ended` in another process.

    Has ``host`` and ``pid``, and where the system provides them ``boot``, ``namespaces`` and ``began`` (clock ticks
    since the boot).
    """
    pid = os.getpid()
    found: dict[str, Any] = {"host": platform.node(), "pid": pid}
    try:
        # A /proc of another namespace (the host's, mounted in a container) would describe another process.
        if str(Path("/proc/self").readlink()) != str(pid):
            return found
        boot = _BOOT.read_text().strip()
        names = " ".join(str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in _NAMESPACES)
        began = int(_fields(pid)[_BEGAN])
    except (OSError, ValueError, IndexError):
        return found
    return {**found, "boot": boot, "namespaces": names, "began": began}


def has_ended(process: Mapping[str, Any]) -> bool:
    """Whether the process with this `identity` has certainly ended. False: it lives, or this host cannot know."""
    here = identity()
    if "began" not in here or any(process.get(name) != here[name] for name in _HERE):
        return False
    pid, began = process.get("pid"), process.get("began")
    if type(pid) is not int or type(began) is not int or pid < 1:
        return False
    try:
        os.kill(pid, 0)  # asks the kernel: mount options of /proc can hide processes, but not from this call
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # the process belongs to another user
        pass
    try:
        fields = _fields(pid)
        # A zombie has ended only if its last thread has: in some processes only the first thread has ended.
        over = fields[_STATE] in ("Z", "X") and int(fields[_THREADS]) <= 1
        return over or int(fields[_BEGAN]) != began
    except (OSError, ValueError, IndexError):
        return False


def _fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the process's name, which may hold any characters."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
