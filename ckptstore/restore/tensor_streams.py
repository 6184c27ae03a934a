"""The tensors of an open checkpoint as streams of bytes, for whoever looks at all of them and keeps none."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckptstore.host.buffers import Bytes
from ckptstore.restore.chain import iterate_chain
from ckptstore.restore.restore_source import Restorable
from ckptstore.restore.shard_streams import iterate_parts

__all__ = ["stream", "streams"]


def streams(found: Restorable) -> Callable[[str], Iterator[Bytes]]:
    """A function that yields a tensor's logical bytes chunk by chunk, verified, each valid until the next one.

    It may be called from several threads, while `found` is open. What is stored in shards is put together: then a chunk
    of each shard at the present place is in memory.
    """
    assert found.tensors is not None  # made here, not by several threads at once

    def chunks(name: str) -> Iterator[Bytes]:
        for _, data in stream(found, name):
            yield data

    return chunks


def stream(found: Restorable, name: str, *, verify: bool = True) -> Iterator[tuple[int, Bytes]]:
    """One tensor: (offset within it, bytes valid until the next)."""
    if found.sharded(name):
        return iterate_parts(found.tensors[name], found.stored(name), verify=verify)
    return iterate_chain(found.chains[name], verify=verify)
