"""Finds the files that hold a full checkpoint uncompressed, for programs that map safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptstore.errors import CorruptSegmentError, UsageError
from ckptstore.formats import jsontext
from ckptstore.formats.segment_files.layout import HEADER_LIMIT
from ckptstore.formats.segment_files.segment_doc import LENGTH
from ckptstore.log.journal import Journal
from ckptstore.restore.open_checkpoint import OpenCheckpoint, opened
from ckptstore.segments.segment_reader import SegmentReader

__all__ = ["StoredFile", "file_of", "has_files"]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A safetensors file of a full checkpoint.

    Attributes:
        path: path of the file; on other media the URL of the object.
        size: its bytes: all of the file, and bytes 0 to `size` of the object.
        tensors: name in the file -> which elements of that tensor it has, as `Store.read_boxes` takes a box; None: all.
    """

    path: str
    size: int
    tensors: Mapping[str, tuple[tuple[int, int], ...] | None]


def file_of(journal: Journal, ref: str | int) -> list[StoredFile]:
    """See `Store.file_of`."""
    with opened(journal, ref) as found:
        files = []
        for segment, tensors in _members(found).items():
            entry = found.readers[segment].entry
            path = journal.backend.locate(entry.key)
            if path is None:
                raise UsageError(f"{journal.url}: no other program can open what is in this store: export {found.ref}")
            files.append(StoredFile(path, entry.size, tensors))
        return files


def has_files(journal: Journal, ref: str | int) -> bool:
    """Whether every tensor of a checkpoint is stored as it is in a safetensors file. Raises as `file_of`."""
    with opened(journal, ref) as found:
        try:
            _members(found)
        except UsageError:
            return False
        return True


def _members(found: OpenCheckpoint) -> dict[str, dict[str, tuple[tuple[int, int], ...] | None]]:
    """Segment -> the tensors that it has, and their boxes. Raises `UsageError` if one is not stored as it is."""
    members: dict[str, dict[str, tuple[tuple[int, int], ...] | None]] = {}
    for name in found.parts:
        for chain, box in found.stored(name):
            if not chain.raw:
                raise _no_file(found, name)
            entry = chain.links[-1].reader.entry
            bounds = tuple(zip(box.offset, box.end, strict=True)) if found.sharded(name) else None
            members.setdefault(entry.id, {})[name] = bounds
    for segment, tensors in members.items():
        if missing := tensors.keys() - _names_in(found.readers[segment]):
            raise _no_file(found, min(missing))
    return members


def _names_in(reader: SegmentReader) -> set[str]:
    """The names in the header of a segment: in the packed form they are not those of the tensors."""
    length = min(reader.entry.header, HEADER_LIMIT)
    header = bytearray(length)
    reader.source.read_into(0, memoryview(header))
    found = jsontext.loads(memoryview(header)[LENGTH.size :], what=reader.entry.key, max_bytes=HEADER_LIMIT)
    if not isinstance(found, dict):
        raise CorruptSegmentError(f"{reader.entry.key}: the header is not a JSON object")
    return set(found)


def _no_file(found: OpenCheckpoint, name: str) -> UsageError:
    last, length = found.plan.encodings[-1], len(found.plan.encodings)
    kind = "a step diff" if last.kind == "gradient" else f"a {last.kind}"
    chain = f", the last of a chain of {length}" if length > 1 else ""
    return UsageError(
        f"checkpoint {found.ref} is {kind}{chain}, and tensor {name!r} is not stored as it is: write a file with "
        f"`ckpt restore STORE {found.ref} --out FILE.safetensors`, or store it uncompressed with "
        f"`ckpt compact STORE --plain {found.ref}`"
    )
