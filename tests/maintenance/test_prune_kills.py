"""SIGKILL at every crash point that pruning passes: a rerun completes it, and nothing kept is lost."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ckptstore
from ckptstore.host import crash_points
from tests import warmth
from tests.forms import LONG, short_or
from tests.maintenance.test_pruning import CHAIN, RULES, check, promised, save

STEPS = range(1, 16)


def killed_at(point: str, count: int, work: Callable[[], None]) -> bool:
    """Run `work` in a separate process until it passes `point` for the `count`-th time -> whether it did."""
    victim = os.fork()
    if victim == 0:
        status = 1
        try:
            crash_points.arm(point, count)
            work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(victim, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def passed(work: Callable[[], object]) -> list[str]:
    """The points that `work` passes, in the order of the register."""
    found: set[str] = set()
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("ckptstore.") and name != crash_points.__name__ and hasattr(module, "crash_point"):
                patch.setattr(module, "crash_point", found.add)
        work()
    return [point for point in (*crash_points.CRASH_POINTS, *crash_points.UPKEEP_POINTS) if point in found]


def every_kill(work: Callable[[Path], None], fresh: Callable[[], Path]) -> Iterator[tuple[str, Path]]:
    """Where a victim died, and the store that it left: at each point the first time; in the long form twice, then each
    third."""
    work(fresh())  # imports what it needs
    for point in passed(lambda: work(fresh())):
        count = 1
        while LONG or count <= 1:
            root = fresh()
            if not killed_at(point, count, lambda root=root: work(root)):
                break
            yield f"{point}:{count}", root
            count += 3 if count > 2 else 1


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[[], Path]:
    """Makes copies of a store of fifteen checkpoints: chains, of which hardly anything can be retired, then fulls."""
    with ckptstore.open(tmp_path / "origin") as store:
        for steps, deltas in ((STEPS[:8], CHAIN), (STEPS[8:], None)):
            with store.writer(deltas=deltas, poll_seconds=None) as writer:
                save(writer, steps)
                writer.tag("mine", 4)
    number = 0

    def made() -> Path:
        nonlocal number
        shutil.rmtree(tmp_path / f"copy-{number}", ignore_errors=True)
        number += 1
        return Path(shutil.copytree(tmp_path / "origin", tmp_path / f"copy-{number}"))

    return made


@pytest.mark.slow
def test_prune_and_gc(fresh: Callable[[], Path]) -> None:
    def work(root: Path) -> None:
        store = ckptstore.open(root)
        store.prune(*RULES, take_over=True)
        store.gc()

    wanted = promised(STEPS, tagged=[4])
    died = []
    for number, (where, root) in enumerate(every_kill(work, fresh)):
        died.append(where.partition(":")[0])
        if number % short_or(3, 1):
            continue
        store = ckptstore.open(root)
        assert set(wanted) <= {info.step for info in store.checkpoints()}, where
        work(root)
        check(store, wanted)
        assert store.tags().keys() == {"mine"}
    assert {"open.created", "create.linked", "commit.before-create", "commit.created", "gc.deleted"} <= set(died)
    assert {"prune.planned", "prune.retired", "gc.surveyed"} <= set(died)
    assert len(died) >= short_or(8, 20)


@pytest.mark.slow
def test_a_writer_that_keeps_to_rules(tmp_path: Path) -> None:
    number = 0

    def empty() -> Path:
        nonlocal number
        shutil.rmtree(tmp_path / f"store-{number}", ignore_errors=True)
        number += 1
        return tmp_path / f"store-{number}"

    def work(root: Path) -> None:
        store = ckptstore.open(root)
        done = store.latest_step() or 0
        with store.writer(keep=["last:2", "every:4"], threads=1, poll_seconds=None) as writer:
            save(writer, range(done + 1, 7))
        store.gc()

    died = []
    for kill, (where, root) in enumerate(every_kill(work, empty)):
        died.append(where.partition(":")[0])
        if kill % short_or(4, 1):
            continue
        work(root)
        store = ckptstore.open(root)
        check(store, [4, 5, 6])
        assert store.rules() == ("last:2", "every:4"), where
    assert {"save.sealed", "commit.before-create", "commit.created", "commit.acknowledged", "gc.deleted"} <= set(died)
    assert len(died) >= short_or(8, 30)


@pytest.mark.parametrize("point", ["create.temp-written", "create.linked", "request.posted"])
def test_a_requester_of_a_live_writer(fresh: Callable[[], Path], point: str) -> None:
    root = fresh()
    store = ckptstore.open(root)
    with store.writer(deltas=CHAIN, poll_seconds=0.02) as writer:
        command = [sys.executable, "-c", "from ckptstore.cli.main import main; main()", "prune", str(root)]
        command += [word for rule in RULES for word in ("--keep", rule)]
        environment = {**os.environ, "CKPTSTORE_CRASH_AT": point}
        died = warmth.nursery().run(command, env=environment, timeout=240)
        assert died.returncode == -signal.SIGKILL, died.stderr
        end = time.monotonic() + 120
        while store.backend.list("req/") and time.monotonic() < end:
            time.sleep(0.02)
        store.prune(*RULES)  # whether it was granted already or never requested
        save(writer, [16])
    check(store, sorted({*promised(STEPS, tagged=[4]), 16}))
