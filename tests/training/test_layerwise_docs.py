"""The example of layer-wise snapshots in docs/writer.md runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests import warmth

pytest.importorskip("torch")

PAGE = Path(__file__).parents[2] / "docs/writer.md"


def test_the_example_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (code,) = [block for block in blocks if "LayerwiseSnapshots(" in block]
    done = warmth.run([sys.executable, "-W", "error", "-c", code], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("one optimizer (AdamW) updates all")
    assert re.fullmatch(r"[\d.]+ s of copying, [\d.]+ s of it waited for", lines[1])
    assert lines[2].startswith("0 to ")


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(((?!http)[^)#]+)\)", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target
