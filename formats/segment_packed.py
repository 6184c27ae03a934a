"""The packed form of a segment: encoded chunks in one tensor, ``ckptstore/payload``, and their index in another.

Nothing of it pretends to be a user's tensor, and a sparse diff is not outweighed by its header: the index is columns
(`segment_index`), compressed, and lies *behind* the payload, because it is known last. The header only says who the
segment is and where its index lies, so that its size is bounded before encoding starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import zstandard

from ckptstore.errors import CorruptSegmentError, FormatError
from ckptstore.formats import jsontext
from ckptstore.formats.checksums import xxh3_128
from ckptstore.formats.layout import HEADER_LIMIT, MAX_SIZE, RESERVED_PREFIX, padded
from ckptstore.formats.members import MAX_INT, Members
from ckptstore.formats.segment_columns import numbers
from ckptstore.formats.segment_doc import (
    LENGTH,
    MAX_DOC_DEPTH,
    USES,
    SegmentDoc,
    frame,
    identity_members,
    read_identity,
)
from ckptstore.formats.segment_index import index_members, read_index, uses_of

__all__ = ["INDEX", "INDEX_LIMIT", "PACKED", "PAYLOAD", "encode_packed", "plan_packed", "read_packed"]

PACKED: Final = "packed"
PAYLOAD: Final = RESERVED_PREFIX + "payload"
INDEX: Final = RESERVED_PREFIX + "index"
INDEX_LIMIT: Final = HEADER_LIMIT
"""Largest index in bytes, stored and decompressed."""

_ROOM: Final = ("_" * 16,) * 16
"""The longest list of these that a header is planned for. Those that this version writes have ten short names."""
_LEVEL = 3


def plan_packed(draft: SegmentDoc) -> int:
    """Bytes to leave for the header, a multiple of `ALIGN`, whatever the payload and the index become.

    Args:
        draft: the document without trees and tensors.

    Raises:
        FormatError: a document that is not well-formed, or a header beyond `HEADER_LIMIT`.
    """
    identity_members(draft, PACKED)  # or it could not be read back
    longest = replace(draft, generation=MAX_INT)
    pointer = _pointer(INDEX_LIMIT, "0" * 32)
    size = padded(LENGTH.size + len(_header_text(longest, MAX_SIZE, INDEX_LIMIT, pointer, _ROOM)))
    if size > HEADER_LIMIT:
        raise FormatError(f"segment {draft.segment}: a header of {size} bytes; at most {HEADER_LIMIT} are allowed")
    return size


def encode_packed(doc: SegmentDoc, payload: int, header_size: int) -> tuple[bytes, bytes]:
    """Header and stored index of a packed segment; the index follows the payload, and ends the file.

    Args:
        doc: the document, with tensors whose chunks lie in the payload; `doc.extra` goes into the index.
        payload: bytes of encoded chunks.
        header_size: what `plan_packed` gave; the payload begins there.

    Raises:
        FormatError: the document could not be read back, or outgrew what was planned.
        CorruptSegmentError: the chunks do not fill the payload without holes and overlaps.
    """
    members = index_members(doc, payload, header_size)
    index = jsontext.bounded(members, what=f"segment {doc.segment}: index")
    stored = zstandard.ZstdCompressor(level=_LEVEL).compress(index)
    if max(len(index), len(stored)) > INDEX_LIMIT:
        raise FormatError(f"segment {doc.segment}: an index of {len(index)} bytes; at most {INDEX_LIMIT} are allowed")
    header = _header_text(doc, payload, len(stored), _pointer(len(index), xxh3_128(stored)), uses_of(members))
    return frame(header, header_size), stored


def read_packed(
    members: Mapping[str, Any],
    document: Members,
    header_size: int,
    size: int,
    read: Callable[[int, int], bytes],
    where: str,
) -> SegmentDoc:
    """The document of a packed segment.

    Args:
        members: the parsed safetensors header, ``__metadata__`` left out.
        document: the members of ``__metadata__["ckptstore"]``.
        header_size: length of the header in bytes.
        size: length of the file in bytes.
        read: gives `length` bytes of the file from `offset`; called once, as ``read(offset, length)``.
        where: names the file in errors.

    Raises:
        FormatError: not a document or index of this version.
        CorruptSegmentError: the index's hash is wrong, or payload, index and chunks do not fill the file.
    """
    names = frozenset(document.rest()) | {"form"}
    doc = read_identity(document, where)
    pointer = Members(document.mapping("index"), f"{where}: index")
    told = document.rules(USES)
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
        raise FormatError(f"{where}: a member that the header has, too: {twice[0]!r:.80}")
    if told is not None and list(told) != uses_of(index):
        raise FormatError(f"{where}: uses {uses_of(index)!r:.200}, the header says {told!r:.200}")
    return found


def _pointer(length: int, digest: str) -> dict[str, Any]:
    return {"codec": "zstd", "length": length, "hash": digest}


def _header_text(doc: SegmentDoc, payload: int, stored: int, pointer: Mapping[str, Any], uses: Sequence[str]) -> bytes:
    document = identity_members(doc, PACKED) | {USES: list(uses), "index": dict(pointer)}
    text = jsontext.bounded(document, what=f"segment {doc.segment}: header").decode("ascii")
    return jsontext.dumps(
        {
            "__metadata__": {"format": "pt", "ckptstore": text},
            PAYLOAD: {"dtype": "U8", "shape": [payload], "data_offsets": [0, payload]},
            INDEX: {"dtype": "U8", "shape": [stored], "data_offsets": [payload, payload + stored]},
        }
    )


def _read_extent(info: Any, start: int, what: str) -> int:
    """Length of the U8 tensor `info`, which must begin at `start`."""
    if not isinstance(info, dict) or info.keys() != {"dtype", "shape", "data_offsets"} or info["dtype"] != "U8":
        raise FormatError(f"{what}: not described as bytes")
    (length,) = numbers(info["shape"], f"{what}: shape", 1)
    if numbers(info["data_offsets"], f"{what}: data_offsets", 2) != (start, start + length):
        raise CorruptSegmentError(f"{what}: {length} bytes belong at {start}, not at {info['data_offsets']}")
    return length


def _decompressed(pointer: Members, stored: bytes, where: str) -> Any:
    """The parsed index. Checked before decompression: its hash, and the size that it will have."""
    digest, decoded = pointer.digest("hash"), pointer.number("length")
    if xxh3_128(stored) != digest:
        raise CorruptSegmentError(f"{where}: {len(stored)} bytes whose hash is not {digest}")
    if pointer.text("codec") != "zstd" or decoded > INDEX_LIMIT:
        raise FormatError(f"{where}: not compressed with zstd, or {decoded} bytes, more than {INDEX_LIMIT}")
    try:
        if zstandard.get_frame_parameters(stored).content_size != decoded:
            raise FormatError(f"{where}: its frame does not hold {decoded} bytes")
        # One frame whose size is known: zstandard allocates that size and nothing more.
        found = zstandard.ZstdDecompressor().decompress(stored, max_output_size=decoded, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError(f"{where}: {error}") from error
    return jsontext.loads(found, what=where, max_bytes=INDEX_LIMIT, max_depth=MAX_DOC_DEPTH)
