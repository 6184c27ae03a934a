"""Crash points: all of them are in the code, in the register and on the page, and the crash tests reach all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.host.crash_points import CRASH_POINTS, PUBLISH_POINTS, RANK_POINTS, TIER_POINTS, UPKEEP_POINTS
from tools.crash.points import ENGINE, Place, calls, page
from tools.crash.scenario import live
from tools.mutants.copies import repository


@pytest.fixture(scope="module")
def called() -> list[Place]:
    """Every call in the engine."""
    return calls()


def test_the_page_is_written_anew() -> None:
    """`python -m tools.crash.points docs/crash-points.md` does that."""
    assert (repository() / "docs/crash-points.md").read_text() == page()


def test_the_register_names_what_is_called_and_nothing_else(called: list[Place]) -> None:
    registered = [*CRASH_POINTS, *UPKEEP_POINTS, *RANK_POINTS, *TIER_POINTS, *PUBLISH_POINTS]
    assert len(set(registered)) == len(registered)
    assert set(registered) == {name for name, _, _ in called}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ckptstore.LostStepsWarning")
def test_the_lives_of_the_crash_tests_pass_every_call(
    called: list[Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached: set[Place] = set()

    def reach(name: str) -> None:
        caller = sys._getframe(1).f_code
        place = Path(caller.co_filename).resolve().relative_to(ENGINE).as_posix()
        reached.add((name, place, caller.co_name))

    for name, module in list(sys.modules.items()):
        if name.startswith("ckptstore.") and hasattr(module, "crash_point") and name != "ckptstore.host.crash_points":
            monkeypatch.setattr(module, "crash_point", reach)
    for mode in ("never", "always"):
        live(LocalBackend(tmp_path / mode, recycle=mode), lambda _: None)
    assert reached == {place for place in called if place[0] in CRASH_POINTS}
