"""Read and write a tensor's image: the C-contiguous, little-endian bytes of an array of any layout."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from ckptstore.formats import dtypes

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["BoxSource", "Bytes", "NumpySource", "Origin", "TensorSource", "blocks", "place_of", "write_into"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
"""One-dimensional uint8 array."""

Origin = Literal["torch", "numpy"]
"""The framework that a tensor came from and is restored to."""


class TensorSource(Protocol):
    """The interface from which a writer reads a tensor. Reading never changes it; every method may run in any thread.

    Attributes:
        dtype: logical dtype (`dtypes.DTYPES`).
        shape: logical shape; ``()`` for 0-d.
        nbytes: bytes of the image.
        origin: ``"torch"`` or ``"numpy"``.
        identity: equal for two sources of the same memory with the same dtype, shape and strides. Such a tensor is
            stored once, and is one object again after a load. Valid while the source is alive.
    """

    @property
    def dtype(self) -> str: ...  # noqa: D102 - described above
    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def nbytes(self) -> int: ...  # noqa: D102
    @property
    def origin(self) -> Origin: ...  # noqa: D102
    @property
    def identity(self) -> Hashable: ...  # noqa: D102

    def view(self) -> Bytes | None:
        """Return the image as 1-D uint8 without a copy, if host memory holds it in this form; else None."""

    def read(self, offset: int, out: Bytes) -> None:
        """Copy bytes [`offset`, `offset` + `out.size`) of the image into `out` (1-D uint8, any alignment).

        Raises:
            ValueError: the range exceeds the image.
        """


class NumpySource:
    """A numpy array of any strides and byte order, including 0-d and empty ones. Implements `TensorSource`."""

    __slots__ = ("array", "dtype", "identity", "nbytes", "shape")

    origin: Origin = "numpy"

    def __init__(self, array: npt.NDArray[Any]) -> None:
        """Wrap `array` without copying it.

        Raises:
            UnsupportedStateError: its dtype cannot be stored.
        """
        dtype = dtypes.from_numpy(array.dtype)
        self.array = array
        self.dtype = dtype.name
        self.shape = array.shape
        self.nbytes = array.size * dtype.itemsize
        # Unrelated empty arrays may have the same address: only the object itself distinguishes them.
        address = array.__array_interface__["data"][0] if self.nbytes else -id(array)
        self.identity: Hashable = ("numpy", address, array.dtype, array.shape, array.strides)

    def view(self) -> Bytes | None:
        """Return the image without a copy, or None if the array is strided or big-endian."""
        array = self.array
        if not array.flags.c_contiguous or array.dtype != dtypes.DTYPES[self.dtype].numpy:
            return None
        return array.reshape(-1).view(np.uint8)

    def read(self, offset: int, out: Bytes) -> None:
        """Copy a range of the image. Only the rows in that range are read."""
        _check_range(offset, out.size, self.nbytes)
        flat = self.view()
        if flat is not None:
            np.copyto(out, flat[offset : offset + out.size])
            return
        dtype = dtypes.DTYPES[self.dtype].numpy
        first, skip = divmod(offset, dtype.itemsize)
        last = -(-(offset + out.size) // dtype.itemsize)
        aligned = not skip and last * dtype.itemsize == offset + out.size
        elements = out.view(dtype) if aligned else np.empty(last - first, dtype)
        done = 0
        for index, count in blocks(self.shape, first, last):
            block = self.array[(*index, ...)]
            np.copyto(elements[done : done + count].reshape(block.shape), block)
            done += count
        if not aligned:
            np.copyto(out, elements.view(np.uint8)[skip : skip + out.size])


class BoxSource:
    """Contiguous elements of another source, as a shard of a larger tensor. Implements `TensorSource`.

    Attributes:
        source: the source of the elements.
        global_shape: shape of the whole tensor; None: this is not a shard.
        offset: position of the shard in the whole tensor.
    """

    __slots__ = ("_start", "dtype", "global_shape", "identity", "nbytes", "offset", "origin", "shape", "source")

    def __init__(
        self,
        source: TensorSource,
        shape: tuple[int, ...],
        start: int = 0,
        global_shape: tuple[int, ...] | None = None,
        offset: tuple[int, ...] | None = None,
    ) -> None:
        """
        Args:
            source: the source of the elements.
            shape: shape of the box.
            start: offset in bytes of the box's image in the image of `source`.
            global_shape: shape of the whole tensor; None: this is not a shard.
            offset: position of the shard in the whole tensor.
        """
        self.dtype: str = source.dtype
        self.shape = shape
        self.nbytes: int = dtypes.nbytes(dtypes.get(source.dtype), shape)
        self.origin: Origin = source.origin
        self.identity: Hashable = ("box", source.identity, start, shape)
        self.global_shape = global_shape
        self.offset = offset
        self.source = source
        self._start = start

    def of(self, source: TensorSource) -> BoxSource:
        """Return the same box of another source of the same tensor."""
        return BoxSource(source, self.shape, self._start, self.global_shape, self.offset)

    def view(self) -> Bytes | None:
        """Return the image without a copy, or None."""
        view = self.source.view()
        return None if view is None else view[self._start : self._start + self.nbytes]

    def read(self, offset: int, out: Bytes) -> None:
        """Copy a range of the image."""
        _check_range(offset, out.size, self.nbytes)
        self.source.read(self._start + offset, out)


def place_of(source: TensorSource) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Return global shape and offset of a source that is a shard; (None, None) for any other source."""
    whole, offset = getattr(source, "global_shape", None), getattr(source, "offset", None)
    return (None, None) if whole is None or offset is None else (tuple(whole), tuple(offset))


