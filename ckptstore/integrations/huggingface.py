"""Saves every step of a Hugging Face Trainer, and resumes it.

::

    callback = CkptstoreCallback("runs/gpt")
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.latest())

A step is saved when everything that the Trainer does with it is over. If it is logged or evaluated, that changes the
Trainer's state (the log, the best metric) and may draw random numbers, so the save waits for the next event::

    on_step_end -> on_log -> on_evaluate -> (the best metric) -> on_step_begin of the next step
                                                              -> on_epoch_begin, after an epoch's last step
                                                              -> on_train_end, after the last step

The Trainer reads its folder when it resumes (`callback.latest`), and skips batches after ``on_train_begin``. It sets
the random generators itself, from ``rng_state.pth``: after that, or when the epoch begins. So the folder is complete,
and the Checkpointer, which restores the same bits once more, only has to check them and to continue the term.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, Unpack

import torch

from ckptstore import store as stores
from ckptstore.errors import MissingDependencyError, UsageError
from ckptstore.host.caller_warnings import DeterminismWarning, warn
from ckptstore.integrations.resume_folders import ResumeFolder
from ckptstore.integrations.trainer_record import TrainerRecord, files_of
from ckptstore.store import Store
from ckptstore.training import rng
from ckptstore.training.checkpointer import Checkpointer
from ckptstore.training.settings import CheckpointerOptions

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "transformers":
        raise
    raise MissingDependencyError("CkptstoreCallback needs transformers: pip install 'ckptstore[hf]'") from error

__all__ = ["CkptstoreCallback"]

_LOG: Final = logging.getLogger("ckptstore.training")

_OWN: Final = frozenset({"model", "optimizer", "scheduler", "scaler", "loader", "extra", "save_every", "group"})
"""Options of the Checkpointer that the callback passes itself."""
_WATCHED: Final = 3
"""Steps after which it is no longer checked whether the loader draws random numbers."""


class CkptstoreCallback(TrainerCallback):
    """Saves a Trainer's steps to a store. Pass it last in ``callbacks=``.

    Attributes:
        checkpointer: the `Checkpointer` of the current training; None: no training runs.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        every: int | None = 1,
        trainer_folders: bool = False,
        stateful: Sequence[Any] = (),
        cache_dir: str | os.PathLike[str] | None = None,
        strategy: str = "auto",
        **options: Unpack[CheckpointerOptions],
    ) -> None:
        """
        Args:
            store: a path or URL, or a store.
            every: optimizer steps from one checkpoint to the next. None: save when the Trainer would
                (``save_strategy``, ``save_steps``). The Trainer's saves and the last step are always saved.
            trainer_folders: True: the Trainer writes its own ``checkpoint-*`` folders, too. False: it writes none,
                unless another callback or ``save_strategy="best"`` says so.
            stateful: those of the Trainer's callbacks that have a state of their own (`ExportableState`, for example
                `EarlyStoppingCallback`). It is saved, and restored when the training resumes.
            cache_dir: where `latest` makes its folders; None: the system's place for temporary files.
            strategy: ``full``, ``delta``, ``gradient`` or ``auto``, as for the `Checkpointer`.
            options: those of the `Checkpointer`. Without ``keep``, ``keep_last``, ``keep_every`` and ``keep_best`` the
                Trainer's ``save_total_limit`` is ``keep_last``, and its ``metric_for_best_model`` is ``keep_best``.

        Raises:
            UsageError: an invalid option.
        """
        super().__init__()
        for name in sorted(_OWN & options.keys()):
            raise UsageError(f"{name!r}: leave it out, because the callback sets it")
        if options.get("agent") or strategy == "replica":
            raise UsageError("agent=True and strategy='replica' are not supported with the Trainer: leave them out")
        if options.get("only") is not None:
            raise UsageError("only: the Trainer resumes from a folder with the whole model: leave it out")
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise UsageError(f"every: {every!r}; expected a number of steps, or None")
        self.checkpointer: Checkpointer | None = None
        self._store = store if isinstance(store, Store) else stores.open(store)
        self._every = every
        self._trainer_folders = trainer_folders
        self._stateful = tuple(stateful)
        self._cache_dir = cache_dir
        self._strategy = strategy
        self._options = options
        self._resumed: _Resumed | None = None
        self._best: ResumeFolder | None = None
        self._record = TrainerRecord({})
        self._waiting: bool | None = None  # the last step is not saved yet; True: the Trainer wants it saved
        self._metrics: dict[str, float] = {}
        self._drawn_since: Mapping[str, Any] | None = None
        self._watched = 0

    # -- resuming

    def latest(self, ref: str | int = "latest") -> str | None:
        """The folder to resume from, for ``trainer.train(resume_from_checkpoint=...)``.

        It is made from the store, with every byte verified, and is removed after the first step of the training, or
        when the process ends.

        Args:
            ref: the checkpoint. If it is not the newest, the training begins a branch.

        Returns:
            None: the store holds no checkpoint; the training starts from scratch.

        Raises:
            CheckpointNotFoundError, CorruptionError, StorageError: as `Store.export_folder`.
            UsageError: the checkpoint was not saved by this callback.
        """
        self._forget_folder()
        if ref == "latest" and self._store.latest_step() is None:
            return None
        info = self._store.checkpoint(ref)
        folder = ResumeFolder(self._cache_dir)
        path = folder.path / f"checkpoint-{info.step}"
        self._store.export_folder(info.ref, path, "hf-trainer")
        self._resumed = _Resumed(info.ref, info.step, folder)
        return str(path)

    def _begin(self, checkpointer: Checkpointer, step: int) -> None:
        """Begin the term at the step at which the Trainer begins."""
        resumed, url = self._resumed, self._store.url
        if resumed is not None and resumed.step == step:
            checkpointer.resume(resumed.ref)
            return
        if step:
            raise UsageError(
                f"the Trainer resumes at step {step} from a folder that callback.latest() did not make"
                + (f" (step {resumed.step})" if resumed is not None else "")
                + ": pass resume_from_checkpoint=callback.latest(). resume_from_checkpoint=True reads the Trainer's "
                "own folders, which this callback does not continue"
            )
        if self._store.latest_step() is not None:
            raise UsageError(
                f"{url} holds a run: call trainer.train(resume_from_checkpoint=callback.latest()) to continue it, or "
                "give the callback another store"
            )
        checkpointer.resume(None)

    def _forget_folder(self) -> None:
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            resumed.folder.remove()

    # -- events of the Trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to save; see `_begin`."""
        if self.checkpointer is not None:  # of a training that an error ended
            self.checkpointer.close()
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        _check_supported(args, model)
        self._check_stateful(state, args)
        self._record = TrainerRecord(files_of(model, kwargs.get("processing_class"), args))
        self._record.note(state, self._stateful)
        options: Any = {**_retention(args, self._options), **self._options}
        every = 1 if self._every is None else self._every
        scaler = getattr(optimizer, "scaler", None)
        self.checkpointer = Checkpointer(
            self._store,
            model=model,
            optimizer=optimizer,
            scheduler=kwargs["lr_scheduler"],
            scaler=scaler,
            extra={"trainer": self._record},
            strategy=self._strategy,
            save_every=every,
            **options,
        )
        try:
            self._begin(self.checkpointer, state.global_step)
        except BaseException:
            checkpointer, self.checkpointer = self.checkpointer, None
            checkpointer.close()
            raise
        self._waiting, self._metrics, self._drawn_since, self._watched = None, {}, None, 0

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save the last step of the epoch before."""
        self._save(state, control)
        self._drawn_since = None  # an epoch's iterator draws numbers, in a resumed run as well

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save the last step, if it was evaluated."""
        since, self._drawn_since = self._drawn_since, None
        if since is not None and rng.first_moved(since) is not None:
            self._watched = _WATCHED
            warn(
                "loading a batch draws random numbers in this process (a collator that masks, an augmentation). The "
                "Trainer loads batches ahead, so a resumed run draws others for its first batches, and is not bit for "
                "bit the run that was saved. With dataloader_num_workers above 0 or samples that depend only "
                "on their index nothing is drawn here",
                DeterminismWarning,
            )
        self._save(state, control)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save the step, or note that it is to be saved when it is logged and evaluated."""
        if self.checkpointer is None:
            return
        self._waiting = self._wanted(control)
        self._metrics = {}
        self._forget_folder()  # the Trainer has read everything
        if not (control.should_log or control.should_evaluate or _ends_epoch(state)):
            self._save(state, control)
            self._watch()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Take the metrics, and save the step if it is not evaluated. The last log names the best model."""
        if self.checkpointer is None:
            return
        if "train_runtime" in (logs or {}):  # the sums over the training: it is over
            self._finish(state, control)
            if args.load_best_model_at_end:
                state.best_model_checkpoint = self._best_model(state)
            return
        self._measured(logs or {})
        if not control.should_evaluate and not _ends_epoch(state):
            self._save(state, control)
            self._watch()

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Take the metrics. The step is saved by the next event: the Trainer notes the best metric after this one."""
        self._measured(metrics or {})

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note that the Trainer wants to save at the end of the epoch."""
        if self.checkpointer is not None and self._wanted(control) and self._waiting is not None:
            self._waiting = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save the step of which the Trainer has made a folder."""
        if self._waiting is not None:
            self._waiting = True
        if not _ends_epoch(state):
            self._save(state, control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Finish all saves, if that was not done."""
        self._finish(state, control)

    # -- saving

    def _wanted(self, control: TrainerControl) -> bool:
        """Whether the Trainer wants to save. Unless `trainer_folders`, it makes no folder then."""
        wanted = bool(control.should_save)
        if not self._trainer_folders:
            control.should_save = False
        return wanted

    def _measured(self, metrics: Mapping[str, Any]) -> None:
        self._metrics |= {name: float(one) for name, one in metrics.items() if isinstance(one, int | float)}

    def _save(self, state: TrainerState, control: TrainerControl) -> None:
        """Save the last step, unless that was done. Ends the training if the Checkpointer says so."""
        wanted, self._waiting = self._waiting, None
        if wanted is None or self.checkpointer is None:
            return
        self._record.note(state, self._stateful)
        save = True if wanted else False if self._every is None else None
        self.checkpointer.step(metrics=self._metrics or None, save=save)
        control.should_training_stop |= self.checkpointer.should_stop

    def _finish(self, state: TrainerState, control: TrainerControl) -> None:
        """Save the last step, and finish all saves. Call it before the Trainer loads the best model."""
        self._save(state, control)
        checkpointer, self.checkpointer = self.checkpointer, None
        if checkpointer is not None:
            checkpointer.close(save=True)
        self._forget_folder()

    def _watch(self) -> None:
        """Nothing draws random numbers from now on until the next step begins, unless the loader does."""
        if self._watched < _WATCHED:
            self._watched += 1
            self._drawn_since = rng.global_states()

    def _best_model(self, state: TrainerState) -> str | None:
        """A folder with the best model; None: the store has none."""
        step = state.best_global_step
        if step is None:
            return None
        if all(one.step != step for one in self._store.checkpoints()):
            _LOG.warning("%s: step %d, the best, is not in the store: the last model stays", self._store.url, step)
            return None
        self._best = ResumeFolder(self._cache_dir)
        path = self._best.path / f"checkpoint-{step}"
        self._store.export_folder(step, path, "hf")
        return str(path)

    # -- checks

    def _check_stateful(self, state: TrainerState, args: TrainingArguments) -> None:
        """Restore the states of the `stateful` callbacks, and warn of others."""
        found: Any = state.stateful_callbacks or {}  # declared as a list; the Trainer makes it a dict
        saved: dict[str, Any] = dict(found)
        if self._stateful and args.restore_callback_states_from_checkpoint:
            raise UsageError(
                "restore_callback_states_from_checkpoint replaces the callbacks that this callback saves: leave it "
                "out; stateful= restores their states"
            )
        given: dict[str, list[Any]] = {}
        for one in self._stateful:
            given.setdefault(type(one).__name__, []).append(one)
        if others := sorted(saved.keys() - given.keys() - {"TrainerControl"}):
            warn(
                f"{', '.join(others)}: has its own state, which is not saved: pass the object to "
                "CkptstoreCallback(stateful=[...]) as well",
                DeterminismWarning,
            )
        if self._resumed is None:
            return
        for name, objects in given.items():
            states = saved.get(name, [])
            for one, its in zip(objects, states if isinstance(states, list) else [states], strict=False):
                for attribute, value in its.get("attributes", {}).items():
                    setattr(one, attribute, value)


