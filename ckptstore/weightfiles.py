"""Checkpoints that other tools wrote, opened as states: ``.safetensors``, a Hugging Face index of shards, ``.pt``.

Only headers are read here; a tensor's bytes are read when the writer asks for them, so memory does not grow with the
file. Nothing in these files is trusted, and no pickled code is ever run.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from ckptstore import torch_seam
from ckptstore.formats import dtypes, jsontext
from ckptstore.formats.errors import (
    FormatError,
    MissingDependencyError,
    StorageError,
    UnsupportedStateError,
    UsageError,
)
from ckptstore.formats.state import FlatState, Origin, flatten, tensor_names
from ckptstore.staging import Bytes

__all__ = [
    "CHECKPOINT_MEMBER",
    "DTYPES_MEMBER",
    "STATE_MEMBER",
    "FileTensor",
    "OpenedFile",
    "file_bytes",
    "locate",
    "open_file",
]

CHECKPOINT_MEMBER: Final = "ckptstore.checkpoint"
"""Member of an exported file's ``__metadata__``: REF of the checkpoint."""
STATE_MEMBER: Final = "ckptstore.state"
"""Likewise: the typed JSON tree of the state. With it an import restores the state, not only its tensors."""
DTYPES_MEMBER: Final = "ckptstore.dtypes"
"""Likewise: JSON object, name -> logical dtype, of the tensors that safetensors stores as something else."""

_HEADER_LIMIT: Final = 100_000_000  # safetensors' own
_INDEX_LIMIT: Final = 64 << 20
_SEGMENT_MEMBER: Final = "ckptstore"  # our own segments describe themselves under this name
_FOLDER_PATTERNS: Final = ("*.safetensors.index.json", "*.bin.index.json", "*.safetensors", "*.bin", "*.pt", "*.pth")


class FileTensor:
    """A tensor in a safetensors file (a `TensorSource`); read by position, from any thread."""

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
        """None: a mapping of the file would count as our memory, and turn a truncated file into a signal."""
        return None

    def read(self, offset: int, out: Bytes) -> None:
        """Fill `out` from byte `offset` of the tensor. Raises `StorageError`."""
        target, at = out.data, self._start + offset
        while len(target):
            try:
                count = os.preadv(self._descriptor, [target], at)
            except OSError as error:
                raise StorageError(error.errno, error.strerror, str(self._path)) from error
            if count == 0:
                raise StorageError(f"{self._path}: became shorter while it was read")
            target, at = target[count:], at + count


@dataclass(slots=True)
class OpenedFile:
    """A checkpoint file as a state; its sources stay readable until it is closed. A context manager."""

    path: Path
    flat: FlatState
    _open: ExitStack

    @property
    def nbytes(self) -> int:
        """Logical bytes of its tensors."""
        return sum(source.nbytes for source in self.flat.tensors.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()


def locate(path: Path) -> Path:
    """The file that `path` stands for: itself, or in a folder its one index or weights file.

    Raises:
        UsageError: there is none, or more than one; or the folder is something else.
        StorageError: `path` does not exist.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    if not path.is_dir():
        return path
    if (path / "FORMAT").exists():
        raise UsageError(f"{path} is a checkpoint store; import the files that `ckpt restore` writes from it")
    if (path / ".metadata").exists():
        raise UsageError(f"{path} was written by torch.distributed.checkpoint, which cannot be imported")
    for pattern in _FOLDER_PATTERNS:
        found = sorted(path.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            raise UsageError(f"{path} holds {len(found)} files {pattern} and no index: name the one to import")
    raise UsageError(f"{path} holds no .safetensors, .bin or .pt file")


def file_bytes(path: Path) -> int:
    """Length of a checkpoint file that `open_file` opens; of an index, that of its shards as well."""
    own = path.stat().st_size
    if path.suffix != ".json":
        return own
    index = jsontext.loads(path.read_bytes(), what=str(path), max_bytes=_INDEX_LIMIT)
    shards: set[str] = set(index["weight_map"].values())
    return own + sum((path.parent / shard).stat().st_size for shard in shards)


def open_file(path: Path) -> OpenedFile:
    """Open a checkpoint file; what it is follows from its contents, except that an index is named ``.json``.

    Raises:
        FormatError: it is none of the formats, or damaged.
        UnsupportedStateError: it holds something that cannot be stored, or needs pickled code to be loaded.
        MissingDependencyError: it needs torch, which is not installed.
        StorageError: it cannot be read.
    """
    opened = ExitStack()
    try:
        flat = _open_index(path, opened) if path.suffix == ".json" else _open_one(path, opened)
    except BaseException as error:
        opened.close()
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, StorageError):
            raise StorageError(error.errno, error.strerror, str(path)) from error
        raise
    return OpenedFile(path, flat, opened)


def _open_one(path: Path, opened: ExitStack) -> FlatState:
    if _is_torch(path):
        return torch_seam.flattened(_load_torch(path))
    tensors, metadata = _read_safetensors(path, opened)
    return _assemble(path, tensors, metadata)


def _is_torch(path: Path) -> bool:
    """A zip archive or a bare pickle of torch.save, rather than the length field of a safetensors header."""
    with path.open("rb") as file:
        head = file.read(9)
    return head[:2] == b"PK" or (head[:1] == b"\x80" and head[8:9] != b"{")


# torch


def _load_torch(path: Path) -> Any:
    try:
        from ckptstore.training.torchfiles import load
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{path} is a torch file; reading it needs: pip install 'ckptstore[torch]'"
        ) from error
    return load(path)


# safetensors


def _read_safetensors(path: Path, opened: ExitStack) -> tuple[dict[str, FileTensor], dict[str, str]]:
    """Header of one file: name -> tensor, and its metadata. Checked against the file's size."""
    file = opened.enter_context(path.open("rb", buffering=0))
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(8)
    if len(prefix) < 8:
        raise FormatError(f"{path}: {size} bytes is too short for a checkpoint file")
    (length,) = struct.unpack("<Q", prefix)
    if length > min(_HEADER_LIMIT, size - 8):
        raise FormatError(f"{path}: neither a .safetensors nor a .pt file (its header would have {length} bytes)")
    header = jsontext.loads(os.pread(file.fileno(), length, 8), what=str(path), max_bytes=_HEADER_LIMIT)
    if not isinstance(header, dict):
        raise FormatError(f"{path}: the header is no JSON object")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"{path}: __metadata__ does not map names to texts")
    if _SEGMENT_MEMBER in metadata:
        raise UsageError(f"{path} is a segment of a checkpoint store; `ckpt restore` makes a file of the checkpoint")
    logical = _logical_dtypes(path, metadata)
    data = 8 + length
    tensors = {
        name: FileTensor(path, file.fileno(), data + start, name, *_type(path, name, entry, logical.get(name)))
        for name, entry, start in _entries(path, header, size - data)
    }
    return tensors, metadata


