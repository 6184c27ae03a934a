"""What Lightning's `Trainer` has besides modules, optimizers and schedules: progress, callbacks, precision."""

from __future__ import annotations

import copy
from typing import Any, Final

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

__all__ = ["TrainerState"]

_CONTEXT: Final = ("epoch", "global_step", "state_dict")


class TrainerState:
    """The rest of the trainer's state, as ``extra`` of a `Checkpointer` takes it.

    Attributes:
        per_rank: logged numbers, and the callbacks that follow them, may differ between ranks.
        in_epoch: the state belongs into the epoch that Lightning has just ended early (`max_steps`, `Timer`).
    """

    per_rank = True

    def __init__(self, trainer: pl.Trainer, own: pl.Callback) -> None:
        """
        Args:
            own: the callback whose state is left out.
        """
        self.in_epoch = False
        self._trainer = trainer
        self._own = own
        self._loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Loops, callbacks, precision plugin, data module, and what the module adds in ``on_save_checkpoint``."""
        trainer = self._trainer
        found: dict[str, Any] = {"loops": self._loops()}
        found["metrics"] = {name: one for name, one in trainer.callback_metrics.items() if one.numel() == 1}
        callbacks = {one.state_key: one.state_dict() for one in self._callbacks()}
        found["callbacks"] = {key: state for key, state in callbacks.items() if state}
        if precision := trainer.precision_plugin.state_dict():
            found["precision"] = precision
        datamodule: pl.LightningDataModule | None = getattr(trainer, "datamodule", None)
        if datamodule is not None and (data := datamodule.state_dict()):
            found["datamodule"] = data
        if is_overridden("on_save_checkpoint", trainer.lightning_module):
            checkpoint = self._context()
            trainer.lightning_module.on_save_checkpoint(checkpoint)
            found["module"] = {key: value for key, value in checkpoint.items() if key not in _CONTEXT}
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        trainer, state = self._trainer, copy.deepcopy(state)
        trainer.fit_loop.load_state_dict(state["loops"])
        self._loaded = state
        for one in self._callbacks():
            if one.state_key in state["callbacks"]:
                one.load_state_dict(state["callbacks"][one.state_key])
        if "precision" in state:
            trainer.precision_plugin.load_state_dict(state["precision"])
        datamodule: pl.LightningDataModule | None = getattr(trainer, "datamodule", None)
        if datamodule is not None and "datamodule" in state:
            datamodule.load_state_dict(state["datamodule"])
        if "module" in state:
            trainer.lightning_module.on_load_checkpoint({**self._context(), **state["module"]})

    def begin(self) -> None:
        """The first batch of a continued run is fetched: end what makes this epoch differ from any other.

        Until then Lightning needs to know that it continues. After that it would not update schedules that follow a
        metric at the end of this epoch, because its own checkpoints have no metrics.
        """
        state, self._loaded = self._loaded, None
        if state is None:
            return
        loop = self._trainer.fit_loop
        # Lightning counts a step once more if it continues where validation may follow.
        loop.epoch_loop.on_load_checkpoint(state["loops"]["epoch_loop.state_dict"])
        loop.on_iteration_done()
        self._trainer.callback_metrics.update(state["metrics"])

    def _context(self) -> dict[str, Any]:
        trainer = self._trainer
        state = trainer.lightning_module.state_dict()
        return dict(zip(_CONTEXT, (trainer.current_epoch, trainer.global_step, state), strict=True))

    def _callbacks(self) -> list[pl.Callback]:
        found: list[pl.Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        return [one for one in found if one is not self._own]

    def _loops(self) -> dict[str, Any]:
        loops = self._trainer.fit_loop.state_dict()
        loops.get("state_dict", {}).pop("combined_loader", None)  # the Checkpointer knows the loader's position
        if self.in_epoch:
            progress = copy.deepcopy(loops["epoch_progress"])
            for counts in progress.values():
                counts["processed"] -= 1
                counts["completed"] = counts["processed"]
            loops["epoch_progress"] = progress
        return loops
