"""Rules that come while a run saves, and go again: what they retire is deleted, whoever writes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402 - torch decides whether this file runs at all
from ckptstore import Store  # noqa: E402
from ckptstore.training import Checkpointer  # noqa: E402
from ckptstore.write.ranks.mailbox import Group, LocalMailbox  # noqa: E402


def segments(store: Store) -> int:
    return len([key for key in store.backend.list("seg/") if key.endswith(".safetensors")])


class Job:
    def __init__(self, store: Store, **options: Any) -> None:
        self.model = torch.nn.Linear(20, 20)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.store = store
        self.checkpointer = Checkpointer(
            store.url, model=self.model, optimizer=self.optimizer, strategy="full", **options
        )

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.model(torch.randn(4, 20)).square().mean().backward()
            self.optimizer.step()
            self.checkpointer.step()

    def run_until(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + 120
        while not true():
            assert time.monotonic() < end, f"{segments(self.store)} segments"
            self.run(1)
            time.sleep(0.05)


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "local": dict,
    "agent": lambda: {"agent": True},
    "ranks": lambda: {"group": Group(0, 1, LocalMailbox())},
}


@pytest.mark.parametrize("kind", KINDS)
def test_rules_that_come_free_what_they_retire(tmp_path: Path, kind: str) -> None:
    store = ckptstore.open(tmp_path / "run")
    job = Job(store, **KINDS[kind]())
    with job.checkpointer:
        job.checkpointer.resume()
        job.run(30)
        job.checkpointer.wait()
        assert len(store.checkpoints()) == 30
        store.keep("last:5")
        job.run_until(lambda: segments(store) < 20)
    assert len(store.checkpoints()) == 5
    assert segments(store) < 20


def test_rules_that_are_gone_again_before_anybody_looked(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run")
    job = Job(store)
    with job.checkpointer:
        job.checkpointer.resume()
        job.run(30)
        job.checkpointer.wait()
        store.keep("last:5")
        job.run(1)
        job.checkpointer.wait()
        store.keep(everything=True)
        job.run_until(lambda: segments(store) <= len(store.checkpoints()) + 1)
        there = len(store.checkpoints())
        job.run(5)
    assert len(store.checkpoints()) == there + 5


def test_rules_that_come_at_the_very_end(tmp_path: Path) -> None:
    """No step follows them: the end of the run deletes what they retire."""
    store = ckptstore.open(tmp_path / "run")
    job = Job(store)
    with job.checkpointer:
        job.checkpointer.resume()
        job.run(30)
        job.checkpointer.wait()
        store.keep("last:5")
        end = time.monotonic() + 60
        while len(store.checkpoints()) > 5 and time.monotonic() < end:  # the writer retires when it looks next
            time.sleep(0.1)
    assert len(store.checkpoints()) == 5
    assert segments(store) == 5


def test_without_rules_nothing_is_deleted(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run")
    job = Job(store)
    with job.checkpointer:
        job.checkpointer.resume()
        job.run(30)
    assert len(store.checkpoints()) == segments(store) == 30
