"""Open a folder of ``torch.distributed.checkpoint`` as a nested state, one tensor in memory at a time."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from ckptstore.errors import FormatError, MissingDependencyError, UnsupportedStateError, UsageError
from ckptstore.exchange.dcp_metadata import DcpMetadata, read_dcp_metadata
from ckptstore.exchange.safetensors_files import TensorInFiles
from ckptstore.exchange.weight_files import OpenedFile, flattened, load_file
from ckptstore.formats import dtypes
from ckptstore.formats.segment_files.boxes import Box, gap, overlapping
from ckptstore.formats.states.state import Origin
from ckptstore.frameworks.dcp_items import DcpItem, DcpTensor
from ckptstore.frameworks.inert_pickles import KeyChoice
from ckptstore.host.buffers import Bytes

__all__ = ["DCP_METADATA", "is_dcp_folder", "open_dcp_folder"]

DCP_METADATA: Final = ".metadata"
_COMPANIONS: Final = ("meta.pt", "common.pt")
"""Files of torch.save that Lightning and Megatron-LM write beside the files of DCP."""
_MOST_HOLES: Final = 1 << 16
"""Elements of a list that may be missing, as where a rank saved a part of it."""


class _DcpSource(TensorInFiles):
    """A tensor in the boxes of such a folder, as a `TensorSource`. A read puts the whole tensor together."""

    def __init__(self, folder: Path, name: str, said: DcpTensor, files: ModuleType) -> None:
        self.dtype: str = files.dtype_name(said.dtype)
        self.shape = said.shape
        self.nbytes = dtypes.nbytes(dtypes.get(self.dtype), said.shape)
        self.origin: Origin = "torch"
        self.identity: Hashable = (folder, name)
        self._folder = folder
        self._name = name
        self._said = said
        self._files = files

    def view(self) -> Bytes | None:
        """None: it is not in memory."""
        return None

    def read(self, offset: int, out: Bytes) -> None:
        """Fill `out` from byte `offset` of the tensor.

        Raises:
            FormatError, CorruptionError, UnsupportedStateError: a box is damaged, or has another form than described.
            StorageError: it cannot be read.
        """
        _newest.of(self).read(offset, out)

    def whole(self) -> Any:
        """The tensor, as a source in memory."""
        return self._files.joined(self._folder, self._name, self._said.dtype, self.shape, self._said.boxes)


class _Newest:
    """Keeps the tensor that was read last, because a tensor is read piece by piece."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._source: _DcpSource | None = None
        self._whole: Any = None

    def of(self, source: _DcpSource) -> Any:
        """The tensor of a source in memory."""
        with self._lock:
            if self._source is not source:
                self._whole = None  # first: two tensors need twice the memory
                self._whole, self._source = source.whole(), source
            return self._whole

    def clear(self) -> None:
        """Free the memory."""
        with self._lock:
            self._source = self._whole = None


_newest: Final = _Newest()


def is_dcp_folder(folder: Path) -> bool:
    """Whether ``dcp.save`` wrote a folder."""
    return (folder / DCP_METADATA).is_file() and not (folder / "FORMAT").exists()


