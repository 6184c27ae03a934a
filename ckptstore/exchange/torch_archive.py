"""Write a file that ``torch.load(weights_only=True)`` opens, without torch and without the tensors in memory.

The file has the form that ``torch.save`` writes since torch 1.6: an uncompressed zip archive of ``data.pkl`` (a pickle
of protocol 2 in which tensors are references) and one record of raw bytes per tensor. This module emits the pickle
itself. It uses only opcodes and names that torch's restricted unpickler allows, so the pickle cannot run code.
"""

from __future__ import annotations

import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from ckptstore.errors import UnsupportedStateError
from ckptstore.formats.dtypes import DTYPES

__all__ = ["PlainParts", "TensorReference", "TorchObject", "is_archive", "write_archive"]

_ALIGN: Final = 64  # as in torch.save, so that torch.load(mmap=True) returns aligned tensors
_ZIP64_FROM: Final = 1 << 30
_ZIP64_EXTRA: Final = 20
_MARK: Final = "ckptstore"
"""Name of a record that marks the file as ours. torch ignores it."""
_LOCAL_HEADER: Final = 30  # bytes of a zip record's local header without name and extra field

# Logical dtype -> (storage class, name of the torch dtype). torch writes the legacy class if there is one.
_TORCH: Final = {
    "BOOL": ("BoolStorage", "bool"),
    "U8": ("ByteStorage", "uint8"),
    "I8": ("CharStorage", "int8"),
    "I16": ("ShortStorage", "int16"),
    "I32": ("IntStorage", "int32"),
    "I64": ("LongStorage", "int64"),
    "F16": ("HalfStorage", "float16"),
    "BF16": ("BFloat16Storage", "bfloat16"),
    "F32": ("FloatStorage", "float32"),
    "F64": ("DoubleStorage", "float64"),
    "C64": ("ComplexFloatStorage", "complex64"),
    "C128": ("ComplexDoubleStorage", "complex128"),
    "C32": (None, "complex32"),
    "U16": (None, "uint16"),
    "U32": (None, "uint32"),
    "U64": (None, "uint64"),
    "F8_E4M3": (None, "float8_e4m3fn"),
    "F8_E5M2": (None, "float8_e5m2"),
    "F8_E4M3FNUZ": (None, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (None, "float8_e5m2fnuz"),
    "F8_E8M0": (None, "float8_e8m0fnu"),
    "F4_E2M1_X2": (None, "float4_e2m1fn_x2"),
}


@dataclass(frozen=True, slots=True)
class TensorReference:
    """Represents a tensor in the state to write. The same object at two places becomes one tensor after loading."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class TorchObject:
    """Represents ``torch.<name>(*arguments)``, or ``torch.<name>`` itself if there are no arguments."""

    name: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class PlainParts:
    """Represents an object that ``weights_only`` would refuse. Its parts are written in its place."""

    value: Any


@dataclass(slots=True)
class _Pickler:
    """Emits opcodes. Tensors get numbered records in the order of their first use."""

    out: bytearray = field(default_factory=bytearray)
    records: list[TensorReference] = field(default_factory=list)
    converted: list[str] = field(default_factory=list)
    memo: dict[int, int] = field(default_factory=dict)

    def emit(self, value: Any, path: str) -> None:
        """Emit any value of a state. `path` names it in messages."""
        if isinstance(value, TensorReference):
            self._tensor(value)
        elif isinstance(value, PlainParts):
            self.converted.append(path)
            self.emit(value.value, path)
        elif isinstance(value, TorchObject):
            self._global("torch", value.name)
            if value.arguments:
                self._call(value.arguments, path)
        elif isinstance(value, np.generic):
            self.converted.append(path)  # the restricted unpickler does not allow numpy scalars
            self.emit(value.item(), path)
        elif value is None or isinstance(value, bool):
            self.out += {None: b"N", True: b"\x88", False: b"\x89"}[value]
        elif isinstance(value, int):
            self._int(value, path)
        elif isinstance(value, float):
            self.out += b"G" + struct.pack(">d", value)
        elif isinstance(value, str):
            self._str(value)
        elif isinstance(value, dict):
            self._dict(value, path)
        elif isinstance(value, list):
            self.out += b"]("
            for index, item in enumerate(value):
                self.emit(item, _at(path, index))
            self.out += b"e"
        elif isinstance(value, tuple):
            self.out += b"("
            for index, item in enumerate(value):
                self.emit(item, _at(path, index))
            self.out += b"t"
        else:
            self._by_call(value, path)

    def _by_call(self, value: Any, path: str) -> None:
        """Emit an object that is written as a call of an allowed function."""
        if isinstance(value, bytes | bytearray):
            if isinstance(value, bytearray):
                self._global("__builtin__", "bytearray")
            self._global("_codecs", "encode")
            self._call((value.decode("latin1"), "latin1"), path)
            if isinstance(value, bytearray):
                self.out += b"\x85R"
        elif isinstance(value, complex):
            self._global("__builtin__", "complex")
            self._call((value.real, value.imag), path)
        elif isinstance(value, set | frozenset):
            if isinstance(value, frozenset):
                self.converted.append(path)  # the restricted unpickler allows set, but not frozenset
            self._global("__builtin__", "set")
            self._call((list(value),), path)
        else:
            raise UnsupportedStateError(f"{path}: a {type(value).__name__} cannot be stored in a .pt file")

    def _dict(self, value: dict[Any, Any], path: str) -> None:
        if isinstance(value, OrderedDict | Counter):
            self._global("collections", type(value).__name__)
            self.out += b")R"
        else:
            self.out += b"}"
        self.out += b"("
        for key, item in value.items():
            self.emit(key, _at(path, key))
            self.emit(item, _at(path, key))
        self.out += b"u"

    def _int(self, value: int, path: str) -> None:
        if 0 <= value < 256:
            self.out += b"K" + bytes([value])
        elif -(2**31) <= value < 2**31:
            self.out += b"J" + struct.pack("<i", value)
        else:
            text = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            if len(text) > 255:
                raise UnsupportedStateError(
                    f"{path}: an integer of {value.bit_length()} bits cannot be stored in a .pt file"
                )
            self.out += b"\x8a" + bytes([len(text)]) + text

    def _str(self, value: str) -> None:
        text = value.encode("utf-8", "surrogatepass")
        self.out += b"X" + struct.pack("<I", len(text)) + text

    def _global(self, module: str, name: str) -> None:
        self.out += f"c{module}\n{name}\n".encode("ascii")

    def _call(self, arguments: tuple[Any, ...], path: str) -> None:
        self.emit(arguments, path)
        self.out += b"R"

    def _tensor(self, tensor: TensorReference) -> None:
        """Emit ``_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks)``; v3 adds a dtype."""
        if id(tensor) in self.memo:
            self.out += b"j" + struct.pack("<I", self.memo[id(tensor)])
            return
        storage, dtype = _TORCH[tensor.dtype]
        self._global("torch._utils", "_rebuild_tensor_v2" if storage else "_rebuild_tensor_v3")
        self.out += b"(("
        self._str("storage")
        if storage:
            self._global("torch", storage)
        else:
            self._global("torch.storage", "UntypedStorage")
        self._str(str(len(self.records)))
        self._str("cpu")
        self._int(tensor.nbytes // DTYPES[tensor.dtype].itemsize if storage else tensor.nbytes, tensor.name)
        self.out += b"tQ"
        self._int(0, tensor.name)
        self.emit(tensor.shape, tensor.name)
        self.emit(_strides(tensor.shape), tensor.name)
        self.out += b"\x89"
        self._global("collections", "OrderedDict")
        self.out += b")R"
        if not storage:
            self._global("torch", dtype)
        self.out += b"tR"
        self.memo[id(tensor)] = len(self.memo)
        self.out += b"r" + struct.pack("<I", self.memo[id(tensor)])
        self.records.append(tensor)


def _at(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


class Appendable(Protocol):
    """The target of an archive. It is only appended to: never read, and never changed."""

    def write(self, data: memoryview | bytes, /) -> int: ...
    def flush(self) -> None: ...


class _Forward:
    """Wraps an `Appendable` for zipfile. It has no `tell` and no `seek`, so zipfile writes checksums after the data."""

    def __init__(self, out: Appendable) -> None:
        self._out = out

    def write(self, data: bytes, /) -> int:
        return self._out.write(data)

    def flush(self) -> None:
        self._out.flush()

    def close(self) -> None:
        """Do nothing: the caller closes the file."""


def write_archive(out: Appendable, state: Any, chunks: Callable[[str], Iterable[memoryview]]) -> list[str]:
    """Write `state` to `out`.

    Args:
        out: the file, which is empty.
        state: nested dicts, lists, tuples and scalars, with `TensorReference` and `TorchObject`.
        chunks: called with the name of every distinct tensor, once each; yields its bytes in order.

    Returns:
        The paths of values that were converted, because ``weights_only`` would refuse them: numpy scalars became Python
        numbers, frozensets became sets, objects their parts.

    Raises:
        UnsupportedStateError: such a file cannot store an object. The message names its path.
    """
    pickler = _Pickler()
    pickler.emit(state, "")
    text = b"\x80\x02" + bytes(pickler.out) + b"."
    with zipfile.ZipFile(_Forward(out), "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        _record(archive, "data.pkl", len(text), [memoryview(text)])
        _record(archive, "byteorder", 6, [memoryview(b"little")])
        for number, tensor in enumerate(pickler.records):
            _record(archive, f"data/{number}", tensor.nbytes, chunks(tensor.name))
        _record(archive, "version", 2, [memoryview(b"3\n")])
        _record(archive, _MARK, 2, [memoryview(b"1\n")])
    return pickler.converted


def is_archive(path: Path) -> bool:
    """Whether `write_archive` wrote the file. Raises `OSError`."""
    try:
        with zipfile.ZipFile(path) as archive:
            return f"archive/{_MARK}" in archive.namelist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError):
        return False


def _record(archive: zipfile.ZipFile, name: str, nbytes: int, parts: Iterable[memoryview]) -> None:
    """Add a record whose data begins at a multiple of `_ALIGN`. An extra field of the zip header is the padding."""
    info = zipfile.ZipInfo(f"archive/{name}", (1980, 1, 1, 0, 0, 0))
    info.file_size = nbytes
    large = nbytes >= _ZIP64_FROM
    assert archive.fp is not None
    begin = archive.fp.tell() + _LOCAL_HEADER + len(info.filename) + (_ZIP64_EXTRA if large else 0) + 4
    padding = -begin % _ALIGN
    info.extra = struct.pack("<2sH", b"FB", padding) + bytes(padding)
    written = 0
    with archive.open(info, "w", force_zip64=large) as record:
        for part in parts:
            record.write(part)
            written += len(part)
    assert written == nbytes, (name, written, nbytes)
