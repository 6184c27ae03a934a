"""Read the ``.metadata`` of a folder of ``torch.distributed.checkpoint``, which is a pickle, without running any of it.

The unpickler knows the classes of that file by name, and makes plain records in their place. Any other name is refused.
Neither torch nor any class of it is imported.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ckptstore.errors import FormatError, UnsupportedStateError
from ckptstore.frameworks.dcp_items import DcpItem, DcpTensor

__all__ = ["DcpMetadata", "read_dcp_metadata"]

_LIMIT: Final = 1 << 30
_DIMENSIONS: Final = 64
_RECORDS: Final = {
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
        }
    ),
    # Megatron-LM adds plans to the description. They are not needed.
    "torch.distributed.checkpoint.planner": frozenset({"SavePlan", "TensorWriteData", "WriteItem"}),
    "megatron.core.dist_checkpointing.strategies.torch": frozenset({"MCoreMetadata", "MCoreSavePlan"}),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo", "_StoragePrefix"}),
}


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """What a folder holds.

    Attributes:
        names: DCP's names, in the order of the description.
        tensors, values: by these names.
        paths: name -> its keys in the nested state; empty for a name that has no path.
    """

    names: tuple[str, ...]
    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, DcpItem]
    paths: Mapping[str, tuple[str | int, ...]]


class _Record:
    """Stands for an object of a class that is known by name.

    Attributes:
        kind: the name of the class.
        fields: its attributes.
    """

    kind = ""

    fields: dict[Any, Any]

    def __new__(cls, *_arguments: Any) -> _Record:
        """Take whatever arguments the pickle has."""
        made = super().__new__(cls)
        made.fields = {}
        return made

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.fields = {str(name): value for name, value in state.items()}
        elif isinstance(state, tuple):
            self.fields = dict(enumerate(state))  # TensorProperties


class _Dtype(str):
    """torch's name of a dtype."""

    __slots__ = ()


def _record_class(name: str) -> type[_Record]:
    return type(name, (_Record,), {"kind": name})


def _size(*arguments: Any) -> tuple[int, ...]:
    """``torch.Size``."""
    lengths = tuple(arguments[0]) if len(arguments) == 1 else ()
    if len(lengths) > _DIMENSIONS or not all(type(one) is int and 0 <= one < 2**48 for one in lengths):
        raise FormatError(f"an invalid shape: {lengths!r:.80}")
    return lengths


def _ignored(*_arguments: Any) -> None:
    """A value that is not needed: a layout, a memory format, a path."""


