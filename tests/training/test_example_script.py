"""The example script: few lines differ from the original, and it continues after a kill with the same bits."""

from __future__ import annotations

import difflib
import signal
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from tools.warm import Script, Warm

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
BEFORE, AFTER = (ROOT / "tools/examples" / f"{name}.py" for name in ("train_gpt", "train_gpt_saved"))
STEPS = 16


def changed(before: str, after: str) -> list[str]:
    """Added or replaced lines, except blank ones and the docstring."""
    lines = difflib.ndiff(before.splitlines(), after.splitlines())
    return [line[2:] for line in lines if line.startswith("+ ") and line[2:].strip() and '"""' not in line]


def test_at_most_8_lines_are_changed() -> None:
    assert 1 <= len(changed(BEFORE.read_text(), AFTER.read_text())) <= 8


def test_docs_show_the_lines_that_are_changed() -> None:
    page = (ROOT / "docs/checkpointer.md").read_text()
    for line in changed(BEFORE.read_text(), AFTER.read_text()):
        assert f"+{line}" in page


def start(warm: Warm, script: Path, folder: Path) -> Script:
    command = [sys.executable, str(script), "--steps", str(STEPS), "--out", "out"]
    return warm.start(command, cwd=folder, stdout=PIPE, text=True)


@pytest.mark.slow
def test_killed_and_begun_again_it_computes_what_the_old_script_does(tmp_path: Path, warm: Warm) -> None:
    reference, _ = start(warm, BEFORE, tmp_path).communicate(timeout=150)
    lines = reference.splitlines()
    assert len(lines) == STEPS
    killed = start(warm, AFTER, tmp_path)
    assert killed.stdout is not None
    for expected in lines[:7]:
        assert killed.stdout.readline() == f"{expected}\n"
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    rest, _ = start(warm, AFTER, tmp_path).communicate(timeout=150)
    found = rest.splitlines()
    assert 0 < len(found) < STEPS
    assert found == lines[-len(found) :]
