"""Files for torch.load, written without torch: bits, types, identity, alignment, and no code that could run."""

from __future__ import annotations

import io
import math
import pickletools
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import UnsupportedStateError
from ckptstore.exchange.torch_archive import TensorReference, TorchObject, write_archive
from ckptstore.formats import dtypes
from ckptstore.frameworks.torch_tensors import torch_dtype
from tests.exchange import inside
from tests.forms import short_or


def archive(state: Any, data: dict[str, bytes] | None = None) -> tuple[io.BytesIO, list[str]]:
    def chunks(name: str) -> Iterator[memoryview]:
        image = (data or {})[name]
        for start in range(0, len(image), 5):  # uneven chunks
            yield memoryview(image)[start : start + 5]

    out = io.BytesIO()
    converted = write_archive(out, state, chunks)
    out.seek(0)
    return out, converted


def loaded(state: Any, data: dict[str, bytes] | None = None) -> Any:
    return torch.load(archive(state, data)[0], weights_only=True)


def reference(name: str, dtype: str, *shape: int) -> TensorReference:
    return TensorReference(name, dtype, shape, math.prod(shape) * dtypes.get(dtype).itemsize)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("shape", [(3, 4), (), (0, 5), (7,)])
@pytest.mark.parametrize("name", dtypes.DTYPES)
def test_every_dtype_and_shape(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    ref = reference("t", name, *shape)
    image = np.random.default_rng(0).integers(0, 2 if name == "BOOL" else 256, ref.nbytes, np.uint8).tobytes()
    (tmp_path / "t.pt").write_bytes(archive({"t": ref}, {"t": image})[0].getvalue())
    for options in ({"weights_only": True}, {"weights_only": True, "mmap": True}, {"weights_only": False}):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
            found = torch.load(tmp_path / "t.pt", **options)["t"]
        assert found.dtype == torch_dtype(name)
        assert tuple(found.shape) == shape
        assert found.is_contiguous()
        assert bits(found) == image


VALUES = [
    None,
    True,
    False,
    0,
    255,
    256,
    -1,
    2**31 - 1,
    2**31,
    -(2**31) - 1,
    2**70,
    -(2**2000),
    1.5,
    -0.0,
    math.inf,
    "",
    "ünï\ud800",
    b"",
    bytes(range(256)),
    bytearray(b"xy"),
    1 - 2j,
    set(),
    {1, "a", (2, 3)},
    (),
    (1,),
    [],
    [[], {}, ()],
    {},
    {1: 2, "1": 3, None: 4, (1, "x"): 5, 1.5: 6},
    OrderedDict([("b", 1), ("a", OrderedDict())]),
    Counter("aab"),
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_values_come_back_as_they_were(value: Any) -> None:
    found = loaded({"value": value})["value"]
    assert type(found) is type(value)
    assert found == value
    assert repr(found) == repr(value)  # the order of keys, and -0.0


def test_nan() -> None:
    assert math.isnan(loaded(math.nan))


def test_torchs_own_small_types() -> None:
    assert loaded(TorchObject("Size", ((1, 2),))) == torch.Size([1, 2])
    assert loaded(TorchObject("bfloat16")) is torch.bfloat16
    assert loaded(TorchObject("device", ("cuda:1",))) == torch.device("cuda:1")


def test_types_without_a_torch_form_are_converted_and_named() -> None:
    out, converted = archive({"a": [np.float32(0.5), frozenset({1})], "b": np.bool_(True), "c": np.int64(3)})
    assert torch.load(out, weights_only=True) == {"a": [0.5, {1}], "b": True, "c": 3}
    assert converted == ["a.0", "a.1", "b", "c"]


def test_one_object_at_two_places_is_one_tensor() -> None:
    tied, equal = reference("x", "F32", 2), reference("y", "F32", 2)
    found = loaded({"a": tied, "b": [tied], "c": equal}, {"x": b"\0" * 8, "y": b"\0" * 8})
    assert found["a"] is found["b"][0]
    found["a"][0] = 1
    assert found["c"].tolist() == [0, 0]


def test_records_are_aligned_for_mapping() -> None:
    out, _ = archive({str(n): reference(str(n), "U8", n) for n in range(40)}, {str(n): b"x" * n for n in range(40)})
    with zipfile.ZipFile(out) as file:
        assert file.testzip() is None
        for info in file.infolist():
            name, extra = np.frombuffer(out.getvalue(), "<u2", 2, info.header_offset + 26)
            assert (info.header_offset + 30 + int(name) + int(extra)) % 64 == 0


def test_large_records_use_zip64(monkeypatch: pytest.MonkeyPatch) -> None:
    inside.shorten_zip(monkeypatch, 1000)
    data = {"big": np.random.default_rng(1).bytes(4096), "small": b"abcd"}
    state = {"big": reference("big", "U8", 4096), "small": reference("small", "U8", 4)}
    out, _ = archive(state, data)
    found = torch.load(out, weights_only=True)
    assert {name: bits(tensor) for name, tensor in found.items()} == data
    with zipfile.ZipFile(out) as file:
        assert file.testzip() is None
        header = file.getinfo("archive/data/0").header_offset
        name, extra = np.frombuffer(out.getvalue(), "<u2", 2, header + 26)
        assert (header + 30 + int(name) + int(extra)) % 64 == 0


@pytest.mark.parametrize("value", [object(), {"deep": [1, (range(3),)]}, -(2**2040)])
def test_unsupported_values_are_named(value: Any) -> None:
    with pytest.raises(UnsupportedStateError, match=r"x(\.deep\.1\.0)?: "):
        archive({"x": value})


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=20)
KEYS = st.text(max_size=5) | st.integers() | st.none() | st.booleans()
STATES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=20,
)


@settings(max_examples=short_or(24, 60), deadline=None)
@given(STATES)
def test_any_state(state: Any) -> None:
    out, converted = archive(state)
    assert torch.load(out, weights_only=True) == state
    assert converted == []
    with zipfile.ZipFile(out) as file:
        opcodes = {opcode.name for opcode, _, _ in pickletools.genops(file.read("archive/data.pkl"))}
    assert not opcodes & {"INST", "OBJ", "STACK_GLOBAL", "EXT1", "BUILD", "NEWOBJ"}
