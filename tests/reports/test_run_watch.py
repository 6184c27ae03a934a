"""Watching a run: beside its writer, across forks, and until somebody removes its store."""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import (
    CorruptLogError,
    DeltaOptions,
    DiffOptions,
    RunStatus,
    StorageError,
    StoreNotFoundError,
    StoreReplacedError,
    UsageError,
)
from ckptstore.backends.memory import MemoryBackend
from ckptstore.formats.history.record_text import encode_format
from ckptstore.formats.history.records import FormatFile, slot_key
from ckptstore.log import fold_writer
from ckptstore.store import Store

EVERY = 0.01


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(5000, step, dtype=np.float32)}


def save(writer: Any, *steps: int, **metadata: Any) -> None:
    for step in steps:
        writer.save(state(step), step, metadata={"loss": 1 / step, **metadata})


def looks(store: Store, **options: Any) -> Iterator[RunStatus]:
    """A status for each ``next``."""
    return store.watch(EVERY, quiet=True, **options)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return ckptstore.open(tmp_path / "run")


def test_a_writer_at_work_is_followed_to_its_end(store: Store) -> None:
    """Every step is reported, once and in order, whatever the timing of looks and saves."""

    seen: list[RunStatus] = []
    told = threading.Semaphore(0)

    def write() -> None:
        time.sleep(0.05)
        with store.writer(diffs=DiffOptions(batch=2)) as writer:
            for step in range(1, 21):
                save(writer, step)
                if step % 8 == 1:
                    told.acquire(timeout=120)  # so that it is seen at work, however busy the machine is

    thread = threading.Thread(target=write)
    thread.start()
    for status in store.watch(EVERY, wait=True):
        seen.append(status)
        told.release()
        if status.writer == "closed":
            break
    thread.join()
    steps = [status.step or 0 for status in seen]
    assert steps == sorted(steps)
    last = seen[-1]
    assert (last.latest, last.checkpoints, last.terms, last.changes[-1]) == ("20@1", 20, 1, "term 1 is closed")
    assert last.values == tuple((step, 1 / step) for step in range(1, 21))
    assert len(seen) > 2
    assert all(status.changes for status in seen[1:])


def test_the_speeds_are_those_of_the_checkpoints(store: Store) -> None:
    with store.writer(poll_seconds=None) as writer:
        save(writer, 10, 20, 30)
        free = [shutil.disk_usage(store.url).free]
        status = next(store.watch())
        free.append(shutil.disk_usage(store.url).free)
        first, _, third = infos = store.checkpoints()
        assert status.steps_per_second == pytest.approx(20 / (third.time - first.time))
        assert status.bytes_per_step == pytest.approx((infos[1].stored + third.stored) / 20)
        assert status.bytes_per_second == pytest.approx((status.steps_per_second or 0) * (status.bytes_per_step or 0))
        assert status.ratio == pytest.approx(sum(i.nbytes for i in infos) / sum(i.stored for i in infos))
        assert status.nbytes == store.stats().nbytes
        assert (status.saved, status.lag) == (third.time, pytest.approx(status.time - third.time))
        assert 0.9 * min(free) < (status.free or 0) < 1.1 * max(free)  # other processes write, too
        assert (status.writer, status.run, status.term, status.parent) == ("alive", store.run, 1, None)


def test_deltas_are_smaller_than_fulls(store: Store) -> None:
    with store.writer(deltas=DeltaOptions(interval=8), poll_seconds=None) as writer:
        save(writer, *range(1, 9))
    assert (next(store.watch()).ratio or 0) > 2


def test_checkpoints_retired_before_a_look_still_count(store: Store) -> None:
    with store.writer(poll_seconds=None, keep=["last:1"]) as writer:
        save(writer, 1)
        watched = looks(store)
        assert next(watched).bytes_per_step is None  # one checkpoint exists
        save(writer, *range(2, 12))
        status = next(watched)
    stored = store.checkpoints()[0].stored
    assert status.checkpoints == 1
    assert [step for step, _ in status.values] == [1, 11]
    assert status.bytes_per_step == pytest.approx(stored)
    assert status.changes == ("saved 11@1", "1 retired")


