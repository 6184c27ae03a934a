"""Saves through ``torch.distributed.checkpoint``: each rank's items become its share of one checkpoint.

::

    dcp.save(state, storage_writer=CkptstoreWriter("runs/gpt", step=100))

All calls of a process share one writer of the store, so ten saves are one term, and each may be a delta against the one
before. Nothing is pickled if a state can hold it (numbers, texts, lists, dicts, tensors ...). Anything else is stored
as the bytes that DCP's planner makes of it, which are a pickle.
"""

from __future__ import annotations

import io
import math
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

import ckptstore
from ckptstore.backends.store_names import canonical
from ckptstore.errors import CkptError, UsageError, WriterError
from ckptstore.formats.states.dcp_member import ABOUT, piece_name
from ckptstore.integrations.dcp.checkpoint_ids import CheckpointPlace, names_store, place_of
from ckptstore.integrations.dcp.host_copy import HostCopy, Pairs
from ckptstore.integrations.dcp.save_turns import SaveTurn, turns_of
from ckptstore.integrations.dcp.staged_updates import StagedUpdates
from ckptstore.integrations.dcp.stored_form import as_bytes, planner_form, tensors_in
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.store.open_store import open as open_store
from ckptstore.write import writer_opening
from ckptstore.write.ranks import rank_writer_factory
from ckptstore.write.saves import ledger
from ckptstore.write.steps.updates import Updates
from ckptstore.write.writer import Writer

__all__ = ["CkptstoreWriter"]

_WORLD: Final = "world"
_ENGINE: Final = (writer_opening, rank_writer_factory)
"""What the first save needs. Imported here because training waits for that save, and not for this import."""


class _Call(threading.local):
    """What DCP's calls for one save have said. All of them come from one thread, but for `CkptstoreWriter.stage`."""

    checkpoint_id: str | os.PathLike[str] | None = None
    place: CheckpointPlace | None = None
    turn: SaveTurn | None = None


