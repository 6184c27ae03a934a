"""Checkpoints of a training script, in two lines: the step to begin with, and a call after each step.

::

    with Checkpointer("runs/gpt", model=model, optimizer=optimizer, scheduler=scheduler, loader=loader) as checkpointer:
        for step in range(checkpointer.resume(), steps):
            loss.backward(); optimizer.step(); scheduler.step(); optimizer.zero_grad()
            checkpointer.step(metrics={"loss": loss})

What a checkpoint holds is gathered in `captured`, what the optimizers did in `taken`. A term is opened in `opening`;
what there is until it ends is its `tenure`. After a step `deciding` says what becomes of it, and `offering` does that;
what is in no checkpoint is told of in `unsaved`. Here is the order of events.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, Unpack

from ckptstore import store as stores
from ckptstore.errors import UsageError, WriterClosedError
from ckptstore.host.caller_warnings import DeterminismWarning, warn, warns_last
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.restore.load_targets import MadeTargets
from ckptstore.store import Store
from ckptstore.training.captured import Captured
from ckptstore.training.deciding import Deciding
from ckptstore.training.environment import compared, hyperparameters, unheeded
from ckptstore.training.explained import Explained
from ckptstore.training.fitting import some
from ckptstore.training.offering import Offering
from ckptstore.training.opening import Opening
from ckptstore.training.optimizer_tracker import LossScale, OptimizerTracker
from ckptstore.training.overlooked import Overlooked
from ckptstore.training.pacing import Pacing
from ckptstore.training.replicas import check_replicable
from ckptstore.training.resume_checks import Comparison, check_parts
from ckptstore.training.settings import CheckpointerOptions, Settings
from ckptstore.training.tenure import Tenure
from ckptstore.training.unsaved import Unsaved
from ckptstore.training.urgency import Urgency
from ckptstore.write.ledger import PendingSave
from ckptstore.write.lost import name_steps

__all__ = ["Checkpointer"]

_LOG: Final = logging.getLogger("ckptstore.training")


class Checkpointer:
    """Saves a training script's state after its steps, and gives it back. Use it in a ``with``.

    Attributes:
        store: where to.
        loader: iterate over this, not over the given loader, whose attributes it has: it counts the batches, and keeps
            the random generators as they are while an iterator is made in a resumed epoch. None: none was given.
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
            loader: what gives the batches. Iterate over `loader` of this.
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
        self._scale = LossScale(options.get("scaler"))
        self.store = store if isinstance(store, Store) else stores.open(store)
        self._owns_store = not isinstance(store, Store)
        self._taken = OptimizerTracker(self._captured.optimizers, self._settings.compressor)
        self._urgency = Urgency(self._settings, self._flush)
        self._pacing = Pacing(self._settings.save_every)
        self._unsaved = Unsaved(self.store.url, self._settings)
        self._overlooked = Overlooked(self._captured, self._settings.keep.metric)
        deciding = Deciding(self._captured, self._taken, self._scale, self._urgency, self._pacing, self._unsaved)
        explained = Explained(self._settings.on_metrics, self._urgency.deadline.saved, self._settings.tensorboard)
        self._offering = Offering(deciding, self._pacing, self._urgency, self._unsaved, self._overlooked, explained)
        self._opening = Opening(self.store, self._settings, self._captured, self._taken, explained.told)
        self._tenure: Tenure | None = None
        self._at_exit = partial(_exited, weakref.ref(self), os.getpid())
        self._done = 0
        self._closed = False
        self._taken.install(predict=False)
        if self._settings.signals:
            self._urgency.install()

    def __repr__(self) -> str:
        term = "not open yet" if self.term is None else f"term {self.term}, step {self._done}"
        why = f" ({self._opening.why})" if self._opening.why else ""
        return f"<Checkpointer of {self.store.url!r}: {self.strategy}{why}, {term}>"

    @property
    def strategy(self) -> str:
        """How checkpoints are stored; ``auto`` until the writer is open."""
        return self._opening.strategy or self._settings.strategy

    @property
    def term(self) -> int | None:
        """The term that this run writes; None until it is open."""
        return None if self._tenure is None else self._tenure.writer.term

    @property
    def agent_pid(self) -> int | None:
        """The process that saves, with ``agent=True``; None: this one, or none yet."""
        writer = None if self._tenure is None else self._tenure.writer
        pid: int | None = getattr(writer, "agent_pid", None)
        return pid

    @property
    def steps_done(self) -> int:
        """Steps of this run, those before it was resumed included."""
        return self._done

    @property
    def should_stop(self) -> bool:
        """The deadline is near, or SIGTERM came, and the last step is durable: end the loop. Alike on all ranks."""
        return self._urgency.stopping

    @warns_last
    def resume(
        self, ref: str | int | None = "latest", *, parts: str | Sequence[str] | None = None, strict: bool = True
    ) -> int:
        """Begin: restore everything in place -> the step to go on from; 0 if there is nothing yet.

        First everything is compared with the script's objects; nothing is restored unless all of it fits. A second
        time, in the same run, it goes back: as `rollback`.

        Args:
            ref: what to continue from: ``latest``, a step, ``STEP@TERM``, ``tag:NAME``; one that is not the newest
                begins a branch. None: from nothing, whatever the store holds.
            parts: restore these alone, and leave the others as the script has them: some of ``model``, ``optimizer``,
                ``scheduler``, ``scaler``, ``compressor``, ``extra``, ``loader``, ``random`` (the generators). None:
                all. A log line says what is left out.
            strict: False: restore what fits, tensor by tensor; a `DeterminismWarning` lists what does not.

        Raises:
            CheckpointNotFoundError: there is no such checkpoint.
            StateMismatchError: the script's objects differ from the checkpoint's; it lists every difference. Nothing
                was restored, and no term is open: another `resume` may follow.
            FormatError: it was not saved by a Checkpointer.
            CorruptionError, StorageError: it cannot be read, or the store not be written.
            UsageError: parts that there are not.
            what an object's own ``load_state_dict`` raises; the objects restored before it are put back.
        """
        self._check_open()
        asked = _Asked(check_parts(parts, self._captured.given), parts, strict)
        if self._tenure is not None:
            if ref is None:
                raise UsageError("resume(None) begins from nothing, and this run has begun: make another Checkpointer")
            return self.rollback(ref, parts=parts, strict=strict)
        tenure = self._open(None if ref is None else str(ref))
        writer = tenure.writer
        if writer.inherited is not None:
            self._begin_with(tenure, None, asked)
        elif writer.parent is not None:
            self._begin_with(tenure, writer.parent, asked)
        else:
            self._agree(tenure)
        return self._done

    @warns_last
    def rollback(
        self, ref: str | int | CheckpointInfo, *, parts: str | Sequence[str] | None = None, strict: bool = True
    ) -> int:
        """Go back to an earlier checkpoint, and restore everything in place -> its step.

        What was saved after it stays in the store, as a branch; ``latest`` is on the new one from now on.

        Args:
            parts, strict: as for `resume`.

        Raises:
            as `resume`.
        """
        name = ref.ref if isinstance(ref, CheckpointInfo) else str(ref)
        tenure = self._tenure
        if tenure is None:
            return self.resume(name, parts=parts, strict=strict)  # or it is closed, which that says
        asked = _Asked(check_parts(parts, self._captured.given), parts, strict)
        parent = tenure.writer.rollback(name)
        self._begin_with(tenure, parent, asked)
        return self._done

    @warns_last
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

    @warns_last
    def wait(self) -> None:
        """Return when every step given so far is durable.

        Raises:
            with ``on_error="raise"`` what stopped a save.
        """
        self._check_open()
        if self._tenure is not None and self._tenure.saving is not None and not self._unsaved.stopped:
            try:
                self._tenure.saving.wait()
            except Exception as error:  # noqa: BLE001  # with on_error="warn" whatever it is
                self._failed(self._tenure, error)

    @warns_last
    def tag(self, name: str, ref: str | int = "latest") -> CheckpointInfo:
        """Name a checkpoint; see `Writer.tag`."""
        self._check_open()
        if self._tenure is None:
            raise UsageError("nothing is open yet: call resume() before tag()")
        return self._tenure.writer.tag(name, ref)

    @warns_last
    def close(self, *, save: bool = False) -> None:
        """Make durable what was given, and leave nothing behind: hooks, signal handlers, threads.

        Args:
            save: also save the last step, if it was not. Leaving the ``with`` without an error does.

        Raises:
            with ``on_error="raise"`` what stopped a save of which nobody has been told.
        """
        if self._closed:
            return
        if not save:
            self._remark_unsaved("close() does not save it, close(save=True) does")
        self._closed, tenure = True, self._tenure
        atexit.unregister(self._at_exit)
        try:
            with contextlib.ExitStack() as last:
                if self._owns_store:
                    last.callback(self.store.close)
                last.callback(self._urgency.remove)
                last.callback(self._taken.remove)
                last.callback(self._overlooked.left)
                last.callback(self._end_term)
                self._urgency.leave()
                if self._tenure is not None and not self._unsaved.stopped:
                    self._finish(self._tenure, save)
        except Exception as error:  # noqa: BLE001  # with on_error="warn" whatever it is
            self._failed(tenure, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._remark_unsaved(f"{type(error).__name__} ended the with")
        try:
            self.close(save=error is None)
        except BaseException:
            if error is None:
                raise
            _LOG.exception("closing %s", self.store.url)  # the loop's own error is on its way

    # -- a term, from its opening to its end

    def _begin_from_nothing(self) -> Tenure:
        newest = self.store.latest_step()
        if newest is not None:
            raise UsageError(
                f"{self.store.url} holds a run of {newest} steps: call resume() before the first step to continue it, "
                "or resume(None) to begin another from nothing"
            )
        # With an agent: one that keeps a step which is in no store yet is not to be gone on from unasked.
        tenure = self._open(None if self._settings.agent else "latest")
        self._agree(tenure)
        return tenure

    def _open(self, ref: str | None) -> Tenure:
        self._tenure = tenure = self._opening.term(ref)
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)
        self._opening.begin(tenure)
        return tenure

    def _begin_with(self, tenure: Tenure, parent: CheckpointInfo | None, asked: _Asked) -> None:
        """Restore what a term goes on from; if that fails there is no term.

        Args:
            parent: None: what an agent has kept.
        """
        try:
            state, comparison, ref = self._read(tenure, parent, asked)
            heard = self._give_back(tenure, state, comparison, ref)
        except BaseException:
            # Prevents: steps of a script that was not restored, as if they followed the checkpoint's.
            self._end_term()
            raise
        self._agree(tenure)
        self._warn(tenure, comparison, heard, ref)  # all is restored: where warnings are errors, nothing is lost

    def _warn(self, tenure: Tenure, comparison: Comparison, heard: Any, ref: str) -> None:
        """Say why the run will not be the one that was saved."""
        left = f"left as the script has it: {some(comparison.differences)}" if comparison.differences else ""
        for said in [*([left] if left else []), *comparison.warnings]:
            warn(f"resuming {ref}: {said}", DeterminismWarning)
        compared(heard, self._captured.environment(tenure.ranks), ref)
        if self.loader is not None:
            self.loader.remark()

    def _read(self, tenure: Tenure, parent: CheckpointInfo | None, asked: _Asked) -> tuple[Any, Comparison, str]:
        """The state, and how it compares with the script's."""
        if parent is None:
            from ckptstore.agent.client import AgentWriter

            writer = tenure.writer
            assert isinstance(writer, AgentWriter)
            state, ref = writer.load(), f"step {writer.step}"
        else:
            ref = parent.ref

            def rooms(outline: Any) -> Mapping[str, Any]:
                return self._captured.rooms(self._compared(outline, asked, ref))

            # Shards are read into the script's own tensors: they are compared before.
            into = MadeTargets(rooms) if self._captured.sharding else None
            state = self.store.load(ref, rank=tenure.rank, into=into)
        return state, self._compared(state, asked, ref), ref

    def _compared(self, state: Any, asked: _Asked, ref: str) -> Comparison:
        comparison = Comparison(self._captured.given, state, asked.parts, whole=asked.named is None)
        if asked.strict:
            comparison.check(ref)
        return comparison

    def _give_back(self, tenure: Tenure, state: Any, comparison: Comparison, ref: str) -> Any:
        """Restore a state -> what it says of the script's environment."""
        chosen = partial(hyperparameters, self._captured.optimizers, scheduled=self._captured.may_have_schedule)
        asked = [] if self._done else chosen()  # later it is what this run has made of it
        comparison.restore(read_in_place=bool(self._captured.sharding))
        notes = [] if self._done else comparison.notes
        self._done = comparison.step
        left = [comparison.left] if comparison.left else []
        if differs := [*unheeded(asked, chosen()), *notes, *left]:
            _LOG.warning("%s: resuming %s: %s", self.store.url, ref, "; ".join(differs))
        self._unsaved.last = None
        self._scale.note()
        self._taken.collected()
        if tenure.saving is not None:
            tenure.saving.restored()
        self._taken.loaded = False
        if self.loader is not None:
            self.loader.saved(None)
        return state.get("environment")

    def _agree(self, tenure: Tenure) -> None:
        """Begin to agree with the other ranks on what is urgent. To be called where the last step is known."""
        if tenure.group is not None:
            self._urgency.join(tenure.group, self.store.run, tenure.writer.term, self._done)

    def _finish(self, tenure: Tenure, save: bool) -> None:
        if save and self._unsaved.last is not None:
            try:
                self._offering.save(tenure, self._done, self._unsaved.last, ())
            except Exception as error:
                name_steps(error, [self._done])
                raise
            self._unsaved.last = None
        tenure.finish()
        self._overlooked.ended()

    def _failed(self, tenure: Tenure | None, error: Exception) -> None:
        """Raise, or warn of, what stopped saves that were waited for: every step of them is named once."""
        lost = [] if tenure is None or tenure.saving is None else tenure.saving.settle()
        if lost:
            self._unsaved.lost(lost)
        if not any(other is error for _, other in lost):
            self._unsaved.failed(error)

    def _end_term(self) -> None:
        tenure, self._tenure = self._tenure, None
        if tenure is not None:
            tenure.end()

    # -- a step

    def _step(
        self, metrics: Mapping[str, Any] | None, tags: str | Sequence[str], save: bool | None
    ) -> PendingSave | None:
        self._check_open()
        if metrics is not None and not isinstance(metrics, Mapping):
            raise UsageError(f"metrics: {type(metrics).__name__}; numbers by name are wanted: {{'loss': loss}}")
        tenure = self._tenure or self._begin_from_nothing()
        if self._taken.loaded and self._done:
            raise UsageError(
                f"an optimizer's state was loaded after step {self._done}: what follows is another branch of the run; "
                "go back with Checkpointer.rollback(REF), which restores everything"
            )
        self._taken.loaded = False
        self._done += 1
        return self._offering.after(tenure, self._done, metrics, tags, save)

    def _flush(self) -> None:
        tenure = self._tenure
        if tenure is not None:
            tenure.writer.wait()

    def _remark_unsaved(self, why: str) -> None:
        """Say that the last step is in no checkpoint, unless an agent writes it."""
        tenure = self._tenure
        if tenure is None or not tenure.written_by_agent:
            self._unsaved.remark(self._done, why, follows=tenure is not None and tenure.follows)

    def _check_open(self) -> None:
        if self._closed:
            raise WriterClosedError(f"{self.store.url}: this Checkpointer is closed")


@dataclass(frozen=True, slots=True)
class _Asked:
    """What `resume` is to restore.

    Attributes:
        parts: of the state.
        named: as they were named; None: all.
        strict: everything of them.
    """

    parts: frozenset[str]
    named: str | Sequence[str] | None
    strict: bool


def _exited(made: weakref.ref[Checkpointer], process: int) -> None:
    """The script is over without `close`: what it was given the writer finishes (`host.interpreter_exit`)."""
    checkpointer = made()
    if checkpointer is None or os.getpid() != process:
        return
    checkpointer._remark_unsaved("the script ended without leaving a with")
