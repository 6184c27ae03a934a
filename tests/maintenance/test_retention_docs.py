"""docs/retention.md is true: its scripts run, and its commands print what it shows."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

from tests import warmth

PAGE = Path(__file__).parents[2] / "docs/retention.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def plain(text: str) -> list[str]:
    """Lines without the parts that differ from run to run: sizes, times, and the spaces that align them."""
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME", text)
    text = re.sub(r"[\d.,]+ (B|KiB|MiB)\b", "SIZE", text)
    text = re.sub(r"[\d.,]+ (s|min)\b", "SECONDS", text)
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.mark.slow
def test_scripts_and_commands_one_after_the_other(tmp_path: Path) -> None:
    printed, compared = "", 0
    for language, text in BLOCKS:
        if language == "python":
            done = warmth.run([sys.executable, "-W", "error", "-c", text], cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            printed += done.stdout
            continue
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            line, _, shown = part.partition("\n")
            words = shlex.split(line)
            assert words[0] == "ckpt"
            command = [sys.executable, "-m", "ckptstore", *words[1:]]
            with warmth.start(command, cwd=tmp_path, stdout=PIPE, stderr=STDOUT, text=True) as script:
                said, _ = script.communicate()
            assert (script.returncode, plain(said)) == (0, plain(shown)), line
            compared += 1
    assert f"prints `{printed.strip()}`" in PAGE.read_text()
    assert compared >= 6


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(((?!http)[^)#]+)\)", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target
