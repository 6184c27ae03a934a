"""The machine-independent costs of a long history: requests, and memory that stays."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

from tests.forms import short_or
from tools.bench.storage import catalog, resident


@pytest.mark.slow
def test_a_long_history_asks_the_medium_for_no_more_than_a_short_one(tmp_path: Path) -> None:
    found = {}
    for count in (500, 8000):
        folder = tmp_path / str(count)
        catalog.make(folder, "fulls", count)
        catalog.place_segments(folder)
        # In a separate process: it counts by replacing methods.
        found[count] = catalog.measured("requests", folder)
    for what in ("log", "open", "save", "gc"):
        for name in ("get", "size"):
            assert found[8000][f"{what}.{name}"] == found[500][f"{what}.{name}"] <= 6, (what, name)
        assert found[8000][f"{what}.list"] <= 4, what  # a save lists when a fold begins


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim") or sys.platform != "linux", reason="asks glibc")
def test_the_memory_of_a_writer_stays(tmp_path: Path) -> None:
    """If everything were kept, each save would leave the catalog about 220 bytes, and a leaked state 8,000."""
    saves = short_or(240, 5_000)
    found = list(resident.readings(tmp_path / "store", saves, saves // 16))
    assert found[-1][2] < 60 + saves // 1000
    assert resident.left_per_save(found) < 4000, found
