"""The store under crashes, kills and faults: short forms of ``python -m tools.crash.{states,kills,faultsweep}``."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptstore.host.crash_points import CRASH_POINTS
from tests.forms import short_or
from tools.crash import faults, faultsweep, kills, states
from tools.crash.scenario import Violation

# A killed writer of diffs may have lost steps that waited for their batch; the next one reports it.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ckptstore.LostStepsWarning")]


def test_every_state_after_a_power_cut_keeps_its_promises() -> None:
    done = states.explore(limit=short_or(4, 12))
    assert done.states > short_or(80, 200)
    assert done.restored > done.states


def test_a_store_that_recycles_files_keeps_them_as_well() -> None:
    done = states.explore(limit=short_or(2, 4), medium="recycled")
    assert done.restored > done.states > short_or(50, 100)


@pytest.mark.parametrize(
    ("calls", "what"),
    [
        (frozenset({"fsync", "fdatasync"}), "no sync at all"),
        (frozenset({"fdatasync"}), "segments are not synced"),
        (frozenset({"fsync"}), "slots, names and folders are not synced"),
    ],
)
def test_a_disk_that_forgets_is_caught(calls: frozenset[str], what: str) -> None:
    """Negative control: the same search finds a store that does not sync."""
    with pytest.raises(Violation):
        states.explore(limit=40, broken=faults.Fault(calls, times=None))


def test_sigkill_at_every_crash_point(tmp_path: Path) -> None:
    done = kills.sweep(short_or(1, 2) * len(CRASH_POINTS), folder=tmp_path)
    assert set(done.points) >= set(CRASH_POINTS)
    assert all(done.points[point] for point in CRASH_POINTS), done.points
    assert done.restored > 0


def test_faults_surface_and_lose_nothing() -> None:
    done = faultsweep.sweep(every=short_or(397, 17), cuts=short_or(1, 3))
    _check_sweep(done)


def test_faults_in_a_store_that_recycles_files_surface_and_lose_nothing() -> None:
    _check_sweep(faultsweep.sweep(every=short_or(631, 29), cuts=short_or(1, 3), medium="recycled"))


def _check_sweep(done: faultsweep.Sweep) -> None:
    assert set(done.injected) == set(faultsweep.KINDS)
    assert done.surfaced["StorageError"] > 0
    assert done.states > 0


def test_the_check_notices_what_it_is_for(tmp_path: Path) -> None:
    """Negative control: a promised checkpoint that is missing, or has other bits, is a violation."""
    from ckptstore.backends.local_disk.local import LocalBackend
    from ckptstore.store import open as open_store
    from tools.crash.scenario import check

    store = open_store(tmp_path / "store")
    with store.writer() as writer:
        writer.save({"not": "the state of step 1"}, step=1)
    with pytest.raises(Violation, match="other bits"):
        check(LocalBackend(tmp_path / "store"), [], write=False)
    with pytest.raises(Violation, match="acknowledged and gone"):
        check(LocalBackend(tmp_path / "store"), ["7@1"], write=False)