def _entries(path: Path, header: Mapping[str, Any], room: int) -> list[tuple[str, Mapping[str, Any], int]]:
    found = []
    for name, entry in header.items():
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(offset) is int for offset in offsets)):
            raise FormatError(f"{path}: tensor {name!r:.80} has no data_offsets")
        if not 0 <= offsets[0] <= offsets[1] <= room:
            raise FormatError(f"{path}: tensor {name!r:.80} lies outside the file")
        found.append((name, entry, offsets[0]))
    return found


def _type(path: Path, name: str, entry: Mapping[str, Any], logical: str | None) -> tuple[str, tuple[int, ...]]:
    """Logical dtype and shape of a header entry, checked against its length."""
    code, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(shape, list) or not all(type(length) is int and length >= 0 for length in shape):
        raise FormatError(f"{path}: tensor {name!r:.80} has the shape {shape!r:.80}")
    if code == "F4" and shape:  # safetensors counts half bytes, torch the bytes
        code, shape = "F4_E2M1_X2", [*shape[:-1], shape[-1] // 2]
    if not isinstance(code, str) or code not in dtypes.DTYPES:
        raise UnsupportedStateError(f"{path}: tensor {name!r:.80} has the dtype {code!r:.20}, which cannot be stored")
    if logical is not None:
        with _named(path):
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
    found = jsontext.loads(text, what=f"{path}: {DTYPES_MEMBER}", max_bytes=_HEADER_LIMIT)
    if not isinstance(found, dict):  # names of dtypes are checked where they are looked up
        raise FormatError(f"{path}: {DTYPES_MEMBER} does not map tensors to dtypes")
    return found


def _assemble(path: Path, tensors: Mapping[str, FileTensor], metadata: Mapping[str, str]) -> FlatState:
    """The state that `ckpt restore` wrote, if its tree is there; else a dict of the tensors under their names."""
    if STATE_MEMBER in metadata:
        text = metadata[STATE_MEMBER].encode(errors="surrogatepass")
        tree = jsontext.loads(text, what=f"{path}: {STATE_MEMBER}", max_bytes=_HEADER_LIMIT)
        with _named(path):
            names = tensor_names(tree)
        if set(names) == tensors.keys():
            return FlatState(tree, {name: tensors[name] for name in names})
    return flatten(dict(tensors), lambda value: value if isinstance(value, FileTensor) else None)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of pure functions, which know no file, get its name."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error


# an index of shards


def _open_index(path: Path, opened: ExitStack) -> FlatState:
    if path.stat().st_size > _INDEX_LIMIT:
        raise FormatError(f"{path}: too long for an index of shards")
    index = jsontext.loads(path.read_bytes(), what=str(path), max_bytes=_INDEX_LIMIT)
    where = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(where, dict) or not where or not all(isinstance(file, str) for file in where.values()):
        raise FormatError(f"{path}: no index of shards (it has no weight_map)")
    shards = list(dict.fromkeys(where.values()))
    for shard in shards:
        if Path(shard).name != shard:  # an index may name its neighbours, nothing else
            raise FormatError(f"{path}: the shard {shard!r:.80} is not a file beside the index")
        if not (path.parent / shard).is_file():
            raise FormatError(f"{path}: the shard {shard} is missing")
    if _is_torch(path.parent / shards[0]):
        return torch_seam.flattened(_merge_torch(path, where, shards))
    tensors: dict[str, FileTensor] = {}
    metadata: dict[str, str] = {}
    for shard in shards:
        found, more = _read_safetensors(path.parent / shard, opened)
        _complete(path, shard, found, where)
        tensors |= found
        metadata |= more
    return _assemble(path, {name: tensors[name] for name in where}, metadata)


def _merge_torch(path: Path, where: Mapping[str, str], shards: Sequence[str]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for shard in shards:
        state = _load_torch(path.parent / shard)
        if not isinstance(state, dict):
            raise FormatError(f"{path.parent / shard}: a shard holds a dict of tensors, not a {type(state).__name__}")
        _complete(path, shard, state, where)
        merged |= state
    return {name: merged[name] for name in where}


def _complete(path: Path, shard: str, found: Mapping[str, Any], where: Mapping[str, str]) -> None:
    if missing := [name for name, file in where.items() if file == shard and name not in found]:
        raise FormatError(f"{path}: the shard {shard} has no tensor {missing[0]!r:.80}")
