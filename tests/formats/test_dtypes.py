"""Logical dtypes: one byte image under three names (logical, safetensors, numpy)."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors

from ckptstore.errors import FormatError, UnsupportedStateError
from ckptstore.formats import dtypes

ALL = sorted(dtypes.DTYPES)
COMPLEX = {"C32": 4, "C64": 8, "C128": 16}


@pytest.mark.parametrize("name", ALL)
def test_every_name_has_the_same_bytes(name: str) -> None:
    dtype = dtypes.get(name)
    assert dtype.name == name
    assert dtype.numpy.itemsize == dtype.itemsize
    stored = dtypes.get(dtype.storage)
    assert stored.storage == dtype.storage
    shape = (3, 5)
    assert (
        dtypes.nbytes(stored, dtypes.storage_shape(dtype, shape)) == dtypes.nbytes(dtype, shape) == 15 * dtype.itemsize
    )


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_safetensors_reads_the_stored_form(name: str, shape: tuple[int, ...]) -> None:
    dtype = dtypes.get(name)
    size = dtypes.nbytes(dtype, shape)
    stored = {"dtype": dtype.storage, "shape": dtypes.storage_shape(dtype, shape), "data_offsets": [0, size]}
    header = json.dumps({"w": stored}).encode()
    data = bytes(range(size))
    ((found, tensor),) = safetensors.deserialize(struct.pack("<Q", len(header)) + header + data)
    assert found == "w"
    assert tuple(tensor["shape"]) == dtypes.storage_shape(dtype, shape)
    assert bytes(tensor["data"]) == data


def test_complex_numbers_are_pairs_of_reals(tmp_path: Path) -> None:
    array = np.array([1 + 2j, -0.0 - 3j], "<c8")
    dtype = dtypes.from_numpy(array.dtype)
    stored = {"dtype": dtype.storage, "shape": dtypes.storage_shape(dtype, array.shape), "data_offsets": [0, 16]}
    header = json.dumps({"z": stored}).encode()
    path = tmp_path / "z.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + array.tobytes())
    with safetensors.safe_open(path, "numpy") as file:
        reals = file.get_tensor("z")
    np.testing.assert_array_equal(reals, [[1, 2], [-0.0, -3]])
    assert {name: dtypes.get(name).itemsize for name in ALL if dtypes.get(name).trailing} == COMPLEX


@pytest.mark.parametrize("name", [name for name in ALL if name != "F4_E2M1_X2"])
def test_numpy_and_back(name: str) -> None:
    dtype = dtypes.get(name)
    assert dtypes.from_numpy(dtype.numpy) is dtype
    assert dtypes.from_numpy(np.zeros(2, dtype.numpy).dtype) is dtype


def test_packed_fp4_is_bytes_in_numpy() -> None:
    assert dtypes.get("F4_E2M1_X2").numpy == np.uint8
    assert dtypes.from_numpy(np.dtype(np.uint8)).name == "U8"


@pytest.mark.parametrize("big", [">f4", ">f8", ">i2", ">u8", ">c8", ">c16", ">f2"])
def test_big_endian_arrays_have_the_same_logical_dtype(big: str) -> None:
    assert dtypes.from_numpy(np.dtype(big)) is dtypes.from_numpy(np.dtype(big).newbyteorder("<"))


def test_equal_c_types_are_one_dtype() -> None:
    assert dtypes.from_numpy(np.dtype("longlong")).name == dtypes.from_numpy(np.dtype("long")).name == "I64"


@pytest.mark.parametrize(
    "bad", ["O", "U3", "S3", "V4", "M8[s]", "m8[s]", "g", "i4,i4", ml_dtypes.int4, ml_dtypes.float4_e2m1fn]
)
def test_refused_numpy_dtypes(bad: object) -> None:
    with pytest.raises(UnsupportedStateError, match="numpy dtype"):
        dtypes.from_numpy(np.dtype(bad))  # type: ignore[call-overload]


@pytest.mark.parametrize("bad", ["", "F33", "f32", "C64 ", None, 3, ["F32"], {"F32": 1}, "x" * 10_000])
def test_unknown_names(bad: object) -> None:
    with pytest.raises(FormatError, match="unknown dtype") as caught:
        dtypes.get(bad)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200


def test_0d_tensors_have_one_element() -> None:
    assert dtypes.nbytes(dtypes.get("BF16"), ()) == 2
    assert dtypes.nbytes(dtypes.get("C128"), (0, 7)) == 0
