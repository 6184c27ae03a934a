"""Remotes on every medium that a second tier is likely to use."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore.tiers import background_drain
from tools.objects.proxy import FaultProxy, Rule
from tools.objects.server import Server, options_for


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain looks for problems and tries again after hundredths of a second: tests wait for both."""
    monkeypatch.setattr(background_drain, "WATCH", 0.05)
    monkeypatch.setattr(background_drain, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(background_drain, "POLL_SECONDS", 0.1)


@dataclass(frozen=True)
class Place:
    """A machine's folder and a remote.

    Attributes:
        here: the folder of the first machine.
        there: the folder of a second machine.
        remote, options: the remote.
    """

    here: Path
    there: Path
    remote: str
    options: dict[str, Any] | None = field(default=None, repr=False)

    def open(self, folder: Path | None = None, **more: Any) -> ckptstore.Store:
        return ckptstore.open(folder or self.here, remote=self.remote, remote_options=self.options, **more)

    def theirs(self) -> ckptstore.Store:
        return ckptstore.open(self.remote, storage_options=self.options, create=False)


@pytest.fixture(params=["local", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    here, there = tmp_path / "machine-a" / "run", tmp_path / "machine-b" / "run"
    if request.param == "local":
        return Place(here, there, str(tmp_path / "remote"))
    if request.param == "memory":
        return Place(here, there, f"memory://{uuid.uuid4().hex}")
    server: Server = request.getfixturevalue("s3")
    return Place(here, there, server.url(), server.options)


@pytest.fixture
def folders(tmp_path: Path) -> Place:
    return Place(tmp_path / "machine-a" / "run", tmp_path / "machine-b" / "run", str(tmp_path / "remote"))


@dataclass(frozen=True)
class Outage:
    """A remote that one machine cannot reach for a while.

    Attributes:
        place: as that machine has it.
        other: as others do.
    """

    place: Place
    other: Place
    proxy: FaultProxy = field(repr=False)

    def begin(self) -> None:
        self.proxy.rules([Rule("503")])

    def end(self) -> None:
        self.proxy.rules([])


@pytest.fixture
def outage(s3: Server, tmp_path: Path) -> Iterator[Outage]:
    here, there, url = tmp_path / "machine-a" / "run", tmp_path / "machine-b" / "run", s3.url()
    with FaultProxy(s3.port) as proxy:
        options = options_for(proxy.port, read_timeout=5.0, tries=2)
        yield Outage(Place(here, there, url, options), Place(here, there, url, s3.options), proxy)