def test_forks_tags_and_other_commits_are_reported(store: Store) -> None:
    with store.writer(poll_seconds=None) as writer:
        save(writer, 1, 2, 3)
        watched = looks(store)
        assert next(watched).changes == ()
        assert next(watched).changes == ()
        writer.tag("best", 2)
        assert next(watched).changes == ("tag best is 2@1",)
    with store.writer("2@1", poll_seconds=None) as writer:
        status = next(watched)
        assert status.changes == ("term 2 forks from 2@1 (the newest was 3@1)",)
        assert (status.latest, status.parent, status.terms) == ("2@1", "2@1", 2)
        assert status.values == ((1, 1.0), (2, 0.5)), "what the fork left behind is not part of its history"
        save(writer, 3, 4)
        status = next(watched)
        assert status.changes == ("saved 3@2 to 4@2 (2)",)
        assert [step for step, _ in status.values] == [1, 2, 3, 4]
    with store.writer(poll_seconds=None):
        pass
    assert next(watched).changes == ("term 3 continues from 4@2", "term 3 is closed")
    store.retire("3@1", "3@2", take_over=True)
    assert next(watched).changes == ("term 4 continues from 4@2", "2 retired")
    store.keep("last:3", take_over=True)
    assert "keeps last:3" in next(watched).changes


def test_a_rollback_within_a_process_is_a_fork(store: Store) -> None:
    with store.writer(poll_seconds=None) as writer:
        save(writer, 1, 2, 3)
        watched = looks(store)
        next(watched)
        writer.rollback(1)
        save(writer, 2)
        assert next(watched).changes == ("term 2 forks from 1@1 (the newest was 3@1)", "saved 2@2")


def test_the_metric_that_is_asked_for(store: Store) -> None:
    with store.writer(poll_seconds=None) as writer:
        writer.save(state(1), 1, metadata={"metrics": {"accuracy": 0.5}, "loss": 3})
        writer.save(state(2), 2, metadata={"accuracy": math.nan})
        writer.save(state(3), 3, metadata={"accuracy": "high"})
        writer.save(state(4), 4)
    (first, (second, value)) = next(store.watch(metric="accuracy")).values
    assert (first, second) == ((1, 0.5), 2)
    assert math.isnan(value)
    assert next(store.watch()).values == ((1, 3.0),)
    assert next(store.watch(metric="nothing")).values == ()


class Counting(MemoryBackend):
    """A medium on which looks are expensive: its calls are counted."""

    cheap_looks = False
    anchored = False

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.asked: Counter[str] = Counter()

    def get(self, key: str, limit: int = 1 << 28) -> bytes:
        self.asked["get"] += 1
        return super().get(key, limit)

    def size(self, key: str) -> int:
        self.asked["head"] += 1
        return super().size(key)

    def list(self, prefix: str) -> list[str]:
        self.asked["list"] += 1
        return super().list(prefix)


def test_a_look_at_a_store_at_rest_takes_four_requests_and_a_record_one_more() -> None:
    MemoryBackend.forget("watched-requests")
    backend = Counting("watched-requests")
    store = ckptstore.open("memory://watched-requests")
    with store.writer(poll_seconds=None) as writer:
        save(writer, *range(1, 30))
        watched = looks(Store(backend))
        next(watched)
        for records in (0, 0, 3, 0):
            for step in range(records):
                save(writer, 100 + step)
            backend.asked.clear()
            next(watched)
            assert backend.asked == {"get": 2 + records, "head": 2}, records


@pytest.mark.parametrize("first", [1, 2, 3, 9])
def test_folds_that_took_the_slots_it_knew_do_not_disturb_it(tmp_path: Path, first: int) -> None:
    """With an anchor every 4 slots most are deleted soon, including the last one that it has read."""
    root = tmp_path / "run"
    root.mkdir()
    (root / "FORMAT").write_bytes(encode_format(FormatFile(run="a" * 32, anchor_every=4)))
    store = ckptstore.open(root)
    with store.writer(poll_seconds=None) as writer:
        save(writer, *range(1, first + 1))
        watched = looks(store)
        next(watched)
        last = root / slot_key(first)
        assert last.exists()
        save(writer, *range(first + 1, first + 21))
        for steps in (range(first + 21, first + 26), range(first + 26, first + 31)):
            fold_writer.fold(store.journal, store.view())
            save(writer, *steps)
        fold_writer.trim(store.journal, store.view())
        assert not last.exists()
        status = next(watched)
    assert status.changes == (f"saved {first + 1}@1 to {first + 30}@1 (30)",)
    assert [step for step, _ in status.values] == list(range(1, first + 31))
    assert status.nbytes == store.stats().nbytes
    store.retire(2, 3, take_over=True)
    store.gc()
    status = next(watched)
    assert "2 retired" in status.changes
    assert status.nbytes == store.stats().nbytes