_CALLS: Final[dict[tuple[str, str], Callable[..., Any]]] = {
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _ignored,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _ignored,
    ("torch.distributed.checkpoint.planner", "WriteItemType"): _ignored,
    ("collections", "OrderedDict"): OrderedDict,
    **{
        (module, name): _ignored
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}


class _Unpickler(pickle.Unpickler):
    """Makes records of known names, and refuses all others."""

    def find_class(self, module: str, name: str, /) -> Any:
        """What stands for a global of the pickle."""
        if name in _RECORDS.get(module, ()):
            return _record_class(name)
        if (found := _CALLS.get((module, name))) is not None:
            return found
        if module == "torch" and name.isidentifier() and name.islower():
            return _Dtype(name)
        raise UnsupportedStateError(
            f"it refers to {module}.{name}, which a description of a checkpoint does not need: it is not loaded"
        )


def read_dcp_metadata(path: Path) -> DcpMetadata:
    """Read a ``.metadata`` file.

    Raises:
        FormatError: it is damaged, or not of that form.
        UnsupportedStateError: it refers to something that only running code could make.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        if path.stat().st_size > _LIMIT:
            raise FormatError(f"{path}: too long for the description of a checkpoint")
        try:
            found = _Unpickler(file).load()
        except (FormatError, UnsupportedStateError) as error:
            raise type(error)(f"{path}: {error}") from error
        except (OSError, MemoryError):
            raise
        except Exception as error:  # a damaged pickle raises errors of many kinds
            raise FormatError(f"{path}: not a description of a checkpoint, or damaged: {error!r:.200}") from error
    try:
        return _checked(found)
    except (FormatError, UnsupportedStateError) as error:
        raise type(error)(f"{path}: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path}: not a description of a checkpoint: {error!r:.200}") from error


def _checked(found: Any) -> DcpMetadata:
    _expect(found, "Metadata")
    items: dict[tuple[str, tuple[int, ...] | None], DcpItem] = {}
    for index, place in found.fields["storage_data"].items():
        _expect(index, "MetadataIndex")
        items[index.fields["fqn"], index.fields.get("offset")] = _item(index.fields["fqn"], place)
    tensors: dict[str, DcpTensor] = {}
    values: dict[str, DcpItem] = {}
    for name, said in found.fields["state_dict_metadata"].items():
        if not isinstance(name, str):
            raise FormatError(f"an invalid name: {name!r:.80}")
        if getattr(said, "kind", "") == "BytesStorageMetadata":
            values[name] = items[name, None]
        else:
            tensors[name] = _tensor(name, said, items)
    paths = found.fields.get("planner_data")
    return DcpMetadata(
        tuple(found.fields["state_dict_metadata"]),
        tensors,
        values,
        {} if paths is None else {name: _path(one) for name, one in paths.items()},
    )


def _expect(value: Any, kind: str) -> None:
    if getattr(value, "kind", "") != kind:
        raise FormatError(f"expected {kind}, not {value!r:.80}")


def _item(name: str, place: Any) -> DcpItem:
    _expect(place, "_StorageInfo")
    if place.fields.get("transform_descriptors"):
        raise UnsupportedStateError(
            f"{name} was written through an extension ({place.fields['transform_descriptors']!r:.80}): save it without"
        )
    file, offset, length = (place.fields[one] for one in ("relative_path", "offset", "length"))
    named = isinstance(file, str) and Path(file).name == file and file not in ("", "..") and "\0" not in file
    if not named or not all(type(one) is int and one >= 0 for one in (offset, length)):
        raise FormatError(
            f"{name} has an invalid place: file {file!r:.80}, {length!r:.20} bytes from byte {offset!r:.20}"
        )
    return DcpItem(file, offset, length)


def _tensor(name: str, said: Any, items: Mapping[tuple[str, tuple[int, ...] | None], DcpItem]) -> DcpTensor:
    _expect(said, "TensorStorageMetadata")
    properties, shape = said.fields["properties"], said.fields["size"]
    _expect(properties, "TensorProperties")
    dtype = properties.fields.get(0, properties.fields.get("dtype"))  # the first of a tuple
    if not isinstance(dtype, _Dtype) or not isinstance(shape, tuple):
        raise FormatError(f"{name} has the dtype {dtype!r:.80} and the shape {shape!r:.80}")
    boxes = []
    for chunk in said.fields["chunks"]:
        _expect(chunk, "ChunkStorageMetadata")
        begin, size = chunk.fields["offsets"], chunk.fields["sizes"]
        if not len(begin) == len(size) == len(shape) or any(
            first + length > whole for first, length, whole in zip(begin, size, shape, strict=True)
        ):
            raise FormatError(f"{name}: a box at {begin!r:.80} of {size!r:.80} is not in a tensor of {shape!r:.80}")
        item = items.get((name, begin)) or items[name, None]
        boxes.append(DcpItem(item.file, item.offset, item.length, begin, size))
    return DcpTensor(str(dtype), shape, tuple(boxes))


def _path(keys: Any) -> tuple[str | int, ...]:
    if not isinstance(keys, tuple) or not all(type(key) in (str, int) for key in keys):
        raise FormatError(f"an invalid path in the state: {keys!r:.80}")
    return keys
