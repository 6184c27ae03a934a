"""Format numbers for the texts of findings."""

from __future__ import annotations

__all__ = ["bandwidth", "counted", "size", "span"]


def size(nbytes: float) -> str:
    """``512 B``, ``1.46 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.3g} {unit}" if abs(nbytes) < 999.5 else f"{nbytes:.0f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB"


def bandwidth(bytes_per_second: float) -> str:
    """``1.46 GiB/s``."""
    return f"{size(bytes_per_second)}/s"


def span(seconds: float) -> str:
    """``0.3 ms``, ``2.1 s``, ``4 min``."""
    if seconds < 1:
        return f"{seconds * 1000:.2g} ms" if seconds < 0.0995 else f"{seconds * 1000:.0f} ms"
    return f"{seconds:.2g} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def counted(number: int, thing: str) -> str:
    """``1 thread``, ``4 threads``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
