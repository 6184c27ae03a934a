"""Read untrusted ``.safetensors`` files: check the header, and read tensors by position on demand.

Like the safetensors library, this module refuses a file whose tensors overlap, leave gaps, or end before the file does.
Bytes of no tensor would be dropped silently, and bytes of two tensors would be stored twice.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from ckptstore.errors import FormatError, StorageError, UnsupportedStateError, UsageError
from ckptstore.formats import dtypes, jsontext
from ckptstore.formats.states.state import Origin
from ckptstore.host.buffers import Bytes

__all__ = ["DTYPES_MEMBER", "HEADER_LIMIT", "FileTensor", "TensorInFiles", "file_in_errors", "read_safetensors"]

DTYPES_MEMBER: Final = "ckptstore.dtypes"
"""Member of an exported file's ``__metadata__``: JSON object, name -> logical dtype, of the tensors that safetensors
stores under another dtype."""

HEADER_LIMIT: Final = 100_000_000
"""Largest header, in bytes: the limit of the safetensors library."""
_SEGMENT_MEMBER: Final = "ckptstore"  # segments of a store have this member


class TensorInFiles:
    """A tensor that is read from files, as a `TensorSource`. `weight_files.flattened` knows it."""

    __slots__ = ()


class FileTensor(TensorInFiles):
    """A tensor in a safetensors file. Reads are by position, from any thread."""

    __slots__ = ("_descriptor", "_path", "_start", "dtype", "identity", "nbytes", "origin", "shape")

    def __init__(self, path: Path, descriptor: int, start: int, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        self._path = path
        self._descriptor = descriptor
        self._start = start
        self.dtype = dtype
        self.shape = shape
        self.nbytes = dtypes.nbytes(dtypes.get(dtype), shape)
        self.origin: Origin = "torch"
        self.identity: Hashable = (path, name)

    def view(self) -> Bytes | None:
        """None. A mapping would count as memory of this process, and reading a truncated file would raise SIGBUS."""
        return None

    def read(self, offset: int, out: Bytes) -> None:
        """Fill `out` from byte `offset` of the tensor. Raises `StorageError` if that fails."""
        target, at = out.data, self._start + offset
        while len(target):
            try:
                count = os.preadv(self._descriptor, [target], at)
            except OSError as error:
                raise StorageError(error.errno, error.strerror, str(self._path)) from error
            if count == 0:
                raise StorageError(f"{self._path}: became shorter while it was read")
            target, at = target[count:], at + count


def read_safetensors(path: Path, opened: ExitStack) -> tuple[dict[str, FileTensor], dict[str, str]]:
    """Read the header of a file: name -> tensor, and the metadata. Every byte of the data belongs to one tensor.

    Args:
        path: the file.
        opened: keeps the file open.

    Raises:
        FormatError: it is not a safetensors file, or it is damaged.
        UnsupportedStateError: a tensor has a dtype that cannot be stored.
        UsageError: it is a segment of a store.
    """
    file = opened.enter_context(path.open("rb", buffering=0))
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(8)
    if len(prefix) < 8:
        raise FormatError(f"{path}: {size} bytes is too short for a checkpoint file")
    (length,) = struct.unpack("<Q", prefix)
    if length > min(HEADER_LIMIT, size - 8):
        raise FormatError(f"{path}: neither a .safetensors nor a .pt file (its header would have {length} bytes)")
    header = jsontext.loads(os.pread(file.fileno(), length, 8), what=str(path), max_bytes=HEADER_LIMIT)
    if not isinstance(header, dict):
        raise FormatError(f"{path}: the header is not a JSON object")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"{path}: __metadata__ does not map names to strings")
    if _SEGMENT_MEMBER in metadata:
        raise UsageError(f"{path} is a segment of a checkpoint store; write the checkpoint to a file: `ckpt restore`")
    logical = _logical_dtypes(path, metadata)
    data = 8 + length
    entries = _entries(path, header, size - data)
    tensors = {
        name: FileTensor(path, file.fileno(), data + start, name, *_type(path, name, entry, logical.get(name)))
        for name, entry, start in entries
    }
    _check_cover(path, entries, size - data)
    return tensors, metadata


def _entries(path: Path, header: Mapping[str, Any], length: int) -> list[tuple[str, Mapping[str, Any], int]]:
    found = []
    for name, entry in header.items():
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(offset) is int for offset in offsets)):
            raise FormatError(f"{path}: tensor {name!r:.80} has no data_offsets")
        if not 0 <= offsets[0] <= offsets[1] <= length:
            raise FormatError(f"{path}: tensor {name!r:.80} is outside the file")
        found.append((name, entry, offsets[0]))
    return found


def _check_cover(path: Path, entries: Iterable[tuple[str, Mapping[str, Any], int]], length: int) -> None:
    """Raise `FormatError` unless the tensors cover all bytes of the data, without gaps or overlaps."""
    end, before = 0, "the header"
    for (start, stop), name in sorted((tuple(entry["data_offsets"]), name) for name, entry, _ in entries):
        if start < end:
            raise FormatError(f"{path}: tensors {before!r:.80} and {name!r:.80} overlap")
        if start > end:
            raise FormatError(f"{path}: {start - end} bytes before tensor {name!r:.80} belong to no tensor")
        end, before = stop, name
    if end != length:
        raise FormatError(f"{path}: {length - end} bytes at its end belong to no tensor")


def _type(path: Path, name: str, entry: Mapping[str, Any], logical: str | None) -> tuple[str, tuple[int, ...]]:
    """Logical dtype and shape of a header entry. Raises `FormatError` if they do not match its length."""
    code, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(shape, list) or not all(type(length) is int and length >= 0 for length in shape):
        raise FormatError(f"{path}: tensor {name!r:.80} has the shape {shape!r:.80}")
    if code == "F4" and shape:  # safetensors counts half bytes, torch counts bytes
        code, shape = "F4_E2M1_X2", [*shape[:-1], shape[-1] // 2]
    if not isinstance(code, str) or code not in dtypes.DTYPES:
        raise UnsupportedStateError(f"{path}: tensor {name!r:.80} has the dtype {code!r:.20}, which cannot be stored")
    if logical is not None:
        with file_in_errors(path):
            dtype = dtypes.get(logical)
        if code != dtype.storage or tuple(shape[len(shape) - len(dtype.trailing) :]) != dtype.trailing:
            raise FormatError(f"{path}: tensor {name!r:.80} is stored as {code}, which is not how {logical} is stored")
        code, shape = logical, shape[: len(shape) - len(dtype.trailing)]
    begin, end = entry["data_offsets"]
    if end - begin != dtypes.nbytes(dtypes.get(code), shape):
        raise FormatError(f"{path}: tensor {name!r:.80} has {end - begin} bytes, which is not {code} {shape!s:.80}")
    return code, tuple(shape)


def _logical_dtypes(path: Path, metadata: Mapping[str, str]) -> dict[str, str]:
    if DTYPES_MEMBER not in metadata:
        return {}
    text = metadata[DTYPES_MEMBER].encode(errors="surrogatepass")
    found = jsontext.loads(text, what=f"{path}: {DTYPES_MEMBER}", max_bytes=HEADER_LIMIT)
    if not isinstance(found, dict):  # `_type` checks the names of the dtypes
        raise FormatError(f"{path}: {DTYPES_MEMBER} does not map tensors to dtypes")
    return found


@contextmanager
def file_in_errors(path: Path) -> Iterator[None]:
    """Add the file's name to errors of functions that do not know the file."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
    except UnsupportedStateError as error:
        raise UnsupportedStateError(f"{path}: {error}") from error
