"""Reads a committed checkpoint back from the store, chunk by chunk, as the base of deltas."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack

from ckptstore.errors import CorruptSegmentError
from ckptstore.formats.layout import CHUNK
from ckptstore.formats.records import CheckpointId
from ckptstore.host.buffers import SLACK, Bytes, aligned
from ckptstore.log.journal import Journal
from ckptstore.restore.chain import Chain, decode_chunk
from ckptstore.restore.open_checkpoint import opened

__all__ = ["StoredBase", "open_base"]


class StoredBase:
    """A base that is read back from the store to save memory. Every thread keeps the chunk that it read last."""

    def __init__(self, identity: CheckpointId, chains: dict[str, Chain], close: Callable[[], None]) -> None:
        self.id = identity
        self._chains = chains
        self._close = close
        self._local = threading.local()

    def spec(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """See `Base.spec`."""
        chain = self._chains.get(name)
        return None if chain is None else (chain.tensor.dtype, chain.tensor.shape)

    def read(self, name: str, start: int, length: int) -> Bytes:
        """See `Base.read`. The range is within one chunk. Raises `CorruptSegmentError`, `StorageError`."""
        chain = self._chains[name]
        index, within = divmod(start, CHUNK)
        out = self._chunk(name, chain, index)
        if within + length <= len(out):
            return out[within : within + length]
        following = self._chunk(name, chain, index + 1)  # a master's range, twice as long as its copy's chunk
        joined = aligned(length)
        joined[: len(out) - within] = out[within:]
        joined[len(out) - within :] = following[: length - (len(out) - within)]
        return joined

    def _chunk(self, name: str, chain: Chain, index: int) -> Bytes:
        kept: tuple[str, int, Bytes] | None = getattr(self._local, "kept", None)
        if kept is not None and kept[:2] == (name, index):
            return kept[2]
        length = chain.tensor.chunks[index].logical
        out = aligned(length)
        decode_chunk(chain, index, out, aligned(CHUNK + SLACK))
        self._local.kept = (name, index, out)
        return out

    def forget(self) -> None:
        """Close the segments."""
        self._close()


def open_base(journal: Journal, identity: CheckpointId) -> StoredBase:
    """Open a committed checkpoint as the base of deltas. Close it with `StoredBase.forget`."""
    stack = ExitStack()
    try:
        found = stack.enter_context(opened(journal, identity.ref))
        if found.entry.id != identity:
            raise CorruptSegmentError(f"checkpoint {identity.ref}: was replaced by another one")
        return StoredBase(identity, found.chains, stack.close)
    except BaseException:
        stack.close()
        raise
