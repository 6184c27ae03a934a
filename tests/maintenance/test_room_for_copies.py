"""If a copy, a remote or a restored folder has no space for everything, nothing is written."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import StorageError
from ckptstore.backends.local_disk.overwriting import LOCAL
from ckptstore.backends.local_disk.posix import Posix


def filled(place: Path, **more: Any) -> None:
    with ckptstore.open(place, **more).writer(poll_seconds=None) as writer:
        for step in (1, 2):
            writer.save({"w": np.arange(5000) * step}, step)


def small_disk(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    """From now on the given number of blocks of 4 kB is free everywhere; a checkpoint takes eleven."""
    space = os.statvfs_result((4096, 4096, 1 << 20, blocks, blocks, 0, 0, 0, 0, 255))
    monkeypatch.setattr(Posix, "statvfs", lambda *_: space)
    monkeypatch.setattr(Posix, "file_system", lambda *_: min(LOCAL))


def refused(call: Callable[[], Any], target: Path) -> None:
    with pytest.raises(StorageError, match="are needed at least") as told:
        call()
    assert told.value.errno == errno.ENOSPC
    assert not list(target.glob("seg/*/*"))


@pytest.mark.parametrize("how", ["stored", "full", "remote"])
def test_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Any) -> None:
    filled(tmp_path / "run")
    store, there = ckptstore.open(tmp_path / "run"), tmp_path / "there"
    small_disk(monkeypatch, 15)  # for one of two
    refused(lambda: store.sync(there) if how == "remote" else store.copy(there, form=how), there)


def test_back_from_the_remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "run", tmp_path / "there"
    filled(here, remote=there)
    shutil.rmtree(here)
    small_disk(monkeypatch, 2)
    refused(lambda: ckptstore.open(here, remote=there), here)
