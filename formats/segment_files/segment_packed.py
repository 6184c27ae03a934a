"""The packed form of a segment: encoded chunks in tensor ``ckptstore/payload``, their index in ``ckptstore/index``.

No entry of the header pretends to be a tensor of the user. The header of a sparse diff stays smaller than its data: the
index consists of columns (`segment_index`), is compressed, and comes *after* the payload, because it is known last. The
header only identifies the segment and says where its index is, so the header's size is bounded before encoding starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import zstandard

from ckptstore.errors import CorruptSegmentError, FormatError
from ckptstore.formats import jsontext
from ckptstore.formats.checksums import xxh3_128
from ckptstore.formats.history.members import MAX_INT, Members
from ckptstore.formats.segment_files.layout import HEADER_LIMIT, MAX_SIZE, RESERVED_PREFIX, padded
from ckptstore.formats.segment_files.segment_columns import numbers
from ckptstore.formats.segment_files.segment_doc import (
    LENGTH,
    MAX_DOC_DEPTH,
    USES,
    SegmentDoc,
    frame,
    identity_members,
    read_identity,
)
from ckptstore.formats.segment_files.segment_index import index_members, read_index, uses_of

__all__ = ["INDEX", "INDEX_LIMIT", "PACKED", "PAYLOAD", "encode_packed", "plan_packed", "read_packed"]

PACKED: Final = "packed"
PAYLOAD: Final = RESERVED_PREFIX + "payload"
INDEX: Final = RESERVED_PREFIX + "index"
INDEX_LIMIT: Final = HEADER_LIMIT
"""Largest index in bytes. It applies to the stored and to the decompressed index."""

_RESERVED_USES: Final = ("_" * 16,) * 16
"""The longest ``uses`` that the header has space for. This version writes at most ten names, all shorter."""
_LEVEL = 3


def plan_packed(draft: SegmentDoc) -> int:
    """Return the bytes to reserve for the header, a multiple of `ALIGN`. Any payload and index fit this header.

    Args:
        draft: the document without trees and tensors.

    Raises:
        FormatError: the document is invalid, or the header exceeds `HEADER_LIMIT`.
    """
    identity = identity_members(draft, PACKED) | {"generation": MAX_INT}
    pointer = _pointer(INDEX_LIMIT, "0" * 32)
    text = _header_text(draft.segment, identity, MAX_SIZE, INDEX_LIMIT, pointer, _RESERVED_USES)
    size = padded(LENGTH.size + len(text))
    if size > HEADER_LIMIT:
        raise FormatError(f"segment {draft.segment}: a header of {size} bytes; at most {HEADER_LIMIT} are allowed")
    return size


def encode_packed(doc: SegmentDoc, payload: int, header_size: int) -> tuple[bytes, bytes]:
    """Return the header and the stored index of a packed segment. The index follows the payload and ends the file.

    Args:
        doc: the document, with tensors whose chunks are in the payload. `doc.extra` is stored in the index.
        payload: bytes of encoded chunks.
        header_size: the result of `plan_packed`, which is also the offset of the payload.

    Raises:
        FormatError: the document is invalid, or larger than planned.
        CorruptSegmentError: the chunks do not fill the payload without gaps and overlaps.
    """
    members = index_members(doc, payload, header_size)
    index = jsontext.bounded(members, what=f"segment {doc.segment}: index")
    stored = zstandard.ZstdCompressor(level=_LEVEL).compress(index)
    if max(len(index), len(stored)) > INDEX_LIMIT:
        raise FormatError(f"segment {doc.segment}: an index of {len(index)} bytes; at most {INDEX_LIMIT} are allowed")
    pointer, identity = _pointer(len(index), xxh3_128(stored)), identity_members(doc, PACKED)
    header = _header_text(doc.segment, identity, payload, len(stored), pointer, uses_of(members))
    return frame(header, header_size), stored


def read_packed(
    members: Mapping[str, Any],
    document: Members,
    header_size: int,
    size: int,
    read: Callable[[int, int], bytes],
    where: str,
) -> SegmentDoc:
    """Parse the document of a packed segment.

    Args:
        members: the parsed safetensors header without ``__metadata__``.
        document: the members of ``__metadata__["ckptstore"]``.
        header_size: length of the header in bytes.
        size: length of the file in bytes.
        read: returns `length` bytes of the file for ``read(offset, length)``; called once.
        where: names the file in errors.

    Raises:
        FormatError: not a document or index of this version.
        CorruptSegmentError: the index's hash is wrong, or payload, index and chunks do not fill the file.
    """
    names = frozenset(document.rest()) | {"form"}
    doc = read_identity(document, where)
    pointer = Members(document.mapping("index"), f"{where}: index")
    declared = document.rules(USES)
    doc = replace(doc, extra=document.rest())
    if members.keys() != {PAYLOAD, INDEX}:
        raise FormatError(f"{where}: a packed segment has the tensors {PAYLOAD} and {INDEX} only")
    payload = _read_extent(members[PAYLOAD], 0, f"{where}: {PAYLOAD}")
    length = _read_extent(members[INDEX], payload, f"{where}: {INDEX}")
    if length > INDEX_LIMIT:
        raise FormatError(f"{where}: an index of {length} bytes; at most {INDEX_LIMIT} are allowed")
    if header_size + payload + length != size:
        raise CorruptSegmentError(f"{where}: ends at byte {header_size + payload + length}, has {size} bytes")
    where = f"{where}: index at byte {header_size + payload}"
    index = _decompressed(pointer, read(header_size + payload, length), where)
    found = read_index(doc, Members(index, where), payload, header_size, where)
    if twice := sorted(names & index.keys()):
        raise FormatError(f"{where}: the header also has its member {twice[0]!r:.80}")
    if declared is not None and list(declared) != uses_of(index):
        raise FormatError(f"{where}: uses {uses_of(index)!r:.200}, the header says {declared!r:.200}")
    return found


def _pointer(length: int, digest: str) -> dict[str, Any]:
    return {"codec": "zstd", "length": length, "hash": digest}


def _header_text(
    segment: str, identity: dict[str, Any], payload: int, stored: int, pointer: dict[str, Any], uses: Sequence[str]
) -> bytes:
    document = identity | {USES: list(uses), "index": pointer}
    text = jsontext.bounded(document, what=f"segment {segment}: header").decode("ascii")
    return jsontext.dumps(
        {
            "__metadata__": {"format": "pt", "ckptstore": text},
            PAYLOAD: {"dtype": "U8", "shape": [payload], "data_offsets": [0, payload]},
            INDEX: {"dtype": "U8", "shape": [stored], "data_offsets": [payload, payload + stored]},
        }
    )


def _read_extent(info: Any, start: int, what: str) -> int:
    """Return the length of the U8 tensor `info`, which must begin at `start`."""
    if not isinstance(info, dict) or info.keys() != {"dtype", "shape", "data_offsets"} or info["dtype"] != "U8":
        raise FormatError(f"{what}: not described as bytes")
    (length,) = numbers(info["shape"], f"{what}: shape", 1)
    if numbers(info["data_offsets"], f"{what}: data_offsets", 2) != (start, start + length):
        raise CorruptSegmentError(f"{what}: {length} bytes belong at {start}, not at {info['data_offsets']}")
    return length


def _decompressed(pointer: Members, stored: bytes, where: str) -> Any:
    """Decompress and parse the index. Its hash and its decompressed size are checked first."""
    digest, decoded = pointer.digest("hash"), pointer.number("length")
    if xxh3_128(stored) != digest:
        raise CorruptSegmentError(f"{where}: {len(stored)} bytes whose hash is not {digest}")
    if pointer.text("codec") != "zstd" or decoded > INDEX_LIMIT:
        raise FormatError(f"{where}: not compressed with zstd, or {decoded} bytes, more than {INDEX_LIMIT}")
    try:
        if zstandard.get_frame_parameters(stored).content_size != decoded:
            raise FormatError(f"{where}: its frame does not hold {decoded} bytes")
        # One frame of known size: zstandard allocates that size and nothing more.
        found = zstandard.ZstdDecompressor().decompress(stored, max_output_size=decoded, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError(f"{where}: {error}") from error
    return jsontext.loads(found, what=where, max_bytes=INDEX_LIMIT, max_depth=MAX_DOC_DEPTH, shared=True)
