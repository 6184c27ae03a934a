"""`ckpt ls`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ckptstore
from tests.cli.conftest import Run, assert_documented, documented


def test_text_and_json(ckpt: Run, run: Path) -> None:
    ckptstore.open(run.parent / "empty", create=True)
    found = ckpt("ls", run.parent, "--json").json
    assert_documented(found, documented("ckpt ls")[0])
    assert [(one["path"], one["latest"], one["checkpoints"]) for one in found["runs"]] == [
        (str(run.parent / "empty"), None, 0),
        (str(run), "5@3", 7),
    ]
    assert found["runs"][1]["pid"] == os.getpid()
    lines = ckpt("ls", run.parent).out.splitlines()
    assert lines[0].split() == ["RUN", "NEWEST", "CHECKPOINTS", "STORED", "IN", "1,000", "STEPS", "LAST", "WRITER"]
    assert lines[1].split() == [str(run.parent / "empty"), "-", "0", "0", "B", "-", "-", "-"]
    assert lines[2].split()[:3] == [str(run), "5@3", "7"]
    assert lines[2].endswith("  closed, all saves done")


def test_live_and_killed_writers(ckpt: Run, run: Path) -> None:
    with ckptstore.open(run).writer():
        assert ckpt("ls", run.parent).out.splitlines()[-1].endswith(f"  process {os.getpid()} is writing")
    script = "import os, sys, ckptstore\nckptstore.open(sys.argv[1]).writer()\nos.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", script, run], check=False).returncode == -9
    assert ckpt("ls", run.parent).out.splitlines()[-1].endswith("  gone without closing (killed?)")


def test_the_current_folder_and_nothing_in_it(ckpt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = ckpt("ls", ".")
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "note: no store in . or below\n")
    assert ckpt("ls", "nothing").code == 2


def test_a_damaged_store_is_called_damaged(ckpt: Run, run: Path) -> None:
    next(iter((run / "seg").rglob("*.safetensors"))).unlink()
    outcome = ckpt("ls", run.parent)
    line = outcome.out.splitlines()[1]
    assert line.split()[:3] == [str(run), "5@3", "7"]
    assert line.endswith("  damaged")
    assert f"note: {run}: 1 segment is missing" in outcome.err
    sorted((run / "log").iterdir())[-1].write_bytes(b"garbage")
    assert "log is damaged or lost" in ckpt("ls", run.parent).err


def test_an_unreadable_run_is_named(ckpt: Run, run: Path) -> None:
    (run / "FORMAT").write_bytes(b"garbage")
    outcome = ckpt("ls", run.parent)
    assert outcome.code == 0
    assert outcome.out.splitlines()[1].endswith("cannot be read")
    assert "FORMAT" in outcome.err
