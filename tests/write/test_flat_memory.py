"""A writer with retention rules needs no more memory the longer it runs: it remembers only the kept checkpoints."""

from __future__ import annotations

import gc
import os
import tracemalloc
from pathlib import Path

import pytest

import ckptstore
from tests.forms import short_or

BEGIN, EARLY, LATE = 96, 480, short_or(1440, 2496)
"""Numbers of saves: tracing begins after the first, when caches are full; memory is read after the other two. A set of
as many numbers is enlarged between the two readings."""
MOST = 10.0
"""Bytes that a save may leave behind. Where each step was kept as a number of its own, each left 40 and more.
One reading differs from the next by up to 5,000 B (slots that await their removal, caches): 5 B for each save here."""


def test_a_writers_memory_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptstore.formats.history.tables.MANY", 32)
    monkeypatch.setattr("ckptstore.write.commits._MANY_DROPPED", 32)
    for sync in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, sync, lambda _descriptor: None)  # this test is not about crashes
    found: dict[int, int] = {}
    store = ckptstore.open(tmp_path / "store")  # in memory the log would count, too
    with store.writer(keep=["last:10", "best:loss:2"], poll_seconds=None) as writer:
        try:
            for step in range(1, LATE + 1):
                if step == BEGIN:
                    tracemalloc.start(1)
                writer.save({"step": step}, 10 * step, metadata={"loss": 1.0 / step})
                if step % 16 == 0:
                    store.gc()
                if step in (EARLY, LATE):
                    found[step] = held()
        finally:
            tracemalloc.stop()
    assert len(store.checkpoints()) == 10
    left = (found[LATE] - found[EARLY]) / (LATE - EARLY)
    assert left < MOST, f"each save left {left:.1f} B behind"


def held() -> int:
    """Bytes that lines of the package have allocated; other code (other threads, the tests) does not count."""
    gc.collect()
    own = tracemalloc.Filter(inclusive=True, filename_pattern=f"{Path(ckptstore.__file__).parent}/*")
    return sum(one.size for one in tracemalloc.take_snapshot().filter_traces([own]).traces)
