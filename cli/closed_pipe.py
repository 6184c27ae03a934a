"""What a command raises when nobody reads its output any more."""

from __future__ import annotations


class ClosedPipeError(Exception):
    """Whoever read our stdout has gone, as with ``| head``."""
