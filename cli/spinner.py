"""Shows on a terminal what a command is doing and for how long, while there is nothing to count."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["over", "patience"]


def over(text: str) -> None:
    """Rewrite the current line of stderr, a terminal. Not through click: with NO_COLOR it strips the erase sequence."""
    sys.stderr.write(f"\r\033[K{text}")
    sys.stderr.flush()


@contextmanager
def patience(label: str, every: float = 1.0) -> Iterator[None]:
    """Show ``inspecting: 3 s`` on stderr while the block runs, if stderr is a terminal; otherwise print nothing.

    Args:
        every: seconds until the line is first shown, and between two updates.
    """
    if not sys.stderr.isatty():
        yield
        return
    from ckptstore.host.background_threads import Periodic

    began = time.monotonic()
    shown: list[bool] = []

    def tell() -> None:
        shown.append(True)
        over(f"{label}: {time.monotonic() - began:.0f} s")

    ticking = Periodic(every, tell, "patience")
    with suppress(RuntimeError):  # no thread could be started: show nothing
        ticking.start()
    try:
        yield
    finally:
        ticking.stop()
        ticking.join(every)
        if shown:
            over("")
