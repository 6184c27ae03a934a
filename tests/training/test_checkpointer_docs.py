"""The examples of docs/checkpointer.md run."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests import warmth

pytest.importorskip("torch")

PAGE = Path(__file__).parents[2] / "docs/checkpointer.md"


def test_the_examples_run(tmp_path: Path) -> None:
    codes = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(codes) == 6
    left_out = (
        "import warnings; warnings.filterwarnings('ignore', 'resuming 1@1')\n"  # the command line of the changed script
    )
    for code in codes:
        done = warmth.run([sys.executable, "-W", "error", "-c", left_out + code], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        said = re.findall(r"^ +print\(error\..*#\s*(.*)$", code, re.MULTILINE)
        assert said == done.stdout.splitlines()[: len(said)]
    there = {"net", "top", "paced", "epochs", "from-pt", "words"}
    assert {one.name for one in (tmp_path / "runs").iterdir()} == there


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(((?!http)[^)#]+)\)", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target
