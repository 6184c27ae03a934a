"""The runs below a folder, whatever else is in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import DiffOptions, RunInfo, find_runs
from ckptstore.formats.history.record_text import encode_open
from ckptstore.formats.history.records import OpenRecord
from tools.objects.server import serving


def fill(path: Path | str, steps: int = 3, storage_options: Any = None, **options: Any) -> ckptstore.Store:
    store = ckptstore.open(path, storage_options=storage_options)
    with store.writer(poll_seconds=None, **options) as writer:
        for step in range(1, steps + 1):
            writer.save({"x": b"x" * 5000, "step": step}, step)
    return store


def only(folder: Path) -> RunInfo:
    (found,) = find_runs(folder).runs
    return found


def test_how_far_how_large_how_old(tmp_path: Path) -> None:
    for name in ("b", "a/deep/er", "c"):
        fill(tmp_path / name)
    ckptstore.open(tmp_path / "new", create=True)
    found = find_runs(tmp_path)
    assert [run.path for run in found.runs] == [str(tmp_path / name) for name in ("a/deep/er", "b", "c", "new")]
    assert found.unreadable == ()
    run, store = found.runs[1], ckptstore.open(tmp_path / "b")
    stats = store.stats()
    assert (run.run, run.checkpoints, run.latest, run.step) == (store.run, 3, "3@1", 3)
    assert (run.nbytes, run.growth, run.error) == (stats.nbytes, stats.growth, None)
    assert run.time == store.checkpoints()[-1].time
    new = found.runs[3]
    assert (new.checkpoints, new.latest, new.time, new.writer) == (0, None, None, "none")
    assert only(tmp_path / "c").path == str(tmp_path / "c")  # the folder itself


def test_the_live_writer(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "mine")
    with store.writer():
        run = only(tmp_path)
        assert (run.writer, run.pid) == ("alive", os.getpid())
        assert run.latest is None
        assert run.time is not None


KILLED = """
import os, signal, sys, ckptstore
with ckptstore.open(sys.argv[1]).writer() as writer:
    writer.save({"x": 1}, 1)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_was_killed_is_gone(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED, "s"], cwd=tmp_path, check=False).returncode == -9
    run = only(tmp_path)
    assert (run.writer, run.latest) == ("gone", "1@1")
    ckptstore.open(tmp_path / "s").tag("best", 1, take_over=True)
    assert only(tmp_path).writer == "gone"  # the run's own end, not that of the command
    with ckptstore.open(tmp_path / "s").writer():
        assert only(tmp_path).writer == "alive"
    ckptstore.open(tmp_path / "s").tag("best", 1, take_over=True)
    assert only(tmp_path).writer == "closed"


@pytest.mark.parametrize("options", [{}, {"diffs": DiffOptions(batch=2)}], ids=["fulls", "diffs"])
def test_a_term_that_was_closed_says_so(tmp_path: Path, options: dict[str, Any]) -> None:
    fill(tmp_path / "s", **options)
    assert only(tmp_path).writer == "closed"
    ckptstore.open(tmp_path / "s").copy(tmp_path / "copy")
    assert only(tmp_path / "copy").writer == "closed"


@pytest.mark.parametrize(
    ("writer", "opened", "expected"),
    [
        ({}, 0.0, "unknown"),
        ({"host": "elsewhere.example", "pid": os.getpid()}, 4e9, "unknown"),
        ({"host": os.uname().nodename, "pid": "7"}, 4e9, "unknown"),
        ({"host": os.uname().nodename, "pid": -7}, 4e9, "unknown"),
        ({"host": os.uname().nodename, "pid": os.getpid()}, 4e9, "alive"),
        ({"host": os.uname().nodename, "pid": os.getpid()}, 10.0, "unknown"),  # younger than the term
        ({"host": os.uname().nodename, "pid": 2**22 + 5}, 4e9, "gone"),
    ],
    ids=["silent", "another-host", "text", "negative", "this-one", "another-of-the-number", "none-of-the-number"],
)
def test_the_facts_of_a_writer(tmp_path: Path, writer: dict[str, Any], opened: float, expected: str) -> None:
    store = ckptstore.open(tmp_path / "s", create=True)
    record = OpenRecord(1, None, "a" * 32, opened, writer)
    store.backend.create(f"log/{0:020d}", encode_open(record, seq=0, run=store.run))
    assert only(tmp_path).writer == expected


