"""Hashes of the format: xxh3, seed 0, of chunks, tensors, headers and states.

xxh3 detects damage, not tampering: whoever can write the store can forge it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["chunk_hash", "header_hash", "state_hash", "tensor_hash", "xxh3_64", "xxh3_128"]


def _flat(data: ReadableBuffer) -> memoryview:
    view = memoryview(data)
    return view if view.ndim == 1 and view.format == "B" else view.cast("B")


def xxh3_64(data: ReadableBuffer) -> int:
    """XXH3-64 of any C-contiguous buffer, as an unsigned number. Copies nothing and releases the GIL."""
    return int(xxhash.xxh3_64_intdigest(_flat(data)))


def xxh3_128(data: ReadableBuffer) -> str:
    """XXH3-128 of any C-contiguous buffer: 32 lower-case hex digits, most significant first."""
    return str(xxhash.xxh3_128_hexdigest(_flat(data)))


def chunk_hash(data: ReadableBuffer) -> str:
    """XXH3-64 of a chunk: 16 lower-case hex digits, most significant first."""
    return f"{xxh3_64(data):016x}"


def header_hash(data: ReadableBuffer) -> str:
    """XXH3-128 of all bytes of a segment's header, its length field and padding included."""
    return xxh3_128(data)


def tensor_hash(chunk_hashes: Sequence[str]) -> str:
    """Hash of a tensor: XXH3-128 of its chunks' decoded hashes, each as a little-endian u64, in chunk order.

    Raises:
        ValueError: an entry is not 16 hex digits.
    """
    return xxh3_128(b"".join(struct.pack("<Q", int(text, 16)) for text in chunk_hashes))


def state_hash(tree_text: bytes, tensors: Iterable[tuple[str, str, Sequence[int], str]]) -> str:
    """Hash that identifies a whole state: XXH3-128 over the tree's canonical JSON and every tensor.

    Args:
        tree_text: canonical JSON of the typed tree (`jsontext.dumps`).
        tensors: (name, logical dtype, logical shape, tensor hash), in any order; names are distinct.

    Each part is preceded by its length (u64, little-endian), so that no two different states give one byte string.
    """
    hasher = xxhash.xxh3_128()

    def feed(part: bytes) -> None:
        hasher.update(struct.pack("<Q", len(part)))
        hasher.update(part)

    feed(tree_text)
    for name, dtype, shape, digest in sorted(tensors):
        feed(name.encode())
        feed(dtype.encode())
        feed(struct.pack(f"<{len(shape)}Q", *shape))
        feed(bytes.fromhex(digest))
    return str(hasher.hexdigest())
