"""Stores with recycled segments, for their tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.backends.local_disk.posix import SYSTEM, Posix
from ckptstore.store import Store

NBYTES = 64 << 10


def recycling_store(path: str | os.PathLike[str], posix: Posix = SYSTEM, mode: str = "always") -> Store:
    """A store that recycles files of any size; skips the test on file systems whose locks are not reliable."""
    backend = LocalBackend(path, posix, recycle=mode)
    backend.check_space(0)  # makes the folder, whose file system is queried then
    if mode == "always" and backend.recycling.startswith("off"):
        pytest.skip(f"recycling is {backend.recycling}")
    return Store(backend)


def state(step: int, nbytes: int = NBYTES) -> dict[str, Any]:
    """A state with its step in every byte."""
    return {"weight": np.full(nbytes, step % 251, np.uint8), "step": step}


def save(store: Store, *steps: int, nbytes: int = NBYTES) -> None:
    """Save these steps in a separate term."""
    with store.writer(threads=1, staging_bytes=32 << 20, poll_seconds=None) as writer:
        for step in steps:
            writer.save(state(step, nbytes), step)


def retire(store: Store, *steps: int) -> None:
    """Retire these, and open a new term, so that their segments can be collected."""
    store.retire(*steps, take_over=True)


def segment_path(store: Store, root: Path, ref: str | int) -> Path:
    """The file of a checkpoint in one segment."""
    ((entry, _),) = store.describe(ref)
    return root / entry.key


def spare(root: Path) -> list[Path]:
    """The spare files."""
    return sorted((root / ".spare").glob("*"))
