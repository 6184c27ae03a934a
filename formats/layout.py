"""Where the tensors of a plain segment lie: their order, their offsets, their chunks, and how big states are split.

The data region starts at a multiple of `ALIGN`. Tensors whose size is a multiple of 128 bytes come first, so each of
them starts on a 128-byte boundary; the others follow by item size, largest first, so each starts at a multiple of its
item size without a hole (item sizes are powers of two). Within both groups the order given is kept: it is the order in
which training will touch them. safetensors refuses holes, overlaps and trailing bytes; there are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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
    "TensorSpec",
    "chunk_count",
    "chunk_extents",
    "order",
    "padded",
    "place",
    "split",
]

CHUNK = 16 << 20
"""Logical bytes of a chunk, the unit of hashing, encoding and parallel work; a tensor's last chunk may be shorter."""

ALIGN = 4096
"""Headers are padded to a multiple of this, so that data starts on a block boundary."""

HEADER_LIMIT = 64 << 20
"""Largest header in bytes, its length field and padding included (safetensors itself refuses 100 MB)."""

SEGMENT_LIMIT = 4 << 30
"""States are split so that a segment stays below this many bytes; a larger tensor has a segment of its own."""

RESERVED_PREFIX = "ckptstore/"
"""Names that begin so belong to the format: no tensor of a state has one, and no tensor of a plain segment."""

MAX_DIMENSIONS = 64
MAX_SIZE = 1 << 53
"""No dimension, product of dimensions or byte count reaches this: every JSON reader is exact below it."""

_CACHE_LINE = 128
_TENSOR_HEADER_BYTES = 400  # more than the members of one tensor take without its name, shards included
_HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What has to be known of a tensor to place it.

    Attributes:
        name: flat name, unique in a segment.
        dtype: logical dtype (`dtypes.DTYPES`).
        shape: logical shape.
        global_shape: shape of the whole tensor when this is a shard of it.
        offset: where the shard begins in the whole tensor, per dimension; given exactly when `global_shape` is.
        itemsize: bytes of one logical element.
        nbytes: bytes of the tensor's C-contiguous little-endian image.

    Raises:
        FormatError: unknown dtype, a name that safetensors cannot hold, a bad shape, a shard outside its tensor.
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


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of the tensors in a plain segment.

    Attributes:
        specs: the tensors in file order.
        header_size: bytes before the data, a multiple of `ALIGN`, the 8-byte length field included.
        offsets: absolute file offset of each tensor, by name, in file order.
        size: length of the file in bytes.
        members: what the header's text says of the tensors, if it was made for its length; not compared.
    """

    specs: tuple[TensorSpec, ...]
    header_size: int
    offsets: Mapping[str, int]
    size: int
    members: bytes | None = field(default=None, repr=False, compare=False)


def order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """File order of `specs`, which come in access order."""

    def rank(spec: TensorSpec) -> int:
        return -_CACHE_LINE if spec.nbytes % _CACHE_LINE == 0 else -spec.itemsize

    return sorted(specs, key=rank)  # stable: access order within


def place(specs: Sequence[TensorSpec], header_size: int) -> Layout:
    """Lay `specs`, already in file order, one after the other behind a header of `header_size` bytes.

    Raises:
        FormatError: a name that a plain segment cannot have, or one twice.
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
    """`size` rounded up to a multiple of `ALIGN`."""
    return -(-size // ALIGN) * ALIGN


def chunk_count(nbytes: int) -> int:
    """Number of chunks of a tensor of `nbytes` bytes; an empty tensor has none."""
    return -(-nbytes // CHUNK)


def chunk_extents(nbytes: int) -> Iterator[tuple[int, int]]:
    """(start, length) of each chunk within the logical bytes of a tensor of `nbytes` bytes."""
    for start in range(0, nbytes, CHUNK):
        yield start, min(CHUNK, nbytes - start)


def split(specs: Iterable[TensorSpec], limit: int = SEGMENT_LIMIT - HEADER_LIMIT) -> list[list[TensorSpec]]:
    """Split a state over segments, in access order: at most `limit` bytes of data and half a header's names in each.

    The other half of the header is the tree's. A tensor larger than `limit` has a segment of its own. There is at
    least one segment, because the tree needs one.
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
    """Raise `FormatError` unless `shape` is one that every reader can compute with.

    The running product is checked from the left as safetensors does, which therefore refuses (2^40, 2^40, 0).
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
