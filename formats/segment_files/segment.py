"""Read and check segments, which are valid safetensors files that describe themselves.

There are two forms. ``plain`` stores the tensors unencoded under their own names; any safetensors reader can use it.
``packed`` stores encoded chunks and a compressed index, for everything else. This module is the entry point: it exports
the functions that write each form, and parses both. Input is not trusted. A truncated, damaged or forged segment raises
`CorruptSegmentError` or `FormatError`, whatever its header claims, and no length is used to allocate memory before it
is checked.

A header is valid because a COMMIT record holds its hash: call `check_header` before `parse`. Data is valid because
the hash of each chunk is in the header, or in the index, whose own hash is in the header.
"""

from __future__ import annotations

from collections.abc import Callable

from ckptstore.errors import CorruptSegmentError, FormatError
from ckptstore.formats import jsontext
from ckptstore.formats.checksums import header_hash
from ckptstore.formats.history.members import Members
from ckptstore.formats.segment_files.layout import ALIGN, HEADER_LIMIT
from ckptstore.formats.segment_files.segment_doc import (
    LENGTH,
    MAX_DOC_DEPTH,
    RAW,
    VERSION,
    Chunk,
    SegmentDoc,
    TensorEntry,
)
from ckptstore.formats.segment_files.segment_packed import PACKED, encode_packed, plan_packed, read_packed
from ckptstore.formats.segment_files.segment_plain import (
    PLAIN,
    encode_plain,
    fill_header,
    plan_plain,
    raw_entry,
    read_plain,
)
from ckptstore.formats.segment_files.segment_steps import read_ranks

__all__ = [
    "RAW",
    "VERSION",
    "Chunk",
    "SegmentDoc",
    "TensorEntry",
    "check_header",
    "encode_packed",
    "encode_plain",
    "fill_header",
    "header_length",
    "parse",
    "plan_packed",
    "plan_plain",
    "raw_entry",
]

_MAX_HEADER_DEPTH = 8  # {"name": {"shape": [...]}} needs 3; the document inside it is a string


def header_length(prefix: bytes, size: int, where: str) -> int:
    """Return the length of a segment's header in bytes, including its length field.

    Args:
        prefix: at least the first 8 bytes of the file.
        size: length of the file in bytes.
        where: names the file in errors.

    Raises:
        FormatError: not a ckptstore segment: no header of this format has this length.
        CorruptSegmentError: the file ends before its header does.
    """
    if min(len(prefix), size) < LENGTH.size:
        raise CorruptSegmentError(f"{where}: ends at byte {min(len(prefix), size)}, within its length field")
    length = LENGTH.size + int(LENGTH.unpack_from(prefix)[0])
    if length > HEADER_LIMIT or length % ALIGN:
        raise FormatError(f"{where}: a header of {length} bytes is not a multiple of {ALIGN} up to {HEADER_LIMIT}")
    if length > size:
        raise CorruptSegmentError(f"{where}: ends at byte {size}, within its header of {length} bytes")
    return length


def check_header(header: bytes, expected: str, where: str) -> None:
    """Compare the complete `header` with the hash in the COMMIT record.

    Raises:
        CorruptSegmentError: the hashes differ.
    """
    found = header_hash(header)
    if found != expected:
        raise CorruptSegmentError(f"{where}: the header's hash is {found}, its COMMIT record has {expected}")


def parse(header: bytes, size: int, where: str, read: Callable[[int, int], bytes]) -> SegmentDoc:
    """Parse the document of a segment and check it against the size of the file.

    Args:
        header: the first `header_length` bytes of the file.
        size: length of the file in bytes.
        where: names the file in errors.
        read: returns `length` bytes of the file for ``read(offset, length)``. It is called once for a packed segment,
            to read the index, and never for a plain one.

    Raises:
        IncompatibleFormatError: another version, or an unknown ``incompat`` feature.
        FormatError: not a ckptstore segment, or a malformed one.
        CorruptSegmentError: the file is truncated, or its parts do not fill it exactly, or the index's hash is wrong.
    """
    if len(header) != header_length(header, size, where):
        raise CorruptSegmentError(f"{where}: {len(header)} bytes were passed as its header")
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
    fields = Members(document, where)
    form = fields.text("form")
    if form == PLAIN:
        doc = read_plain(members, fields, len(header), size, where)
    elif form == PACKED:
        doc = read_packed(members, fields, len(header), size, read, where)
    else:
        raise FormatError(f"{where}: unknown form {form!r:.40}")
    read_ranks(doc.extra, doc.steps, where)  # the result is not used: this refuses malformed members
    return doc
