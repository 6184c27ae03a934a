"""The index of a packed segment: the entries of several steps, as columns.

Consecutive steps usually hold the same tensors in the same encodings. Therefore each distinct tensor description and
each distinct (codec, parameters) pair is written once, and an entry is a pair of row numbers. Chunks are columns of
numbers and hashes. Derivable values are omitted: the decoded length of a chunk, its offset (each chunk begins where the
previous one ends), the hash of zero bytes, and the decoded hash of raw bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from ckptstore.errors import CorruptSegmentError, FormatError
from ckptstore.formats import jsontext
from ckptstore.formats.history.members import Members, natural
from ckptstore.formats.segment_files.layout import TensorSpec, chunk_extents, spec_of
from ckptstore.formats.segment_files.segment_columns import (
    digest_column,
    hash_column,
    known_hashes,
    numbers,
    optional_hashes,
)
from ckptstore.formats.segment_files.segment_doc import (
    HASH_OF_NOTHING,
    RAW,
    Chunk,
    SegmentDoc,
    TensorEntry,
    read_trees,
    with_extra,
)
from ckptstore.formats.segment_files.step_tensors import (
    EntryColumns,
    Numbers,
    SpecTable,
    StepTensors,
    chunk_counts,
    logical_lengths,
)

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["MAX_CHUNKS", "MAX_ENTRIES", "index_members", "read_index", "uses_of"]

MAX_ENTRIES: Final = 1 << 20
MAX_CHUNKS: Final = 1 << 20
"""Maximum entries and chunks of one packed segment. They bound what a hostile index can make a reader allocate."""

_Table = TypeVar("_Table")
_ABSENT: Final = object()


def index_members(doc: SegmentDoc, payload: int, header_size: int) -> dict[str, Any]:
    """Return the index of `doc` as a JSON object.

    Args:
        doc: the document; its tensors have their chunks.
        payload: bytes of encoded chunks.
        header_size: offset of the payload in the file.

    Raises:
        FormatError: the index is invalid: a reader would refuse it.
        CorruptSegmentError: the chunks do not fill the payload without gaps and overlaps.
    """
    entries = [entry for step in doc.steps for entry in doc.tensors.get(step, {}).values()]
    chunks = [chunk for entry in entries for chunk in entry.chunks]
    if len(entries) > MAX_ENTRIES or len(chunks) > MAX_CHUNKS:
        raise FormatError(f"segment {doc.segment}: {len(entries)} entries, {len(chunks)} chunks are too many")
    tensors, codecs = _RowTable(), _RowTable()
    columns: dict[str, Any] = {
        "counts": [len(doc.tensors.get(step, {})) for step in doc.steps],
        "tensor": [_described(tensors, entry) for entry in entries],
        "codec": [_encoded(codecs, entry) for entry in entries],
        "length": [chunk.length for chunk in chunks],
    }
    _check_tiling(chunks, payload, header_size, f"segment {doc.segment}")
    columns["stored"] = hash_column(chunk.stored_hash for chunk in chunks if chunk.length)
    columns["decoded"] = hash_column(
        chunk.decoded_hash for entry in entries if entry.codec != RAW for chunk in entry.chunks
    )
    if any(entry.digest is not None for entry in entries):
        columns["digests"] = digest_column(entry.digest for entry in entries)
    trees = {str(step): tree for step, tree in doc.trees.items()}
    return with_extra({"trees": trees, "tensors": tensors.rows, "codecs": codecs.rows} | columns, doc)


def read_index(doc: SegmentDoc, index: Members, payload: int, header_size: int, where: str) -> SegmentDoc:
    """Return `doc` with the trees, tensors and unknown members of its index.

    Args:
        doc: the document as read from the header.
        index: the members of the parsed index.
        payload: bytes of encoded chunks.
        header_size: offset of the payload in the file.
        where: names the index in errors.

    Raises:
        FormatError: not an index of this version.
        CorruptSegmentError: the chunks do not fill the payload without gaps and overlaps.
    """
    trees = read_trees(index, doc.steps)
    columns = index.rest()
    counts = numbers(columns.pop("counts", None), f"{where}: counts", len(doc.steps))
    if sum(counts) > MAX_ENTRIES:
        raise FormatError(f"{where}: {sum(counts)} entries, at most {MAX_ENTRIES} are allowed")
    table, tensor = _picked(columns, "tensors", "tensor", sum(counts), _read_specs, where)
    codecs, codec = _picked(columns, "codecs", "codec", sum(counts), _read_codecs, where)
    found = _read_chunks(columns, table, tensor, codecs, codec, (header_size, payload), where)
    tensors: dict[int, StepTensors] = {}
    start = 0
    for step, count in zip(doc.steps, counts, strict=True):
        tensors[step] = StepTensors(found, start, count)
        if len(tensors[step].rows.places) != count:
            raise FormatError(f"{where}: a tensor twice in step {step}")
        start += count
    return replace(doc, trees=trees, tensors=tensors, extra={**doc.extra, **columns})


def uses_of(index: Mapping[str, Any]) -> list[str]:
    """Return what a reader of this index must know, sorted: codecs and the rule ids of optimizer steps."""
    found = set()
    for codec, params in index["codecs"]:
        found.add(codec)
        rule = params.get("rule")
        if type(rule) is dict and type(rule.get("rule")) is str:
            found.add(rule["rule"])
    return sorted(found)


class _RowTable:
    """Distinct rows, in order of first use."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self._places: dict[Any, int] = {}

    def row(self, key: Any, value: Any) -> int:
        """Return the index of the row for `key`; append `value` as a new row if there is none."""
        place = self._places.setdefault(key, len(self.rows))
        if place == len(self.rows):
            self.rows.append(value)
        return place


