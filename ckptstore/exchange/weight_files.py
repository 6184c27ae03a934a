"""Open checkpoint files of other tools as states: ``.safetensors``, a Hugging Face index of shards, ``.pt``.

Opening reads only headers. The writer reads a tensor's bytes when it needs them, so memory does not grow with the file.
The contents of these files are not trusted, and no pickled code is ever run.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, cast

import numpy as np

from ckptstore.errors import FormatError, MissingDependencyError, StorageError
from ckptstore.exchange.safetensors_files import (
    HEADER_LIMIT,
    FileTensor,
    TensorInFiles,
    file_in_errors,
    read_safetensors,
)
from ckptstore.formats import jsontext
from ckptstore.formats.states.state import (
    FlatState,
    NumpySource,
    Origin,
    Parts,
    Tagged,
    TensorSource,
    check_size,
    flatten,
    tensor_names,
    unflatten,
)
from ckptstore.frameworks import bridge
from ckptstore.frameworks.inert_pickles import KeyChoice

__all__ = [
    "CHECKPOINT_MEMBER",
    "STATE_MEMBER",
    "OpenedFile",
    "exported_ref",
    "flattened",
    "index_shards",
    "is_torch",
    "load_file",
    "open_file",
]

CHECKPOINT_MEMBER: Final = "ckptstore.checkpoint"
"""Member of an exported file's ``__metadata__``: the REF of the checkpoint."""
_FORMER_CHECKPOINT_MEMBER: Final = "ckptstore.log.checkpoints"
"""The member in files that earlier versions exported."""
STATE_MEMBER: Final = "ckptstore.state"
"""Member of an exported file's ``__metadata__``: the typed JSON tree of the state (SPEC section 3.1). With it an import
restores the whole state, not only its tensors."""

_INDEX_LIMIT: Final = 64 << 20


@dataclass(slots=True)
class OpenedFile:
    """An opened checkpoint, as a state. Its sources stay readable until it is closed. A context manager.

    Attributes:
        path: the file or folder.
        flat: the state.
        files: the files that the state was taken from.
        opened: closes the files.
        left_out: names in a folder, and keys in files, that were left out.
    """

    path: Path
    flat: FlatState
    files: tuple[Path, ...]
    opened: ExitStack
    left_out: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Logical bytes of all tensors."""
        return sum(source.nbytes for source in self.flat.tensors.values())

    @property
    def file_bytes(self) -> int:
        """Total length of the files, in bytes."""
        return sum(file.stat().st_size for file in self.files)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.opened.close()


def exported_ref(metadata: Mapping[str, str]) -> str | None:
    """The REF of the checkpoint that a file was exported from, by its ``__metadata__``; None: it is not an export."""
    return metadata.get(CHECKPOINT_MEMBER, metadata.get(_FORMER_CHECKPOINT_MEMBER))


def open_file(path: Path, choice: KeyChoice | None = None) -> OpenedFile:
    """Open a checkpoint file. The format is detected from the contents, except that an index is named ``.json``.

    Args:
        path: the file.
        choice: parts of a torch file that are left out or taken as values.

    Raises:
        FormatError: the file has none of the formats, or is damaged.
        UnsupportedStateError: the file has a value that cannot be stored, or loading it would run pickled code.
        MissingDependencyError: the file needs torch, which is not installed.
        StorageError: the file cannot be read.
    """
    opened = ExitStack()
    try:
        state = load_file(path, opened, choice)
        flat = state if isinstance(state, FlatState) else flattened(path, state)
    except BaseException as error:
        opened.close()
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, StorageError):
            raise StorageError(error.errno, error.strerror, str(path)) from error
        raise
    shards = [path.parent / shard for shard in index_shards(path)] if path.suffix == ".json" else []
    return OpenedFile(path, flat, (path, *shards), opened, tuple(choice.left_out) if choice else ())


def load_file(path: Path, opened: ExitStack, choice: KeyChoice | None = None, *, nested: bool = False) -> Any:
    """Load the state of one file or index, for `flattened`. For an exported file: a `FlatState`, unless `nested`.

    Args:
        path: the file.
        opened: keeps the files open that the state reads from.
        choice: parts of a torch file that are left out or taken as values; files of other forms have no such parts.
        nested: the state will be a part of a larger state.

    Raises:
        CkptError: as `open_file`.
        OSError: the file cannot be read.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise FormatError(f"{path}: not a regular file")  # opening a pipe would wait for a writing process
    if path.suffix == ".json":
        return _load_index(path, opened, nested)
    if is_torch(path):
        return _load_torch(path, choice)
    return _exported_state(path, *read_safetensors(path, opened), nested)


def flattened(path: Path, state: Any) -> FlatState:
    """Flatten the state of a file. Raises `UnsupportedStateError` naming the file and the key path in it."""
    with file_in_errors(path):
        return flatten(state, _recognise)


