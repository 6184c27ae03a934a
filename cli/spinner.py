"""What a terminal shows while a command works and has nothing to count: what it does, and for how long already."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["over", "patience"]


def over(text: str) -> None:
    """Write a line of stderr, a terminal, anew. Not by click, which leaves out with NO_COLOR what erases it."""
    sys.stderr.write(f"\r\033[K{text}")
    sys.stderr.flush()


@contextmanager
def patience(label: str, every: float = 1.0) -> Iterator[None]:
    """``inspecting: 3 s`` on stderr while the block runs, if stderr is a terminal; silence otherwise.

    Args:
        every: seconds until it is shown first, and between two times.
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
    with suppress(RuntimeError):  # no thread is to be had: then nothing is shown
        ticking.start()
    try:
        yield
    finally:
        ticking.stop()
        ticking.join(every)
        if shown:
            over("")
