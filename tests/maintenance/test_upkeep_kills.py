"""SIGKILL at every crash point that copying and repairing pass: the same call again completes, bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import StoreNotFoundError
from ckptstore.formats.history.records import COPYING_KEY
from ckptstore.host import crash_points
from tests import warmth
from tests.forms import LONG, short_or
from tests.maintenance.stores import broken, flip, grown, states
from tests.maintenance.test_prune_kills import killed_at, passed
from tools.objects.server import Server


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("upkeep") / "store"
    grown(root).retire("1@1", take_over=True)
    return root


@pytest.fixture(scope="module")
def damaged(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without a slot of its log, and a batch of which the first half is intact."""
    entry, doc = ckptstore.open(source).describe("13@3")[-1]
    chunk = next(one for tensor in doc.tensors[14].values() for one in tensor.chunks if one.length)

    def damage(root: Path) -> None:
        flip(sorted((root / "log").iterdir())[3])
        flip(root / entry.key, chunk.offset)

    return broken(source, tmp_path_factory.mktemp("upkeep") / "damaged", damage)


def every_kill(work: Callable[[Path], object], place: Path) -> Iterator[tuple[str, Path]]:
    """Where a victim died, and the files that it left: at each point the first time; in the long form every time."""
    work(place / "first")  # imports what it needs
    for point in passed(lambda: work(place / "second")):
        count = 1
        while LONG or count <= 1:
            target = place / f"{point}-{count}"
            if not killed_at(point, count, lambda: work(target)):  # noqa: B023 - called at once
                break
            yield f"{point}:{count}", target
            shutil.rmtree(target, ignore_errors=True)
            count += 1


def is_no_store_or_whole(root: str | Path, wanted: dict[str, Any]) -> None:
    try:
        found = states(ckptstore.open(root))
    except StoreNotFoundError:
        return
    assert found == wanted


def check(root: str | Path, wanted: dict[str, Any]) -> None:
    store = ckptstore.open(root)
    report = store.verify(deep=True)
    assert report.ok
    assert (report.orphans, report.strangers) == ((), ())
    assert states(store) == wanted
    assert COPYING_KEY not in store.backend.list("")


@pytest.mark.slow
def test_copy(source: Path, tmp_path: Path) -> None:
    wanted, died = states(ckptstore.open(source)), []
    kills = every_kill(lambda target: ckptstore.open(source).copy(target, threads=1), tmp_path)
    for number, (where, target) in enumerate(kills):
        died.append(where.partition(":")[0])
        if number % short_or(2, 1):
            continue
        is_no_store_or_whole(target, wanted)
        ckptstore.open(source).copy(target)
        check(target, wanted)
    assert {one for one in crash_points.UPKEEP_POINTS if one.startswith("copy.")} <= set(died)
    assert {"create.temp-written", "create.before-link", "create.linked", "create.synced", "pin.created"} <= set(died)


@pytest.mark.slow
def test_repair(damaged: Path, tmp_path: Path) -> None:
    ckptstore.repair(damaged, tmp_path / "whole")
    wanted, died = states(ckptstore.open(tmp_path / "whole")), []
    before = {path: path.read_bytes() for path in damaged.rglob("*") if path.is_file()}
    assert {"13@3", "20@4"} <= wanted.keys()
    assert "14@3" not in wanted
    kills = every_kill(lambda target: ckptstore.repair(damaged, target, threads=1), tmp_path / "kills")
    for number, (where, target) in enumerate(kills):
        died.append(where.partition(":")[0])
        if number % short_or(3, 1):
            continue
        is_no_store_or_whole(target, wanted)
        ckptstore.repair(damaged, target)
        check(target, wanted)
    assert {path: path.read_bytes() for path in damaged.rglob("*") if path.is_file()} == before
    wanted_points = {one for one in crash_points.UPKEEP_POINTS if one.startswith(("copy.", "repair."))}
    assert wanted_points <= set(died)


# -- the same on an object server


def killed(call: str, point: str, server: Server, *arguments: str) -> None:
    name, _, count = point.partition(":")
    armed = f"from ckptstore.host.crash_points import arm; arm({name!r}, {int(count or 1)})"
    command = [sys.executable, "-c", f"import sys, ckptstore; {armed}; {call}", *arguments]
    done = warmth.nursery().run(command, env={**os.environ, **server.environment()}, timeout=120)
    assert done.returncode == -signal.SIGKILL, (point, done.stderr)


@pytest.mark.slow
def test_objects(source: Path, s3: Server) -> None:
    """A copy to a bucket, then the same store pruned and collected there."""
    url, options = s3.url(), s3.options
    origin = ckptstore.open(source)
    wanted = states(origin)
    # In the order in which copies reach them: a copy that is continued has claimed its place already.
    points = ("copy.claimed", "copy.before-header:2", "copy.sealed:3", "copy.brought", "copy.before-format")
    for point in short_or((points[1], points[4]), points):
        killed("ckptstore.open(sys.argv[1]).copy(sys.argv[2])", point, s3, str(source), url)
        with pytest.raises(StoreNotFoundError):
            ckptstore.open(url, storage_options=options).checkpoints()
    store = ckptstore.open(url, storage_options=options)
    origin.copy(store)
    assert store.verify(deep=True).ok
    assert states(store) == wanted
    prune = "ckptstore.open(sys.argv[1]).prune('last:3', take_over=True)"
    for point in short_or(("prune.retired",), ("prune.planned", "commit.before-create", "prune.retired")):
        killed(prune, point, s3, url)
        store = ckptstore.open(url, storage_options=options)
        assert {"2@1", "18@3", "19@4", "20@4"} <= states(store).keys()
    store.prune("last:3", take_over=True)
    for point in short_or(("gc.deleted",), ("gc.surveyed", "gc.before-delete", "gc.deleted")):
        killed("ckptstore.open(sys.argv[1]).gc()", point, s3, url)
    store.gc()
    kept = {"2@1", "18@3", "19@4", "20@4"}  # 2@1 has a tag
    assert states(store) == {ref: wanted[ref] for ref in kept}
    assert store.verify(deep=True).ok
    assert not store.gc(dry_run=True).segments
