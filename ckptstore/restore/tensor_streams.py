"""Streams the bytes of an open checkpoint's tensors, for callers that look at all of them and keep none."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckptstore.host.buffers import Bytes
from ckptstore.restore.chains.chain import iterate_chain
from ckptstore.restore.restore_source import RestoreSource
from ckptstore.restore.shard_streams import iterate_parts

__all__ = ["stream", "streams"]


def streams(found: RestoreSource) -> Callable[[str], Iterator[Bytes]]:
    """A function that yields a tensor's logical bytes chunk by chunk, verified, each valid until the next one.

    Several threads may call it while `found` is open. Sharded tensors are assembled: then one chunk of each shard at
    the current position is in memory.
    """
    assert found.tensors is not None  # computed here, not by several threads at once

    def chunks(name: str) -> Iterator[Bytes]:
        for _, data in stream(found, name):
            yield data

    return chunks


def stream(found: RestoreSource, name: str, *, verify: bool = True) -> Iterator[tuple[int, Bytes]]:
    """Stream one tensor: (offset within it, bytes valid until the next one)."""
    if found.sharded(name):
        return iterate_parts(found.tensors[name], found.stored(name), verify=verify)
    return iterate_chain(found.chains[name], verify=verify)
