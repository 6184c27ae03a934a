"""Inputs that once got past a reader, or took it down: found by ``tools.fuzz``, one file each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.fuzz.guard import attempt
from tools.fuzz.targets import TARGETS

FOLDER = Path(__file__).parents[1] / "regressions"
FILES = sorted(path for path in FOLDER.rglob("*") if path.is_file())


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_found_by_fuzzing(path: Path) -> None:
    attempt(TARGETS[path.parent.name], path.read_bytes(), memory=True)


def test_every_file_belongs_to_a_target() -> None:
    assert {path.parent.name for path in FILES} <= TARGETS.keys()
    assert FILES