def _recognise(value: object) -> TensorSource | Tagged | Parts | None:
    if isinstance(value, Tagged):
        return value
    if isinstance(value, TensorInFiles):
        return cast("TensorSource", value)  # its subclasses are sources
    if isinstance(value, np.ndarray) and type(value) is not np.ndarray:  # a `PickledArray` of `torch_files`
        return NumpySource(value.view(np.ndarray))
    if not bridge.torch_in_use():
        return None
    found: TensorSource | Tagged | Parts | None = bridge.tensors().recognise(value)
    return found


def is_torch(path: Path) -> bool:
    """Whether a file begins like a zip archive or a bare pickle of torch.save, and not like a safetensors file."""
    with path.open("rb") as file:
        head = file.read(9)
    return head[:2] == b"PK" or (head[:1] == b"\x80" and head[8:9] != b"{")


def _load_torch(path: Path, choice: KeyChoice | None = None) -> Any:
    try:
        from ckptstore.frameworks.torch_files import load
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{path} is a torch file; reading it needs: pip install 'ckptstore[torch]'"
        ) from error
    return load(path, choice)


def _exported_state(path: Path, tensors: Mapping[str, FileTensor], metadata: Mapping[str, str], nested: bool) -> Any:
    """The state that `ckpt restore` wrote, if the file has its tree. Otherwise a dict of the tensors by name."""
    if STATE_MEMBER not in metadata:
        return dict(tensors)
    text = metadata[STATE_MEMBER].encode(errors="surrogatepass")
    tree = jsontext.loads(text, what=f"{path}: {STATE_MEMBER}", max_bytes=HEADER_LIMIT)
    with file_in_errors(path):
        names = tensor_names(tree)
        if set(names) != tensors.keys():
            return dict(tensors)
        if not nested:
            check_size(tree)
            return FlatState(tree, {name: tensors[name] for name in names})

        def resolve(name: str, origin: Origin) -> FileTensor:
            tensors[name].origin = origin
            return tensors[name]

        return unflatten(tree, resolve, _TAGGED)


_TAGGED: Final = {tag: lambda value, tag=tag: Tagged(tag, value) for tag in ("$size", "$dtype", "$device")}


# an index of shards


def index_shards(path: Path) -> list[str]:
    """Names of the shards that an index lists; they are in its folder. Raises `FormatError` or `OSError`."""
    return list(dict.fromkeys(_weight_map(path).values()))


def _weight_map(path: Path) -> dict[str, str]:
    if path.stat().st_size > _INDEX_LIMIT:
        raise FormatError(f"{path}: too long for an index of shards")
    index = jsontext.loads(path.read_bytes(), what=str(path), max_bytes=_INDEX_LIMIT)
    where = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(where, dict) or not where or not all(isinstance(file, str) for file in where.values()):
        raise FormatError(f"{path}: not an index of shards (it has no weight_map)")
    for shard in dict.fromkeys(where.values()):
        if Path(shard).name != shard:  # an index may only name files in its own folder
            raise FormatError(f"{path}: the shard {shard!r:.80} is not a file in the folder of the index")
    return where


def _load_index(path: Path, opened: ExitStack, nested: bool) -> Any:
    where = _weight_map(path)
    shards = list(dict.fromkeys(where.values()))
    for shard in shards:
        if not (path.parent / shard).is_file():
            raise FormatError(f"{path}: the shard {shard} is missing")
    if is_torch(path.parent / shards[0]):
        return _merge_torch(path, where, shards)
    tensors: dict[str, FileTensor] = {}
    metadata: dict[str, str] = {}
    for shard in shards:
        found, more = read_safetensors(path.parent / shard, opened)
        _check_complete(path, shard, found, where)
        tensors |= found
        metadata |= more
    return _exported_state(path, {name: tensors[name] for name in where}, metadata, nested)


def _merge_torch(path: Path, where: Mapping[str, str], shards: Sequence[str]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for shard in shards:
        state = _load_torch(path.parent / shard)
        if not isinstance(state, dict):
            raise FormatError(f"{path.parent / shard}: a shard must be a dict, not a {type(state).__name__}")
        _check_complete(path, shard, state, where)
        merged |= state
    return {name: merged[name] for name in where}


def _check_complete(path: Path, shard: str, found: Mapping[str, Any], where: Mapping[str, str]) -> None:
    """Raise `FormatError` unless index and shard name the same tensors: others would be dropped silently."""
    if missing := [name for name, file in where.items() if file == shard and name not in found]:
        raise FormatError(f"{path}: the shard {shard} has no tensor {missing[0]!r:.80}")
    if unknown := [name for name in found if where.get(name) != shard]:
        raise FormatError(f"{path}: the index does not name {unknown[0]!r:.80}, which is in the shard {shard}")
