"""Parse times, sizes and bandwidths with units."""

from __future__ import annotations

import math
import re
from typing import Final

from ckptstore.errors import UsageError

__all__ = ["bandwidth", "nbytes", "seconds"]

_NUMBER: Final = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+)"
_SECONDS: Final = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PREFIX: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def seconds(text: str) -> float:
    """Parse ``500ms``, ``0.5s``, ``30min``, ``2h``, ``1h30min``, ``3d`` -> seconds. The unit is required.

    Raises:
        UsageError: another form.
    """
    parts = re.findall(rf"{_NUMBER}\s*(us|µs|ms|min|s|m|h|d)", text)
    if not parts or "".join(number + unit for number, unit in parts) != re.sub(r"\s", "", text):
        raise UsageError(f"{text!r} is not a time: write 500ms, 0.5s, 30min, 2h, 1h30min or 3d")
    return _finite(sum(float(number) * _SECONDS[unit] for number, unit in parts), text)


def nbytes(text: str) -> float:
    """Parse ``5GB``, ``500MiB`` or a number of bytes -> bytes.

    Raises:
        UsageError: another form.
    """
    found = re.fullmatch(rf"{_NUMBER}\s*([kmgt]i?)?B?", text.strip(), re.I)
    if not found:
        raise UsageError(f"{text!r} is not a size: write 5GB, 500MiB or a number of bytes")
    return _finite(float(found[1]) * _PREFIX[(found[2] or "").lower()], text)


def bandwidth(text: str) -> float:
    """Parse ``1GB/s``, ``800MiB/s``, ``10Gbit/s``, ``25Gbps`` -> bytes per second.

    Raises:
        UsageError: another form; also ``Gb/s``, which some read as bytes and some as bits.
    """
    word = text.strip()
    if re.fullmatch(rf"{_NUMBER}\s*[kKmMgGtT]?i?b/s", word) or re.fullmatch(rf"{_NUMBER}\s*[kKmMgGtT]?i?Bps", word):
        raise UsageError(f"{text!r} could be bits or bytes: write 1GB/s (bytes) or 10Gbit/s (bits)")
    found = re.fullmatch(rf"{_NUMBER}\s*([kKmMgGtT]i?)?(B/s|bit/s|bps)", word)
    if not found:
        raise UsageError(f"{text!r} is not a bandwidth: write 1GB/s, 800MiB/s or 10Gbit/s")
    return _finite(float(found[1]) * _PREFIX[(found[2] or "").lower()] / (1 if found[3] == "B/s" else 8), text)


def _finite(value: float, text: str) -> float:
    if not math.isfinite(value):
        raise UsageError(f"{text!r} is out of range")
    return value
