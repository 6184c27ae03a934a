"""A writer under rules of retention takes no more memory the longer it runs: it remembers what the rules keep."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import pytest

import ckptstore
from tests.forms import short_or

SAVES = short_or(1250, 2500)
EARLY, LATE = (600, 750), (SAVES - 150, SAVES)
"""A window when the caches are full (until then 40 B a save), and one at the end. Of each the least counts: tables are
tidied now and then."""
MOST = 25.0
"""Bytes that a save may leave behind: it left 80 while each step was kept as a number of its own; a number takes 36."""


def test_what_a_writer_remembers_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptstore.formats.tables.MANY", 32)
    monkeypatch.setattr("ckptstore.write.commits._MANY_DROPPED", 32)
    found: dict[tuple[int, int], int] = {}
    store = ckptstore.open(tmp_path / "store")  # in memory the log would count, too
    with store.writer(keep=["last:10", "best:loss:2"], poll_seconds=None) as writer:
        tracemalloc.start(1)
        try:
            for step in range(1, SAVES + 1):
                writer.save({"step": step}, 10 * step, metadata={"loss": 1.0 / step})
                if step % 16 == 0:
                    store.gc()
                for window in (EARLY, LATE):
                    if window[0] < step <= window[1] and step % 10 == 0:
                        gc.collect()
                        found[window] = min(tracemalloc.get_traced_memory()[0], found.get(window, 1 << 60))
        finally:
            tracemalloc.stop()
    assert len(store.checkpoints()) == 10
    left = (found[LATE] - found[EARLY]) / (LATE[0] - EARLY[0])
    assert left < MOST, f"each save left {left:.0f} B behind"
