"""Reads a committed checkpoint back from the store, chunk by chunk, as the base of deltas."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack

from ckptstore.errors import CorruptSegmentError
from ckptstore.formats.history.records import CheckpointId
from ckptstore.formats.segment_files.layout import CHUNK
from ckptstore.formats.segment_files.shards import shard_key
from ckptstore.formats.sources import place_of
from ckptstore.formats.states.state import FlatState, TensorSource
from ckptstore.host.buffers import SLACK, Bytes, aligned
from ckptstore.log.journal import Journal
from ckptstore.restore.chains.assembly import assemble
from ckptstore.restore.chains.chain import Chain, decode_chunk
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


def open_base(journal: Journal, identity: CheckpointId, share: FlatState | None = None) -> StoredBase:
    """Open a committed checkpoint as the base of deltas. Close it with `StoredBase.forget`.

    Args:
        share: what a rank stored of it; its tensors keep their names, and shards are read as shards. None: all of it.

    Raises:
        CorruptSegmentError: it is another checkpoint now, or a tensor of `share` is not in it.
        StorageError: the medium failed.
    """
    stack = ExitStack()
    try:
        found = stack.enter_context(opened(journal, identity.ref))
        if found.entry.id != identity:
            raise CorruptSegmentError(f"checkpoint {identity.ref}: was replaced by another one")
        if share is None:
            return StoredBase(identity, found.chains, stack.close)
        keys = {name: _key(name, source) for name, source in share.tensors.items()}
        stored = found.encodings
        if lost := [name for name, key in keys.items() if key not in stored[-1]]:
            raise CorruptSegmentError(f"checkpoint {identity.ref}: it does not have this rank's part of {lost[0]!r}")
        chains = assemble(stored, list(keys.values()))
        return StoredBase(identity, {name: chains[key] for name, key in keys.items()}, stack.close)
    except BaseException:
        stack.close()
        raise


def _key(name: str, source: TensorSource) -> str:
    """What a tensor of a share goes by among the entries of all segments."""
    whole, offset = place_of(source)
    return name if whole is None or offset is None else shard_key(name, source.shape, whole, offset)
