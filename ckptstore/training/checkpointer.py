"""Checkpoints of a training script, in two lines: the step to begin with, and a call after each step.

::

    with Checkpointer("runs/gpt", model=model, optimizer=optimizer, scheduler=scheduler, loader=loader) as checkpointer:
        for step in range(checkpointer.resume(), steps):
            loss.backward(); optimizer.step(); scheduler.step(); optimizer.zero_grad()
            checkpointer.step(metrics={"loss": loss})

What a checkpoint holds is gathered in `captured`, what the optimizers did in `taken`, how it is stored is decided in
`strategies`, what is kept in `retention`. Here is the order of events, and what becomes of errors.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, Unpack, cast

from ckptstore import agent
from ckptstore import store as stores
from ckptstore.errors import MissingRankError, UsageError, WriterClosedError, WriterError
from ckptstore.host.caller_warnings import UnexplainedStepWarning, warn
from ckptstore.log.checkpoints import CheckpointInfo
from ckptstore.restore.targets import MadeTargets
from ckptstore.store import Store
from ckptstore.training import strategies
from ckptstore.training.captured import Captured
from ckptstore.training.environment import compared, hyperparameters, unheeded
from ckptstore.training.explained import Explained
from ckptstore.training.overlooked import Overlooked
from ckptstore.training.pacing import Pacing
from ckptstore.training.replicas import check_replicable
from ckptstore.training.replicated import ReplicaSaving
from ckptstore.training.retention import Retention
from ckptstore.training.saving import Saving, ranks_of
from ckptstore.training.settings import CheckpointerOptions, Settings, UnsavedStepWarning
from ckptstore.training.taken import TakenSteps
from ckptstore.training.urgency import Urgency
from ckptstore.training.writing import GoesBack, Inherits, StateWriter
from ckptstore.write.ledger import PendingSave
from ckptstore.write.ranks.mailbox import Group
from ckptstore.write.ranks.options import RankOptions

__all__ = ["Checkpointer"]

_LOG: Final = logging.getLogger("ckptstore.training")


class Checkpointer:
    """Saves a training script's state after its steps, and gives it back. Use it in a ``with``.

    Attributes:
        store: where to.
        loader: iterate over this: the given loader if it knows its position, else one that is counted.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        model: Any,
        optimizer: Any = None,
        scheduler: Any = None,
        loader: Any = None,
        strategy: str = "auto",
        **options: Unpack[CheckpointerOptions],
    ) -> None:
        """Look at what is to be saved. Nothing is opened for writing before `resume`, or the first `step`.

        Args:
            store: a path or URL, or a store.
            model: a module, compiled or wrapped by DistributedDataParallel or not; or several, in a list or dict.
            optimizer: what moves it; or several. Its steps are noticed by hooks.
            scheduler: its schedule, or several.
            loader: what gives the batches. If it has no ``state_dict``, iterate over `loader` of this.
            strategy: ``full``, ``delta``, ``gradient``, ``replica`` (with ``agent=True``), or ``auto``, which chooses
                one of the first three and says why: in a line on a terminal, in the ``repr``, and to the logger
                ``ckptstore.training`` (level INFO).
            options: see `CheckpointerOptions`.

        Raises:
            UsageError: an object or option that cannot be meant.
            as `ckptstore.open`.
        """
        self._settings = Settings.of(strategy, options)
        self._captured = Captured(
            model, optimizer, scheduler, loader, options.get("scaler"), options.get("extra"), self._settings.compressor
        )
        if self._settings.strategy == "replica":
            check_replicable(self._captured)
        self.loader = self._captured.loader
        self._scaler = options.get("scaler")
        self._scale = self._scale_now()
        self.store = store if isinstance(store, Store) else stores.open(store)
        self._owns_store = not isinstance(store, Store)
        self._taken = TakenSteps(self._captured.optimizers, self._settings.compressor)
        self._urgency = Urgency(self._settings, self._flush)
        self._pacing = Pacing(self._settings.save_every)
        self._explained = Explained(self._settings.on_metrics, self._urgency.deadline.saved, self._settings.tensorboard)
        self._writer: StateWriter | None = None
        self._saving: Saving | None = None
        self._retention: Retention | None = None
        self._strategy: strategies.Strategy | None = None
        self._why = ""
        self._group: Group | None = None
        self._at_exit = partial(_exited, weakref.ref(self), os.getpid())
        self._done = 0
        self._unsaved: Mapping[str, Any] | None = None  # the metrics of the last step, if it was not saved
        self._overlooked = Overlooked(self._captured, self._settings.keep.metric)
        self._stopped = False
        self._closed = False
        self._taken.install(predict=False)
        if self._settings.signals:
            self._urgency.install()

    def __repr__(self) -> str:
        term = "not open yet" if self.term is None else f"term {self.term}, step {self._done}"
        why = f" ({self._why})" if self._why else ""
        return f"<Checkpointer of {self.store.url!r}: {self.strategy}{why}, {term}>"

    @property
    def strategy(self) -> str:
        """How checkpoints are stored; ``auto`` until the writer is open."""
        return self._strategy or self._settings.strategy

    @property
    def term(self) -> int | None:
        """The term that this run writes; None until it is open."""
        return None if self._writer is None else self._writer.term

    @property
    def agent_pid(self) -> int | None:
        """The process that saves, with ``agent=True``; None: this one, or none yet."""
        pid: int | None = getattr(self._writer, "agent_pid", None)
        return pid

    @property
    def steps_done(self) -> int:
        """Steps of this run, those before it was resumed included."""
        return self._done

    @property
    def should_stop(self) -> bool:
        """The deadline is near, or SIGTERM came, and the last step is durable: end the loop. Alike on all ranks."""
        return self._urgency.stopping

    def resume(self, ref: str | int | None = "latest") -> int:
        """Begin: restore everything in place -> the step to go on from; 0 if there is nothing yet.

        A second time, in the same run, it goes back: as `rollback`.

        Args:
            ref: what to continue from: ``latest``, a step, ``STEP@TERM``, ``tag:NAME``; one that is not the newest
                begins a branch. None: from nothing, whatever the store holds.

        Raises:
            CheckpointNotFoundError: there is no such checkpoint.
            FormatError: it was not saved by a Checkpointer, or without a part that is to be restored.
            CorruptionError, StorageError: it cannot be read, or the store not be written.
        """
        self._check_open()
        if self._writer is not None:
            if ref is None:
                raise UsageError("resume(None) begins from nothing, and this run has begun: make another Checkpointer")
            return self.rollback(ref)
        writer = self._open(None if ref is None else str(ref))
        if isinstance(writer, Inherits) and writer.inherited is not None:
            self._give_back(writer.load(), f"step {writer.step}")
        elif writer.parent is not None:
            self._restore(writer.parent)
        self._agree()
        return self._done

    def rollback(self, ref: str | int | CheckpointInfo) -> int:
        """Go back to an earlier checkpoint, and restore everything in place -> its step.

        What was saved after it stays in the store, as a branch; ``latest`` is on the new one from now on.

        Raises:
            as `resume`.
        """
        name = ref.ref if isinstance(ref, CheckpointInfo) else str(ref)
        if self._writer is None:
            return self.resume(name)  # or it is closed, which that says
        if isinstance(self._writer, GoesBack):
            parent: CheckpointInfo | None = self._writer.rollback(name)
        else:
            name = self.store.checkpoint(name).ref  # says what is wrong with it before the term is ended
            self._end_writer()
            parent = self._open(name).parent
        assert parent is not None
        self._restore(parent)
        self._agree()
        return self._done

    def step(
        self, metrics: Mapping[str, Any] | None = None, *, tags: str | Sequence[str] = (), save: bool | None = None
    ) -> PendingSave | None:
        """A training step is done: save it, if it is to be saved.

        Call it after ``optimizer.step()`` and ``scheduler.step()``. A call between which and the one before no
        optimizer has stepped (a micro-batch whose gradients are accumulated) counts as a step and saves nothing; a step
        that the `GradScaler` skipped is saved as any other.

        Args:
            metrics: numbers, or tensors of one, by name: they are kept with the checkpoint, and `keep_best` looks at
                them. A tensor on a device is waited for.
            tags: names that the checkpoint gets.
            save: whether to save this step; None: what `save_every` says.

        Returns:
            the checkpoint on its way; None if this step is not saved (with ``replica``: if the agent has it in memory
            alone, because it is not due or the medium has not taken those before yet).

        Raises:
            UsageError: the store holds checkpoints and `resume` was not called; an optimizer's state was loaded by
                somebody else since the last step; metrics that are no numbers.
            with ``on_error="raise"`` whatever stops a save.
        """
        self._pacing.came()
        try:
            return self._step(metrics, tags, save)
        finally:
            self._pacing.goes_on()

    def _step(
        self, metrics: Mapping[str, Any] | None, tags: str | Sequence[str], save: bool | None
    ) -> PendingSave | None:
        self._check_open()
        if metrics is not None and not isinstance(metrics, Mapping):
            raise UsageError(f"metrics: {type(metrics).__name__}; numbers by name are wanted: {{'loss': loss}}")
        if self._writer is None:
            self._begin_from_nothing()
        if self._taken.loaded and self._done:
            raise UsageError(
                f"an optimizer's state was loaded after step {self._done}: what follows is another branch of the run; "
                "go back with Checkpointer.rollback(REF), which restores everything"
            )
        self._taken.loaded = False
        self._done += 1
        skipped = self._skipped()
        moved = self._taken.any or skipped or not self._captured.optimizers
        urgent = self._is_urgent(moved)
        due = urgent or (moved and self._pacing.due(self._done) if save is None else save)
        self._overlooked.stepped(moved)
        if moved:  # a call without an optimizer's step takes nothing from the step before
            self._unsaved = None if due else metrics or {}
        if not moved and (save or tags) and not self._stopped:
            warn(
                f"step {self._done} is not saved, in spite of save= or tags=: no optimizer has stepped since the call "
                "before",
                UnsavedStepWarning,
            )
        if self._stopped or not moved or not (due or self._follows):
            if urgent and self._stopped:
                self._urgency.settled(self._done)
            if moved and self._saving is not None and not self._stopped:
                self._saving.passed(self._done)
            return None
        try:
            forced = due and (urgent or save is True or bool(tags))
            pending = self._pacing.save(lambda: self._save(metrics, tags, due=due, forced=forced))
            if urgent and pending is not None:
                pending = self._saved(pending)
                self._urgency.settled(self._done)
        except Exception as error:  # noqa: BLE001  # with on_error="warn" whatever it is
            if urgent and self._group is not None:
                self._urgency.settled(self._done)  # the other ranks end, too
            self._failed(error)
            return None
        self._urgency.pass_on()
        return pending

    def _is_urgent(self, moved: bool) -> bool:
        """Whether the step that is done is to be saved and durable now, whatever `save_every` says."""
        try:
            return self._urgency.after(self._done, moved)
        except MissingRankError as error:
            self._failed(error)
            return False

    def wait(self) -> None:
        """Return when every step given so far is durable.

        Raises:
            with ``on_error="raise"`` what stopped a save.
        """
        self._check_open()
        if self._saving is not None and not self._stopped:
            try:
                self._saving.wait()
            except Exception as error:  # noqa: BLE001  # with on_error="warn" whatever it is
                self._failed(error)

    def tag(self, name: str, ref: str | int = "latest") -> CheckpointInfo:
        """Name a checkpoint; see `Writer.tag`."""
        self._check_open()
        if self._writer is None:
            raise UsageError("nothing is open yet: call resume() before tag()")
        return self._writer.tag(name, ref)

    def close(self, *, save: bool = False) -> None:
        """Make durable what was given, and leave nothing behind: hooks, signal handlers, threads.

        Args:
            save: also save the last step, if it was not. Leaving the ``with`` without an error does.

        Raises:
            with ``on_error="raise"`` what stopped a save of which nobody has been told.
        """
        if self._closed:
            return
        if not save and not self._written_by_agent:
            self._remark_unsaved("close() does not save it, close(save=True) does")
        self._closed = True
        atexit.unregister(self._at_exit)
        try:
            with contextlib.ExitStack() as last:
                if self._owns_store:
                    last.callback(self.store.close)
                last.callback(self._urgency.remove)
                last.callback(self._taken.remove)
                last.callback(self._overlooked.left)
                last.callback(self._end_writer)
                self._urgency.leave()
                if self._writer is not None and not self._stopped:
                    self._finish(save)
        except Exception as error:  # noqa: BLE001  # with on_error="warn" whatever it is
            self._failed(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._written_by_agent:
            self._remark_unsaved(f"{type(error).__name__} ended the with")
        try:
            self.close(save=error is None)
        except BaseException:
            if error is None:
                raise
            _LOG.exception("closing %s", self.store.url)  # the loop's own error is on its way

    # -- opening, and going back

    def _begin_from_nothing(self) -> None:
        newest = self.store.latest_step()
        if newest is not None:
            raise UsageError(
                f"{self.store.url} holds a run of {newest} steps: call resume() before the first step to continue it, "
                "or resume(None) to begin another from nothing"
            )
        # With an agent: one that keeps a step which is in no store yet is not to be gone on from unasked.
        self._open(None if self._settings.agent else "latest")
        self._agree()

    def _open(self, ref: str | None) -> StateWriter:
        settings = self._settings
        self._group = ranks_of(settings.group, self._captured.sharding)
        if self._group is not None and settings.every is None:
            raise UsageError("save_every: the ranks' controllers would say different things; give a number")
        if self._strategy is None:
            self._strategy = self._choose()
        told = strategies.writer_options(
            self._strategy, settings.full_every, settings.batch, settings.deltas, settings.every
        )
        told |= {"max_in_flight": settings.max_in_flight, "threads": settings.threads}
        told |= {"on_metrics": self._explained.told, "keep": settings.keep.store_rules}
        if self._group is not None:
            told["group"] = self._group
            told["ranks"] = RankOptions(timeout=settings.rank_timeout, per_rank=self._captured.per_rank)
        if settings.compact is not None:
            told["compact"] = settings.compact
        if settings.agent:
            writer: StateWriter = agent.writer(self.store, ref, linger_seconds=settings.linger_seconds, **told)
        else:
            writer = self.store.writer(ref, **told)
        self._writer = writer
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)
        self._taken.install(predict=self._strategy == "gradient")
        if (self._group is None or self._group.rank == 0) and (settings.keep.best is not None or self.store.rules()):
            self._retention = Retention(self.store, writer, settings.keep)
        kind = ReplicaSaving if self._strategy == "replica" else Saving
        self._saving = kind(
            self.store, writer, self._captured, self._taken, self._strategy, settings, self._ranks, self._retention
        )
        return writer

    def _choose(self) -> strategies.Strategy:
        """The strategy; what ``auto`` takes is said in one line."""
        captured, settings = self._captured, self._settings
        if settings.strategy != "auto":
            return cast(strategies.Strategy, settings.strategy)
        self.store.create()
        strategy, why = strategies.chosen(
            strategies.Circumstances(
                nbytes=strategies.state_bytes(captured.models, captured.optimizers),
                rate=None if self._group is not None else strategies.measured_rate(self.store.backend),
                spare=strategies.spare_cores(captured.models),
                unpredicted=strategies.predicted(captured.optimizers, settings.every),
            )
        )
        self._why = why
        if self._group is None or self._group.rank == 0:
            strategies.tell(self.store.url, strategy, why)
        return strategy

    def _restore(self, parent: CheckpointInfo) -> None:
        rank = None if self._group is None else self._group.rank
        into = MadeTargets(self._captured.rooms) if self._captured.sharding else None
        self._give_back(self.store.load(parent.ref, rank=rank, into=into), parent.ref)

    @property
    def _ranks(self) -> int:
        """How many save together."""
        return 1 if self._group is None else self._group.size

    def _agree(self) -> None:
        """Begin to agree with the other ranks on what is urgent. To be called where the last step is known."""
        if self._group is not None and self._writer is not None:
            self._urgency.join(self._group, self.store.run, self._writer.term, self._done)

    def _give_back(self, state: Any, ref: str) -> None:
        chosen = partial(hyperparameters, self._captured.optimizers, scheduled=self._captured.may_have_schedule)
        asked = [] if self._done else chosen()  # later it is what this run has made of it
        self._done = self._captured.restore(state)
        if differs := unheeded(asked, chosen()):
            _LOG.warning("%s: resuming %s: %s", self.store.url, ref, "; ".join(differs))
        self._unsaved = None
        self._scale = self._scale_now()
        self._taken.collected()
        if self._saving is not None:
            self._saving.restored()
        self._taken.loaded = False
        compared(state.get("environment"), self._captured.environment(self._ranks), ref)

    # -- saving

    @property
    def _written_by_agent(self) -> bool:
        """Whether the last step is written at the end, due or not. Of several ranks that is for all of them to say."""
        return self._follows and self._group is None

    @property
    def _follows(self) -> bool:
        return self._saving is not None and self._saving.follows

    def _save(
        self, metrics: Mapping[str, Any] | None, tags: str | Sequence[str], *, due: bool = True, forced: bool = True
    ) -> PendingSave | None:
        assert self._saving is not None  # a writer is open
        self._saving.settle()
        pending = self._saving.offer(self._done, metrics, tags, due=due, forced=forced)
        if self._group is None or self._group.rank == 0:
            self._overlooked.measured(metrics)
        self._draw(metrics or {})
        remark = self._explained.remark()
        if remark is not None and not self._follows:  # where steps are passed over, diffs span several
            warn(remark, UnexplainedStepWarning)
        return pending

    def _draw(self, metrics: Mapping[str, Any]) -> None:
        board = self._settings.tensorboard
        if board is None:
            return
        for name, value in metrics.items():
            board.add_scalar(name, float(value.item() if hasattr(value, "item") else value), self._done)

    def _saved(self, pending: PendingSave) -> PendingSave:
        """The save that is durable: another one, where its agent died with it."""
        assert self._saving is not None
        return self._saving.durable(pending)

    def _skipped(self) -> bool:
        """Whether the scaler has skipped a step since the last call: its scale has fallen."""
        before, self._scale = self._scale, self._scale_now()
        return before is not None and self._scale is not None and self._scale < before

    def _scale_now(self) -> float | None:
        return None if self._scaler is None else float(self._scaler.get_scale())

    def _flush(self) -> None:
        writer = self._writer
        if writer is not None:
            writer.wait()

    # -- errors, and the end

    def _failed(self, error: Exception) -> None:
        """Raise, or warn and go on: a writer that is finished ends the saving, anything else one step's."""
        if self._settings.on_error == "raise":
            raise error  # and each later call raises what the writer then says
        self._stopped = self._stopped or isinstance(error, WriterError)
        what = "no step is saved any more" if self._stopped else f"step {self._done} or one before it was not saved"
        warn(f"{self.store.url}: {what}, and training goes on: {type(error).__name__}: {error}", UnsavedStepWarning)

    def _remark_unsaved(self, why: str) -> None:
        """Say that the last step is in no checkpoint: its state may have been changed since, so it is not saved now."""
        if self._unsaved is not None and not self._stopped:
            every, self._unsaved = self._settings.save_every, None
            lost = "and is lost"
            if self._follows:  # one of several ranks: whether all of their agents have it nobody knows yet
                lost = "and is lost unless the trainers of all ranks end soon: then their agents write it"
            what = f"step {self._done} was not saved (save_every={every}), {lost}"
            _LOG.warning("%s: %s: %s", self.store.url, what, why)

    def _finish(self, save: bool) -> None:
        if save and self._unsaved is not None:
            self._save(self._unsaved, ())
            self._unsaved = None
        if self._saving is not None and (self._retention is not None or self._settings.agent):
            self._saving.ended()
        if self._retention is not None:
            self._retention.close()
        self._overlooked.ended()

    def _end_writer(self) -> None:
        writer, self._writer = self._writer, None
        retention, self._retention = self._retention, None
        saving, self._saving = self._saving, None
        try:
            if retention is not None:
                retention.abandon()
            if writer is not None:
                writer.close()
        finally:
            if saving is not None:
                saving.close()

    def _check_open(self) -> None:
        if self._closed:
            raise WriterClosedError(f"{self.store.url}: this Checkpointer is closed")


def _exited(made: weakref.ref[Checkpointer], process: int) -> None:
    """The script is over without `close`: what it was given the writer finishes (`host.exiting`)."""
    checkpointer = made()
    if checkpointer is None or os.getpid() != process:
        return
    if not checkpointer._written_by_agent:
        checkpointer._remark_unsaved("the script ended without leaving a with")
