"""What a writer knows of somebody who works beside its saves, in its own process, as long as it is open."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Companion"]


class Companion(Protocol):
    """Works while the writer has nothing to do. Every method may be called by any thread."""

    def active(self) -> bool:
        """Whether it is at work just now, or stands still for a save."""

    def close(self) -> None:
        """Stop soon, and give up what is half done. The writer still commits."""
