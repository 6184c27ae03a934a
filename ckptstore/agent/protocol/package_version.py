"""Says which ckptstore a process runs: a trainer and its agent should run the same one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptstore._version import __version__

__all__ = ["other_package", "package"]


def package() -> dict[str, str]:
    """Version and folder of the package that this process runs."""
    return {"version": __version__, "location": str(Path(__file__).resolve().parents[2])}


def other_package(greeting: Mapping[str, Any]) -> str | None:
    """A text that names an agent's ckptstore, if it differs from this process's; None: it is the same."""
    mine = package()
    its = {key: str(greeting.get(key, "?")) for key in mine}
    if its == mine:
        return None
    its_place, place = its["location"], mine["location"]
    return f"runs ckptstore {its['version']} of {its_place}, and this process {mine['version']} of {place}"
