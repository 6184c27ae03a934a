"""The alignment unit of direct I/O."""

from __future__ import annotations

from typing import Final

__all__ = ["BLOCK"]

BLOCK: Final = 4096
"""Alignment, in bytes, of segment writes: offset, length and memory address."""
