"""A process that is killed at each crash point while it replaces the newest step: the old one or the new is there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import ckptstore
from ckptstore.host.crash_points import CRASH_POINTS
from tests import warmth
from tests.forms import short_or

pytestmark = pytest.mark.usefixtures("numpy_elsewhere_in_ci")

POINTS = [name for name in CRASH_POINTS if name.split(".")[0] in ("save", "commit", "create", "open")]
CHILD = """
import sys
import numpy, ckptstore
from ckptstore.host import crash_points

url, place, count = sys.argv[1:]
with ckptstore.open(url).writer(poll_seconds=None) as writer:
    if writer.parent is None:
        writer.save({"w": numpy.zeros(3000), "again": 0}, 5)
    crash_points.arm(place, int(count))
    writer.save({"w": numpy.ones(3000), "again": 1}, 5, replace=True)
    crash_points.arm("")
"""


def run(url: Path, place: str, count: int) -> bool:
    """Replace step 5 -> whether the process was killed."""
    command = [sys.executable, "-c", CHILD, str(url), place, str(count)]
    done = warmth.run(command, cwd=Path(__file__).resolve().parents[2], timeout=120)
    if done.returncode not in (0, -9):
        raise AssertionError(done.stderr)
    return done.returncode == -9


@pytest.mark.slow
def test_killed_at_every_crash_point(tmp_path: Path) -> None:
    kills, left = 0, set()
    for place in POINTS:
        for count in range(1, 20):
            url = tmp_path / f"{place}-{count}"
            killed = run(url, place, count)
            store = ckptstore.open(url)
            newest, named = (store.load(ref, framework="numpy") for ref in ("latest", 5))
            assert newest["again"] == named["again"] == newest["w"][0], (place, count)
            assert store.checkpoint().step == 5
            assert store.load("5@1", framework="numpy")["again"] == 0, "it stays reachable by its term"
            if not killed:
                assert newest["again"] == 1
                break
            kills += 1
            left.add(newest["again"])
            if kills % short_or(5, 1) == 0:
                assert not run(url, "", 1), "the next process replaces it"
                assert ckptstore.open(url).load(5, framework="numpy")["again"] == 1, (place, count)
    assert left == {0, 1}
    assert kills > len(POINTS), "each point is passed; those of `create` by the OPEN and by the COMMIT"
