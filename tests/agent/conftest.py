"""A runtime folder for each test, and no agent left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.lives import own_runtime


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with own_runtime(tmp_path / "runtime", monkeypatch) as folder:
        yield folder
