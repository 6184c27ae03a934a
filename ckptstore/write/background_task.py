"""The protocol of background work in a writer's process, while the writer is open."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Companion"]


class Companion(Protocol):
    """Works while the writer is idle. Any thread may call any method."""

    def active(self) -> bool:
        """Whether it is working now, or paused for a save."""

    def close(self) -> None:
        """Stop soon, and discard unfinished work. The writer can still commit."""
