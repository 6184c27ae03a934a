"""Checks that no file has the header of one segment over the bytes of another: safetensors would read it silently.

A file that is reused for a new segment keeps the old header until it is cleared. After a crash the file may be the old
segment, the new one, or unreadable; never one header over the other's data, under any name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ckptstore.errors import CkptError
from ckptstore.formats import checksums
from ckptstore.formats.segment_files.segment import SegmentDoc, header_length, parse
from tools.crash.disk import Image

__all__ = ["files_below", "files_of", "mixed"]


def files_of(image: Image) -> Iterator[tuple[str, bytes]]:
    """Path and bytes of every file in an image."""
    return ((path, blob.data) for path, blob in image.walk() if blob is not None)


def files_below(root: Path) -> Iterator[tuple[str, bytes]]:
    """Path and bytes of every file below a real folder."""
    return ((str(path), path.read_bytes()) for path in sorted(root.rglob("*")) if path.is_file())


def mixed(files: Iterable[tuple[str, bytes]]) -> list[str]:
    """Paths of segments whose header names another segment, and whose data is not all of that segment's.

    A file with its own name is skipped: while it is written it may have the header and not the data, like any new file.
    A recycled file has two names while a power cut may still undo its rename; the check finds it under the old one.
    """
    return [path for path, data in files if "/seg/" in path or "/.spare/" in path if _is_mixed(path, data)]


def _is_mixed(path: str, data: bytes) -> bool:
    try:
        length = header_length(data[:8], len(data), path)
        doc = parse(data[:length], len(data), path, lambda offset, count: data[offset : offset + count])
    except CkptError:
        return False  # unreadable
    return doc.segment not in path and not _whole(doc, data)


def _whole(doc: SegmentDoc, data: bytes) -> bool:
    return all(
        checksums.chunk_hash(data[chunk.offset : chunk.offset + chunk.length]) == chunk.stored_hash
        for tensors in doc.tensors.values()
        for tensor in tensors.values()
        for chunk in tensor.chunks
    )
