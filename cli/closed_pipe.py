"""Defines the error for a closed stdout."""

from __future__ import annotations


class ClosedPipeError(Exception):
    """The process that read our stdout has exited, as with ``| head``."""
