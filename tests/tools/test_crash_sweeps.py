"""The store under kills and faults: short forms of ``python -m tools.crash.{kills,faultsweep}``."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptstore.host.crash_points import CRASH_POINTS
from tests.forms import short_or
from tools.crash import faultsweep, kills

# A killed writer of diffs may have lost steps that waited for their batch; the next one reports it.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ckptstore.LostStepsWarning")]


def test_sigkill_at_every_crash_point(tmp_path: Path) -> None:
    done = kills.sweep(short_or(1, 2) * len(CRASH_POINTS), folder=tmp_path)
    assert set(done.points) >= set(CRASH_POINTS)
    assert all(done.points[point] for point in CRASH_POINTS), done.points
    assert done.restored > 0


def test_faults_surface_and_lose_nothing() -> None:
    done = faultsweep.sweep(every=short_or(397, 67), cuts=short_or(1, 2))
    _check_sweep(done)


def test_faults_in_a_store_that_recycles_files_surface_and_lose_nothing() -> None:
    _check_sweep(faultsweep.sweep(every=short_or(631, 113), cuts=short_or(1, 2), medium="recycled"))


def _check_sweep(done: faultsweep.Sweep) -> None:
    assert set(done.injected) == set(faultsweep.KINDS)
    assert done.surfaced["StorageError"] > 0
    assert done.states > 0
