"""Finds what a follower already has of a checkpoint: in the tensors that it fills, or in the file that it writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from ckptstore.errors import CkptError, UsageError
from ckptstore.exchange.export import is_export
from ckptstore.exchange.safetensors_files import read_safetensors
from ckptstore.exchange.weight_files import exported_ref
from ckptstore.frameworks import bridge
from ckptstore.host.buffers import Bytes
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import View
from ckptstore.restore.open_checkpoint import opened
from ckptstore.restore.resident_checkpoint import ResidentCheckpoint
from ckptstore.restore.resident_load import adopt_resident

__all__ = ["TargetState", "refuse_foreign", "resident_from_file"]


class _Readable(Protocol):
    def read(self, offset: int, out: Bytes) -> None: ...


class TargetState:
    """A state whose tensors may be those of a checkpoint."""

    def __init__(self, state: Any) -> None:
        """Read nothing yet. Raises `UnsupportedStateError`."""
        self._tensors: Mapping[str, _Readable] = bridge.flattened(state).tensors

    def adopted(
        self,
        journal: Journal,
        ref: str,
        select: str | Sequence[str] | None,
        since: View | None = None,
        rank: int | None = None,
    ) -> ResidentCheckpoint | None:
        """The checkpoint `ref` held in memory, without reading a tensor of it from the store; None: the state has other
        values, or the checkpoint cannot be opened."""
        return _adopted(journal, ref, select, since, self._tensors, rank)


def _adopted(
    journal: Journal,
    ref: str,
    select: Any,
    since: View | None,
    tensors: Mapping[str, _Readable],
    rank: int | None = None,
) -> ResidentCheckpoint | None:
    try:
        with opened(journal, ref, since=since) as found:
            if found.lossy:
                return None
            return adopt_resident(found, select, lambda name, offset, out: tensors[name].read(offset, out), rank)
    except CkptError:
        return None  # it is read from the store then, which raises the error


def refuse_foreign(path: Path) -> None:
    """Raise `UsageError` if there is a file that no follower and no export made, because it would be replaced.

    An empty file (of ``mktemp``) may be replaced.
    """
    if path.is_file() and path.stat().st_size and not is_export(path):
        raise UsageError(
            f"{path} exists, and was not exported from a store: name another file, or remove this one, because a "
            "follower replaces it with each checkpoint"
        )


def resident_from_file(
    path: Path, journal: Journal, select: str | Sequence[str] | None, since: View | None = None
) -> ResidentCheckpoint | None:
    """The checkpoint in an exported safetensors file, if the file is complete and the store still has it."""
    try:
        with ExitStack() as stack:
            tensors, metadata = read_safetensors(path, stack)
            ref = exported_ref(metadata)
            return None if ref is None else _adopted(journal, ref, select, since, tensors)
    except (CkptError, OSError):
        return None