class _Resumed:
    """What `latest` made: the checkpoint, its step, and the folder."""

    def __init__(self, ref: str, step: int, folder: ResumeFolder) -> None:
        self.ref, self.step, self.folder = ref, step, folder


def _ends_epoch(state: TrainerState) -> bool:
    """Whether the last step is the last one of an epoch. The Trainer may evaluate it again then."""
    return float(state.epoch or 0).is_integer() and state.global_step > 0


def _check_supported(args: TrainingArguments, model: torch.nn.Module) -> None:
    """Raise `UsageError` for what the Trainer does in another way."""
    if getattr(args, "deepspeed", None):
        raise UsageError("CkptstoreCallback does not support DeepSpeed, which keeps the optimizer to itself")
    if getattr(args, "fsdp", None):
        raise UsageError("CkptstoreCallback does not support the Trainer's fsdp=: use a loop with the Checkpointer")
    if hasattr(model, "peft_config"):
        raise UsageError("CkptstoreCallback does not support PEFT models yet: use a loop with the Checkpointer")


def _retention(args: TrainingArguments, options: Mapping[str, Any]) -> dict[str, Any]:
    """The rules that the Trainer's arguments ask for, unless the options have some."""
    if any(options.get(name) is not None for name in ("keep", "keep_last", "keep_every", "keep_best")):
        return {}
    found: dict[str, Any] = {}
    if args.save_total_limit is not None and args.save_total_limit > 0:
        found["keep_last"] = args.save_total_limit
    if args.metric_for_best_model is not None:
        name = args.metric_for_best_model
        name = name if name.startswith("eval_") else f"eval_{name}"
        found["keep_best"] = f"max:{name}" if args.greater_is_better else name
    return found
