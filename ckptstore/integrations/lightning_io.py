"""Lightning's own checkpoints in a store: the `CheckpointIO` that ``Trainer(plugins=[...])`` takes."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from inspect import signature
from typing import Any, Final, Literal

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.plugins.io import CheckpointIO

from ckptstore import store as stores
from ckptstore.agent.protocol.state_hash import hash_of
from ckptstore.errors import CheckpointNotFoundError, UnsupportedStateError, UsageError
from ckptstore.formats.states.state import FlatState
from ckptstore.frameworks.bridge import flattened
from ckptstore.host.option_checks import whole
from ckptstore.host.threads import started_pool
from ckptstore.integrations.lightning_names import free_tag, read_marker, remove_marker, write_marker
from ckptstore.integrations.lightning_values import as_saved, as_state
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.store import Store
from ckptstore.write.policy.delta_options import DeltaOptions
from ckptstore.write.saves.ledger import PendingSave
from ckptstore.write.writer import Writer

__all__ = ["CkptstoreIO"]

_KEEP: Final = ("tagged",)
_LOADABLE: Final = (str, torch.device)


class CkptstoreIO(CheckpointIO):
    """Stores what Lightning saves as checkpoints of one store: ``Trainer(plugins=[CkptstoreIO("runs/gpt-best")])``.

    Each path is a tag of a checkpoint. At the path there is a text file that names the store and the tag. A path that
    is saved again moves its tag to a new checkpoint; nothing is overwritten. Checkpoints without a tag are retired by
    the next save (the rule ``tagged``), so such a store holds only what Lightning saved.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        asynchronous: bool = False,
        max_in_flight: int = 1,
        deltas: DeltaOptions | Literal["auto"] | int | None = None,
    ) -> None:
        """
        Args:
            store: a path or URL, or a store.
            asynchronous: copy the state, and write it while training continues. An error is raised by the next save,
                or at the end of ``fit``.
            max_in_flight: how many saves may be in flight; each takes memory for one state.
            deltas: store what differs from an earlier checkpoint, as `Store.writer` does.

        Raises:
            UsageError: an invalid option.
            as `ckptstore.open`.
        """
        super().__init__()
        whole("max_in_flight", max_in_flight, 1)
        self.store = store if isinstance(store, Store) else stores.open(store)
        self._asynchronous = asynchronous
        self._max_in_flight = max_in_flight
        self._deltas = deltas
        self._writer: Writer | None = None
        self._parent: str | None = None  # what was loaded last: what is saved next continues from it
        self._last: tuple[int, int, PendingSave | CheckpointInfo] | None = None  # the trainer's step, ours, the save
        self._pending: list[tuple[PendingSave, str, str]] = []  # with path and tag
        self._unnamed: set[tuple[str, str]] = set()  # path and tag whose file is to be written
        self._naming = threading.Lock()
        self._given: dict[str, str] = {}  # path -> tag, of this writer
        self._unwanted: list[str] = []  # tags
        self._removed = False

    # -- what Lightning calls

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Store a checkpoint, and name it by `path`.

        Raises:
            UnsupportedStateError: a value cannot be stored; it names its key.
            UsageError: `storage_options`.
            as `Writer.save`; with ``asynchronous`` the error of an earlier save.
        """
        if storage_options is not None:
            raise UsageError("storage_options: pass CkptstoreIO(ckptstore.open(PATH, storage_options=...)) instead")
        name = _absolute(path)
        flat = _flat(checkpoint)
        writer = self._open()
        self._settle(self._max_in_flight - 1)
        self._remove_unwanted(writer)
        tag = self._tag_of(name)
        trainer_step = int(checkpoint.get("global_step", 0))
        if (same := self._same(trainer_step, flat)) is not None:
            writer.tag(tag, same)
            self._named(name, tag)
            return
        step = max(trainer_step, 0 if self._last is None else self._last[1] + 1, self._above(writer))
        said = {"global_step": trainer_step, "epoch": int(checkpoint.get("epoch", 0)), "path": name}
        metadata = {"lightning": said}
        if self._asynchronous:
            pending = writer.save_async(flat, step, metadata=metadata, tags=tag)
            self._last = (trainer_step, step, pending)
            self._given[name] = tag
            self._pending.append((pending, name, tag))
            self._unnamed.add((name, tag))
            pending.when_done(lambda durable: self._durable(name, tag) if durable else None)
        else:
            self._last = (trainer_step, step, writer.save(flat, step, metadata=metadata, tags=tag))
            self._named(name, tag)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load what was saved under `path`, or the checkpoint of a REF, or a file that Lightning itself had written.

        Args:
            map_location: a device. Functions and dicts do not apply: tensors are on the host.
            weights_only: no checkpoint of a store runs code; it matters only for Lightning's own files.

        Raises:
            FileNotFoundError: nothing was saved there.
            as `Store.load`.
        """
        self._settle(0)
        name = _absolute(path)
        found = self._find(name, os.fspath(path))
        if found is None:
            loaded: dict[str, Any]
            if weights_only is None:
                loaded = TorchCheckpointIO().load_checkpoint(name, map_location)
            elif "weights_only" in signature(TorchCheckpointIO.load_checkpoint).parameters:
                loaded = TorchCheckpointIO().load_checkpoint(name, map_location, weights_only)
            else:  # Lightning 2.5
                loaded = torch.load(name, map_location=map_location, weights_only=weights_only)
            return loaded
        self._parent = found.ref
        device = map_location if isinstance(map_location, _LOADABLE) else None
        state: dict[str, Any] = as_saved(self.store.load(found.ref, framework="torch", device=device))
        return state

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a path's name; the checkpoint is retired unless another path names it, or others build on it."""
        name = _absolute(path)
        if os.path.islink(name):  # noqa: PTH114  # ModelCheckpoint(save_last="link")
            remove_marker(name)
            return
        tag = self._given.pop(name, None) or self._marked(name)
        remove_marker(name)
        if tag is not None:
            self._unwanted.append(tag)
            if not self._asynchronous:
                self._remove_unwanted(self._open())

    def teardown(self) -> None:
        """Make all saves durable, and end the term. Raises the error of a save that failed."""
        writer, removed = self._writer, self._removed
        try:
            if writer is not None:
                self._settle(0)
                self._remove_unwanted(writer)
        finally:
            self._writer, self._parent, self._last, self._removed = None, None, None, False
            self._pending, self._given, self._unwanted, self._unnamed = [], {}, [], set()
            if writer is not None:
                writer.close()
        if removed:
            self.store.gc()

    # -- a save

    def _open(self) -> Writer:
        if self._writer is None:
            newest = self.store.latest_step()
            parent = None if newest is None else (self._parent or "latest")
            options: Any = {"max_in_flight": self._max_in_flight, "deltas": self._deltas, "keep": _KEEP}
            self._writer = self.store.writer(parent, **options)
        return self._writer

    def _above(self, writer: Writer) -> int:
        """The first step that may follow."""
        return 0 if writer.parent is None else writer.parent.step + 1

    def _same(self, trainer_step: int, flat: FlatState) -> CheckpointInfo | None:
        """The checkpoint of this step that was saved last, if it has the same content.

        Tensors on a device are not compared.
        """
        if self._last is None or self._last[0] != trainer_step:
            return None
        if any(one.view() is None for one in flat.tensors.values()):
            return None
        saved = self._last[2]
        info = saved.result() if isinstance(saved, PendingSave) else saved
        with started_pool(2, "ckptstore-lightning") as pool:
            return info if hash_of(flat, pool) == info.state else None

    def _durable(self, name: str, tag: str) -> None:
        """A save in flight is durable: write the file that names it, unless it is there, or was removed meanwhile."""
        with self._naming:
            if self._given.get(name) == tag and (name, tag) in self._unnamed:
                write_marker(name, self.store, tag)
            self._unnamed.discard((name, tag))

    def _settle(self, most: int) -> None:
        """Wait until at most `most` saves are in flight. Raises the error of one that failed."""
        while self._pending and (len(self._pending) > most or self._pending[0][0].done()):
            pending, name, tag = self._pending.pop(0)
            pending.result()
            self._durable(name, tag)  # if the thread that wrote it could not, or has not yet

    def _remove_unwanted(self, writer: Writer) -> None:
        if self._pending:
            return  # it would wait for them
        unwanted, self._unwanted = self._unwanted, []
        for tag in unwanted:
            try:
                writer.untag(tag)
            except CheckpointNotFoundError:
                continue  # somebody removed it
            self._removed = True

    # -- names

    def _tag_of(self, name: str) -> str:
        """The tag of a path: its own, or a new one."""
        if (tag := self._given.get(name) or self._marked(name)) is not None:
            return tag
        tags = self.store.tags()
        for tag, info in tags.items():  # Prevents: a tag that nothing names, if the run was killed before the file
            if _path_of(info) == name and tag == free_tag(name, set(tags) - {tag}):
                return tag
        return free_tag(name, {*tags, *self._given.values()})

    def _named(self, name: str, tag: str) -> None:
        self._given[name] = tag
        write_marker(name, self.store, tag)

    def _marked(self, name: str) -> str | None:
        """The tag that the file at a path names; None: there is no such file, or it names another store."""
        marker = read_marker(name)
        return None if marker is None or not self._is_mine(marker) else marker["tag"]

    def _is_mine(self, marker: Mapping[str, str]) -> bool:
        """Whether a file names a checkpoint of this store, wherever the store is now."""
        return self.store.latest_step() is not None and marker["run"] == self.store.run

    def _find(self, name: str, given: str) -> CheckpointInfo | None:
        """The checkpoint of a path or REF; None: the path is a file of Lightning, or nothing."""
        marker = read_marker(name)
        if marker is not None:
            if not self._is_mine(marker):
                raise UsageError(
                    f"{given} is a checkpoint of {marker['store']}, and this CkptstoreIO has {self.store.url}"
                )
            return self.store.checkpoint(f"tag:{marker['tag']}")
        if os.path.exists(name) or self.store.latest_step() is None:  # noqa: PTH110
            return None
        for info in self.store.tags().values():
            if _path_of(info) == name:
                return info  # the run was killed before the file was written
        try:
            return self.store.checkpoint(given)
        except (CheckpointNotFoundError, UsageError):
            return None


def _flat(checkpoint: Mapping[str, Any]) -> FlatState:
    try:
        return flattened(as_state(checkpoint))
    except UnsupportedStateError as error:
        error.add_note(
            "Lightning collects this in a checkpoint: of hyper_parameters leave it out "
            "(save_hyperparameters(ignore=[...])), of callbacks or lr_schedulers let state_dict() return plain values, "
            "of anything else change on_save_checkpoint"
        )
        raise


def _path_of(info: CheckpointInfo) -> str | None:
    said = info.metadata.get("lightning")
    return said.get("path") if isinstance(said, Mapping) else None


def _absolute(path: str | os.PathLike[str]) -> str:
    """A path as Lightning's different parts name it: absolute, unless it is a URL."""
    name = os.fspath(path)
    return name if "://" in name else os.path.abspath(name)  # noqa: PTH100
