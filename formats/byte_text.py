"""Bytes as people read them: one text for the command, reports and the log of a training script."""

from __future__ import annotations

__all__ = ["size"]


def size(nbytes: float) -> str:
    """In binary units, three digits: ``512 B``, ``41.9 MiB``, ``1.46 GiB``."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    value, units = nbytes / 1024, ["PiB", "TiB", "GiB", "MiB", "KiB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1024
        units.pop()
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {units[-1]}"
