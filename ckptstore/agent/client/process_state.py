"""Says whether another process is stopped, and by what. A stopped process answers nothing until it is continued."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["state_of", "stopped"]

_GROUPS: Final = Path("/sys/fs/cgroup")
_STATES: Final = {
    "D": "it waits for a device",
    "R": "it is running",
    "S": "it is sleeping",
    "T": "it is stopped by a signal",
    "t": "a debugger has stopped it",
}


def stopped(pid: int) -> str | None:
    """Why a process is stopped, and how to continue it; None: it is not stopped, or the system does not say."""
    state = _letter(pid)
    if state == "T":
        return f"it is stopped by a signal (state T): `kill -CONT {pid}` continues it"
    if state == "t":
        return "a debugger has stopped it (state t): continue it there, or detach"
    if state and (group := _frozen(pid)):
        return f"its control group {group} is frozen: thaw it"
    return None


def state_of(pid: int) -> str:
    """The state of a process, as the system reports it, as a text."""
    letter = _letter(pid)
    return stopped(pid) or (f"{_STATES[letter]} (state {letter})" if letter in _STATES else f"state {letter or '?'}")


def _letter(pid: int) -> str:
    try:
        # The process name before may hold any byte.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode("ascii", "replace")
    except (OSError, IndexError):
        return ""


def _frozen(pid: int) -> str | None:
    """The control group of a process, if it is frozen (version 1, version 2, or both side by side)."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and any(_says(root, path, "cgroup.events", "frozen 1") for root in ("", "unified")):
            return path
        if "freezer" in controllers.split(",") and _says("freezer", path, "freezer.state", "FROZEN"):
            return path
    return None


def _says(root: str, group: str, name: str, line: str) -> bool:
    """Whether a file of a control group has a line."""
    try:
        return line in (_GROUPS / root / group.lstrip("/") / name).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return False
