"""`ckpt bisect`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import ckptstore
from tests.cli.conftest import Run, assert_documented, documented


@pytest.fixture(scope="module")
def nan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bisect") / "store"
    with ckptstore.open(root).writer(poll_seconds=None) as writer:
        for step in range(1, 13):
            writer.save({"w": np.full(3, np.inf if step >= 9 else step, "f4"), "n": np.arange(2)}, step)
    return root


def test_its_output(ckpt: Run, nan: Path) -> None:
    outcome = ckpt("bisect", nan, "--nan")
    assert outcome.out.splitlines()[-2:] == ["first bad: 9@1", "last good: 8@1"]
    assert outcome.out.splitlines()[0] == "good     6@1  (6 left)"
    assert len(outcome.out.splitlines()) <= 6
    done = ckpt("bisect", nan, "--expr", "tensors['w'].max() > 4", "--select", "w", "--check", "1", "--json").json
    assert_documented(done, documented("ckpt bisect")[0])
    assert (done["last_good"], done["first_bad"], done["contradictions"]) == ("4@1", "5@1", [])
    spike = ckpt("bisect", nan, "--expr", "4 < state['w'][0] < 8", "--check", "2", "--bad", "7")
    assert "first bad: 5@1" in spike.out
    text = ckpt("bisect", nan, "--expr", "state['w'][0] == 6", "--check", "1")
    assert "note: 12@1 is good, and should be bad" in text.err
    assert ckpt("bisect", nan, "--expr", "False").out.splitlines()[-1].startswith("no bad checkpoint was found")


def test_mistakes(ckpt: Run, nan: Path) -> None:
    assert ckpt("bisect", nan).code == 2
    assert ckpt("bisect", nan, "true", "--nan").code == 2
    assert ckpt("bisect", nan, "--nan", "--ref", "3", "--bad", "4").code == 2
    assert ckpt("bisect", nan, "--expr", "1 +").code == 2
    outcome = ckpt("bisect", nan, "--expr", "tensors['nothing']")
    assert (outcome.code, "raised KeyError" in outcome.err) == (2, True)
    assert ckpt("bisect", nan, "--nan", "--good", "99").code == 3


def test_ctrl_c_leaves_nothing_behind(nan: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from ckptstore.cli.main import main; main()", "bisect", str(nan)]
    once, there = tmp_path / "once", tmp_path / "there"
    command.append(f"test -e {once} || {{ touch {once}; exit 0; }}; echo here > {there}; exec sleep 60")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not there.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)  # until the shell is asleep
    assert process.pid > 1
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert out.startswith("good     6@1")
    assert "Traceback" not in err
    assert {path.name for path in tmp_path.iterdir()} == {"once", "there"}


def test_an_expression_that_ends_the_process_is_a_mistake(ckpt: Run, run: Path) -> None:
    outcome = ckpt("bisect", run, "--expr", "__import__('sys').exit(0)")
    assert outcome.code == 2
    assert "ends the process" in outcome.err
