"""A Lightning callback that saves a run after every optimizer step, and continues it bit for bit."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, Final, Unpack

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ckptstore import store as stores
from ckptstore.errors import UsageError
from ckptstore.integrations.lightning_batches import TrainBatches
from ckptstore.integrations.lightning_trainer_state import TrainerState
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.store import Store
from ckptstore.training.checkpointer import Checkpointer
from ckptstore.training.loaders.counted_batches import CountedBatches
from ckptstore.training.save_pace import SavePolicy
from ckptstore.training.settings import CheckpointerOptions

__all__ = ["StepCheckpoint"]

_LOG: Final = logging.getLogger("ckptstore.training")
_STRATEGIES: Final = (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy)
_ITS_OWN: Final = {"save_every": "every=", "scaler": "the precision plugin's", "optimizer": "the module's"}
_EXTRA: Final = "lightning"


class StepCheckpoint(pl.Callback):
    """Saves a run of ``Trainer.fit`` with a `Checkpointer`, in the middle of epochs, too, and continues it.

    ::

        trainer = Trainer(callbacks=[StepCheckpoint("runs/gpt")])
        trainer.fit(module, loader)  # run it again: it continues after the last step in the store

    A step is saved before the next batch is fetched, when Lightning has done all that follows the step: hooks of
    callbacks, validation, the end of the epoch, schedules. The last one is saved in ``on_train_end``. The number of a
    checkpoint is ``trainer.global_step`` (with manual optimization: the number of batches that stepped).

    Attributes:
        checkpointer: the `Checkpointer` of the current ``fit``; None: there is none.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        every: int | SavePolicy = 1,
        strategy: str = "auto",
        resume: str | int | None = "latest",
        **options: Unpack[CheckpointerOptions],
    ) -> None:
        """
        Args:
            store: a path or URL, or a store.
            every: optimizer steps from one checkpoint to the next, as a `Checkpointer`'s ``save_every``.
            strategy: as a `Checkpointer`'s.
            resume: the checkpoint to continue from: ``latest``, a step, ``STEP@TERM``, ``tag:NAME``. None: begin from
                nothing, whatever the store holds.
            options: the other options of a `Checkpointer`, except for ``scaler``.

        Raises:
            UsageError: an option that the callback sets itself.
            as `ckptstore.open`.
        """
        if taken := sorted(set(options) & set(_ITS_OWN)):
            raise UsageError(f"{taken[0]}: a StepCheckpoint takes {_ITS_OWN[taken[0]]}")
        if _EXTRA in (options.get("extra") or {}):
            raise UsageError(f"extra[{_EXTRA!r}]: this name is reserved for the trainer's state; use another one")
        super().__init__()
        self.store = store if isinstance(store, Store) else stores.open(store)
        self.checkpointer: Checkpointer | None = None
        self._every = every
        self._strategy = strategy
        self._resume = resume
        self._options = options
        self._trainer_state: TrainerState | None = None
        self._out_of_time = False  # the deadline came
        self._seen = 0  # the trainer's steps that were offered to the checkpointer, or restored
        self._begun = True  # the first batch was asked for
        self._release: Callable[[], None] | None = None

    def latest(self) -> CheckpointInfo | None:
        """The newest checkpoint of the store; None: there is none."""
        return None if self.store.latest_step() is None else self.store.checkpoint("latest")

    # -- hooks

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Have the training loader passed here when Lightning has made it ready."""
        del pl_module
        if stage != "fit" or getattr(trainer, "fast_dev_run", False):
            return
        self._check(trainer)
        self._leave()
        strategy: Any = trainer.strategy
        its_own = strategy.process_dataloader

        def process(loader: object) -> object:
            loader = its_own(loader)
            return self._begin(trainer, loader) if trainer.training else loader

        strategy.process_dataloader = process

        def release() -> None:
            if vars(strategy).get("process_dataloader") is process:
                del strategy.process_dataloader

        self._release = release

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the last step, and make all saves durable."""
        del pl_module
        if self.checkpointer is None or self._trainer_state is None:
            return
        if self._out_of_time:
            self.checkpointer.close()
            self._leave()
            return
        if _has_epoch_ended(trainer):
            _loader_of(self.checkpointer).finish()
        else:
            self._trainer_state.in_epoch = True
        self._offer(trainer)
        self.checkpointer.close(save=True)
        self._leave()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Make the saves in flight durable. After SIGTERM, which ends Lightning's loop between steps, save the last."""
        del pl_module
        checkpointer, self.checkpointer = self.checkpointer, None
        if checkpointer is None:
            self._leave()
            return
        if isinstance(exception, SIGTERMException) and trainer.training:  # not in the middle of validation
            self.checkpointer = checkpointer
            try:
                self._offer(trainer)
                checkpointer.close(save=True)
            except Exception:  # noqa: BLE001  # Lightning raises what ended the run
                _LOG.exception("saving the last step of %s after SIGTERM", self.store.url)
        checkpointer.__exit__(type(exception), exception, exception.__traceback__)
        self._leave()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """End a run that had nothing to train."""
        del trainer, pl_module
        if stage == "fit":
            if self.checkpointer is not None:
                self.checkpointer.close()
            self._leave()

    # -- the run

    def _check(self, trainer: pl.Trainer) -> None:
        """Refuse what cannot be continued exactly, before anything is set up."""
        if not isinstance(trainer.strategy, _STRATEGIES):
            raise UsageError(
                f"{type(trainer.strategy).__name__}: a StepCheckpoint saves runs on one device, with DDP and with "
                "ModelParallelStrategy (FSDP2)"
            )
        if getattr(trainer, "reload_dataloaders_every_n_epochs", 0):
            raise UsageError(
                "reload_dataloaders_every_n_epochs: a StepCheckpoint continues one loader; let its dataset or "
                "sampler change from epoch to epoch (set_epoch)"
            )

    def _begin(self, trainer: pl.Trainer, loader: object) -> TrainBatches:
        """Restore the run once loader, optimizers and schedules are ready -> what Lightning iterates over."""
        if self.checkpointer is not None:
            raise UsageError("a StepCheckpoint continues one training loader, and the module has several")
        if trainer.ckpt_path is not None:
            raise UsageError(
                f"ckpt_path={str(trainer.ckpt_path)!r}: a StepCheckpoint restores the run itself. Leave ckpt_path "
                "out (resume= names another checkpoint), or load weights before fit()"
            )
        _check_length(trainer, loader)
        optimizers, configs = trainer.optimizers, trainer.lr_scheduler_configs
        if any(one.reduce_on_plateau and one.interval == "step" for one in configs):
            raise UsageError(
                "ReduceLROnPlateau with interval='step': Lightning updates it once more when it continues in the "
                "middle of an epoch; take interval='epoch'"
            )
        schedulers = [one.scheduler for one in configs]
        self._trainer_state = TrainerState(trainer, self)
        options: Any = dict(self._options)
        options["extra"] = {**(options.get("extra") or {}), _EXTRA: self._trainer_state}
        self.checkpointer = checkpointer = Checkpointer(
            self.store,
            model=trainer.lightning_module,
            optimizer=optimizers[0] if len(optimizers) == 1 else optimizers or None,
            scheduler=schedulers[0] if len(schedulers) == 1 else schedulers or None,
            loader=loader,
            strategy=self._strategy,
            save_every=self._every,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            **options,
        )
        checkpointer.resume(self._resume)
        self._seen = trainer.global_step
        self._begun = False
        return TrainBatches(_loader_of(checkpointer), lambda: self._before_batch(trainer))

    def _before_batch(self, trainer: pl.Trainer) -> None:
        begun, self._begun = self._begun, True
        if not begun and self._trainer_state is not None and self.checkpointer is not None:
            self._trainer_state.begin()
            self.checkpointer.restore_generators()  # hooks that run before the first batch may have drawn
        self._offer(trainer)

    def _offer(self, trainer: pl.Trainer) -> None:
        """Pass the step since the last call to the checkpointer, if an optimizer stepped."""
        checkpointer = self.checkpointer
        if checkpointer is None or trainer.global_step == self._seen:
            return
        self._seen = trainer.global_step
        checkpointer.step(metrics=_metrics(trainer))
        if checkpointer.should_stop and not trainer.received_sigterm:  # Lightning itself ends a run after SIGTERM
            # Lightning will train one more batch, and validate. None of that is saved: a continued run is the run that
            # was never stopped.
            trainer.should_stop = self._out_of_time = True

    def _leave(self) -> None:
        self.checkpointer, self._trainer_state, self._begun, self._out_of_time = None, None, True, False
        release, self._release = self._release, None
        if release is not None:
            release()


def _loader_of(checkpointer: Checkpointer) -> CountedBatches:
    assert checkpointer.loader is not None  # it was given one
    return checkpointer.loader


def _metrics(trainer: pl.Trainer) -> dict[str, Any]:
    """The logged numbers."""
    return {name: one for name, one in trainer.callback_metrics.items() if one.numel() == 1}


def _has_epoch_ended(trainer: pl.Trainer) -> bool:
    """Whether training stopped at the end of an epoch, not in its middle."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return bool(progress.is_last_batch) or progress.current.ready >= trainer.num_training_batches


def _check_length(trainer: pl.Trainer, loader: Any) -> None:
    """Refuse a loader of unknown length: Lightning fetches its batches one step early."""
    limit = trainer.limit_train_batches
    if isinstance(limit, int):
        return
    try:
        len(loader)
    except (TypeError, NotImplementedError) as error:
        raise UsageError(
            "the training loader has no length: Lightning then fetches each batch one step early, and a continued run "
            "would skip one. Give its dataset a __len__, or Trainer(limit_train_batches=N) batches in an epoch"
        ) from error
