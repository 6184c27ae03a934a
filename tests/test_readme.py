"""Every example of the README runs: the Python blocks one after the other, the commands against what they made."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests import warmth

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("readme")


def test_python_examples(folder: Path) -> None:
    code = "\n".join(text for language, text in BLOCKS if language == "python")
    assert code.count("store.") > 5
    for attempt in range(2):  # the second run resumes
        done = warmth.run([sys.executable, "-W", "error", "-c", code], cwd=folder)
        assert done.returncode == 0, (attempt, done.stderr)
    assert "20@1" in done.stdout


def test_commands(folder: Path) -> None:
    lines = [
        line for language, text in BLOCKS if language == "sh" for line in text.splitlines() if line.startswith("ckpt ")
    ]
    assert len(lines) >= 6
    for line in lines:
        arguments = shlex.split(line, comments=True)
        if "--iteration-time" in arguments:
            arguments += ["--probe", "8MiB"]  # how much its trial saves write is no part of what is shown
        done = warmth.run([sys.executable, "-m", "ckptstore", *arguments[1:]], cwd=folder)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        assert done.stdout or "restore" in line, line  # it ran


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
