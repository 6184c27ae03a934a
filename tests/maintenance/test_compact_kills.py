"""SIGKILL at every crash point that compaction passes: a rerun completes it, and nothing kept is lost."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptstore
from ckptstore import DeltaOptions, RestoreBound, Store
from tests import warmth
from tests.forms import short_or
from tests.maintenance.test_compaction import check, save
from tests.maintenance.test_prune_kills import every_kill, killed_at

CHAIN = DeltaOptions(interval=1, bound=RestoreBound(times=None, depth=100))
KEPT = [4, 8, 9, 10, 11, 14]


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[[], Path]:
    """Makes copies of a store that needs every kind of move: bases to be freed, a chain too long, fulls alike."""
    with ckptstore.open(tmp_path / "origin") as store:
        for steps, deltas in ((range(1, 10), CHAIN), (range(10, 12), None), (range(12, 15), CHAIN)):
            with store.writer(deltas=deltas, poll_seconds=None) as writer:
                save(writer, steps)
        store.prune("last:1", "every:4", take_over=True)
        with store.writer(deltas=CHAIN, poll_seconds=None) as writer:
            save(writer, [15])
    number = 0

    def made() -> Path:
        nonlocal number
        shutil.rmtree(tmp_path / f"copy-{number}", ignore_errors=True)
        number += 1
        return Path(shutil.copytree(tmp_path / "origin", tmp_path / f"copy-{number}"))

    return made


def work(root: Path) -> None:
    store = ckptstore.open(root)
    store.compact(take_over=True, max_depth=1)
    store.gc()


def done(store: Store, steps: list[int]) -> None:
    """Check that nothing is left to do, and everything is there."""
    assert store.view().catalog.held == {}
    assert max(len(store.plan(info.ref).encodings) for info in store.checkpoints()) <= 2
    for pin in store.backend.list("pins/"):
        store.backend.delete(pin)  # a killed process cannot; a collector takes it for dead after ten minutes
    check(store, steps)
    named = {f"{one}.safetensors" for one in store.view().catalog.segments}
    assert {key.rpartition("/")[2] for key in store.backend.list("seg/")} == named, "an orphan is left"


def kept(root: Path) -> list[int]:
    return [info.step for info in ckptstore.open(root).checkpoints()]


@pytest.mark.parametrize("point", ["compact.rewritten", "compact.verified", "compact.committed", "gc.deleted"])
def test_each_step_of_a_move(fresh: Callable[[], Path], point: str) -> None:
    for count in (1, 2):
        root = fresh()
        steps = kept(root)
        assert killed_at(point, count, lambda root=root: work(root)), point
        check(ckptstore.open(root), steps)
        work(root)
        done(ckptstore.open(root), steps)


@pytest.mark.slow
def test_every_crash_point(fresh: Callable[[], Path]) -> None:
    died = []
    steps = kept(fresh())
    for number, (where, root) in enumerate(every_kill(work, fresh)):
        died.append(where.partition(":")[0])
        if number % short_or(4, 1):
            continue
        assert kept(root) == steps, where
        work(root)
        done(ckptstore.open(root), steps)
    passed = {"save.sealed", "commit.created", "create.linked", "pin.created", "open.created", "gc.deleted"}
    assert {*passed, "compact.rewritten", "compact.verified", "compact.committed"} <= set(died)
    assert len(died) >= short_or(10, 40)


@pytest.mark.parametrize("point", ["compact.rewritten", "compact.verified", "request.posted", "compact.committed"])
def test_a_requester_of_a_live_writer(fresh: Callable[[], Path], point: str) -> None:
    root = fresh()
    store = ckptstore.open(root)
    steps = kept(root)
    with store.writer(deltas=CHAIN, poll_seconds=0.02) as writer:
        command = [sys.executable, "-c", "from ckptstore.cli.main import main; main()", "compact", str(root)]
        environment = {**os.environ, "CKPTSTORE_CRASH_AT": point}
        died = warmth.nursery().run([*command, "--max-depth", "1"], env=environment, timeout=240)
        assert died.returncode == -signal.SIGKILL, died.stderr
        end = time.monotonic() + 120
        while store.backend.list("req/") and time.monotonic() < end:
            time.sleep(0.02)
        report = store.compact(max_depth=1)  # whether a move was granted already or never requested
        assert report.complete
        save(writer, [16])
    check(store, [*steps, 16])
