"""Who looks at a checkpoint reads the log for it once: as often as opening it does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore.backends.memory import MemoryBackend
from ckptstore.exchange.exporting import export
from ckptstore.log.journal import Journal
from ckptstore.reports.comparison import compare
from ckptstore.reports.explaining import explain
from ckptstore.reports.inspection import inspect, statistics
from ckptstore.restore.opened import opened


@pytest.fixture
def journal() -> Journal:
    store = ckptstore.open("memory://reads-once")
    with store.writer(parent=None, poll_seconds=None) as writer:
        for step in (1, 2):
            writer.save({"w": np.full(5, step, np.float32)}, step=step)
    return store.journal


@pytest.fixture
def gets(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counted: Counter[str] = Counter()
    get = MemoryBackend.get

    def counting(self: MemoryBackend, key: str, *limit: int) -> bytes:
        counted["gets"] += 1
        return get(self, key, *limit)

    monkeypatch.setattr(MemoryBackend, "get", counting)
    return counted


def looks(tmp_path: Path) -> dict[str, tuple[int, Callable[[Journal], Any]]]:
    return {
        "export": (1, lambda journal: export(journal, "latest", tmp_path / "x.safetensors")),
        "compare": (2, lambda journal: compare(journal, "1", "latest")),
        "inspect": (1, lambda journal: inspect(journal, "latest")),
        "statistics": (1, lambda journal: statistics(journal, "latest", "w")),
        "explain": (1, lambda journal: explain(journal, "latest")),
    }


@pytest.mark.parametrize("look", ["export", "compare", "inspect", "statistics", "explain"])
def test_the_log_is_read_as_often_as_checkpoints_are_opened(
    tmp_path: Path, journal: Journal, gets: Counter[str], look: str
) -> None:
    journal.format  # noqa: B018  # the FORMAT file is read once for all
    gets.clear()
    with opened(journal, "latest"):
        opening = gets["gets"]
    assert opening > 0
    checkpoints, work = looks(tmp_path)[look]
    gets.clear()
    work(journal)
    assert gets["gets"] == checkpoints * opening
