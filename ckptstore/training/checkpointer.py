"""Checkpoints of a training script, in two lines: the step to begin with, and a call after each step.

::

    with Checkpointer("runs/gpt", model=model, optimizer=optimizer, scheduler=scheduler, loader=loader) as checkpointer:
        for step in range(checkpointer.resume(), steps):
            loss.backward(); optimizer.step(); scheduler.step(); optimizer.zero_grad()
            checkpointer.step(metrics={"loss": loss})

`ScriptState` gathers what a checkpoint holds. `OptimizerTracker` notes what the optimizers did. `OpenTerm` is the term
that is written. `StepSaves` decides after each step whether to save it. This module calls them in order.
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
from ckptstore.training import rng
from ckptstore.training.capture.script_state import ScriptState
from ckptstore.training.environment import compared, hyperparameters, unheeded
from ckptstore.training.open_term import OpenTerm, choose_strategy
from ckptstore.training.optimizers.optimizer_tracker import OptimizerTracker
from ckptstore.training.replica.replicable_state import check_replicable
from ckptstore.training.resume.part_fit import some
from ckptstore.training.resume.resume_checks import Comparison, check_parts
from ckptstore.training.settings import CheckpointerOptions, SaveSettings
from ckptstore.training.state_saves import ranks_of
from ckptstore.training.step_saves import StepSaves
from ckptstore.training.strategies import Strategy
from ckptstore.write.saves.ledger import PendingSave

__all__ = ["Checkpointer"]

_LOG: Final = logging.getLogger("ckptstore.training")


class Checkpointer:
    """Saves a training script's state after its steps, and restores it. Use it in a ``with``.

    Attributes:
        store: the store of the run.
        loader: iterate over this, not over the loader that you passed. It has that loader's attributes, counts the
            batches, and keeps the random generators unchanged while a resumed epoch makes its iterator. None: you
            passed no loader.
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
        """Check the objects and options. Nothing is opened for writing before `resume`, or the first `step`.

        Args:
            store: a path or URL, or a store.
            model: a module, or a list or dict of modules. It may be compiled or wrapped by DistributedDataParallel.
            optimizer: its optimizer, or several. Hooks notice their steps.
            scheduler: its schedule, or several.
            loader: the data loader. Iterate over the attribute `loader` instead of it.
            strategy: ``full``, ``delta``, ``gradient``, ``replica`` (with ``agent=True``), or ``auto``, which chooses
                one of the first three and says why: in a line on a terminal, in the ``repr``, and to the logger
                ``ckptstore.training`` (level INFO).
            options: see `CheckpointerOptions`.

        Raises:
            UsageError: an invalid object or option.
            as `ckptstore.open`.
        """
        self._settings = SaveSettings.of(strategy, options)
        self._captured = ScriptState(
            model,
            optimizer,
            scheduler,
            loader,
            options.get("scaler"),
            options.get("extra"),
            self._settings.compressor,
            only=self._settings.only,
        )
        if self._settings.strategy == "replica":
            check_replicable(self._captured)
        self.loader = self._captured.loader
        self.store = store if isinstance(store, Store) else stores.open(store)
        self._owns_store = not isinstance(store, Store)
        self._tracker = OptimizerTracker(self._captured.optimizers, self._settings.compressor, options.get("scaler"))
        self._steps = StepSaves(self.store.url, self._settings, self._captured, self._tracker, self._flush)
        self._strategy: tuple[Strategy, str] | None = None
        self._term: OpenTerm | None = None
        self._generators: dict[str, Any] | None = None  # the global ones, when `resume` returned
        self._at_exit = partial(_warn_unclosed, weakref.ref(self), os.getpid())
        self._done = 0
        self._closed = False
        self._tracker.install(predict=False)
        if self._settings.signals:
            self._steps.urgency.install()

    def __repr__(self) -> str:
        term = "not open yet" if self.term is None else f"term {self.term}, step {self._done}"
        why = f" ({self._strategy[1]})" if self._strategy and self._strategy[1] else ""
        return f"<Checkpointer of {self.store.url!r}: {self.strategy}{why}, {term}>"

    @property
    def strategy(self) -> str:
        """How checkpoints are stored; ``auto`` until the writer is open."""
        return self._strategy[0] if self._strategy else self._settings.strategy

    @property
    def term(self) -> int | None:
        """The number of the term that this run writes; None until it is open."""
        return None if self._term is None else self._term.writer.term

    @property
    def agent_pid(self) -> int | None:
        """The process id of the agent, with ``agent=True``; None: this process saves, or no agent runs yet."""
        writer = None if self._term is None else self._term.writer
        pid: int | None = getattr(writer, "agent_pid", None)
        return pid

    @property
    def steps_done(self) -> int:
        """Steps of this run, including those before it was resumed."""
        return self._done

    @property
    def should_stop(self) -> bool:
        """Whether to end the loop: the deadline is near or SIGTERM came, and the last step is durable.

        All ranks get the same answer.
        """
        return self._steps.urgency.stopping

    @warns_last
    def resume(
        self, ref: str | int | None = "latest", *, parts: str | Sequence[str] | None = None, strict: bool = True
    ) -> int:
        """Begin the run: restore everything in place -> the step to continue from; 0 if the store has no checkpoint.

        The checkpoint is first compared with all of the script's objects. Nothing is restored unless all of it fits. A
        second call in the same run works as `rollback`.

        Args:
            ref: the checkpoint to continue from: ``latest``, a step, ``STEP@TERM``, ``tag:NAME``. If it is not the
                newest, the run begins a branch. None: start from scratch, whatever the store holds.
            parts: restore only these parts, and leave the others as the script has them: some of ``model``,
                ``optimizer``, ``scheduler``, ``scaler``, ``compressor``, ``extra``, ``loader``, ``random`` (the
                generators). None: all. A log line lists the parts that are left out.
            strict: False: restore what fits, tensor by tensor. A `DeterminismWarning` lists the rest.

        Raises:
            CheckpointNotFoundError: there is no such checkpoint.
            StateMismatchError: the script's objects differ from the checkpoint's; it lists every difference. Nothing
                was restored, and no term is open: another `resume` may follow.
            FormatError: it was not saved by a Checkpointer.
            CorruptionError, StorageError: the checkpoint cannot be read, or the store cannot be written.
            UsageError: unknown parts.
            and whatever an object's own ``load_state_dict`` raises. Then the objects that were already restored get
                their old state back.
        """
        self._check_open()
        asked = _Asked(check_parts(parts, self._captured.given), parts, strict)
        if self._term is not None:
            if ref is None:
                raise UsageError("resume(None) starts from scratch, and this run has begun: make another Checkpointer")
            return self.rollback(ref, parts=parts, strict=strict)
        term = self._open(None if ref is None else str(ref))
        writer = term.writer
        if writer.inherited is not None:
            self._begin_with(term, None, asked)
        elif writer.parent is not None:
            self._begin_with(term, writer.parent, asked)
        else:
            self._agree(term)
        self._generators = rng.global_states()
        return self._done

    @warns_last
    def rollback(
        self, ref: str | int | CheckpointInfo, *, parts: str | Sequence[str] | None = None, strict: bool = True
    ) -> int:
        """Go back to an earlier checkpoint, and restore everything in place -> its step.

        Later checkpoints stay in the store, as a branch. From now on ``latest`` is on the new branch.

        Args:
            parts, strict: as for `resume`.

        Raises:
            as `resume`.
        """
        name = ref.ref if isinstance(ref, CheckpointInfo) else str(ref)
        term = self._term
        if term is None:
            return self.resume(name, parts=parts, strict=strict)  # it raises if this is closed
        asked = _Asked(check_parts(parts, self._captured.given), parts, strict)
        parent = term.writer.rollback(name)
        self._begin_with(term, parent, asked)
        self._generators = rng.global_states()
        return self._done

    def restore_generators(self) -> None:
        """Set the global random generators once more to what they were when `resume`, or `rollback`, returned.

        Call it before the first batch if something draws random numbers in between, whenever a process begins: hooks of
        a framework, another model. It does nothing to generators in ``extra`` and those of the loader.

        Raises:
            UsageError: neither was called.
        """
        self._check_open()
        if self._generators is None:
            raise UsageError("there is nothing to restore: call resume() before restore_generators()")
        rng.restore(self._generators)

    @warns_last
    def step(
        self, metrics: Mapping[str, Any] | None = None, *, tags: str | Sequence[str] = (), save: bool | None = None
    ) -> PendingSave | None:
        """Note that a training step is done, and save it if it is due.

        Call it after ``optimizer.step()`` and ``scheduler.step()``. If no optimizer has stepped since the last call (a
        micro-batch whose gradients are accumulated), the call counts as a step and saves nothing. A step that the
        `GradScaler` skipped is saved like any other.

        Args:
            metrics: numbers, or tensors of one element, by name. They are stored with the checkpoint, and `keep_best`
                uses them. The call waits for a tensor on a device.
            tags: names for the checkpoint.
            save: whether to save this step; None: as `save_every` says.

        Returns:
            the save in flight. None if this step is not saved; with ``replica`` also if only the agent's memory holds
            it, because it is not due or the medium has not stored the steps before it yet.

        Raises:
            UsageError: the store holds checkpoints and `resume` was not called; something else has loaded an
                optimizer's state since the last step; metrics that are not numbers.
            with ``on_error="raise"``: the error of a save that failed.
        """
        self._steps.pace.came()
        try:
            return self._step(metrics, tags, save)
        finally:
            self._steps.pace.left()

    @warns_last
    def wait(self) -> None:
        """Wait until all saves so far are durable.

        Raises:
            with ``on_error="raise"``: the error of a save that failed.
        """
        self._check_open()
        if self._term is not None and not self._steps.stopped:
            try:
                self._term.saves.wait()
            except Exception as error:  # noqa: BLE001  # on_error="warn" turns any error into a warning
                self._steps.failed(self._term, error)

    @warns_last
    def tag(self, name: str, ref: str | int = "latest") -> CheckpointInfo:
        """Name a checkpoint; see `Writer.tag`."""
        self._check_open()
        if self._term is None:
            raise UsageError("nothing is open yet: call resume() before tag()")
        return self._term.writer.tag(name, ref)

    @warns_last
    def close(self, *, save: bool = False) -> None:
        """Make all saves durable, and remove hooks, signal handlers and threads.

        Args:
            save: also save the last step if it was not saved. Leaving the ``with`` without an error does so.

        Raises:
            with ``on_error="raise"``: the error of a save that failed, if it was not raised before.
        """
        if self._closed:
            return
        if not save:
            self._steps.remark_unsaved(self._term, self._done, "close() does not save it, close(save=True) does")
        self._closed, term = True, self._term
        atexit.unregister(self._at_exit)
        try:
            with contextlib.ExitStack() as last:
                if self._owns_store:
                    last.callback(self.store.close)
                last.callback(self._steps.urgency.remove)
                last.callback(self._tracker.remove)
                last.callback(self._steps.checks.left)
                last.callback(self._end_term)
                self._steps.urgency.leave()
                if term is not None and not self._steps.stopped:
                    self._steps.finish(term, self._done, save=save)
        except Exception as error:  # noqa: BLE001  # on_error="warn" turns any error into a warning
            self._steps.failed(term, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._steps.remark_unsaved(self._term, self._done, f"{type(error).__name__} ended the with")
        try:
            self.close(save=error is None)
        except BaseException:
            if error is None:
                raise
            _LOG.exception("closing %s", self.store.url)  # the loop's own error continues

    # -- a term, from its opening to its end

    def _begin_from_nothing(self) -> OpenTerm:
        newest = self.store.latest_step()
        if newest is not None:
            raise UsageError(
                f"{self.store.url} holds a run of {newest} steps: call resume() before the first step to continue it, "
                "or resume(None) to start another one from scratch"
            )
        # An agent may hold a step that is in no store yet: only resume() continues from that.
        term = self._open(None if self._settings.agent else "latest")
        self._agree(term)
        return term

    def _open(self, ref: str | None) -> OpenTerm:
        """Open a term that continues from `ref`; None: from scratch."""
        settings, captured = self._settings, self._captured
        group = ranks_of(settings.group, captured.sharding)
        if group is not None and settings.every is None:
            raise UsageError("save_every: the ranks' controllers would say different things; give a number")
        if self._strategy is None:
            self._strategy = choose_strategy(self.store, settings, captured, group)
        captured.note_frozen()
        reports = self._steps.reports
        self._term = term = OpenTerm(
            self.store, settings, captured, self._tracker, self._strategy[0], group, reports, ref
        )
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)
        return term

    def _begin_with(self, term: OpenTerm, parent: CheckpointInfo | None, asked: _Asked) -> None:
        """Restore what a term continues from. If that fails, the term ends.

        Args:
            parent: the checkpoint; None: the state that an agent holds.
        """
        try:
            state, comparison, ref = self._read(term, parent, asked)
            heard = self._give_back(term, state, comparison, ref)
        except BaseException:
            # Prevents: steps of a script that was not restored, as if they followed the checkpoint's.
            self._end_term()
            raise
        self._agree(term)
        self._warn(term, comparison, heard, ref)  # all is restored: where warnings are errors, nothing is lost

    def _warn(self, term: OpenTerm, comparison: Comparison, heard: Any, ref: str) -> None:
        """Warn of everything that makes the run differ from the one that was saved."""
        left = f"left as the script has it: {some(comparison.differences)}" if comparison.differences else ""
        for said in [*([left] if left else []), *comparison.warnings]:
            warn(f"resuming {ref}: {said}", DeterminismWarning)
        compared(heard, self._captured.environment(term.ranks), ref)
        if self.loader is not None:
            self.loader.remark()

    def _read(self, term: OpenTerm, parent: CheckpointInfo | None, asked: _Asked) -> tuple[Any, Comparison, str]:
        """The state, and how it compares with the script's."""
        if parent is None:
            from ckptstore.agent.client.agent_writer import AgentWriter

            writer = term.writer
            assert isinstance(writer, AgentWriter)
            state, ref = writer.load(), f"step {writer.step}"
        else:
            ref = parent.ref

            def rooms(outline: Any) -> Mapping[str, Any]:
                return self._captured.rooms(self._compared(outline, asked, ref))

            # Shards are read into the script's own tensors, so they are compared before that.
            into = MadeTargets(rooms) if self._captured.sharding else None
            state = self.store.load(ref, rank=term.rank, into=into)
        return state, self._compared(state, asked, ref), ref

    def _compared(self, state: Any, asked: _Asked, ref: str) -> Comparison:
        comparison = Comparison(self._captured.given, state, asked.parts, whole=asked.named is None)
        if asked.strict:
            comparison.check(ref)
        return comparison

    def _give_back(self, term: OpenTerm, state: Any, comparison: Comparison, ref: str) -> Any:
        """Restore a state -> its record of the script's environment."""
        chosen = partial(hyperparameters, self._captured.optimizers, scheduled=self._captured.may_have_schedule)
        asked = [] if self._done else chosen()  # after the first step this run may have changed them
        comparison.restore(read_in_place=bool(self._captured.sharding))
        notes = [] if self._done else comparison.notes
        self._done = comparison.step
        left = [comparison.left] if comparison.left else []
        if differs := [*unheeded(asked, chosen()), *notes, *left]:
            _LOG.warning("%s: resuming %s: %s", self.store.url, ref, "; ".join(differs))
        self._steps.unsaved = None
        self._tracker.restored()
        term.saves.restored()
        if self.loader is not None:
            self.loader.saved(None)
        return state.get("environment")

    def _agree(self, term: OpenTerm) -> None:
        """Begin to agree with the other ranks on urgent steps. Call it when the last step is known."""
        if term.group is not None:
            self._steps.urgency.join(term.group, self.store.run, term.writer.term, self._done)

    def _end_term(self) -> None:
        term, self._term = self._term, None
        if term is not None:
            term.end()

    # -- a step

    def _step(
        self, metrics: Mapping[str, Any] | None, tags: str | Sequence[str], save: bool | None
    ) -> PendingSave | None:
        self._check_open()
        if metrics is not None and not isinstance(metrics, Mapping):
            raise UsageError(f"metrics: {type(metrics).__name__}; expected numbers by name: {{'loss': loss}}")
        term = self._term or self._begin_from_nothing()
        if self._tracker.loaded and self._done:
            raise UsageError(
                f"an optimizer's state was loaded after step {self._done}: what follows is another branch of the run; "
                "go back with Checkpointer.rollback(REF), which restores everything"
            )
        self._tracker.loaded = False
        self._done += 1
        return self._steps.after(term, self._done, metrics, tags, save)

    def _flush(self) -> None:
        term = self._term
        if term is not None:
            term.writer.wait()

    def _check_open(self) -> None:
        if self._closed:
            raise WriterClosedError(f"{self.store.url}: this Checkpointer is closed")


@dataclass(frozen=True, slots=True)
class _Asked:
    """What `resume` restores.

    Attributes:
        parts: the parts of the state.
        named: the parts as the caller named them; None: all.
        strict: everything in them must fit.
    """

    parts: frozenset[str]
    named: str | Sequence[str] | None
    strict: bool


def _warn_unclosed(made: weakref.ref[Checkpointer], process: int) -> None:
    """Warn that the script ended without `close`. The writer finishes the saves in flight (`host.interpreter_exit`)."""
    checkpointer = made()
    if checkpointer is None or os.getpid() != process:
        return
    checkpointer._steps.remark_unsaved(
        checkpointer._term, checkpointer._done, "the script ended without leaving a with"
    )
