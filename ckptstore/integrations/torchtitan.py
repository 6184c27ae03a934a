"""torchtitan's checkpoint manager with a store in place of a folder for each step.

::

    Trainer.Config(..., checkpoint=CkptstoreManager.Config(enable=True, interval=10))

The store is ``checkpoint.folder``. Every other setting means what it means to torchtitan's `CheckpointManager`, from
which this class is made; what it replaces are the two calls of ``torch.distributed.checkpoint`` and the three questions
about folders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torchtitan.components.checkpointer import MODEL, AsyncMode, CheckpointManager

from ckptstore import store as stores
from ckptstore.errors import CkptError, StoreNotFoundError, UsageError
from ckptstore.host.caller_warnings import warn
from ckptstore.integrations.dcp import CkptstoreReader, CkptstoreWriter

__all__ = ["CkptstoreManager"]


class CkptstoreManager(CheckpointManager):  # type: ignore[misc]  # torchtitan has no types
    """Saves and loads what torchtitan's `CheckpointManager` does, in one store. All ranks use it.

    A folder or initial checkpoint that is none of a store is loaded as torchtitan loads it (a DCP folder, Hugging Face
    files), and so is a last checkpoint in Hugging Face's form written.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """As `CheckpointManager.Config`. ``keep_latest_k`` becomes the retention rule ``last:K``."""

        deltas: bool = False
        """Store checkpoints as deltas against earlier ones (``deltas="auto"`` of `Store.writer`)."""

    def __init__(self, config: Config, **parts: Any) -> None:
        """
        Args:
            config: the settings.
            parts: what torchtitan's trainer passes: ``dataloader``, ``model_parts``, ``optimizers`` ...

        Raises:
            UsageError: ``async_mode`` is ``async_with_pinned_mem``, which saves in another process.
        """
        if config.enable and config.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            raise UsageError(
                "checkpoint.async_mode='async_with_pinned_mem' saves in a process without the ranks' group: use 'async'"
            )
        super().__init__(config, **parts)
        self._deltas = "auto" if config.enable and config.deltas else None

    def _writer(self) -> CkptstoreWriter:
        """A writer for one save. A job that resumes at its last step saves that again."""
        keep = [f"last:{self.keep_latest_k}"] if self.keep_latest_k else []
        group = "world" if self.pg is None else self.pg
        return CkptstoreWriter(replace=True, group=group, keep=keep, deltas=self._deltas)

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save a state as a checkpoint of the store -> the future of an asynchronous save, or None.

        Args:
            state_dict: as torchtitan has made it.
            checkpoint_id: ``FOLDER/step-N``.
            async_mode: ``AsyncMode.DISABLED`` or ``AsyncMode.ASYNC``.
            enable_garbage_collection: collect Python's garbage afterwards.
            to_hf: write Hugging Face files, as torchtitan does.
        """
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        if async_mode == AsyncMode.ASYNC:
            return async_save(
                state_dict, checkpoint_id=checkpoint_id, storage_writer=self._writer(), process_group=self.pg
            )
        save(state_dict, checkpoint_id=checkpoint_id, storage_writer=self._writer())
        return None

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load a checkpoint into a state.

        Args:
            state_dict: what to load; its tensors are filled.
            checkpoint_id: ``STORE/step-N``; or a DCP folder, or Hugging Face files (`from_hf`, `from_quantized`).
        """
        if from_hf or not self._is_stored(checkpoint_id):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        load(state_dict, checkpoint_id=checkpoint_id, storage_reader=CkptstoreReader())
        if (
            MODEL in self.states
        ):  # its tensors are at the top of the state, where DCP does not know that they are a model's
            self.states[MODEL].load_state_dict(state_dict)

    def _is_stored(self, checkpoint_id: str) -> bool:
        return checkpoint_id.startswith(f"{self.folder.rstrip('/')}/") and self._find_load_step() >= 0

    def _load(self, step: int = -1) -> bool:
        """See `BaseCheckpointManager.load`."""
        found = self._find_load_step()
        if found < 0:  # no store, or nothing in it
            return bool(super()._load(step))
        wanted = found if step == -1 else step
        states = self._states_to_load(wanted == 0)
        self.dcp_load(states, self._create_checkpoint_id(wanted), from_hf=False, from_quantized=False)
        return True

    def _find_load_step(self, folder: str = "") -> int:
        """The newest step of the store; -1: there is none."""
        try:
            with stores.open(folder or self.folder, create=False) as store:
                found = store.latest_step()
        except StoreNotFoundError:
            return -1
        return -1 if found is None else found

    def _purge_stale_checkpoints(self) -> None:
        """Delete what the retention rules have retired: the writer applies them with each save."""
        if self._should_purge():
            try:
                with stores.open(self.folder, create=False) as store:
                    store.gc()
            except CkptError as error:  # the state is saved
                warn(f"{self.folder}: checkpoints that are no longer kept could not be deleted: {error}")
