"""Counts of a simulated device: bytes over the bus, waits of the host and their callers, launches, memory."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

__all__ = ["Counts", "Wait", "place_here"]

_ROOT: Final = Path(__file__).resolve().parents[2]
_PRODUCT: Final = f"{_ROOT / 'ckptstore'}/"
_DEPTH: Final = 3


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait of the host for a device.

    Attributes:
        why: the call that waited.
        where: up to three places in ckptstore, the innermost first, ``file:line``; empty: the caller is not ckptstore.
        outstanding: how many jobs were not done yet.
        thread: the thread that waited (`threading.get_ident`).
    """

    why: str
    where: tuple[str, ...]
    outstanding: int
    thread: int = field(default_factory=threading.get_ident)


@dataclass
class Counts:
    """Counts since the last `reset`.

    Attributes:
        to_host, to_device: bytes over the bus.
        launches: kernels and copies on the device that were queued, by the place in ckptstore; None: by others.
        copies: copies over the bus, likewise.
        waits: of the host.
        held: bytes of device memory now.
        peak: the most bytes held since the reset.
        base: the bytes held at the reset.
        product, product_peak: likewise, of the memory that ckptstore allocated.
    """

    to_host: int = 0
    to_device: int = 0
    launches: Counter[str | None] = field(default_factory=Counter)
    copies: Counter[str | None] = field(default_factory=Counter)
    waits: list[Wait] = field(default_factory=list)
    held: int = 0
    peak: int = 0
    base: int = 0
    product: int = 0
    product_peak: int = 0

    def reset(self) -> None:
        """Start from 0, except for the memory that is held now."""
        self.to_host = self.to_device = 0
        self.launches.clear()
        self.copies.clear()
        self.waits.clear()
        self.base = self.peak = self.held
        self.product_peak = self.product

    @property
    def extra(self) -> int:
        """The peak of held bytes since the reset, minus those at the reset."""
        return self.peak - self.base

    def took(self, nbytes: int, where: str | None) -> None:
        """Count an allocation."""
        self.held += nbytes
        self.peak = max(self.peak, self.held)
        if where is not None:
            self.product += nbytes
            self.product_peak = max(self.product_peak, self.product)

    def gave(self, nbytes: int, where: str | None) -> None:
        """Count the release of memory that was allocated at `where`."""
        self.held -= nbytes
        if where is not None:
            self.product -= nbytes

    def of_product(self, counted: Counter[str | None]) -> int:
        """The number of launches or copies that ckptstore made."""
        return sum(number for where, number in counted.items() if where is not None)


def place_here() -> tuple[str, ...]:
    """The places in ckptstore on the stack, the innermost first; empty: ckptstore is not on the stack."""
    found = []
    for frame in _frames():
        name = frame.f_code.co_filename
        if name.startswith(_PRODUCT):
            found.append(f"{name.removeprefix(_PRODUCT)}:{frame.f_lineno}")
            if len(found) == _DEPTH:
                break
    return tuple(found)


def _frames() -> Iterator[Any]:
    frame = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back  # type: ignore[assignment]
