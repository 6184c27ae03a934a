"""What a follower may have of a checkpoint already: in the tensors that it fills, or in the file that it writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from ckptstore.errors import CkptError, UsageError
from ckptstore.exchange.export import is_export
from ckptstore.exchange.safetensors_files import read_safetensors
from ckptstore.exchange.weight_files import CHECKPOINT_MEMBER
from ckptstore.frameworks import bridge
from ckptstore.host.buffers import Bytes
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import View
from ckptstore.restore.open_checkpoint import opened
from ckptstore.restore.resident_checkpoint import HeldState
from ckptstore.restore.resident_load import adopt

__all__ = ["Holder", "from_file", "refuse_foreign"]


class _Readable(Protocol):
    def read(self, offset: int, out: Bytes) -> None: ...


class Holder:
    """A state, whose tensors may be those of a checkpoint."""

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
    ) -> HeldState | None:
        """The checkpoint `ref` held in memory, without reading any tensor of it from the store; None: it is not what
        the state has, or cannot be opened."""
        return _adopted(journal, ref, select, since, self._tensors, rank)


def _adopted(
    journal: Journal,
    ref: str,
    select: Any,
    since: View | None,
    tensors: Mapping[str, _Readable],
    rank: int | None = None,
) -> HeldState | None:
    try:
        with opened(journal, ref, since=since) as found:
            if found.lossy:
                return None
            return adopt(found, select, lambda name, offset, out: tensors[name].read(offset, out), rank)
    except CkptError:
        return None  # it is read anew then, which says what is wrong


def refuse_foreign(path: Path) -> None:
    """Raise `UsageError` where there is a file that no follower and no export made: it would be replaced.

    An empty one (of ``mktemp``) is nobody's loss.
    """
    if path.is_file() and path.stat().st_size and not is_export(path):
        raise UsageError(
            f"{path} exists, and was not exported from a store: name another file, or remove this one, for a follower "
            "replaces it with each checkpoint"
        )


def from_file(
    path: Path, journal: Journal, select: str | Sequence[str] | None, since: View | None = None
) -> HeldState | None:
    """The checkpoint that an exported safetensors file holds, if it is whole and the store has it still."""
    try:
        with ExitStack() as stack:
            tensors, metadata = read_safetensors(path, stack)
            ref = metadata.get(CHECKPOINT_MEMBER)
            return None if ref is None else _adopted(journal, ref, select, since, tensors)
    except (CkptError, OSError):
        return None
