"""Hashes of the format: xxh3 with seed 0, of chunks, tensors, headers and states.

xxh3 detects damage, not tampering: anyone who can write to the store can forge it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["chunk_hash", "chunk_hashes", "header_hash", "state_hash", "tensor_hash", "xxh3_64", "xxh3_128"]

_LENGTH = struct.Struct("<Q")


def _flat(data: ReadableBuffer) -> memoryview:
    view = memoryview(data)
    return view if view.ndim == 1 and view.format == "B" else view.cast("B")


def xxh3_64(data: ReadableBuffer) -> int:
    """Return XXH3-64 of any C-contiguous buffer, as an unsigned number. Copies nothing and releases the GIL."""
    return int(xxhash.xxh3_64_intdigest(_flat(data)))


def xxh3_128(data: ReadableBuffer) -> str:
    """Return XXH3-128 of any C-contiguous buffer: 32 lower-case hex digits, most significant first."""
    return str(xxhash.xxh3_128_hexdigest(_flat(data)))


def chunk_hash(data: ReadableBuffer) -> str:
    """Return XXH3-64 of a chunk: 16 lower-case hex digits, most significant first."""
    return str(xxhash.xxh3_64_hexdigest(_flat(data)))


def chunk_hashes(data: ReadableBuffer, lengths: Iterable[int]) -> list[str]:
    """Return `chunk_hash` of each of the consecutive chunks of `data`; `lengths` in bytes."""
    flat, at, found = _flat(data), 0, []
    for length in lengths:
        found.append(str(xxhash.xxh3_64_hexdigest(flat[at : at + length])))
        at += length
    return found


def header_hash(data: ReadableBuffer) -> str:
    """Return XXH3-128 of all bytes of a segment's header, including its length field and padding."""
    return xxh3_128(data)


def tensor_hash(chunk_hashes: Sequence[str]) -> str:
    """Return the hash of a tensor: XXH3-128 of its chunks' decoded hashes, each a little-endian u64, in chunk order.

    Raises:
        ValueError: an entry is not 16 hex digits.
    """
    cells = [bytes.fromhex(text)[::-1] for text in chunk_hashes]
    if any(len(cell) != 8 for cell in cells):
        raise ValueError(f"chunk hashes {chunk_hashes!r:.80}: each has 16 hex digits")
    return str(xxhash.xxh3_128_hexdigest(b"".join(cells)))


def state_hash(tree_text: bytes, tensors: Iterable[tuple[str, str, Sequence[int], str]]) -> str:
    """Return the hash that identifies a state: XXH3-128 of the tree's canonical JSON and every tensor (SPEC.md 4).

    Args:
        tree_text: canonical JSON of the typed tree (`jsontext.dumps`).
        tensors: (name, logical dtype, logical shape, tensor hash), in any order; names are distinct.

    Each part is preceded by its length (u64, little-endian), so that different states never give the same byte string.
    """
    parts = [struct.pack("<Q", len(tree_text)), tree_text]
    for name, dtype, shape, digest in sorted(tensors):
        last = bytes.fromhex(digest)
        parts += (_described(name, dtype, tuple(shape)), _LENGTH.pack(len(last)), last)
    return xxh3_128(b"".join(parts))


@lru_cache(maxsize=1 << 14, typed=True)  # a run saves the same tensors again and again
def _described(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """The parts of a state hash that say what a tensor is."""
    one, two, rank = name.encode(), dtype.encode(), len(shape)
    form = f"<Q{len(one)}sQ{len(two)}sQ{rank}Q"
    return struct.pack(form, len(one), one, len(two), two, 8 * rank, *shape)