def write_into(array: npt.NDArray[Any], data: Bytes, offset: int) -> None:
    """Write `data` at byte `offset` of the image of an existing array, the inverse of `NumpySource.read`.

    Args:
        array: writable, of any strides and byte order.
        data: 1-D uint8.
        offset: bytes; neither it nor `data.size` need be a multiple of the element size.

    Raises:
        ValueError: the range exceeds the image, or the array is read-only.
        UnsupportedStateError: the array's dtype cannot be stored.
    """
    _check_range(offset, data.size, array.nbytes)
    dtype = dtypes.from_numpy(array.dtype).numpy
    if array.flags.c_contiguous and dtype == array.dtype:
        np.copyto(array.reshape(-1).view(np.uint8)[offset : offset + data.size], data)
        return
    first, skip = divmod(offset, dtype.itemsize)
    last = -(-(offset + data.size) // dtype.itemsize)
    if skip or last * dtype.itemsize != offset + data.size:  # part of an element changes: read the rest from the array
        whole = np.empty((last - first) * dtype.itemsize, np.uint8)
        NumpySource(array).read(first * dtype.itemsize, whole)
        whole[skip : skip + data.size] = data
        data = whole
    elements = data.view(dtype)
    done = 0
    for index, count in blocks(array.shape, first, last):
        block = array[(*index, ...)]
        np.copyto(block, elements[done : done + count].reshape(block.shape))
        done += count


def blocks(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int | slice, ...], int]]:
    """Cut elements [`start`, `stop`) of an array of `shape`, counted in C order, into rectangular blocks.

    Yields (index of a block, its number of elements), in order; at most two blocks per dimension. So a range of a
    strided array takes few strided copies and no contiguous copy of the whole array.
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield (slice(start, stop),) if shape else (), stop - start
        return
    row = math.prod(shape[1:])
    first, skip = divmod(start, row)
    last, rest = divmod(stop, row)
    if first == last:
        yield from _inside(first, shape, skip, rest)
        return
    if skip:
        yield from _inside(first, shape, skip, row)
        first += 1
    if first < last:
        yield (slice(first, last),), (last - first) * row
    if rest:
        yield from _inside(last, shape, 0, rest)


def _inside(row: int, shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int | slice, ...], int]]:
    for index, count in blocks(shape[1:], start, stop):
        yield (row, *index), count


def _check_range(offset: int, length: int, size: int) -> None:
    if offset < 0 or offset + length > size:
        raise ValueError(f"bytes {offset} to {offset + length} of a tensor of {size} bytes")