def _described(tensors: _RowTable, entry: TensorEntry) -> int:
    what = f"tensor {entry.name!r}"
    spec = spec_of(entry.name, entry.dtype, entry.shape, entry.global_shape, entry.offset)
    if [chunk.logical for chunk in entry.chunks] != [length for _, length in chunk_extents(spec.nbytes)]:
        raise FormatError(f"{what}: its chunks do not match its size of {spec.nbytes} bytes")
    for chunk in entry.chunks:
        if not natural(chunk.length):
            raise FormatError(f"{what}: a chunk of {chunk.length} bytes")
        if chunk.length == 0 and chunk.stored_hash != HASH_OF_NOTHING:
            raise FormatError(f"{what}: an empty chunk does not have the hash of zero bytes")
        if entry.codec == RAW and (chunk.length != chunk.logical or chunk.stored_hash != chunk.decoded_hash):
            raise FormatError(f"{what}: a raw chunk whose stored and decoded bytes differ")
    row: list[Any] = [spec.name, spec.dtype, spec.shape]
    if spec.offset is not None:
        row += [spec.global_shape, spec.offset]
    return tensors.row(spec, row)


def _encoded(codecs: _RowTable, entry: TensorEntry) -> int:
    # The key has the parameters as JSON text: in Python True == 1 == 1.0, but JSON distinguishes them.
    params = dict(entry.params)
    return codecs.row((entry.codec, jsontext.dumps(params) if params else b""), [entry.codec, params])


def _check_tiling(chunks: Sequence[Chunk], payload: int, header_size: int, where: str) -> None:
    """Check that each byte of the payload belongs to exactly one chunk: it then has one hash and one meaning."""
    position = header_size
    for chunk in chunks:
        if chunk.offset != position and chunk.length:
            raise CorruptSegmentError(f"{where}: a chunk at byte {chunk.offset} of the file, expected at {position}")
        position += chunk.length
    _check_end(position - header_size, payload, where)


def _check_end(end: int, payload: int, where: str) -> None:
    if end != payload:
        raise CorruptSegmentError(f"{where}: the chunks end at byte {end} of a payload of {payload}")


