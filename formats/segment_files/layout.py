"""Place tensors in a plain segment: their order, offsets and chunks, and the split of a large state over segments.

The data region starts at a multiple of `ALIGN`. Tensors whose size is a multiple of 128 bytes come first, so each of
them starts on a 128-byte boundary. The others follow by item size, largest first, so each starts at a multiple of its
item size without a gap (item sizes are powers of two). Within both groups the given order is kept, because it is the
order in which training uses the tensors. safetensors refuses gaps, overlaps and trailing bytes; there are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ckptstore.errors import FormatError
from ckptstore.formats import dtypes

__all__ = [
    "ALIGN",
    "CHUNK",
    "HEADER_LIMIT",
    "MAX_DIMENSIONS",
    "MAX_SIZE",
    "RESERVED_PREFIX",
    "SEGMENT_LIMIT",
    "Layout",
    "PlannedHeader",
    "TensorSpec",
    "chunk_count",
    "chunk_extents",
    "order",
    "padded",
    "place",
    "spec_of",
    "split",
]

CHUNK = 16 << 20
"""Logical bytes of a chunk, the unit of hashing, encoding and parallel work. A tensor's last chunk may be shorter."""

ALIGN = 4096
"""Headers are padded to a multiple of this, so that data starts on a block boundary."""

HEADER_LIMIT = 64 << 20
"""Largest header in bytes, including its length field and padding (safetensors itself refuses 100 MB)."""

SEGMENT_LIMIT = 4 << 30
"""A state is split so that each segment stays below this many bytes. A larger tensor gets a segment of its own."""

RESERVED_PREFIX = "ckptstore/"
"""Prefix of names that belong to the format. No tensor of a state or of a plain segment has such a name."""

MAX_DIMENSIONS = 64
MAX_SIZE = 1 << 53
"""Upper bound (exclusive) of dimensions, their products and byte counts: every JSON reader is exact below it."""

_CACHE_LINE = 128
_TENSOR_HEADER_BYTES = 400  # more than the members of one tensor need without its name, even for a shard
_HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The properties of a tensor that determine its place.

    Attributes:
        name: flat name, unique in a segment.
        dtype: logical dtype (`dtypes.DTYPES`).
        shape: logical shape.
        global_shape: shape of the whole tensor if this is a shard.
        offset: position of the shard in the whole tensor, per dimension; set exactly if `global_shape` is.
        itemsize: bytes of one logical element.
        nbytes: bytes of the tensor's C-contiguous little-endian image.

    Raises:
        FormatError: unknown dtype, a name that safetensors cannot store, an invalid shape, a shard outside its tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...] | None = None
    offset: tuple[int, ...] | None = None
    itemsize: int = field(init=False, repr=False, compare=False)
    nbytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.name == "__metadata__":
            raise FormatError(f"tensor name {self.name!r} is reserved")
        try:
            self.name.encode()
        except UnicodeEncodeError as error:
            raise FormatError(f"tensor name {self.name!r} is not Unicode text: {error.reason}") from error
        _check_shape(self.shape, self.name)
        if self.global_shape is not None or self.offset is not None:
            _check_shard(self)
        dtype = dtypes.get(self.dtype)
        nbytes = dtypes.nbytes(dtype, self.shape)
        if nbytes >= MAX_SIZE:
            raise FormatError(f"tensor {self.name!r}: {nbytes} bytes are too many")
        object.__setattr__(self, "itemsize", dtype.itemsize)
        object.__setattr__(self, "nbytes", nbytes)


@lru_cache(maxsize=1 << 14, typed=True)  # a run saves the same tensors again and again
def spec_of(
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    global_shape: tuple[int, ...] | None = None,
    offset: tuple[int, ...] | None = None,
) -> TensorSpec:
    """Return the `TensorSpec` of these arguments. One that was checked before is not checked again."""
    return TensorSpec(name, dtype, shape, global_shape, offset)


@dataclass(frozen=True, slots=True)
class PlannedHeader:
    """The text of a plain segment's header around the two columns that are known last.

    Attributes:
        document: what the text was made of, to compare with the document that is written.
        before: the text up to the hashes.
        between: the text between hashes and digests; a header without digests does not have it.
        after: the rest.
    """

    document: tuple[Any, ...]
    before: bytes
    between: bytes
    after: bytes

    def length(self, cells: int, digests: int | None) -> int:
        """Bytes of the text with this number of characters in the column of hashes, and of digests (None: without)."""
        return len(self.before) + cells + (0 if digests is None else len(self.between) + digests) + len(self.after)

    def text(self, hashes: str, digests: str | None) -> bytes:
        """The whole text. The columns are hex digits, which JSON text holds as they are."""
        column = b"" if digests is None else self.between + digests.encode("ascii")
        return b"".join((self.before, hashes.encode("ascii"), column, self.after))


