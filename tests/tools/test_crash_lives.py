"""Crashes on unusual paths of a store: with a memory budget, layer by layer, with many ranks.

Short forms of ``python -m tools.crash.{states,kills,faultsweep} --life NAME``; ranks as processes that die one by one
are in `test_rank_kills`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forms import LONG, long_only, short_or
from tools.crash import faults, faultsweep, kills, states
from tools.crash.lives import LIVES, POINTS
from tools.crash.media import MEDIA
from tools.crash.scenario import Violation

# A killed writer of diffs may have lost steps that waited for their batch; the next one reports it.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ckptstore.LostStepsWarning")]

NEW = [life for life in LIVES if life != "whole"]


@pytest.mark.parametrize("medium", MEDIA if LONG else ("folder", "pmem"))
@pytest.mark.parametrize("life", NEW)
def test_every_state_after_a_power_cut_keeps_its_promises(life: str, medium: str) -> None:
    done = states.explore(limit=short_or(2, 20), life=life, medium=medium)
    assert done.states > 40
    assert done.restored > done.states


@pytest.mark.parametrize("life", NEW)
def test_a_disk_that_forgets_is_caught(life: str) -> None:
    """Negative control: these lives pass the syncs, and the search notices if a segment's is missing."""
    with pytest.raises(Violation):
        states.explore(limit=40, life=life, broken=faults.Fault(frozenset({"fdatasync"}), times=None))


@pytest.mark.parametrize("life", ["layered", "ranks"])
def test_persistent_memory_that_is_not_drained_is_caught(life: str) -> None:
    with pytest.raises(Violation):
        states.explore(limit=40, life=life, medium="pmem", forgets=frozenset({"drain"}))


@pytest.mark.parametrize("life", [life if life == "layered" else pytest.param(life, marks=long_only) for life in NEW])
def test_sigkill_at_every_crash_point_that_it_passes(tmp_path: Path, life: str) -> None:
    done = kills.sweep(short_or(1, 3) * len(POINTS[life]), folder=tmp_path, life=life)
    assert all(done.points[point] for point in POINTS[life]), done.points
    assert done.restored > 0


@pytest.mark.parametrize("life", [life if life == "bounded" else pytest.param(life, marks=long_only) for life in NEW])
def test_faults_surface_and_lose_nothing(life: str) -> None:
    done = faultsweep.sweep(every=short_or(101, 7), cuts=short_or(1, 2), life=life)
    assert set(done.injected) == set(faultsweep.KINDS)
    assert done.surfaced["StorageError"] > 0
    assert done.states > 0


@long_only
@pytest.mark.parametrize("medium", ["recycled", "pmem", "pmem-msync"])
@pytest.mark.parametrize("life", NEW)
def test_faults_of_other_media_surface_and_lose_nothing(life: str, medium: str) -> None:
    done = faultsweep.sweep(every=13, cuts=2, life=life, medium=medium)
    assert done.surfaced["StorageError"] > 0
