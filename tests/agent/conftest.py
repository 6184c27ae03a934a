"""A runtime folder for each test, and no agent left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.lives import agents, kill


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numpy_elsewhere: None) -> Iterator[Path]:
    folder = tmp_path / "runtime"
    monkeypatch.setenv("CKPTSTORE_RUNTIME_DIR", str(folder))
    yield folder
    for pid in agents(folder):
        kill(pid)