class CkptstoreWriter(StorageWriter, BlockingAsyncStager):
    """Writes what ``dcp.save`` and ``dcp.async_save`` pass on as one checkpoint of a store.

    ``async_save`` copies the state by this class, as by torch's own writer, unless it is given an ``async_stager``. An
    object may be used again, but has one asynchronous save in flight at most: make one for each save.

    Attributes:
        saved: the checkpoint of the last save, on each rank; None before it.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | None = None,
        step: int | None = None,
        *,
        replace: bool = False,
        group: Any = _WORLD,
        metadata: ledger.Metadata | None = None,
        tags: str | Sequence[str] = (),
        storage_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Nothing is opened before the first save, so that the object can be sent to another process.

        Args:
            store: path or URL. None: ``checkpoint_id`` names it, as ``runs/gpt/100`` or ``ckpt://runs/gpt/step-100``.
            step: the step of the checkpoint. None: ``checkpoint_id`` names it, else it is the next one.
            replace: allow to save the newest step again, as `FileSystemWriter` does; `step` or ``checkpoint_id`` has
                to name it. See `Writer.save`.
            group: the process group whose ranks save together, the same that ``dcp.save`` uses. None: this process
                alone, as with ``no_dist=True``. ``world``: all ranks, if `torch.distributed` is initialised.
            metadata, tags: see `Writer.save`. A function is not called before the shares of all ranks are durable.
            storage_options: see `ckptstore.open`.
            options: those of `Store.writer`, such as ``deltas``, ``keep`` and ``max_in_flight``. And
                ``cache_staged_state_dict`` (True): keep the memory of the copy that ``async_save`` makes, for the next
                save of the store. It is pinned for tensors of a CUDA device. False: each save takes new memory. And
                ``updates`` of `Writer.save`: what the optimizer did in this one step, as ``OptimizerStep(optimizer)``.
                With ``diffs`` the save may then be a step diff against the one before.

        Raises:
            UsageError: `group` is neither a group, None, nor ``world``.
        """
        if isinstance(group, str) and group != _WORLD:
            raise UsageError(f"group={group!r:.80}: expected a process group, None, or {_WORLD!r}")
        BlockingAsyncStager.__init__(self)
        self._url = None if store is None else os.fspath(store)
        self._step = step
        self._replace = replace
        self._group = group
        self._keeps_copy = bool(options.pop("cache_staged_state_dict", True))
        self._labels = {"metadata": metadata, "tags": tags}
        self._updates: Updates | None = options.pop("updates", None)
        self._storage_options = storage_options
        self._options = options
        self._call = _Call()
        self._staged: SaveTurn | None = None
        self._in_flight: weakref.ref[SaveTurn] | None = None
        self.saved: CheckpointInfo | None = None

    # -- DCP's interface

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A save begins. See `place_of` for `checkpoint_id`."""
        self._call.checkpoint_id = checkpoint_id
        self._call.place = self._call.turn = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Find out which store and step it is."""
        del is_coordinator, args, kwargs
        # From here on the turn belongs to this thread: if the planner fails, it ends with the thread.
        self._call.turn, self._staged = self._staged, None
        self._call.place = self._find_place()

    def storage_meta(self) -> StorageMeta | None:
        """The ``checkpoint_id``."""
        found = self._call.checkpoint_id
        return StorageMeta(checkpoint_id=found if found is not None else self._url)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan, unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans, with the names of tensors that are stored as pieces."""
        pieces = frozenset(name for plan in plans for name in _not_one_box(plan))
        return [replace(plan, storage_data=pieces) for plan in plans]

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state for ``async_save``. The saves of a store are written in the order of these calls.

        DCP does not say here which ``checkpoint_id`` it is: so saves whose store only that names wait for each other.

        Raises:
            UsageError: the last asynchronous save of this object is in flight.
        """
        before = None if self._in_flight is None else self._in_flight()
        if before is not None and not before.over:
            raise UsageError(
                "this CkptstoreWriter has an asynchronous save in flight: make a CkptstoreWriter for each save (they "
                "share the writer of the store), or wait for the result first"
            )
        del before
        turns = turns_of("" if self._url is None else canonical(self._url))
        self._staged = turn = turns.take()
        self._in_flight = weakref.ref(turn)
        if not self._keeps_copy and self._updates is None:
            return super().stage(state_dict)
        pairs: Pairs = []
        copy = turns.idle_copy() if self._keeps_copy else HostCopy()
        found = copy.fill(state_dict, None if self._updates is None else pairs)
        if self._keeps_copy:
            turn.copy = copy
        if self._updates is not None:
            turn.updates = StagedUpdates(self._updates, pairs)
        return found

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save this rank's items. The checkpoint is durable and committed when this returns, on all ranks.

        Raises:
            as `Writer.save`; an error of one rank is a `RankError` on all others.
        """
        turn, self._call.turn = self._call.turn, None
        if turn is None:
            return self._written(plan, planner, self._updates)
        with turn:
            return self._written(plan, planner, turn.updates)

    def _written(self, plan: SavePlan, planner: SavePlanner, updates: Updates | None) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        writer = self._writer()
        try:
            state = _state(plan, planner)
        except Exception as error:
            self._give_up(writer, error)
            raise
        step = self._find_place().step
        self.saved = writer.save(state, step, updates=updates, replace=self._replace, **self._labels)  # type: ignore[arg-type]
        done.set_result([WriteResult(item.index, _nbytes(item), None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing is left to do: the checkpoint says by itself what it holds."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a store. DCP asks this only of its own classes."""
        return names_store(checkpoint_id)

    # -- the store

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """What DCP passed on for the save that this thread makes."""
        return self._call.checkpoint_id

    def _find_place(self) -> CheckpointPlace:
        return self._call.place or place_of(self._call.checkpoint_id, self._url, self._step)

    def _writer(self) -> Writer:
        store = _opened(self._find_place().url, self._storage_options)
        group = self._group
        if isinstance(group, str):
            group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if group is not None and dist.get_world_size(group) == 1:
            group = None
        writer: Writer = store.writer(group=group, reuse=True, **self._options)
        return writer

    def _give_up(self, writer: Writer, error: Exception) -> None:
        """Tell the other ranks that this one has no share."""
        if isinstance(writer, ckptstore.RankWriter):
            why = error if isinstance(error, CkptError) else WriterError(f"DCP's planner failed: {error!r}")
            writer.forgo(self._find_place().step, why, replace=self._replace)

    def __getstate__(self) -> dict[str, Any]:
        """For a process of its own: it has the save that is sent, and this object has none in flight any more.

        Raises:
            UsageError: it has ``updates``, which are of tensors of this process.
        """
        if self._updates is not None:
            raise UsageError("updates= cannot be sent to another process: use async_save by a thread, the default")
        if self._staged is not None:
            # Its copy is not given back: the other process reads that memory.
            self._staged.end()
            self._staged = None
        return {**self.__dict__, "_call": None, "_in_flight": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._call = _Call()


_opened_before: Final[dict[str, ckptstore.Store]] = {}
_MOST_OPENED: Final = 8


def _opened(url: str, storage_options: Mapping[str, Any] | None) -> ckptstore.Store:
    """The store at a path or URL. `Store.writer` with ``reuse`` reads the medium anew, whatever this handle knows."""
    if storage_options or ("://" not in url and not Path(url).is_absolute()):  # another folder after `os.chdir`
        return open_store(url, storage_options=storage_options)
    if (found := _opened_before.get(url)) is None:
        if len(_opened_before) >= _MOST_OPENED:
            _opened_before.clear()
        found = _opened_before[url] = open_store(url)
    return found


def _state(plan: SavePlan, planner: SavePlanner) -> dict[str, Any]:
    """This rank's share of the state. See `stored_form`."""
    state, pieces = _tensors(plan, planner)
    opaque: dict[str, bool] = {}
    parts: dict[str, list[str]] = {}
    for item in plan.items:
        if item.type != WriteItemType.BYTE_IO:
            continue
        name = item.index.fqn
        inner: list[str] | None = None
        if _is_default(planner):
            value: Any = planner.lookup_object(item.index)
            inner = tensors_in(name, value)
        if inner is None:
            state[name], opaque[name] = _planned_bytes(item, planner), True
        else:
            state[name] = value
            if inner:
                parts[name] = inner
    if ABOUT in state:
        raise UsageError(f"{ABOUT!r} is reserved for the store: give the value another name")
    state[ABOUT] = {"planner": planner_form(plan.planner_data), "bytes": opaque, "parts": parts, "pieces": pieces}
    return state


def _planned_bytes(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    """What the planner makes of a value."""
    data = planner.resolve_data(item)
    assert isinstance(data, io.BytesIO)
    return as_bytes(data.getbuffer())


def _is_default(planner: SavePlanner) -> TypeGuard[DefaultSavePlanner]:
    """Whether the planner resolves values as DCP's own does: then the value itself can be asked for."""
    return isinstance(planner, DefaultSavePlanner) and all(
        getattr(type(planner), name) is getattr(DefaultSavePlanner, name)
        for name in ("resolve_data", "lookup_object", "transform_object")
    )


def _tensors(plan: SavePlan, planner: SavePlanner) -> tuple[dict[str, Any], dict[str, Any]]:
    """This rank's tensors and boxes of tensors by name, and the description of pieces (`stored_form`)."""
    found: dict[str, Any] = {}
    boxes: dict[str, list[ckptstore.Shard]] = {}
    pieces: dict[str, Any] = {}
    for item in plan.items:
        if item.type == WriteItemType.BYTE_IO:
            continue
        name, said, tensor = item.index.fqn, item.tensor_data, planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        assert said is not None
        tensor = tensor.detach()
        if name in (plan.storage_data or ()):
            piece = piece_name(name, said.chunk.offsets)
            found[piece] = tensor
            pieces.setdefault(name, {})[piece] = {"offset": list(said.chunk.offsets), "whole": list(said.size)}
        elif said.chunk.sizes == said.size:
            found[name] = tensor
        else:
            boxes.setdefault(name, []).append(ckptstore.Shard(tensor, tuple(said.size), tuple(said.chunk.offsets)))
    found |= {name: parts[0] if len(parts) == 1 else ckptstore.Shards(parts) for name, parts in boxes.items()}
    return found, pieces


def _not_one_box(plan: SavePlan) -> Iterator[str]:
    """Names of the tensors of which a rank has several boxes that are not one box together."""
    chunks: dict[str, list[ChunkStorageMetadata]] = {}
    for item in plan.items:
        if item.tensor_data is not None:
            chunks.setdefault(item.index.fqn, []).append(item.tensor_data.chunk)
    for name, found in chunks.items():
        dimensions = range(len(found[0].sizes))
        first = [min(one.offsets[at] for one in found) for at in dimensions]
        last = [max(one.offsets[at] + one.sizes[at] for one in found) for at in dimensions]
        together = math.prod(end - start for start, end in zip(first, last, strict=True))
        if len(found) > 1 and sum(math.prod(one.sizes) for one in found) != together:
            yield name


def _nbytes(item: WriteItem) -> int:
    return (item.tensor_storage_size() or 0) if item.tensor_data is not None else 0
