"""Order, offsets, chunks and splitting of plain segments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import FormatError
from ckptstore.formats.dtypes import DTYPES
from ckptstore.formats.segment_files.layout import (
    ALIGN,
    CHUNK,
    HEADER_LIMIT,
    SEGMENT_LIMIT,
    TensorSpec,
    chunk_count,
    chunk_extents,
    order,
    padded,
    place,
    split,
)

shapes = st.lists(st.integers(0, 70), max_size=3).map(tuple)
described = st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), shapes), max_size=30)


def make(rows: list[tuple[str, tuple[int, ...]]]) -> list[TensorSpec]:
    return [TensorSpec(f"t{row}", dtype, shape) for row, (dtype, shape) in enumerate(rows)]


@given(described)
def test_tensors_are_aligned_without_holes(rows: list[tuple[str, tuple[int, ...]]]) -> None:
    specs = make(rows)
    layout = place(order(specs), 2 * ALIGN)
    position = 2 * ALIGN
    for spec in layout.specs:
        assert layout.offsets[spec.name] == position
        assert position % (128 if spec.nbytes % 128 == 0 else spec.itemsize) == 0
        position += spec.nbytes
    assert layout.size == position
    assert sorted(spec.name for spec in layout.specs) == sorted(spec.name for spec in specs)


def test_access_order_is_kept_within_a_group() -> None:
    rows = [("U8", (3,)), ("F32", (32,)), ("F64", (3,)), ("U8", (128,)), ("F32", (1,)), ("BF16", (5,)), ("F32", ())]
    assert [spec.name for spec in order(make(rows))] == ["t1", "t3", "t2", "t4", "t6", "t5", "t0"]


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK])
def test_chunks_cover_a_tensor(nbytes: int) -> None:
    extents = list(chunk_extents(nbytes))
    assert len(extents) == chunk_count(nbytes)
    assert sum(length for _, length in extents) == nbytes
    assert all(start == row * CHUNK and 0 < length <= CHUNK for row, (start, length) in enumerate(extents))


def test_padding_is_to_whole_blocks() -> None:
    assert [padded(size) for size in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (("__metadata__", "U8", (1,)), "reserved"),
        (("\ud800", "U8", (1,)), "Unicode"),
        (("a", "F33", (1,)), "dtype"),
        (("a", "U8", (-1,)), "out of range"),
        (("a", "U8", (1 << 53,)), "out of range"),
        (("a", "U8", (1 << 40, 1 << 40, 0)), "out of range"),
        (("a", "F64", (1 << 51,)), "too many"),
        (("a", "U8", (1,) * 65), "65 dimensions"),
        (("a", "U8", (4,), (9,)), "both"),
        (("a", "U8", (4,), None, (9,)), "both"),
        (("a", "U8", (4,), (9,), (6,)), "not inside"),
        (("a", "U8", (4,), (9,), (-1,)), "not inside"),
        (("a", "U8", (4,), (9, 1), (0, 0)), "not inside"),
        (("a", "U8", (4,), (1 << 54,), (0,)), "out of range"),
    ],
)
def test_a_tensor_that_no_reader_could_take_is_refused(spec: tuple[object, ...], reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        TensorSpec(*spec)  # type: ignore[arg-type]


def test_a_plain_segment_has_each_name_once_and_no_reserved_one() -> None:
    with pytest.raises(FormatError, match="twice"):
        place([TensorSpec("a", "U8", (1,)), TensorSpec("a", "U8", (2,))], ALIGN)
    with pytest.raises(FormatError, match="reserved"):
        place([TensorSpec("ckptstore/payload", "U8", (1,))], ALIGN)


def test_big_states_are_split_in_access_order() -> None:
    gigabyte = make([("U8", (1 << 30,))] * 9)
    parts = split(gigabyte)
    assert [len(part) for part in parts] == [3, 3, 3]
    assert [spec for part in parts for spec in part] == gigabyte
    assert all(sum(spec.nbytes for spec in part) + HEADER_LIMIT <= SEGMENT_LIMIT for part in parts)


def test_a_tensor_larger_than_a_segment_has_one_of_its_own() -> None:
    sizes = [1, SEGMENT_LIMIT * 2, 1, 1]
    assert [len(part) for part in split(make([("U8", (size,)) for size in sizes]))] == [1, 1, 2]


def test_many_names_are_split_before_they_outgrow_a_header() -> None:
    specs = [TensorSpec(f"{row}" + "\U0001f600" * 100_000, "U8", (1,)) for row in range(60)]
    parts = split(specs)
    assert len(parts) > 1
    assert [spec for part in parts for spec in part] == specs


def test_a_state_without_tensors_still_needs_a_segment() -> None:
    assert split([]) == [[]]


@pytest.mark.parametrize("shape", [(0, 2**53), (2**53, 0), (0, 2**60), (0, -1)])
def test_a_dimension_out_of_range_hides_behind_no_empty_one(shape: tuple[int, ...]) -> None:
    with pytest.raises(FormatError, match="out of range"):
        TensorSpec("x", "U8", shape)
