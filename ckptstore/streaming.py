"""The tensors of an open checkpoint as streams of bytes, for whoever looks at all of them and keeps none."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckptstore.formats.errors import FormatError
from ckptstore.formats.segment import RAW
from ckptstore.loading import Opened
from ckptstore.reading import iterate_tensor
from ckptstore.staging import Bytes

__all__ = ["Progress", "streams"]

Progress = Callable[[int, int], None]
"""Told (bytes done, bytes in all) as work goes on, from any thread, one call at a time."""


def streams(found: Opened) -> Callable[[str], Iterator[Bytes]]:
    """A function that yields a tensor's logical bytes chunk by chunk, verified, each valid until the next one.

    It may be called from several threads, while `found` is open.
    """
    available = found.tensors

    def chunks(name: str) -> Iterator[Bytes]:
        tensor, reader = available[name]
        if tensor.codec != RAW:
            raise FormatError(f"{reader.entry.key}: tensor {name!r}: codec {tensor.codec!r} is not known")
        for _, data in iterate_tensor(reader, tensor):
            yield data

    return chunks