def _picked(
    columns: dict[str, Any], table: str, column: str, count: int, read: Callable[[list[Any], str], _Table], where: str
) -> tuple[_Table, Numbers]:
    """Remove `table` and `column` -> the table, and for each of the `count` cells the row of it that the cell names."""
    found = columns.pop(table, None)
    if type(found) is not list:
        raise FormatError(f"{where}: {table} is not an array")
    rows = read(found, f"{where}: {table}")
    return rows, np.array(numbers(columns.pop(column, None), f"{where}: {column}", count, len(found) - 1), np.int64)


def _read_specs(rows: list[Any], what: str) -> SpecTable:
    return SpecTable.of(rows, lambda row: _read_spec(row, what))


def _read_spec(row: Any, what: str) -> TensorSpec:
    if type(row) is not list or len(row) not in (3, 5) or type(row[0]) is not str:
        raise FormatError(f"{what}: not [name, dtype, shape] or [name, dtype, shape, global shape, offset]")
    try:
        return TensorSpec(row[0], row[1], *(numbers(part, "shape or offset") for part in row[2:]))
    except FormatError as error:
        raise FormatError(f"{what}: tensor {row[0]!r:.200}: {error}") from error


def _read_codecs(rows: list[Any], what: str) -> list[tuple[str, dict[str, Any]]]:
    return [_read_codec(row, what) for row in rows]


def _read_codec(row: Any, what: str) -> tuple[str, dict[str, Any]]:
    if type(row) is not list or len(row) != 2 or type(row[0]) is not str:
        raise FormatError(f"{what}: not [codec, parameters]")
    return row[0], _read_params(row[1], what)


def _read_params(value: Any, what: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise FormatError(f"{what}: parameters are not an object")
    return value


def _read_chunks(
    columns: dict[str, Any],
    table: SpecTable,
    tensor: Numbers,
    codecs: Sequence[tuple[str, Mapping[str, Any]]],
    codec: Numbers,
    extent: tuple[int, int],
    where: str,
) -> EntryColumns:
    """Remove the columns of chunks and digests and return those of the entries. `extent`: offset, length of payload."""
    # Count before allocating: a hostile file can state any shape.
    nbytes = table.nbytes[tensor]
    counts = chunk_counts(nbytes)
    total = int(counts.sum())
    if total > MAX_CHUNKS:
        raise FormatError(f"{where}: {total} chunks, at most {MAX_CHUNKS} are allowed")
    lengths = numbers(columns.pop("length", None), f"{where}: length", total)
    _check_end(sum(lengths), extent[1], where)
    length = np.array(lengths, np.int64)
    filled = length > 0
    stored = known_hashes(columns.pop("stored", None), int(filled.sum()), f"{where}: stored")
    raw = np.array([name == RAW for name, _ in codecs], bool)[codec]
    coded = np.repeat(~raw, counts)
    decoded = optional_hashes(columns.pop("decoded", None), int(coded.sum()), f"{where}: decoded")
    first = _starts(counts)
    wrong = ~coded & (length != logical_lengths(nbytes))
    if wrong.any():
        chunk = int(wrong.argmax())
        place = int(first.searchsorted(chunk, "right")) - 1
        what = f"{where}: tensor {table.specs[tensor.item(place)].name!r:.200}"
        logical = int(logical_lengths(nbytes)[chunk])
        raise CorruptSegmentError(f"{what}: {lengths[chunk]} raw bytes of a chunk of {logical}")
    digests = columns.pop("digests", _ABSENT)
    return EntryColumns(
        table,
        tensor,
        codecs,
        codec,
        first,
        _starts(length) + extent[0],
        length,
        stored,
        _starts(filled),
        decoded,
        _starts(coded),
        None if digests is _ABSENT else optional_hashes(digests, len(tensor), f"{where}: digests"),
    )


def _starts(counts: Numbers | npt.NDArray[np.bool_]) -> Numbers:
    """Return the sum of all counts before each place, and at the end the sum of all."""
    found = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=found[1:])
    return found
