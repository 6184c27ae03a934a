"""Segments: valid safetensors files that describe themselves, in two forms.

``plain``: the tensors as they are, under their own names; any safetensors reader can use it. ``packed``: encoded chunks
and a compressed index, for everything else. This module is the way in: it gathers what writes both forms and reads
either. Nothing here trusts its input: a segment that was cut, damaged or forged gives `CorruptSegmentError` or
`FormatError`, whatever its header claims, before anything is allocated by a length that was not checked.

A header is valid because a COMMIT record holds its hash; check that (`check_header`) before `parse`. Data is valid
because each chunk's hash is in the header or in the index, whose own hash is in the header.
"""

from __future__ import annotations

from collections.abc import Callable

from ckptstore.errors import CorruptSegmentError, FormatError
from ckptstore.formats import jsontext
from ckptstore.formats.checksums import header_hash
from ckptstore.formats.layout import ALIGN, HEADER_LIMIT
from ckptstore.formats.members import Members
from ckptstore.formats.segment_doc import LENGTH, MAX_DOC_DEPTH, RAW, VERSION, Chunk, SegmentDoc, TensorEntry
from ckptstore.formats.segment_packed import PACKED, encode_packed, plan_packed, read_packed
from ckptstore.formats.segment_plain import PLAIN, encode_plain, plan_plain, raw_entry, read_plain
from ckptstore.formats.segment_steps import read_ranks

__all__ = [
    "RAW",
    "VERSION",
    "Chunk",
    "SegmentDoc",
    "TensorEntry",
    "check_header",
    "encode_packed",
    "encode_plain",
    "header_length",
    "parse",
    "plan_packed",
    "plan_plain",
    "raw_entry",
]

_MAX_HEADER_DEPTH = 8  # {"name": {"shape": [...]}} needs 3; the document is text inside it


def header_length(prefix: bytes, size: int, where: str) -> int:
    """Bytes of a segment's header, its length field included.

    Args:
        prefix: the first 8 bytes of the file, or more.
        size: length of the file in bytes.
        where: names the file in errors.

    Raises:
        FormatError: not a segment of ours: no header of ours has this length.
        CorruptSegmentError: the file ends before its header does.
    """
    if min(len(prefix), size) < LENGTH.size:
        raise CorruptSegmentError(f"{where}: ends at byte {min(len(prefix), size)}, within its length field")
    length = LENGTH.size + int(LENGTH.unpack_from(prefix)[0])
    if length > HEADER_LIMIT or length % ALIGN:
        raise FormatError(f"{where}: a header of {length} bytes; ours are multiples of {ALIGN} up to {HEADER_LIMIT}")
    if length > size:
        raise CorruptSegmentError(f"{where}: ends at byte {size}, within its header of {length} bytes")
    return length


def check_header(header: bytes, expected: str, where: str) -> None:
    """Compare `header`, all of it, with the hash in the COMMIT record.

    Raises:
        CorruptSegmentError: they differ.
    """
    found = header_hash(header)
    if found != expected:
        raise CorruptSegmentError(f"{where}: the header's hash is {found}, committed was {expected}")


def parse(header: bytes, size: int, where: str, read: Callable[[int, int], bytes]) -> SegmentDoc:
    """The document of a segment, checked against the size of its file.

    Args:
        header: the first `header_length` bytes of the file.
        size: length of the file in bytes.
        where: names the file in errors.
        read: gives `length` bytes of the file, called as ``read(offset, length)``; once, for the index of a packed
            segment, never for a plain one.

    Raises:
        IncompatibleFormatError: another version, or an unknown ``incompat`` feature.
        FormatError: not a segment of ours, or a malformed one.
        CorruptSegmentError: the file is cut, or its parts do not fill it exactly, or the index's hash is wrong.
    """
    if len(header) != header_length(header, size, where):
        raise CorruptSegmentError(f"{where}: {len(header)} bytes given as its header")
    members = jsontext.loads(
        memoryview(header)[LENGTH.size :], what=where, max_bytes=HEADER_LIMIT, max_depth=_MAX_HEADER_DEPTH
    )
    if header[LENGTH.size] != ord("{"):
        raise FormatError(f"{where}: the header is not a JSON object")
    metadata = members.pop("__metadata__", None)
    text = metadata.get("ckptstore") if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise FormatError(f"{where}: no ckptstore document in the metadata: an ordinary safetensors file?")
    document = jsontext.loads(
        text.encode(errors="surrogatepass"), what=where, max_bytes=HEADER_LIMIT, max_depth=MAX_DOC_DEPTH
    )
    taken = Members(document, where)
    form = taken.text("form")
    if form == PLAIN:
        doc = read_plain(members, taken, len(header), size, where)
    elif form == PACKED:
        doc = read_packed(members, taken, len(header), size, read, where)
    else:
        raise FormatError(f"{where}: unknown form {form!r:.40}")
    read_ranks(doc.extra, doc.steps, where)  # only to refuse what is not of their form
    return doc
