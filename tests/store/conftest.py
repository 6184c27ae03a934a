"""The places of the stores in these tests."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest


@pytest.fixture(params=["local", "memory", "pmem"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    places = {"local": str(tmp_path / "store"), "pmem": f"pmem://{tmp_path}/store"}
    return places.get(request.param, f"memory://{uuid.uuid4().hex}")
