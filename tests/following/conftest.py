"""The media of the followed runs."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptstore
from tools.objects.server import Server

Opener = Callable[[], ckptstore.Store]


@pytest.fixture(params=["local", "memory", "fsspec", "s3"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    """Another handle of one store at each call."""
    if request.param == "s3":
        server: Server = request.getfixturevalue("s3")
        url = server.url()
        return lambda: ckptstore.open(url, storage_options=server.options)
    if request.param == "fsspec":
        fsspec = pytest.importorskip("fsspec")
        return lambda: ckptstore.open(str(tmp_path / "run"), filesystem=fsspec.filesystem("file"))
    place = f"memory://{uuid.uuid4().hex}" if request.param == "memory" else str(tmp_path / "run")
    return lambda: ckptstore.open(place)
