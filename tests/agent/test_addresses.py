"""An agent opens its trainer's store or none, whatever the path, the folder and the file system."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem

import ckptstore
import ckptstore.agent
from ckptstore.errors import UsageError


def saved(store: ckptstore.Store | str, step: int) -> None:
    with ckptstore.agent.writer(store, linger_seconds=5.0) as writer:
        writer.save({"step": step}, step)


def test_an_agent_writes_where_a_relative_path_led_when_the_store_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    store = ckptstore.open("run")
    with store.writer() as writer:
        writer.save({"step": 1}, 1)
    monkeypatch.chdir("there")
    saved(store, 2)
    assert store.latest_step() == 2
    assert list(Path().iterdir()) == []


def test_an_agent_and_a_store_read_a_path_behind_a_link_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "link").symlink_to(tmp_path / "far" / "deep")
    monkeypatch.chdir(tmp_path / "near")
    saved("link/../run", 1)
    assert ckptstore.open("link/../run").latest_step() == 1
    assert (tmp_path / "far" / "run" / "FORMAT").exists()


@pytest.mark.parametrize("kind", ["memory", "file", "folder"])
def test_an_agent_is_refused_for_a_file_system_that_it_cannot_have(tmp_path: Path, kind: str) -> None:
    files = fsspec.filesystem("memory" if kind == "memory" else "file")
    if kind == "folder":
        files = DirFileSystem(str(tmp_path), fs=files)
    store = ckptstore.open("/agents-run" if kind == "memory" else str(tmp_path / "run"), filesystem=files)
    with pytest.raises(UsageError, match=r"an agent.*cannot open this store.*filesystem="):
        saved(store, 1)