def test_nothing_that_lies_there_breaks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "good")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "link-to-a-store").symlink_to(tmp_path / "good")
    (tmp_path / "nowhere").symlink_to(tmp_path / "no such thing")
    for name in ("fifo", "link", "text", "folder"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "fifo/FORMAT")
    (tmp_path / "link/FORMAT").symlink_to(tmp_path / "good/FORMAT")
    (tmp_path / "text/FORMAT").write_text("of something else")
    (tmp_path / "folder/FORMAT").mkdir()
    (tmp_path / os.fsdecode(b"\xff\xfe")).mkdir()
    fill(tmp_path / "piped")
    os.mkfifo(tmp_path / f"piped/log/{99:020d}")
    damaged = fill(tmp_path / "damaged")
    (tmp_path / "damaged/FORMAT").write_bytes(b"garbage")
    del damaged
    last = fill(tmp_path / "last-slot")
    sorted((Path(last.url) / "log").iterdir())[-1].write_bytes(b"garbage")
    locked = tmp_path / "locked"
    locked.mkdir()
    scandir = os.scandir

    def refusing(path: Any) -> Any:
        if str(path) == str(locked):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    found = find_runs(tmp_path)
    runs = {Path(run.path).name: run for run in found.runs}
    assert set(runs) == {"good", "piped", "damaged", "last-slot"}
    assert runs["good"].latest == "3@1"
    assert runs["damaged"].error is not None
    assert "FORMAT" in runs["damaged"].error
    assert (runs["last-slot"].latest, runs["last-slot"].checkpoints) == (
        None,
        3,
    )  # it was closed, in an unreadable record
    assert found.unreadable == ((str(locked), "Permission denied"),)


def test_a_damaged_or_missing_log_is_reported(tmp_path: Path) -> None:
    fill(tmp_path / "flipped")
    slot = sorted((tmp_path / "flipped" / "log").iterdir())[-1]
    data = bytearray(slot.read_bytes())
    data[len(data) // 2] ^= 1
    slot.write_bytes(data)
    fill(tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone" / "log")
    fill(tmp_path / "unnamed")
    (tmp_path / "unnamed" / "FORMAT").unlink()
    found = ckptstore.find_runs(tmp_path)
    assert [(Path(run.path).name, run.error is not None) for run in found.runs] == [("flipped", True), ("gone", True)]
    assert all("damaged or lost" in str(run.error) for run in found.runs)
    ((path, why),) = found.unreadable
    assert Path(path).name == "unnamed"
    assert "FORMAT" in why


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ckptstore.NotFoundError, match="no such folder"):
        find_runs(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(ckptstore.NotFoundError, match="it is a file"):
        find_runs(tmp_path / "file")
    with pytest.raises(ckptstore.UsageError, match="no backend for nonsense://"):
        find_runs("nonsense://bucket/runs")
    assert find_runs(tmp_path).runs == ()


def test_missing_segments_are_reported(tmp_path: Path) -> None:
    """The log of a closed store is whole though its segments are gone."""
    store = fill(tmp_path / "run")
    gone = sorted((tmp_path / "run" / "seg").rglob("*.safetensors"))
    gone[0].unlink()
    found = only(tmp_path)
    assert (found.latest, found.writer) == ("3@1", "closed")
    assert found.error is not None
    assert found.error.startswith("1 segment is missing: `ckpt verify`")
    for one in gone[1:]:
        one.unlink()
    assert str(only(tmp_path).error).startswith(f"{len(gone)} segments are missing")
    del store


def test_segments_collected_meanwhile_are_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptstore.backends.local_disk.local import LocalBackend

    fill(tmp_path / "run")
    before, done = LocalBackend.list, []

    def retiring(self: LocalBackend, prefix: str) -> list[str]:
        if prefix == "seg/" and not done:
            done.append(True)
            store = ckptstore.open(tmp_path / "run")
            store.retire(1, take_over=True)
            store.gc()
        return before(self, prefix)

    monkeypatch.setattr(LocalBackend, "list", retiring)
    assert only(tmp_path).error is None
    assert done


def test_runs_in_a_bucket(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        bucket, _, prefix = server.url().removeprefix("s3://").partition("/")
        for name in ("gpt", "deep/er/net"):
            fill(f"s3://{bucket}/{prefix}/{name}", storage_options=server.options)
        other = ckptstore.open(f"s3://{bucket}/{prefix}/unnamed", storage_options=server.options)
        with other.writer() as writer:
            writer.save({"x": np.ones(3)}, 1)
        other.backend.delete("FORMAT")
        found = find_runs(f"s3://{bucket}/{prefix}/", storage_options=server.options)
        assert [(run.path, run.latest, run.error) for run in found.runs] == [
            (f"s3://{bucket}/{prefix}/deep/er/net", "3@1", None),
            (f"s3://{bucket}/{prefix}/gpt", "3@1", None),
        ]
        ((path, why),) = found.unreadable
        assert path == f"s3://{bucket}/{prefix}/unnamed"
        assert "FORMAT" in why
        all_of_it = find_runs(f"s3://{bucket}", storage_options=server.options)
        assert {run.path for run in all_of_it.runs} >= {run.path for run in found.runs}
        (one,) = find_runs(f"s3://{bucket}/{prefix}/gpt", storage_options=server.options).runs
        assert one.path == f"s3://{bucket}/{prefix}/gpt"
        assert find_runs(f"s3://{bucket}/{prefix}/nothing", storage_options=server.options).runs == ()
        with pytest.raises(ckptstore.NotFoundError, match="no such bucket"):
            find_runs("s3://not-a-bucket", storage_options=server.options)
