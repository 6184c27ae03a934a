"""Files of other tools: every dtype, every layout, and files with false contents."""

from __future__ import annotations

import copy
import json
import struct
import zipfile
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptstore.errors import (
    CkptError,
    CorruptionError,
    FormatError,
    StorageError,
    UnsupportedStateError,
    UsageError,
)
from ckptstore.exchange.checkpoint_folders import survey
from ckptstore.exchange.safetensors_files import FileTensor
from ckptstore.exchange.weight_files import open_file
from ckptstore.formats.states.state import unflatten
from tests.forms import short_or
from tests.store.states import every_dtype, same, tensor_bytes, training_state


def contents(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """name -> dtype, shape, bytes of every tensor, read in odd pieces."""
    found = {}
    with open_file(path) as opened:
        for name, source in opened.flat.tensors.items():
            image = np.empty(source.nbytes, np.uint8)
            for start in range(0, source.nbytes, 7):
                source.read(start, image[start : start + 7])
            found[name] = (source.dtype, source.shape, image.tobytes())
        assert opened.nbytes == sum(len(image) for _, _, image in found.values())
    return found


def raw(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_every_dtype_that_safetensors_writes(tmp_path: Path) -> None:
    tensors = {
        name: tensor.contiguous().clone()
        for name, tensor in every_dtype().items()
        if isinstance(tensor, torch.Tensor) and tensor.dtype != torch.complex128
    }
    tensors["e8m0"] = torch.arange(9, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    found = contents(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name][1:] == (tuple(tensor.shape), tensor_bytes(tensor)), name
    assert found["bfloat16"][0] == "BF16"
    assert found["e8m0"][0] == "F8_E8M0"
    assert found["complex64"][0] == "C64"


def test_half_bytes_are_counted_as_torch_does(tmp_path: Path) -> None:
    path = raw(tmp_path / "x", {"t": entry("F4", [3, 4], 0, 6)}, b"abcdef")
    assert contents(path) == {"t": ("F4_E2M1_X2", (3, 2), b"abcdef")}


def test_a_flat_dict_under_the_files_names(tmp_path: Path) -> None:
    path = raw(
        tmp_path / "x",
        {"a.b": entry("U8", [1], 0, 1), "a": entry("U8", [1], 1, 2), "": entry("U8", [0], 2, 2)},
        b"12",
    )
    with open_file(path) as opened:
        assert unflatten(opened.flat.tree, lambda name, origin: (name, origin)) == {
            "a.b": ("a.b", "torch"),
            "a": ("a", "torch"),
            "": ("%", "torch"),
        }


def test_a_source_reads_only_while_the_file_is_open_and_whole(tmp_path: Path) -> None:
    path = raw(tmp_path / "x", {"t": entry("U8", [4], 0, 4)}, b"1234")
    with open_file(path) as opened:
        source = opened.flat.tensors["t"]
        assert isinstance(source, FileTensor)
        assert source.view() is None
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(StorageError, match="became shorter"):
            source.read(0, np.empty(4, np.uint8))
    with pytest.raises(StorageError):
        source.read(0, np.empty(1, np.uint8))


GOOD = {"t": entry("F32", [2, 3], 0, 24)}


@pytest.mark.parametrize(
    ("header", "error", "message"),
    [
        ({"t": entry("F32", [2, 3], 0, 20)}, FormatError, "20 bytes, which is not F32"),
        ({"t": entry("F32", [2, 3], 8, 32)}, FormatError, "outside the file"),
        ({"t": entry("F32", [2, 3], 24, 0)}, FormatError, "outside the file"),
        ({"t": entry("F32", [2, 3], -24, 0)}, FormatError, "outside the file"),
        ({"t": entry("F32", [2, -3], 0, 24)}, FormatError, "shape"),
        ({"t": entry("F32", [True, 6], 0, 24)}, FormatError, "shape"),
        ({"t": entry("F32", [2**40, 2**40], 0, 24)}, FormatError, "which is not F32"),
        ({"t": entry("F6_E3M2", [32], 0, 24)}, UnsupportedStateError, "F6_E3M2"),
        ({"t": {"dtype": "F32", "shape": [2, 3]}}, FormatError, "data_offsets"),
        ({"t": {**GOOD["t"], "data_offsets": [0, 24.0]}}, FormatError, "data_offsets"),
        ({"t": {**GOOD["t"], "dtype": ["F32"]}}, UnsupportedStateError, "dtype"),
        ({"t": {**GOOD["t"], "data_offsets": [0]}}, FormatError, "data_offsets"),
        ({"t": {**GOOD["t"], "data_offsets": [0, 24, 48]}}, FormatError, "data_offsets"),
        ({"t": {**GOOD["t"], "shape": None}}, FormatError, "shape"),
        ({"t": {**GOOD["t"], "shape": {}}}, FormatError, "shape"),
        ({"t": [0, 24]}, FormatError, "data_offsets"),
        ({"__metadata__": {"a": 1}, **GOOD}, FormatError, "__metadata__"),
        ({"__metadata__": [], **GOOD}, None, ""),
        ({"__metadata__": ["a"], **GOOD}, FormatError, "__metadata__"),
        (
            {"__metadata__": {"ckptstore.dtypes": '{"t": "C64"}'}, "t": entry("U32", [3, 2], 0, 24)},
            FormatError,
            "stored as U32, which is not how C64 is stored",
        ),
        ({"__metadata__": {"ckptstore.dtypes": '{"t": ["C64"]}'}, **GOOD}, FormatError, "C64"),
        ({"__metadata__": {"ckptstore": "{}"}, **GOOD}, UsageError, "segment of a checkpoint store"),
        ({"__metadata__": {"ckptstore.dtypes": "[]"}, **GOOD}, FormatError, "ckptstore.dtypes"),
        ({"__metadata__": {"ckptstore.dtypes": '{"t": "C64"}'}, **GOOD}, FormatError, "not how C64 is stored"),
        ({"__metadata__": {"ckptstore.dtypes": '{"t": "C65"}'}, **GOOD}, FormatError, "C65"),
        ({"__metadata__": {"ckptstore.state": "{"}, **GOOD}, FormatError, "ckptstore.state"),
        ({"__metadata__": {"ckptstore.state": '{"$t": 5}'}, **GOOD}, FormatError, "is not a valid tensor name"),
        ({"__metadata__": {"ckptstore.state": '{"$t": "u"}'}, **GOOD}, None, ""),
        (b'{"t": 1, "t": 2}', FormatError, "duplicate"),
        (b"[]", FormatError, "not a JSON object"),
        (b"{nonsense", FormatError, "not JSON"),
        (b"[" * 10_000 + b"]" * 10_000, FormatError, "deeper"),
    ],
)
def test_a_header_that_lies(tmp_path: Path, header: Any, error: type[CkptError] | None, message: str) -> None:
    path = raw(tmp_path / "x", header, b"x" * 24)
    if error is None:
        assert contents(path).keys() == {"t"}
        return
    with pytest.raises(error, match=message) as raised:
        open_file(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("offsets", "length", "message"),
    [
        ([(0, 24), (8, 16)], 24, "tensors 't0' and 't1' overlap"),
        ([(0, 8), (4, 12)], 12, "tensors 't0' and 't1' overlap"),
        ([(0, 8), (0, 8)], 8, "tensors 't0' and 't1' overlap"),
        ([(8, 16)], 16, "8 bytes before tensor 't0' belong to no tensor"),
        ([(0, 8), (9, 17)], 17, "1 bytes before tensor 't1' belong to no tensor"),
        ([(0, 8)], 9, "1 bytes at its end belong to no tensor"),
        ([(0, 8), (4, 4)], 8, "overlap"),
        ([], 1, "1 bytes at its end belong to no tensor"),
        ([(8, 24), (0, 8), (8, 8), (24, 24)], 24, None),
    ],
)
def test_every_byte_belongs_to_one_tensor(
    tmp_path: Path, offsets: list[tuple[int, int]], length: int, message: str | None
) -> None:
    """As in the safetensors library."""
    header = {f"t{n}": entry("U8", [end - begin], begin, end) for n, (begin, end) in enumerate(offsets)}
    path = raw(tmp_path / "x", header, bytes(length))
    if message is None:
        assert len(contents(path)) == len(safetensors.torch.load_file(path)) == len(offsets)
        return
    with pytest.raises(FormatError, match=message):
        open_file(path)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.torch.load_file(path)


@pytest.mark.parametrize(
    "data", [b"", b"short", b"\xff" * 100, struct.pack("<Q", 90) + b"{}", b"PK\x03\x04 no zip", b"\x80\x02."]
)
def test_not_a_checkpoint(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(FormatError):
        open_file(tmp_path / "x")


@settings(max_examples=short_or(60, 150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_header_never_does_worse_than_an_error(tmp_path: Path, data: st.DataObject) -> None:
    good = json.dumps({"__metadata__": {"ckptstore.dtypes": '{"c": "C64"}'}, **GOOD, "c": entry("F32", [1, 2], 24, 32)})
    text = bytearray(good.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    path = raw(tmp_path / "x", bytes(text), b"y" * 32)
    try:
        found = contents(path)
    except CkptError:
        return
    assert all(len(image) <= 32 for _, _, image in found.values())


# torch files


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_training_state(tmp_path: Path, legacy: bool) -> None:
    state = training_state()
    state["model"] = OrderedDict(state["model"])
    torch.save(state, tmp_path / "x", _use_new_zipfile_serialization=not legacy)
    with open_file(tmp_path / "x") as opened:
        sources: Any = opened.flat.tensors
        from ckptstore.frameworks.torch_tensors import revive

        def resolve(name: str, origin: str) -> Any:
            return sources[name].tensor if origin == "torch" else sources[name].array

        same(unflatten(opened.flat.tree, resolve, revive), state)


def test_a_torch_file_that_needs_code(tmp_path: Path) -> None:
    torch.save({"args": partial(int, base=2)}, tmp_path / "x.pt")
    with pytest.raises(UnsupportedStateError, match=r"args: it is a functools\.partial") as raised:
        open_file(tmp_path / "x.pt")
    assert "save it again" in raised.value.__notes__[0]


@pytest.mark.parametrize("sums", [True, False], ids=["with sums", "without"])
def test_a_flipped_bit_in_a_torch_file(tmp_path: Path, sums: bool) -> None:
    """torch writes CRCs, and never compares them; it may be configured to write none."""
    path = tmp_path / "x.pt"
    torch.serialization.set_crc32_options(sums)
    try:
        torch.save({"w": torch.arange(1000, dtype=torch.int32)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    with open_file(path) as opened:
        assert list(opened.flat.tensors) == ["w"]
    data = bytearray(path.read_bytes())
    data[data.index(np.arange(500, 600, dtype=np.int32).tobytes())] ^= 1
    path.write_bytes(data)
    if sums:
        with pytest.raises(CorruptionError, match=r"x\.pt: damaged: .*CRC.*data/0"), open_file(path):
            pass
    else:
        with open_file(path) as opened:
            assert list(opened.flat.tensors) == ["w"]


@pytest.mark.parametrize("how", ["compressed", "repeated"])
def test_an_archive_that_unpacks_to_more_than_it_is(tmp_path: Path, how: str) -> None:
    """Refused at once: checking its sums would take hours, or all memory."""
    path = tmp_path / "x.pt"
    torch.save({"w": torch.arange(10)}, path)
    with zipfile.ZipFile(path, "a") as archive:
        if how == "compressed":
            archive.writestr("archive/bomb", bytes(50_000_000), zipfile.ZIP_DEFLATED)
        else:
            archive.writestr("archive/data/9", bytes(100_000))
            (last,) = [record for record in archive.infolist() if record.filename == "archive/data/9"]
            for number in range(2000):
                again = copy.copy(last)
                again.filename = f"archive/data/{10 + number}"
                archive.filelist.append(again)
    says = {"compressed": "a record is compressed", "repeated": "records are longer than the file"}
    with pytest.raises(FormatError, match=rf"x\.pt: .*{says[how]}"), open_file(path):
        pass


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_torn_torch_file(tmp_path: Path, legacy: bool) -> None:
    """Wherever it ends, it is damaged: neither a failure of the medium nor code that would run."""
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(1000)}, path, _use_new_zipfile_serialization=not legacy)
    data = path.read_bytes()
    told = set()
    for length in [*range(10, 400, 7), *range(400, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(FormatError, match=r"x\.pt: ") as raised:
            open_file(path)
        told.add(str(raised.value).partition("x.pt: ")[2])
    assert any(text.startswith("truncated: it ends in" if legacy else "truncated: the directory") for text in told)
    assert legacy or len(told) == 1


# shards and folders


def shards(folder: Path, kind: str) -> Path:
    folder.mkdir(exist_ok=True)
    parts = [{"a": torch.ones(2), "b": torch.zeros(3)}, {"c": torch.full((1,), 7.0)}]
    where: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05d}-of-00002.{kind}"
        if kind == "bin":
            torch.save(part, folder / name)
        else:
            safetensors.torch.save_file(part, folder / name)
        where |= dict.fromkeys(part, name)
    index = folder / f"model.{kind}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 24}, "weight_map": where}))
    return index


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_shards_with_an_index(tmp_path: Path, kind: str) -> None:
    index = shards(tmp_path, kind)
    assert survey(tmp_path).weights == index
    found = contents(index)
    assert list(found) == ["a", "b", "c"]
    assert found["c"] == ("F32", (1,), np.float32(7).tobytes())


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_an_index_that_lies(tmp_path: Path, kind: str) -> None:
    index = shards(tmp_path, kind)
    good = json.loads(index.read_text())["weight_map"]
    for weight_map, message in [
        ({**good, "d": good["c"]}, "has no tensor 'd'"),
        ({"a": good["a"], "c": good["c"]}, "does not name 'b', which is in the shard model-00001"),
        ({**good, "d": "model-3.safetensors"}, "is missing"),
        ({**good, "d": "../../etc/passwd"}, "not a file in the folder of the index"),
        ({}, "no weight_map"),
        ({"a": 5}, "no weight_map"),
        (["a"], "no weight_map"),
    ]:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(FormatError, match=message):
            open_file(index)
    index.write_text("{}")
    with pytest.raises(FormatError):
        open_file(index)
    with index.open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(FormatError, match="too long for an index"):
        open_file(index)


def test_a_shard_that_is_no_dict(tmp_path: Path) -> None:
    torch.save(["a"], tmp_path / "one.bin")
    index = tmp_path / "model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.bin"}}))
    with pytest.raises(FormatError, match="not a list"):
        open_file(index)
