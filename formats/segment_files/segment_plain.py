"""The plain form of a segment: an ordinary ``.safetensors`` file with the tensors under their own names.

Everything in the header except hashes and digests is known before the data is read, and those have a fixed width.
Therefore the size of the header is exact before the first byte is written. The header is written last: the text that
was built to compute its size, with the hashes and digests filled in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from ckptstore.errors import CorruptSegmentError, FormatError
from ckptstore.formats import dtypes, jsontext
from ckptstore.formats.history.columns import ascending
from ckptstore.formats.history.members import Members, natural
from ckptstore.formats.segment_files.layout import (
    HEADER_LIMIT,
    Layout,
    PlannedHeader,
    TensorSpec,
    chunk_count,
    chunk_extents,
    order,
    padded,
    place,
)
from ckptstore.formats.segment_files.segment_columns import (
    WIDTH,
    digest_column,
    hash_column,
    numbers,
    read_digests,
    read_known_hashes,
)
from ckptstore.formats.segment_files.segment_doc import (
    LENGTH,
    RAW,
    USES,
    Chunk,
    SegmentDoc,
    TensorEntry,
    frame,
    identity_members,
    read_identity,
    read_trees,
    with_extra,
)

__all__ = ["PLAIN", "encode_plain", "fill_header", "plan_plain", "raw_entry", "read_plain"]

PLAIN: Final = "plain"


def plan_plain(specs: Iterable[TensorSpec], draft: SegmentDoc, *, digests: bool = True) -> Layout:
    """Order and place tensors and compute the header's size, before any of their bytes are read.

    Args:
        specs: the tensors, in access order.
        draft: the document without its `tensors`; it has one step.
        digests: reserve space for a state digest of each tensor (16 bytes of header each).

    Raises:
        FormatError: two tensors have one name, the document is invalid, or the header exceeds `HEADER_LIMIT`.
            `layout.split` keeps the tensors' part of it small enough, so a header that is too large has a large tree.
    """
    placed = _in_order(tuple(specs))
    header = _planned_header(placed, draft)
    size = header.length(WIDTH * placed.cells, WIDTH * len(placed.specs) if digests else None)
    at = _layout(placed, _header_size(draft, size))
    return Layout(at.specs, at.header_size, at.offsets, at.size, header)


def raw_entry(layout: Layout, spec: TensorSpec, hashes: Sequence[str], digest: int | None = None) -> TensorEntry:
    """Return the entry of a tensor that is stored unencoded, at its position in `layout`.

    Args:
        hashes: `chunk_hash` of each chunk.
        digest: state digest, if one was computed.

    Raises:
        FormatError: the number of hashes is not the number of chunks.
    """
    if len(hashes) != chunk_count(spec.nbytes):
        raise FormatError(f"tensor {spec.name!r}: {len(hashes)} hashes for {chunk_count(spec.nbytes)} chunks")
    return _entry(spec, layout.offsets[spec.name], hashes, digest)


def encode_plain(layout: Layout, doc: SegmentDoc) -> bytes:
    """Return the header of a plain segment, exactly `layout.header_size` bytes.

    Args:
        layout: the result of `plan_plain` for the same document.
        doc: the document with the tensors of `layout` (see `raw_entry`).

    Raises:
        FormatError: the document differs from the planned one, or a tensor is not stored raw at its position.
    """
    entries = doc.tensors.get(doc.steps[0], {})
    if len(entries) != len(layout.specs):
        raise FormatError(f"segment {doc.segment}: {len(entries)} tensors, {len(layout.specs)} were planned")
    hashes: list[str] = []
    for spec in layout.specs:
        entry = entries.get(spec.name)
        if entry is None:
            raise FormatError(f"segment {doc.segment}: tensor {spec.name!r} was planned and is missing")
        if not _as_planned(entry, spec, layout.offsets[spec.name]):
            raise FormatError(f"segment {doc.segment}: tensor {spec.name!r} differs from its plan")
        hashes += [chunk.stored_hash for chunk in entry.chunks]
    return fill_header(layout, doc, hashes, [entries[spec.name].digest for spec in layout.specs])


def fill_header(layout: Layout, doc: SegmentDoc, hashes: Sequence[str], digests: Sequence[int | None]) -> bytes:
    """Return the header of a plain segment, as `encode_plain`, from the sums of its tensors alone.

    Args:
        layout: the result of `plan_plain` for the same document.
        doc: the document; its tensors are not read.
        hashes: `chunk_hash` of each chunk of the tensors of `layout`, in file order.
        digests: state digest of each tensor, in file order; all of them None: none was computed.

    Raises:
        FormatError: the document differs from the planned one, or the sums are not those of as many tensors.
    """
    column = None if all(digest is None for digest in digests) else digest_column(digests)
    placed = _in_order(layout.specs)
    if len(hashes) != placed.cells or len(digests) != len(placed.specs):
        raise FormatError(
            f"segment {doc.segment}: {len(hashes)} hashes and {len(digests)} digests of {len(placed.specs)} tensors"
        )
    header = layout.header or _planned_header(placed, doc)
    # Prevents: a segment with the tree or the base of another checkpoint, because the document changed since the plan.
    if header.document != _described(doc):
        raise FormatError(f"segment {doc.segment}: its document differs from the planned one")
    text = header.text(hash_column(hashes), column)
    _header_size(doc, len(text))
    return frame(text, layout.header_size)


def read_plain(members: Mapping[str, Any], document: Members, header_size: int, size: int, where: str) -> SegmentDoc:
    """Parse the document of a plain segment.

    Args:
        members: the parsed safetensors header without ``__metadata__``.
        document: the members of ``__metadata__["ckptstore"]``.
        header_size: length of the header in bytes.
        size: length of the file in bytes.
        where: names the file in errors.

    Raises:
        FormatError: not a document of this version.
        CorruptSegmentError: the tensors do not fill the file.
    """
    doc = read_identity(document, where)
    if len(doc.steps) != 1:
        raise FormatError(f"{where}: a plain segment holds one step, not {len(doc.steps)}")
    specs = _specs(members, document, size - header_size, where)
    counts = [chunk_count(spec.nbytes) for spec in specs]  # bounded: the tensors fill the file of `size` bytes
    hashes = read_known_hashes(document.text("hashes"), sum(counts), f"{where}: hashes")
    digests = read_digests(document.rest(), len(specs), where)
    tensors: dict[str, TensorEntry] = {}
    position, cell = header_size, 0
    for spec, count, digest in zip(specs, counts, digests, strict=True):
        tensors[spec.name] = _entry(spec, position, hashes[cell : cell + count], digest)
        position += spec.nbytes
        cell += count
    trees = read_trees(document, doc.steps)
    if USES in document.rest():  # else a packed segment made of this one would get it as a member of its index
        document.refuse(USES, "a member of a plain segment")
    return replace(doc, trees=trees, tensors={doc.steps[0]: tensors}, extra=document.rest())


@dataclass(frozen=True, slots=True, eq=False)
class _PlacedTensors:
    """What a header says of its tensors whatever their bytes are: it is the same in every save of a run.

    Attributes:
        specs: the tensors in file order.
        cells: number of their chunks.
        columns: members ``dtypes`` and ``shards`` of the document, if it needs them.
        members: the header's members for the tensors, as text with a comma before it.
    """

    specs: tuple[TensorSpec, ...]
    cells: int
    columns: Mapping[str, Any]
    members: bytes


@lru_cache(maxsize=8)  # a run saves the same tensors again and again
def _in_order(specs: tuple[TensorSpec, ...]) -> _PlacedTensors:
    """Order tensors. Raises `FormatError` for tensors that cannot be in one segment."""
    ordered = tuple(order(specs))
    place(ordered, 0)
    logical = [[row, spec.dtype] for row, spec in enumerate(ordered) if dtypes.get(spec.dtype).storage != spec.dtype]
    shards = [[row, spec.global_shape, spec.offset] for row, spec in enumerate(ordered) if spec.offset is not None]
    columns = {name: rows for name, rows in (("dtypes", logical), ("shards", shards)) if rows}
    members = b"," + _members_text(ordered)[1:-1] if ordered else b""
    return _PlacedTensors(ordered, sum(chunk_count(spec.nbytes) for spec in ordered), columns, members)


@lru_cache(maxsize=8)
def _layout(placed: _PlacedTensors, header_size: int) -> Layout:
    return place(placed.specs, header_size)


def _planned_header(placed: _PlacedTensors, doc: SegmentDoc) -> PlannedHeader:
    """Build all of the header that does not depend on the data of the tensors."""
    what = f"segment {doc.segment}: header"
    # The columns add no values: what can be read without them can be read with them.
    document = jsontext.bounded(_document(placed, doc, "", ""), what=what)
    after = b'"' + (b"," + jsontext.dumps(dict(doc.extra))[1:] if doc.extra else b"}")
    before = document.removesuffix(_BETWEEN + after)
    header = PlannedHeader(
        _described(doc), _FRONT + _within(before), _WITHIN_BETWEEN, _within(after) + _BACK + placed.members + b"}"
    )
    jsontext.check(header.text("", None), what=what)
    return header


def _within(text: bytes) -> bytes:
    """Return the text as it is written within a JSON string."""
    return jsontext.dumps(text.decode("ascii"))[1:-1]


_BETWEEN: Final = b'","digests":"'
_WITHIN_BETWEEN: Final = _within(_BETWEEN)
_FRONT, _BACK = jsontext.dumps({"__metadata__": {"format": "pt", "ckptstore": "-"}})[:-1].split(b"-")


def _described(doc: SegmentDoc) -> tuple[Any, ...]:
    """Return what the header says of the document, except for its tensors."""
    about = (doc.run, doc.term, doc.segment, doc.generation, doc.encodings, doc.parents, doc.trees)
    return (*about, doc.incompat, doc.ro_compat, doc.extra)


def _header_size(doc: SegmentDoc, length: int) -> int:
    """Return the bytes before the data for a header text of `length` bytes. Raises `FormatError` if it is too long."""
    size = padded(LENGTH.size + length)
    if size > HEADER_LIMIT:
        raise FormatError(f"segment {doc.segment}: a header of {length} bytes; at most {HEADER_LIMIT} are allowed")
    return size


def _members_text(specs: Sequence[TensorSpec]) -> bytes:
    """Return the header's description of the tensors, a JSON object, as text."""
    members: dict[str, Any] = {}
    end = 0
    for spec in specs:
        dtype = dtypes.get(spec.dtype)
        start, end = end, end + spec.nbytes
        shape = list(dtypes.storage_shape(dtype, spec.shape))
        members[spec.name] = {"dtype": dtype.storage, "shape": shape, "data_offsets": [start, end]}
    return jsontext.dumps(members)


