"""Whether a process that named itself has ended: known for certain on its own host alone.

A number alone does not name a process. Another host has the same numbers, so has another container, and a number is
given again. So a process says besides its number which boot of which kernel it runs under, in which namespaces, and
when it began. Whoever asks compares all of it with his own, and does not know where anything differs or is missing.
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
"""Of numbers, and of the clock in which the kernel says when a process began."""
_HERE: Final = ("host", "boot", "namespaces")
_STATE, _THREADS, _BEGAN = 0, 17, 19  # fields of /proc/PID/stat behind the process's name


def identity() -> dict[str, Any]:
    """This process, for `has_ended` elsewhere: ``host`` and ``pid``; and ``boot``, ``namespaces``, ``began`` (clock
    ticks since the boot), where the system says them.
    """
    pid = os.getpid()
    found: dict[str, Any] = {"host": platform.node(), "pid": pid}
    try:
        # A /proc of another namespace (a host's, shown in a container) would tell of another process.
        if str(Path("/proc/self").readlink()) != str(pid):
            return found
        boot = _BOOT.read_text().strip()
        names = " ".join(str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in _NAMESPACES)
        began = int(_fields(pid)[_BEGAN])
    except (OSError, ValueError, IndexError):
        return found
    return {**found, "boot": boot, "namespaces": names, "began": began}


def has_ended(process: Mapping[str, Any]) -> bool:
    """Whether the process that gave this `identity` has certainly ended. False: it lives, or nobody here can tell."""
    here = identity()
    if "began" not in here or any(process.get(name) != here[name] for name in _HERE):
        return False
    pid, began = process.get("pid"), process.get("began")
    if type(pid) is not int or type(began) is not int or pid < 1:
        return False
    try:
        os.kill(pid, 0)  # asks the kernel, from which no option of /proc hides a process
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # it is another user's
        pass
    try:
        fields = _fields(pid)
        # A zombie has ended, if its last thread has: a process may have lost its first thread alone.
        over = fields[_STATE] in ("Z", "X") and int(fields[_THREADS]) <= 1
        return over or int(fields[_BEGAN]) != began
    except (OSError, ValueError, IndexError):
        return False


def _fields(pid: int) -> list[str]:
    """What the kernel says of a process, behind its name, which may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
