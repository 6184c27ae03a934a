"""Lets the writers of Checkpointers look for requests of other processes often: a test waits for no poll of 5 s."""

from __future__ import annotations

import pytest

from ckptstore.training import open_term

__all__ = ["poll_often"]


def poll_often(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.1) -> None:
    """Set the `poll_seconds` of every writer that a `Checkpointer` opens from now on."""
    plain = open_term._writer_options
    monkeypatch.setattr(open_term, "_writer_options", lambda *given: {**plain(*given), "poll_seconds": seconds})
