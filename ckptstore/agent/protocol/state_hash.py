"""Computes the hash of a whole state in memory: the state hash of its checkpoint (SPEC, state hash)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from ckptstore.formats import checksums, jsontext
from ckptstore.formats.segment_files.layout import CHUNK
from ckptstore.formats.states.state import FlatState
from ckptstore.host.buffers import Bytes

__all__ = ["hash_of"]


def hash_of(flat: FlatState, pool: ThreadPoolExecutor) -> str:
    """Hash a state whose tensors are in host memory -> 32 hex digits.

    Args:
        pool: threads that hash chunks.
    """
    pieces: list[Bytes] = []
    counts: list[int] = []
    for source in flat.tensors.values():
        image = source.view()
        assert image is not None  # shared memory
        found = [image[start : start + CHUNK] for start in range(0, len(image), CHUNK)]
        pieces += found
        counts.append(len(found))
    hashes = iter(list(pool.map(checksums.chunk_hash, pieces)))
    rows = [
        (name, source.dtype, tuple(source.shape), checksums.tensor_hash([next(hashes) for _ in range(count)]))
        for (name, source), count in zip(flat.tensors.items(), counts, strict=True)
    ]
    return checksums.state_hash(jsontext.dumps(flat.tree), rows)
