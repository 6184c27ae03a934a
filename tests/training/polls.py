"""Lets the writers of Checkpointers look for requests of other processes often: a test waits for no poll of 5 s."""

from __future__ import annotations

from functools import partial, partialmethod

import pytest

from ckptstore import Store, agent

__all__ = ["poll_often"]


def poll_often(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.1) -> None:
    """Set the `poll_seconds` of every writer that a `Checkpointer` opens from now on."""
    monkeypatch.setattr(Store, "writer", partialmethod(Store.writer, poll_seconds=seconds))
    monkeypatch.setattr(agent, "writer", partial(agent.writer, poll_seconds=seconds))
