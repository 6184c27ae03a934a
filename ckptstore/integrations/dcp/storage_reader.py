"""Loads through ``torch.distributed.checkpoint``, from any checkpoint of a store, however its tensors were divided."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

import ckptstore
from ckptstore.errors import UsageError
from ckptstore.formats.states.dcp_member import ABOUT, piece_name
from ckptstore.frameworks.torch_tensors import torch_dtype
from ckptstore.integrations.dcp.checkpoint_ids import names_store, place_of
from ckptstore.integrations.dcp.stored_form import planner_data, values_by_name

__all__ = ["CkptstoreReader"]


class CkptstoreReader(StorageReader):
    """Reads for ``dcp.load`` from a store. Everything that is read is verified.

    Attributes:
        ref: the checkpoint that was read last, as STEP@TERM; None before.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | None = None,
        ref: str | int = "latest",
        *,
        unpickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            store: path or URL. None: ``checkpoint_id`` names it, as ``runs/gpt/100``, or ``runs/gpt`` for the newest.
            ref: which checkpoint, if ``checkpoint_id`` names none.
            unpickle: whether values that were stored as DCP's own bytes are passed to its planner, which unpickles
                them. Such a value can run any code: say this only of a store that you trust.
            storage_options: see `ckptstore.open`.
        """
        self._url = None if store is None else os.fspath(store)
        self._wanted = ref
        self._unpickle = unpickle
        self._storage_options = storage_options
        self.checkpoint_id: str | os.PathLike[str] | None = None
        self.ref: str | None = None
        self._store: ckptstore.Store | None = None
        self._values: dict[str, Any] = {}
        self._opaque: frozenset[str] = frozenset()
        self._parts: dict[str, list[str]] = {}
        self._pieces: dict[str, dict[str, Any]] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    # -- DCP's interface

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A load begins. See `place_of` for `checkpoint_id`."""
        self.checkpoint_id = checkpoint_id
        self._store = self.ref = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds: each tensor as one chunk, because any box of it can be read.

        Raises:
            CheckpointNotFoundError, StoreNotFoundError, CorruptLogError: see `Store.checkpoint`.
        """
        del args
        if kwargs:  # DCP asks for a rank's own metadata after the first call failed; that error says why
            raise UsageError("a store has one description of a checkpoint, not one for each rank")
        place = place_of(self.checkpoint_id, self._url, None)
        store = ckptstore.open(place.url, storage_options=self._storage_options)
        self.ref = store.checkpoint(self._wanted if place.step is None else place.step).ref
        self._store = store
        state = store.load(self.ref, select=[])
        about = state.pop(ABOUT, {}) if isinstance(state, dict) else {}
        self._opaque = frozenset(about.get("bytes", {}))
        self._parts = about.get("parts", {})
        self._values = dict(state.items() if about else values_by_name(state))
        self._pieces = about.get("pieces", {})
        inner = {name for names in self._parts.values() for name in names} | self._opaque
        tensors = {one.name: one for one in store.inspect(self.ref).tensors if one.name not in inner}
        described: dict[str, Any] = {
            name: _pieced({piece: (tensors.pop(piece), said) for piece, said in pieces.items()})
            for name, pieces in self._pieces.items()
        }
        described |= {name: _described(one) for name, one in tensors.items()}
        self._dtypes = {name: one.properties.dtype for name, one in described.items()}
        described |= {name: BytesStorageMetadata() for name in (*self._values, *self._opaque)}
        return Metadata(described, planner_data(about.get("planner", {})), {}, StorageMeta(self.checkpoint_id))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: `read_metadata` has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans, unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of the plan into the tensors of the planner.

        Raises:
            CorruptSegmentError, StorageError, TensorNotFoundError: see `Store.load`.
            UsageError: a value is stored as bytes of DCP's planner, and `unpickle` was not given.
        """
        assert self._store is not None
        assert self.ref is not None
        opaque = sorted({item.storage_index.fqn for item in plan.items} & self._opaque)
        if opaque and not self._unpickle:
            raise UsageError(
                f"{self._store.url}: {opaque[0]!r}{f' and {len(opaque) - 1} others' if opaque[1:] else ''} could only "
                "be stored as the pickle that DCP made, which can run any code when it is loaded; if you trust it, "
                "use CkptstoreReader(..., unpickle=True)"
            )
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._value(item.storage_index.fqn))
        self._read_tensors([item for item in plan.items if item.type == LoadItemType.TENSOR], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a store. DCP asks this only of its own classes."""
        return names_store(checkpoint_id)

    # -- one load

    def _value(self, name: str) -> io.BytesIO:
        """A value in the form that DCP's planners read: what `torch.save` writes, made here of what is stored."""
        assert self._store is not None
        assert self.ref is not None
        if name in self._opaque:
            return io.BytesIO(self._store.read_tensor(self.ref, name).tobytes())
        value = self._values.get(name)
        if parts := self._parts.get(name):
            value = self._store.load(self.ref, select=parts)[name]
        image = io.BytesIO()
        torch.save(value, image)
        image.seek(0)
        return image

    def _stored_box(self, item: ReadItem) -> tuple[str, tuple[tuple[int, int], ...]]:
        """The name and box of the stored tensor that an item reads."""
        name, chunk = item.storage_index.fqn, item.storage_index.offset or (0,) * len(item.lengths)
        if name in self._pieces:
            return piece_name(name, chunk), _box(item, (0,) * len(item.lengths))
        return name, _box(item, chunk)

    def _read_tensors(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        """Read boxes straight into the planner's tensors. A tensor of another dtype is cast, as DCP does."""
        assert self._store is not None
        assert self.ref is not None
        targets = [planner.resolve_tensor(item).detach() for item in items]
        stored = [self._dtypes[item.storage_index.fqn] for item in items]
        out = [
            one if one.dtype == dtype else torch.empty(one.shape, dtype=dtype)
            for one, dtype in zip(targets, stored, strict=True)
        ]
        self._store.read_boxes(self.ref, [self._stored_box(item) for item in items], out=out)
        for item, target, read in zip(items, targets, out, strict=True):
            if read is not target:
                target.copy_(read)
            planner.commit_tensor(item, target)


def _described(one: ckptstore.TensorDescription) -> TensorStorageMetadata:
    whole = torch.Size(one.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(whole)), whole)
    return TensorStorageMetadata(TensorProperties(dtype=torch_dtype(one.dtype)), whole, [chunk])


def _pieced(pieces: dict[str, tuple[ckptstore.TensorDescription, Mapping[str, Any]]]) -> TensorStorageMetadata:
    """The description of a tensor in pieces: (tensor, what the state says of it) of each."""
    chunks = [
        ChunkStorageMetadata(torch.Size(said["offset"]), torch.Size(stored.shape)) for stored, said in pieces.values()
    ]
    stored, said = next(iter(pieces.values()))
    return TensorStorageMetadata(TensorProperties(dtype=torch_dtype(stored.dtype)), torch.Size(said["whole"]), chunks)


def _box(item: ReadItem, before: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The box that an item reads, of a tensor in which DCP's chunk begins at `before`: (start, stop) by dimension."""
    starts = [first + offset for first, offset in zip(before, item.storage_offsets, strict=True)]
    return tuple((start, start + length) for start, length in zip(starts, item.lengths, strict=True))