def open_dcp_folder(folder: Path, leave_out: Sequence[str] = (), choice: KeyChoice | None = None) -> OpenedFile:
    """Open a folder that ``dcp.save`` wrote, also one of Lightning or Megatron-LM, which add a file of torch.save.

    Args:
        leave_out: globs of DCP's names (``optimizer.state.*``), and of files beside those of DCP.
        choice: globs of DCP's names, too, and of keys in the other file.

    Raises:
        UnsupportedStateError: values would need pickled code and are not left out. The message names them.
        FormatError, CorruptionError: a file is damaged or missing, or boxes leave a part of a tensor out.
        MissingDependencyError: torch is not installed.
        OSError: a file cannot be read.
    """
    try:
        from ckptstore.frameworks import torch_dcp_files
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{folder} was written by torch.distributed.checkpoint; reading it needs: pip install 'ckptstore[torch]'"
        ) from error
    said = read_dcp_metadata(folder / DCP_METADATA)
    names = said.names
    globs = [*leave_out, *(choice.leave_out if choice else ())]
    left_out = [name for name in names if any(fnmatchcase(name, glob) for glob in globs)]
    kept = [name for name in names if name not in set(left_out)]
    if not kept:
        raise UsageError(f"{folder}: nothing is left to import")
    found: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for name in kept:
        try:
            if name in said.tensors:
                _check_covered(folder, name, said.tensors[name])
                found[name] = _DcpSource(folder, name, said.tensors[name], torch_dcp_files)
            else:
                found[name] = torch_dcp_files.value_of(folder, said.values[name])
        except UnsupportedStateError as error:
            refused[name] = str(error)
    if refused:
        raise _refusal(folder, refused)
    files = [folder / name for name in dict.fromkeys(_files(said, kept))]
    state = _nested(found, said)
    for file in sorted(folder.iterdir()):
        if file in files or file.suffix == ".distcp":
            continue
        if file.name in _COMPANIONS and not any(fnmatchcase(file.name, glob) for glob in globs):
            state = _joined(state, file, choice)
            files.append(file)
        else:
            left_out.append(file.name)
    left_out += choice.left_out if choice else []
    opened = ExitStack()
    opened.callback(_newest.clear)
    return OpenedFile(folder, flattened(folder, state), tuple(files), opened, tuple(left_out))


def _joined(state: Any, file: Path, choice: KeyChoice | None) -> Any:
    """The state with the members of a file beside DCP's."""
    more = load_file(file, ExitStack(), choice, nested=True)
    if not isinstance(more, dict) or not isinstance(state, dict):
        raise FormatError(f"{file} is not a dict, as a file in a DCP folder must be")
    if twice := [key for key in more if key in state]:
        raise FormatError(f"{file}: the key {twice[0]!r:.80} is also in the folder's .metadata")
    return state | more


def _files(said: DcpMetadata, kept: Sequence[str]) -> list[str]:
    items: list[DcpItem] = []
    for name in kept:
        items += said.tensors[name].boxes if name in said.tensors else [said.values[name]]
    return [DCP_METADATA, *(item.file for item in items)]


def _refusal(folder: Path, refused: dict[str, str]) -> UnsupportedStateError:
    each = "; ".join(f"{name}: {why}" for name, why in list(refused.items())[:10])
    error = UnsupportedStateError(f"{folder}: cannot be imported whole: {each}")
    error.add_note("to import the rest: " + " ".join(f"--leave-out {name!r}" for name in refused))
    return error


def _check_covered(folder: Path, name: str, said: DcpTensor) -> None:
    """Raise `FormatError` unless each element of the tensor is in exactly one box."""
    boxes = [box for one in said.boxes if (box := Box(one.begin, one.shape)).size]
    if pair := overlapping(boxes):
        raise FormatError(f"{folder}: {name}: the box {boxes[pair[1]]} overlaps {boxes[pair[0]]}")
    if (missing := gap(said.shape, boxes)) is not None and missing.size:
        raise FormatError(f"{folder}: {name}: elements {missing} of {list(said.shape)} are in none of its boxes")


class _Node(dict[str | int, Any]):
    """A dict or list of the state that is being put together; values that are dicts are none."""


def _nested(found: Mapping[str, Any], said: DcpMetadata) -> Any:
    """The state that was saved: DCP's names by their paths."""
    root = _Node()
    for name, value in found.items():
        *above, last = said.paths.get(name) or (name,)
        place = root
        for key in above:
            place = place.setdefault(key, _Node())
            if not isinstance(place, _Node):
                raise FormatError(f"{name} is inside a value that is not a container, at {key!r:.80}")
        if last in place:
            raise FormatError(f"two names have the path of {name}")
        place[last] = value
    return _plain(root)


def _plain(value: Any) -> Any:
    """Nodes as dicts. A node with numbers as keys is a list; an element that was not stored is None."""
    if not isinstance(value, _Node):
        return value
    if value and all(isinstance(key, int) for key in value):
        last = max(int(key) for key in value)
        if min(int(key) for key in value) < 0 or last >= 2 * len(value) + _MOST_HOLES:
            raise FormatError(f"a list has {len(value)} elements, and one at {last}")
        return [_plain(value.get(number)) for number in range(last + 1)]
    return {key: _plain(one) for key, one in value.items()}