@dataclass(frozen=True, slots=True)
class Layout:
    """The positions of the tensors in a plain segment.

    Attributes:
        specs: the tensors in file order.
        header_size: bytes before the data, a multiple of `ALIGN`, including the 8-byte length field.
        offsets: absolute file offset of each tensor, by name, in file order.
        size: length of the file in bytes.
        header: the header's text without its hashes, which was built to compute its length; None: not built yet. Not
            compared.
    """

    specs: tuple[TensorSpec, ...]
    header_size: int
    offsets: Mapping[str, int]
    size: int
    header: PlannedHeader | None = field(default=None, repr=False, compare=False)


def order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Return `specs`, given in access order, in file order."""

    def rank(spec: TensorSpec) -> int:
        return -_CACHE_LINE if spec.nbytes % _CACHE_LINE == 0 else -spec.itemsize

    return sorted(specs, key=rank)  # stable: keeps the access order within a rank


def place(specs: Sequence[TensorSpec], header_size: int) -> Layout:
    """Place `specs`, already in file order, one after the other behind a header of `header_size` bytes.

    Raises:
        FormatError: a name occurs twice, or is not allowed in a plain segment.
    """
    offsets: dict[str, int] = {}
    end = header_size
    for spec in specs:
        if spec.name.startswith(RESERVED_PREFIX):
            raise FormatError(f"tensor name {spec.name!r} is reserved")
        if spec.name in offsets:
            raise FormatError(f"tensor name {spec.name!r} twice in one segment")
        offsets[spec.name] = end
        end += spec.nbytes
    return Layout(tuple(specs), header_size, offsets, end)


def padded(size: int) -> int:
    """Round `size` up to a multiple of `ALIGN`."""
    return -(-size // ALIGN) * ALIGN


def chunk_count(nbytes: int) -> int:
    """Number of chunks of a tensor of `nbytes` bytes; an empty tensor has none."""
    return -(-nbytes // CHUNK)


def chunk_extents(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of each chunk within the logical bytes of a tensor of `nbytes` bytes."""
    if 0 < nbytes <= CHUNK:  # nearly always: a generator takes longer
        return iter(((0, nbytes),))
    return ((start, min(CHUNK, nbytes - start)) for start in range(0, nbytes, CHUNK))


def split(specs: Iterable[TensorSpec], limit: int = SEGMENT_LIMIT - HEADER_LIMIT) -> list[list[TensorSpec]]:
    """Split a state over segments, in access order.

    Each segment gets at most `limit` bytes of data, and tensors whose descriptions fill at most half a header: the
    other half is for the state's tree. A tensor larger than `limit` gets its own segment. There is always at least one
    segment, because the tree needs one.
    """
    parts: list[list[TensorSpec]] = [[]]
    data = header = 0
    for spec in specs:
        described = _TENSOR_HEADER_BYTES + 12 * len(spec.name) + 64 * len(spec.shape)
        described += _HASH_BYTES * chunk_count(spec.nbytes)
        if parts[-1] and (data + spec.nbytes > limit or header + described > HEADER_LIMIT // 2):
            parts.append([])
            data = header = 0
        parts[-1].append(spec)
        data += spec.nbytes
        header += described
    return parts


def _check_shape(shape: Sequence[int], name: str) -> None:
    """Raise `FormatError` for a shape that some reader cannot compute with.

    The running product is checked from the left, as in safetensors, which therefore refuses (2^40, 2^40, 0).
    """
    if len(shape) > MAX_DIMENSIONS:
        raise FormatError(f"tensor {name!r}: {len(shape)} dimensions, at most {MAX_DIMENSIONS} are allowed")
    product = 1
    for length in shape:
        product *= length
        if not 0 <= length < MAX_SIZE or product >= MAX_SIZE:
            raise FormatError(f"tensor {name!r}: shape {list(shape)} is out of range")


def _check_shard(spec: TensorSpec) -> None:
    whole, offset = spec.global_shape, spec.offset
    if whole is None or offset is None:
        raise FormatError(f"tensor {spec.name!r}: a shard needs both a global shape and an offset")
    _check_shape(whole, spec.name)
    if not len(spec.shape) == len(whole) == len(offset) or any(
        start < 0 or start + length > limit for length, limit, start in zip(spec.shape, whole, offset, strict=True)
    ):
        raise FormatError(f"tensor {spec.name!r}: shard {spec.shape} at {offset!r:.80} is not inside {whole}")
