"""Every example of the README runs: the Python blocks in order, then the commands against the results of the blocks."""

from __future__ import annotations

import re
import shlex
import sys
import time
from pathlib import Path

import pytest

import ckptstore
from tests import warmth

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


PYTHON = [text for language, text in BLOCKS if language == "python"]
PAUSE = "time.sleep(0.05)"
PATIENT = """
import warnings
from ckptstore.training import SlowSavesWarning
warnings.simplefilter("ignore", SlowSavesWarning)
"""
"""Without its pause an example does little else than save, and a busy disk is slow."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("readme")


def test_python_examples(folder: Path) -> None:
    code = PATIENT + "\n".join(PYTHON).replace(PAUSE, "pass")
    assert code.count("store.") > 5
    for attempt in range(2):  # the second run resumes
        done = warmth.run([sys.executable, "-W", "error", "-c", code], cwd=folder)
        assert done.returncode == 0, (attempt, done.stderr)
    assert "20@1" in done.stdout


@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_example_that_is_pasted_alone_runs(tmp_path: Path, number: int) -> None:
    done = warmth.run(
        [sys.executable, "-W", "error", "-c", PATIENT + PYTHON[number].replace(PAUSE, "pass")], cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


def test_the_first_example_continues_after_a_kill(tmp_path: Path) -> None:
    assert PAUSE in PYTHON[0]
    (seconds,) = re.findall(r"time\.sleep\((.*?)\)", PYTHON[0])
    (steps,) = re.findall(r"resume\(\), (\d+)\)", PYTHON[0])
    assert 15 <= float(seconds) * int(steps) <= 40
    script = [sys.executable, "-c", PYTHON[0]]
    running = warmth.start(script, cwd=tmp_path)
    try:
        store = ckptstore.open(tmp_path / "runs/short")
        end = time.monotonic() + 120
        while (store.latest_step() or 0) < 5:
            assert time.monotonic() < end
            assert running.poll() is None
            time.sleep(0.05)
            store = ckptstore.open(tmp_path / "runs/short")
        assert running.poll() is None  # long before the end of the run
    finally:
        running.kill()
        running.wait()
    reached = store.latest_step()
    assert reached is not None
    assert reached < int(steps) // 2
    done = warmth.run([sys.executable, "-c", PYTHON[0].replace(PAUSE, "pass")], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    last = ckptstore.open(tmp_path / "runs/short").checkpoint()
    assert (last.step, last.term) == (int(steps), 2)


def test_commands(folder: Path) -> None:
    lines = [
        line for language, text in BLOCKS if language == "sh" for line in text.splitlines() if line.startswith("ckpt ")
    ]
    assert len(lines) >= 6
    for line in lines:
        arguments = shlex.split(line, comments=True)
        if "--iteration-time" in arguments:
            arguments += ["--probe", "8MiB"]  # the bytes that its trial saves write are not part of the example
        done = warmth.run([sys.executable, "-m", "ckptstore", *arguments[1:]], cwd=folder)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        assert done.stdout or "restore" in line, line  # it did run


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"make (\w[\w-]*)", (ROOT / "README.md").read_text())
    assert {"demo", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(((?!http)[^)#]+)\)", (ROOT / "README.md").read_text())
    assert len(links) > 5
    for target in links:
        assert (ROOT / target).exists(), target
