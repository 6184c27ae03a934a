"""The `Writer` interface: shared by the writer of one process, of one of many ranks, and of a process with an agent."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ckptstore.errors import CkptError, UsageError
from ckptstore.formats.history.checkpoint_ref import step_number, text_of
from ckptstore.host.caller_warnings import warns_last
from ckptstore.host.interpreter_exit import Finishable
from ckptstore.host.progress import Progress, as_progress
from ckptstore.host.signal_reentry import codes_of, refuse_within
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.write.saves.ledger import Labels, Metadata, PendingSave
from ckptstore.write.saves.lost_steps import note_lost
from ckptstore.write.steps.updates import Updates

if TYPE_CHECKING:
    from ckptstore.write.capture.layerwise_save import LayeredSave
    from ckptstore.write.second_tier import Lag

__all__ = ["Writer"]


class Writer(Finishable):
    """One term of a store. `Store.writer` and `ckptstore.agent.writer` open it. Leaving its ``with`` finishes saves.

    Without a ``with``, a normal exit of the interpreter does the same; only a killed process loses saves in flight. Any
    thread may call any method, except `rollback` and `close`: one thread calls them, while no other thread saves.
    """

    takes_copies: ClassVar[bool] = False
    """Whether the caller may copy the state itself: `LocalWriter.adopt`, `AgentWriter.save_filled`."""
    _WAIT: ClassVar[frozenset[CodeType]] = frozenset()
    """The code of methods that wait for others while they hold something that the others may need."""
    _interrupted = False
    """Whether Ctrl-C ended the ``with``: then `close` says what it waits for."""

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL of the store."""

    @property
    @abstractmethod
    def term(self) -> int:
        """The number of this term."""

    @property
    @abstractmethod
    def parent(self) -> CheckpointInfo | None:
        """The checkpoint this term continues from: load it before training; None for a new run."""

    @property
    def usable(self) -> bool:
        """Whether it can save, as far as it knows: it is not closed, nothing has ended it (a newer term exists), and
        this process is not a fork of the one that opened it.
        """
        try:
            self._check_open()
        except CkptError:
            return False
        return True

    @abstractmethod
    def _check_open(self) -> None:
        """Raise the error that every save would raise. Does no I/O."""

    @property
    def recomputes(self) -> bool:
        """Whether the host computes the steps of devices again: then `updates` should carry gradients."""
        return False

    @property
    def inherited(self) -> object:
        """The state of a dead trainer that an agent has kept, until the first save; None: there is none."""
        return None

    def __repr__(self) -> str:
        since = "from scratch" if self.parent is None else f"from {self.parent.ref}"
        return f"<Writer of {self.url!r}: term {self.term}, {since}>"

    # -- saving

    @warns_last
    def save(
        self,
        state: Any,
        step: int | None = None,
        *,
        metadata: Metadata | None = None,
        tags: str | Sequence[str] = (),
        updates: Updates | None = None,
        progress: Progress | bool | None = None,
        replace: bool = False,
    ) -> CheckpointInfo:
        """Make `state` durable as the checkpoint of `step`. When this returns, anyone can load it.

        Args:
            state: nested dict of tensors, numbers, strings, lists, RNG states ..., or a `FlatState` (a state that is
                flattened already). It must not change during the call. With many ranks: this rank's tensors; a
                `DTensor` is this rank's shard of a tensor that is distributed over all ranks.
            step: number of optimizer steps done; a Python or numpy integer. It must be above every step that this term
                continues from. All ranks save the same steps in the same order. None: the next one, which is the
                highest that this writer was ever given (at first that of the parent, or 0) plus 1. Calls of several
                threads get different steps.
            metadata: facts about the checkpoint that every listing of the store shows (a loss, a commit, a note): a
                mapping of texts, numbers, booleans, None, lists and mappings, at most 16 KiB as JSON. It is stored in
                `CheckpointInfo.metadata`. With many ranks, rank 0's metadata is stored. Or a function that returns such
                a mapping or None, for what is known later: a thread of rank 0's writer calls it when everything but the
                record that commits the checkpoint is durable, and waits for it. If it raises, nothing is committed.
            tags: one or more names for the checkpoint, set in the same commit; an existing tag moves. With many ranks,
                rank 0's tags are set.
            updates: what the optimizers did since the previous save (`training.OptimizerStep`), for step diffs; only a
                writer with `diffs` makes these. With a `DiffOptions.batch` above 1, all waiting steps are written.
            progress: called from other threads as bytes are copied; the total is the size of the state in bytes, or of
                this rank's share. True: a progress line on stderr.
            replace: allow that `step` is the newest checkpoint's. Then this save replaces it: the REFs ``STEP`` and
                ``latest`` lead to the old checkpoint until this one is durable, and to this one from then on, also
                after a crash. The old one remains as ``STEP@TERM`` until the retention rules retire it; its tags stay
                with it. As `rollback` does, this waits for earlier saves and begins a new term; so no other thread may
                save meanwhile, all ranks give the same `replace`, and the checkpoint is a full. It needs `step`. To
                save a step below the newest one, call `rollback` first.

        Raises:
            UnsupportedStateError: a value in `state` cannot be stored; the error names its key path. Nothing was
                written.
            StepOrderError: the step exists, or is not above the parent's; with `replace`: it is below the newest
                checkpoint's. Nothing was written.
            UsageError: `metadata` or `tags` cannot be stored; `metadata` is a function, and an agent saves; `replace`
                without `step`, or where an agent saves; or a signal handler calls this while the same thread is inside
                `save`, `save_async` or `begin`. Nothing was written. Or the function `metadata` failed (``__cause__``),
                or returned what cannot be stored: nothing was committed, and the step may be saved again.
            with `replace` also as `rollback`; then the old checkpoint is still the newest.
            RankError: the ranks could not save this step; its subclasses tell why. Nothing was committed, and the next
                step may be saved.
            StorageError: the medium failed. The checkpoint does not exist; the writer is still usable.
            FencedError: a newer term exists. This writer can save no more.
            CommitUnknownError: the checkpoint may or may not exist. This writer can save no more.
        """
        refuse_within(self, self._WAIT)
        labels, given = Labels.of(metadata, tags), _given(step)
        if replace:
            self._make_way(_named(given))
        return self._save(state, given, labels, updates, as_progress(progress))

    @warns_last
    def save_async(
        self,
        state: Any,
        step: int | None = None,
        *,
        metadata: Metadata | None = None,
        tags: str | Sequence[str] = (),
        updates: Updates | None = None,
        replace: bool = False,
    ) -> PendingSave:
        """Copy `state` to host memory and make it durable in the background. When this returns, the state may change.

        Args:
            state, step, metadata, tags: as for `save`.
            updates: as for `save`; gradients are copied, too.
            replace: as for `save`.

        Waits while `max_in_flight` earlier saves are not durable yet, and while the `memory` budget is used up
        (`on_metrics` receives the time). A step diff that waits for its batch is not counted. A rank waits for the
        other ranks if they must agree again who writes what, as at the first save. An error that `result` has not
        returned to anyone is raised by the next call, or on leaving the ``with``.

        Raises:
            as `save`; errors of the medium and of other ranks come from `PendingSave.result`.
        """
        refuse_within(self, self._WAIT)
        labels, given = Labels.of(metadata, tags), _given(step)
        if replace:
            self._make_way(_named(given))
        return self._save_async(state, given, labels, updates)

    def _make_way(self, step: int) -> None:
        """Allow the next save to replace the newest checkpoint, if that has `step`.

        If it was saved in this term, this begins a term that continues from it. So readers find the old checkpoint
        until the new one is committed: a term without checkpoints leads to its parent.

        Raises:
            UsageError: this writer cannot.
            as `rollback`.
        """
        raise UsageError(f"replace: step {step}: an agent's writer cannot; use a writer without an agent")

    @abstractmethod
    def _save(
        self, state: Any, step: int | None, labels: Labels, updates: Updates | None, progress: Progress | None
    ) -> CheckpointInfo:
        """See `save`."""

    @abstractmethod
    def _save_async(self, state: Any, step: int | None, labels: Labels, updates: Updates | None) -> PendingSave:
        """See `save_async`."""

    def prepare(self, state: Any) -> None:
        """Announce a state for `save_async`, so that its memory is ready. Returns at once, and writes nothing.

        The first use of fresh memory costs several times as much as the copy into it, so the first `save_async` of a
        run blocks training longer than later ones. Call this when the state is complete (the optimizer's moments exist)
        and there is other work to do: the memory is touched in the background. A second call does nothing. On a writer
        of many ranks, it does nothing.

        Args:
            state: as for `save`; only the names, types and shapes of its tensors matter.

        Raises:
            UnsupportedStateError: a value in `state` cannot be stored.
            WriterClosedError, FencedError: as `save`.
        """

    @warns_last
    def begin(self, state: Any, step: int, layers: Mapping[str, Sequence[str]], *, direct: bool = False) -> LayeredSave:
        """Begin a save whose snapshot is filled layer by layer, as layers are updated (LightCheck, section III-B).

        `training.LayerwiseSnapshots` does this for torch's optimizers. One at a time: finish or abandon it before the
        next save.

        Args:
            state: as for `save_async`; each tensor of `layers` may still change until its layer is `ready`. Only the
                dtype and shape of the other tensors are read here.
            step: as for `save`.
            layers: names of tensors (`FlatState.tensors`) by the name of their layer.
            direct: copy straight into mapped segments, without host memory in between. Needs a medium with mapped
                segments (``pmem://``) and a writer without `deltas` and `diffs`; an agent cannot do it.

        Waits while `max_in_flight` earlier snapshots are not durable yet.

        Raises:
            as `save_async`.
            UsageError: a tensor is in two layers, or not in the state; `direct`, and the medium has no mapped segments;
                or this is a writer of many ranks.
            StorageError: `direct`, and the medium failed or is full.
        """
        refuse_within(self, self._WAIT)
        return self._begin_layers(state, step_number(step), layers, direct=direct)

    def _begin_layers(self, state: Any, step: int, layers: Mapping[str, Sequence[str]], *, direct: bool) -> LayeredSave:
        """See `begin`."""
        del state, step, layers, direct
        raise UsageError("begin: ranks that save together copy their states whole: call save_async")

    # -- waiting, tags, rollback

    @property
    def _needs_caller(self) -> bool:
        """Whether a waiting save holds what other calls of the same thread may need."""
        return True

    @warns_last
    def wait(self) -> None:
        """Wait until every save so far is durable: those in flight, and those that wait for their batch, which are
        written now.

        Raises:
            StorageError, FencedError, CommitUnknownError: a `save_async` failed and no call has raised its error yet.
                The error has a note on every other such save; no later call raises it again.
            WriterClosedError: the writer is closed; `close` has waited, and raised.
        """
        if self._needs_caller:
            refuse_within(self, self._WAIT)
        self._wait()

    @abstractmethod
    def _wait(self) -> None:
        """See `wait`."""

    @warns_last
    def poll(self) -> None:
        """Answer requests of other processes now (`Store.merge`, `tag`, `retire` ... in another process), and fold the
        log if that is due. A writer also does this after every save, and every `poll_seconds`; with many ranks, the
        first rank does.

        A failure here fails no save: it causes one warning, or the next save raises it.

        Raises:
            WriterClosedError: the writer is closed.
        """
        if self._needs_caller:
            refuse_within(self, self._WAIT)
        self._poll()

    @abstractmethod
    def _poll(self) -> None:
        """See `poll`."""

    def lag(self) -> Lag | None:
        """How far the store's second tier is behind; None: it has none.

        Raises `CorruptLogError`, `StorageError` if the store's own log cannot be read.
        """
        return None

    @warns_last
    def tag(self, name: str, ref: str | int | CheckpointInfo = "latest") -> CheckpointInfo:
        """Tag a checkpoint of this term or an earlier one; an existing tag moves. With many ranks, only the first may.

        If the checkpoint waits for its batch, the batch is written first.

        Args:
            name: 1-128 letters, digits and ``_.+/-``, beginning with a letter, digit or ``_``.
            ref: ``latest``, a step, ``STEP@TERM``, ``tag:NAME``, or a checkpoint.

        Returns:
            the checkpoint, with its tags.

        Raises:
            UsageError: `name` is not a valid tag name; or this is not the first rank.
            CheckpointNotFoundError: no checkpoint matches `ref`.
            StorageError, FencedError, CommitUnknownError: as `save`.
        """
        if self._needs_caller:
            refuse_within(self, self._WAIT)
        return self._tag(name, text_of(ref))

    @abstractmethod
    def _tag(self, name: str, ref: str) -> CheckpointInfo:
        """See `tag`."""

    @warns_last
    def untag(self, name: str) -> None:
        """Remove a tag; the checkpoint stays.

        Raises:
            UsageError: this is not the first rank.
            CheckpointNotFoundError: there is no such tag.
            StorageError, FencedError, CommitUnknownError: as `save`.
        """
        if self._needs_caller:
            refuse_within(self, self._WAIT)
        self._untag(name)

    @abstractmethod
    def _untag(self, name: str) -> None:
        """See `untag`."""

    @warns_last
    def rollback(self, ref: str | int | CheckpointInfo) -> CheckpointInfo:
        """Go back: begin a new term that continues from an earlier checkpoint, and that replaces the present one.

        Saves in flight are finished first. Checkpoints saved since `ref` stay in the store, as a branch. The next
        checkpoint is a full; its step may be any above that of `ref`. All ranks call this with the same `ref`; either
        all of them go back, or all raise.

        Args:
            ref: ``latest``, a step, ``STEP@TERM``, ``tag:NAME``, or a checkpoint.

        Returns:
            the checkpoint that the new term continues from: load it. `parent` and `term` describe the new term.

        Raises:
            UsageError: `ref` is not a valid REF; the present term stays open.
            CheckpointNotFoundError: no checkpoint matches `ref`; the present term stays open.
            RankMismatchError: the ranks name different checkpoints; the present term stays open.
            MissingRankError: a rank did not call this in time; the present term stays open, unless rank 0 died.
            FailedRankError: another rank failed; that rank raises its own error.
            FencedError: a newer term exists, and this call does not fence it. This writer can save no more.
            StorageError: the medium failed; if a term was opened nevertheless, the next save raises.
            and the error of a `save_async` that no call has raised yet; then nothing was done.
        """
        refuse_within(self, self._WAIT)
        if ref is None:  # Prevents: a term that starts from scratch, which fences the present one.
            raise UsageError(
                "rollback takes a checkpoint to go back to; to start from scratch open a writer with parent=None"
            )
        return self._rollback(ref)  # unchanged: a CheckpointInfo says more than its name

    @abstractmethod
    def _rollback(self, ref: str | int | CheckpointInfo) -> CheckpointInfo:
        """See `rollback`."""

    # -- the end

    @abstractmethod
    def close(self) -> None:
        """Wait for every save, then end the term. A second call does nothing.

        Raises the error of a `save_async` that no call has raised yet.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A user who interrupts a run wants to know what it waits for.
        self._interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
        try:
            self.close()
        except BaseException as lost:
            if error is None:
                raise
            note_lost(error, self.url, lost)


def _named(step: int | None) -> int:
    """The step that a save replaces. Raises `UsageError`."""
    if step is None:
        # Prevents: a script that believes it overwrites a checkpoint, and stores another one with each save.
        raise UsageError("replace=True: say which step: step=None is always a new one")
    return step


def _given(step: Any) -> int | None:
    return None if step is None else step_number(step)


Writer._WAIT = codes_of(Writer.save, Writer.save_async, Writer.begin)
