"""The tensors of an open checkpoint as streams of bytes, for whoever looks at all of them and keeps none."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckptstore.host.buffers import Bytes
from ckptstore.restore.chain import iterate_chain
from ckptstore.restore.opened import Opened

__all__ = ["streams"]


def streams(found: Opened) -> Callable[[str], Iterator[Bytes]]:
    """A function that yields a tensor's logical bytes chunk by chunk, verified, each valid until the next one.

    It may be called from several threads, while `found` is open.
    """
    available = found.chains

    def chunks(name: str) -> Iterator[Bytes]:
        for _, data in iterate_chain(available[name]):
            yield data

    return chunks
