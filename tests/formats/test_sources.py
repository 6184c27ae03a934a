"""Tensor images: any array, any range, both ways."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import UnsupportedStateError
from ckptstore.formats.sources import NumpySource, blocks, write_into
from tests.forms import short_or

DTYPES: list[Any] = ["?", "<u1", "<i4", ">f4", "<f8", ">c16", "<c8", ml_dtypes.bfloat16, ml_dtypes.float8_e5m2]


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Arrays of many dtypes, transposed, sliced, reversed, of 0 to 4 dimensions."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    size = math.prod(shape) * dtype.itemsize
    bits = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 2 if dtype.kind == "b" else 256, size, np.uint8)
    array = bits.view(dtype).reshape(shape)
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    cuts = st.sampled_from([slice(None), slice(None, None, -1), slice(1, None)])
    return array[(*(draw(cuts) for _ in array.shape), ...)]


def image(array: np.ndarray) -> bytes:
    """C-contiguous little-endian bytes, byte-swapped as bits: the independent form."""
    swap = array.dtype.byteorder == ">"
    return np.ascontiguousarray(array).byteswap().tobytes() if swap else np.ascontiguousarray(array).tobytes()


@given(arrays(), st.data())
@settings(max_examples=short_or(120, 300), deadline=None)
def test_any_range_of_any_array(array: np.ndarray, data: st.DataObject) -> None:
    source = NumpySource(array)
    expected = image(array)
    assert source.nbytes == len(expected)
    assert source.shape == array.shape
    start = data.draw(st.integers(0, len(expected)))
    stop = data.draw(st.integers(start, len(expected)))
    out = np.zeros(stop - start + 1, np.uint8)[data.draw(st.sampled_from([0, 1])) :][: stop - start]
    source.read(start, out)
    assert out.tobytes() == expected[start:stop]
    view = source.view()
    if view is not None:
        assert view.tobytes() == expected
        assert view.size == 0 or np.shares_memory(view, array)


@given(arrays(), st.data())
@settings(max_examples=short_or(120, 300), deadline=None)
def test_writing_is_the_inverse_of_reading(array: np.ndarray, data: st.DataObject) -> None:
    target = np.array(array, order="K", copy=True)
    size = NumpySource(target).nbytes
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    new = np.random.default_rng(1).integers(0, 2 if array.dtype.kind == "b" else 256, stop - start, np.uint8)
    new.flags.writeable = False
    expected = bytearray(image(target))
    expected[start:stop] = new.tobytes()
    write_into(target, new, start)
    assert image(target) == bytes(expected)


@given(st.lists(st.integers(0, 4), max_size=4), st.data())
@settings(max_examples=short_or(80, 200), deadline=None)
def test_blocks_cover_a_range_once_and_in_order(shape: list[int], data: st.DataObject) -> None:
    numbers = np.arange(math.prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, numbers.size))
    stop = data.draw(st.integers(start, numbers.size))
    found: list[int] = []
    pieces = list(blocks(shape, start, stop))
    for index, count in pieces:
        block = numbers[(*index, ...)]
        assert block.size == count
        found.extend(block.reshape(-1).tolist())
    assert found == list(range(start, stop))
    assert len(pieces) <= 2 * max(1, len(shape))


def test_only_contiguous_little_endian_arrays_have_a_view() -> None:
    plain = np.arange(12, dtype="<f4").reshape(3, 4)
    assert NumpySource(plain).view() is not None
    assert NumpySource(plain[1:]).view() is not None
    assert NumpySource(plain.T).view() is None
    assert NumpySource(plain.astype(">f4")).view() is None
    assert NumpySource(np.array(1.5)).view() is not None


def test_nan_payloads_survive_a_change_of_byte_order() -> None:
    bits = np.array([0x7F800001, 0xFFC00001, 0x80000000, 0x7FC00000], ">u4")
    out = np.empty(16, np.uint8)
    NumpySource(bits.view(">f4")).read(0, out)
    assert out.view("<u4").tolist() == bits.tolist()
    target = np.zeros(4, ">f4")
    write_into(target, out, 0)
    assert target.view(">u4").tolist() == bits.tolist()


def test_identity_is_same_memory_seen_the_same_way() -> None:
    array = np.arange(6, dtype="<f4")
    same = [array, array.view(), array[:]]
    assert len({NumpySource(other).identity for other in same}) == 1
    square = np.arange(4, dtype="<f4").reshape(2, 2)
    different = [array, array.copy(), array[:3], array[1:4], array.view("<i4"), array.reshape(2, 3), square, square.T]
    assert len({NumpySource(other).identity for other in different}) == len(different)


def test_empty_arrays_are_tied_only_to_themselves() -> None:
    base = np.zeros(3)
    one, two = base[:0], base[:0]  # one address
    assert NumpySource(one).identity == NumpySource(one).identity
    assert NumpySource(one).identity != NumpySource(two).identity


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 49), (48, 1), (49, 0)])
def test_ranges_outside_the_image(offset: int, length: int) -> None:
    for array in (np.zeros(12, "<f4"), np.zeros((3, 4), "<f4").T):
        with pytest.raises(ValueError, match="of a tensor of 48 bytes"):
            NumpySource(array).read(offset, np.empty(length, np.uint8))
        with pytest.raises(ValueError, match="of a tensor of 48 bytes"):
            write_into(array, np.empty(length, np.uint8), offset)


def test_an_array_without_a_dtype_is_refused() -> None:
    with pytest.raises(UnsupportedStateError):
        NumpySource(np.array([object()]))


def test_read_only_arrays_are_read_but_not_written() -> None:
    array = np.arange(4, dtype="<f4")
    array.flags.writeable = False
    assert NumpySource(array).view() is not None
    for target in (array, array[::2]):
        with pytest.raises(ValueError, match="read-only"):
            write_into(target, np.zeros(4, np.uint8), 0)
