"""Puts our storage in the place of torch's `FileSystemWriter` and `FileSystemReader`, with their arguments.

A copied test calls `install` before it imports torch's classes, in every process that it starts.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _storage_utils, filesystem

import ckptstore
from ckptstore.integrations.dcp import CkptstoreReader, CkptstoreWriter
from ckptstore.integrations.dcp.checkpoint_ids import place_of

__all__ = ["FileSystemReader", "FileSystemWriter", "install"]


class FileSystemWriter(CkptstoreWriter):
    """Writes the next step of a store at ``path``."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *ignored: Any,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        **others: Any,
    ) -> None:
        del ignored, others  # how torch's writer divides its files
        super().__init__(path, cache_staged_state_dict=cache_staged_state_dict)
        self._path = os.fspath(path)
        self._fresh = not overwrite

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """As torch's: ``overwrite=False`` refuses a place that has a checkpoint."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        url = place_of(self.checkpoint_id, self._path, None).url
        if self._fresh and ckptstore.open(url).latest_step() is not None:
            raise RuntimeError(f"Checkpoint already exists in {url}")


class FileSystemReader(CkptstoreReader):
    """Reads the newest step of a store at ``path``. Tests save objects of their own, which are theirs to unpickle."""

    def __init__(self, path: str | os.PathLike[str], *ignored: Any, **others: Any) -> None:
        del ignored, others
        super().__init__(path, unpickle=True)


def install() -> None:
    """Replace torch's classes wherever tests and torch itself look for them."""
    for module in (dcp, filesystem, _storage_utils):
        module.FileSystemWriter = FileSystemWriter  # type: ignore[attr-defined]
        module.FileSystemReader = FileSystemReader  # type: ignore[attr-defined]
