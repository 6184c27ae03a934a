"""Write a folder of ``torch.distributed.checkpoint`` with torch's own planner and writer, one file in memory at a time.

torch's `FileSystemWriter` makes all files, also the ``.metadata``. This module only plans what it writes, and supplies
the data of an item when the writer asks for it.
"""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ckptstore.errors import UnsupportedStateError
from ckptstore.formats.segment_files.boxes import Box
from ckptstore.frameworks.dcp_items import SuppliedBytes, SuppliedTensor
from ckptstore.frameworks.torch_tensors import from_buffer, torch_dtype

__all__ = ["flattened_as_dcp", "write_folder"]

Paths = Mapping[str, tuple[str | int, ...]]
"""DCP's name of an item -> its keys in the nested state."""
_SPARE: Final = 1 << 16


def flattened_as_dcp(state: Mapping[str, Any]) -> tuple[dict[str, Any], Paths]:
    """Flatten a nested state as ``dcp.save`` does: dicts, and lists that have tensors or dicts in them.

    Args:
        state: with `SuppliedTensor` in place of tensors.

    Raises:
        UnsupportedStateError: two places get one name.
    """
    supplied: dict[int, SuppliedTensor] = {}
    stand_ins: list[torch.Tensor] = []  # keeps the ids

    def stand_in(value: Any) -> Any:
        """A tensor without memory, by which torch sees where a tensor is."""
        if isinstance(value, SuppliedTensor):
            stand_ins.append(torch.empty(0, device="meta"))
            supplied[id(stand_ins[-1])] = value
            return stand_ins[-1]
        if isinstance(value, Mapping):
            return {key: stand_in(one) for key, one in value.items()}
        return [stand_in(one) for one in value] if type(value) is list else value

    planner = DefaultSavePlanner()
    try:
        planner.set_up_planner(stand_in(state), None, True)
    except ValueError as error:
        raise UnsupportedStateError(f"as a folder of DCP, which joins keys by dots: {error}") from error
    flat = {name: supplied.get(id(value), value) for name, value in planner.state_dict.items()}
    return flat, dict(planner.mappings)


def write_folder(folder: Path, flat: Mapping[str, Any], paths: Paths, limit: int) -> None:
    """Write a checkpoint that ``dcp.load`` reads into an empty folder, durably.

    Args:
        folder: the folder.
        flat: DCP's name -> `SuppliedTensor`, `SuppliedBytes`, a tensor in memory, or another value, which is pickled as
            ``dcp.save`` does.
        paths: for the description.
        limit: bytes of tensors in one file, which torch keeps in memory until then. A larger box gets its own.

    Raises:
        UnsupportedStateError: a value cannot be pickled, or a tensor is not dense.
        OSError: the folder cannot be written.
        anything that `read` of an item raises.
    """
    writer = FileSystemWriter(folder, sync_files=True, thread_count=1, per_thread_copy_ahead=0)
    planner = _Planner(flat)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own classes of storages
        plans = [SavePlan(items, planner_data=dict(paths)) for items in _by_size(_items(flat), limit)]
        writer.set_up_storage_writer(True)
        planner.set_up_planner({}, None, True)
        plans, metadata = planner.create_global_plan([writer.prepare_local_plan(plan) for plan in plans])
        plans = writer.prepare_global_plan(plans)
        with _system_errors():
            results = [writer.write_data(planner.finish_plan(plan), planner).wait() for plan in plans]
            writer.finish(metadata, results)


@contextlib.contextmanager
def _system_errors() -> Iterator[None]:
    """Raise the system's error where torch raises another one: it closes its archive, which it could not write."""
    try:
        yield
    except RuntimeError as error:
        reason = error.__context__
        while reason is not None and not isinstance(reason, OSError):
            reason = reason.__context__
        if reason is None:
            raise
        raise reason from error


class _Planner(DefaultSavePlanner):
    """Supplies each item when it is written."""

    def __init__(self, flat: Mapping[str, Any]) -> None:
        super().__init__()
        self._flat = flat

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The tensor of a box, or the bytes of a value."""
        name = write_item.index.fqn
        value = self._flat[name]
        if isinstance(value, SuppliedBytes):
            return io.BytesIO(value.read())
        if write_item.tensor_data is None:
            image = io.BytesIO()
            try:
                torch.save(value, image)
            except Exception as error:  # an object's own code may fail in any way
                raise UnsupportedStateError(f"{name}: cannot be a value of a DCP folder: {error!r:.200}") from error
            return image
        if isinstance(value, torch.Tensor):
            return value.detach()
        chunk = write_item.tensor_data.chunk
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        return from_buffer(value.dtype, box.shape, value.read(box))


def _items(flat: Mapping[str, Any]) -> Iterator[WriteItem]:
    for name, value in flat.items():
        if isinstance(value, SuppliedTensor):
            yield from _boxes(name, torch_dtype(value.dtype), value.shape, value.boxes)
        elif isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                raise UnsupportedStateError(f"{name}: DCP stores dense tensors, and this one is {value.layout}")
            yield from _boxes(name, value.dtype, tuple(value.shape), [Box.whole(tuple(value.shape))])
        else:
            yield WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)


def _boxes(name: str, dtype: torch.dtype, shape: Sequence[int], boxes: Sequence[Box]) -> Iterator[WriteItem]:
    kind = WriteItemType.TENSOR if len(boxes) == 1 else WriteItemType.SHARD
    for box in boxes:
        chunk = ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
        said = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(shape))
        yield WriteItem(MetadataIndex(name, chunk.offsets), kind, tensor_data=said)


def _by_size(items: Iterator[WriteItem], limit: int) -> list[list[WriteItem]]:
    """Groups of items, one for each file."""
    groups: list[list[WriteItem]] = [[]]
    size = 0
    for item in items:
        said = item.tensor_data
        nbytes = _SPARE if said is None else math.prod(said.chunk.sizes) * said.properties.dtype.itemsize
        if groups[-1] and size + nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += nbytes
    return groups