def _document(placed: _PlacedTensors, doc: SegmentDoc, hashes: str, digests: str) -> dict[str, Any]:
    if len(doc.steps) != 1:
        raise FormatError(f"segment {doc.segment}: a plain segment holds one step, not {len(doc.steps)}")
    document = {**identity_members(doc, PLAIN), **placed.columns}
    document["trees"] = {str(step): tree for step, tree in doc.trees.items()}
    document["hashes"] = hashes
    document["digests"] = digests
    return with_extra(document, doc)


def _as_planned(entry: TensorEntry, spec: TensorSpec, position: int) -> bool:
    """Whether `entry` is equal to what `_entry` makes of its hashes."""
    if len(entry.chunks) != chunk_count(spec.nbytes):
        return False
    if len(entry.chunks) != 1:
        return entry == _entry(spec, position, [chunk.stored_hash for chunk in entry.chunks], entry.digest)
    # Most tensors have one chunk. Building a second entry to compare with would take longer than the rest of a header.
    (chunk,) = entry.chunks
    return (
        chunk.offset == position
        and chunk.length == chunk.logical == spec.nbytes
        and chunk.stored_hash == chunk.decoded_hash
        and entry.codec == RAW
        and not entry.params
        and (entry.name, entry.dtype, entry.shape) == (spec.name, spec.dtype, spec.shape)
        and (entry.global_shape, entry.offset) == (spec.global_shape, spec.offset)
    )