def test_a_lost_old_slot_is_reported(store: Store, tmp_path: Path) -> None:
    with store.writer(poll_seconds=None) as writer:
        save(writer, 1, 2, 3)
        watched = looks(store)
        next(watched)
        save(writer, 4)
        (tmp_path / "run" / slot_key(3)).unlink()
        status = next(watched)
    assert (status.latest, status.damage) == ("4@1", 1)
    assert "log slot 3 is damaged or missing" in status.changes


def test_a_store_that_is_not_there(store: Store) -> None:
    with pytest.raises(StoreNotFoundError):
        next(store.watch())
    waiting = store.watch(EVERY, wait=True)
    timer = threading.Timer(0.1, store.create)
    timer.start()
    status = next(waiting)
    timer.join()
    assert (status.latest, status.term, status.writer, status.lag) == (None, 0, "none", None)
    with store.writer(poll_seconds=None) as writer:
        save(writer, 1)
    assert next(waiting).changes == ("term 1 starts from scratch", "saved 1@1", "term 1 is closed")


@pytest.mark.parametrize("how", ["delete", "move", "replace", "older copy", "another history", "format", "last slot"])
def test_a_store_that_is_taken_away(store: Store, tmp_path: Path, how: str) -> None:
    """The store that is at the place now counts: a handle of the old one would show nothing of it."""
    run = tmp_path / "run"
    with store.writer(poll_seconds=None) as writer:
        save(writer, 1)
        shutil.copytree(run, tmp_path / "copy")
        save(writer, 2, 3)
    watched = looks(store, wait=True)
    next(watched)
    expected: tuple[type[Exception], str]
    if how == "delete":
        shutil.rmtree(run)
        expected = StoreNotFoundError, "run"
    elif how == "format":
        (run / "FORMAT").unlink()
        expected = StoreNotFoundError, "it was removed"
    elif how == "last slot":
        run.joinpath(slot_key(4)).write_bytes(b"garbage")
        expected = CorruptLogError, "slot 4 is damaged.*last intact checkpoint is 3@1"
    else:
        run.rename(tmp_path / "moved")
        expected = StoreNotFoundError, "no checkpoint store here"
    if how == "replace":
        with ckptstore.open(run).writer(poll_seconds=None) as other:
            save(other, *range(1, 9))
        expected = StoreReplacedError, "another run|that of run"
    elif how in ("older copy", "another history"):
        (tmp_path / "copy").rename(run)
        expected = CorruptLogError, "the log ends before slot 2"
    if how == "another history":
        with ckptstore.open(run).writer(poll_seconds=None) as other:
            save(other, 2, 3)
        watched_too = looks(ckptstore.open(tmp_path / "moved"))
        next(watched_too)
        expected = StoreReplacedError, "another history of this run.*slot 4 is not the one"
    with pytest.raises(expected[0], match=expected[1]):
        next(watched)


def test_the_end_of_a_process_is_reported(store: Store, tmp_path: Path) -> None:
    import subprocess
    import sys

    script = "import ckptstore, sys\nw = ckptstore.open('run').writer()\nw.save({'x': 1}, 1)\nprint(1, flush=True)\n"
    script += "sys.stdin.read()\nimport os; os._exit(9)"
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    watched = looks(store)
    assert next(watched).writer == "alive"
    process.communicate()
    status = next(watched)
    assert (status.changes, status.writer) == ((f"the writing process {process.pid} is gone",), "gone")


@pytest.mark.parametrize(
    "options",
    [{"every": 0}, {"every": math.nan}, {"every": 1e9}, {"every": None}, {"every": True}, {"metric": ""}],
    ids=["zero", "nan", "years", "none", "true", "no-metric"],
)
def test_invalid_arguments_are_refused_at_once(store: Store, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        store.watch(**options)


def test_a_medium_that_fails_is_no_absence(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with store.writer(poll_seconds=None) as writer:
        save(writer, 1)
    watched = looks(store, wait=True)
    next(watched)

    def fail(*_: Any, **__: Any) -> bytes:
        raise StorageError(5, "Input/output error")

    monkeypatch.setattr("ckptstore.backends.local_disk.local.LocalBackend.get", fail)
    with pytest.raises(StorageError, match="Input/output"):
        next(watched)