def _entry(spec: TensorSpec, position: int, hashes: Sequence[str], digest: int | None) -> TensorEntry:
    chunks = tuple(
        Chunk(position + start, length, length, cell, cell)
        for (start, length), cell in zip(chunk_extents(spec.nbytes), hashes, strict=True)
    )
    return TensorEntry(
        spec.name, spec.dtype, spec.shape, chunks, global_shape=spec.global_shape, offset=spec.offset, digest=digest
    )


def _specs(members: Mapping[str, Any], document: Members, data: int, where: str) -> list[TensorSpec]:
    """Return the tensors in file order. Each begins where the previous one ends; together they are `data` bytes."""
    logical = _placed(document, "dtypes", 2, len(members), "[place, dtype]")
    shards = _placed(document, "shards", 3, len(members), "[place, global shape, offset]")
    specs: list[TensorSpec] = []
    position = 0
    for row, (name, info) in enumerate(members.items()):
        what = f"{where}: tensor {name!r:.200}"
        if type(info) is not dict or info.keys() != {"dtype", "shape", "data_offsets"}:
            raise FormatError(f"{what}: not described by dtype, shape and data_offsets alone")
        start, end = numbers(info["data_offsets"], f"{what}: data_offsets", 2)
        shard = [numbers(part, f"{what}: shard") for part in shards.get(row, [])]
        try:
            dtype = dtypes.get(logical.get(row, [info["dtype"]])[0])
            shape = _logical_shape(dtype, info)
            spec = TensorSpec(name, dtype.name, shape, *shard)
        except FormatError as error:
            raise FormatError(f"{what}: {error}") from error
        if start != position or end - start != spec.nbytes:
            raise CorruptSegmentError(
                f"{what}: has {spec.nbytes} bytes and belongs at {position}, but is at [{start}, {end}) of {data}"
            )
        position = end
        specs.append(spec)
    if position != data:
        raise CorruptSegmentError(f"{where}: the tensors end at byte {position} of a data region of {data}")
    return specs


def _logical_shape(dtype: dtypes.DType, info: Mapping[str, Any]) -> tuple[int, ...]:
    shape = numbers(info["shape"], "shape")
    kept = len(shape) - len(dtype.trailing)
    if info["dtype"] != dtype.storage or shape[kept:] != dtype.trailing:  # also true for too few dimensions
        raise FormatError(f"{dtype.name} is not stored as {info['dtype']!r:.20} {shape!r:.80}")
    return shape[:kept]


def _placed(document: Members, name: str, width: int, count: int, wanted: str) -> dict[int, list[Any]]:
    """Remove list `name` and return its rows by tensor index. The indexes ascend and are below `count`."""
    rows = document.items(name, lambda row: _row(row, width, count), wanted)
    if not ascending([place for place, _ in rows]):
        document.refuse(name, f"a list of {wanted} whose places ascend")
    return dict(rows)


def _row(row: Any, width: int, count: int) -> tuple[int, list[Any]] | None:
    """Return ``[index, ...]`` as (index, [...]) if the index is below `count`, else None."""
    if type(row) is not list or len(row) != width or not natural(row[0]) or row[0] >= count:
        return None
    return row[0], row[1:]
