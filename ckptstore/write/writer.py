"""What everything that writes a store has: a process of its own, one of many ranks, one whose work an agent does."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import CodeType, TracebackType
from typing import Any, ClassVar, Self

from ckptstore.errors import UsageError
from ckptstore.formats.checkpoint_ref import step_number, text_of
from ckptstore.host.caller_warnings import warns_last
from ckptstore.host.interpreter_exit import Finishable
from ckptstore.host.progress import Progress, as_progress
from ckptstore.host.signal_reentry import codes_of, refuse_within
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.write.capture.layerwise_save import LayeredSave
from ckptstore.write.saves.ledger import Labels, PendingSave
from ckptstore.write.saves.lost_steps import note_lost
from ckptstore.write.second_tier import Lag
from ckptstore.write.steps.updates import Updates

__all__ = ["Writer"]


class Writer(Finishable):
    """One term of a store, as `Store.writer` and `ckptstore.agent.writer` open it. Leaving its ``with`` saves the rest.

    Without a ``with``, the interpreter's ordinary end does what leaving would; only a process that is killed loses what
    is on its way. Any thread may call it, but for `rollback` and `close`: those by one, while no other saves.
    """

    takes_copies: ClassVar[bool] = False
    """Whether its caller may copy a state by itself: `LocalWriter.adopt`, `AgentWriter.save_filled`."""
    _WAIT: ClassVar[frozenset[CodeType]] = frozenset()
    """The code of methods that wait for others while they hold something that those may need."""
    _interrupted = False
    """Ctrl-C ended its ``with``: closing says what it waits for."""

    @property
    @abstractmethod
    def url(self) -> str:
        """The store's."""

    @property
    @abstractmethod
    def term(self) -> int:
        """The number of this term."""

    @property
    @abstractmethod
    def parent(self) -> CheckpointInfo | None:
        """The checkpoint this term continues from: load it before training; None for a new run."""

    @property
    def inherited(self) -> object:
        """A state that an agent has kept of a trainer that died, until the first save; None: there is none."""
        return None

    def __repr__(self) -> str:
        since = "from nothing" if self.parent is None else f"from {self.parent.ref}"
        return f"<Writer of {self.url!r}: term {self.term}, {since}>"

    # -- saving

    @warns_last
    def save(
        self,
        state: Any,
        step: int,
        *,
        metadata: Mapping[str, Any] | None = None,
        tags: str | Sequence[str] = (),
        updates: Updates | None = None,
        progress: Progress | bool | None = None,
    ) -> CheckpointInfo:
        """Make `state` durable as the checkpoint of `step`; it may be loaded by anyone when this returns.

        Args:
            state: nested dict of tensors, numbers, strings, lists, RNG states ..., or a `FlatState` (one that was taken
                apart already); must not change meanwhile. Of one of many ranks: this rank's tensors; a `DTensor` is a
                shard of one that all ranks make up.
            step: optimizer steps done, above every step that this term continues from; numpy's integers, too. All ranks
                save the same steps in the same order.
            metadata: what is to be known of the checkpoint wherever the store is listed (a loss, a commit, a note): a
                mapping of texts, numbers, booleans, None, lists and mappings, at most 16 KiB as JSON. It is in
                `CheckpointInfo.metadata`. Of many ranks, what rank 0 gives counts.
            tags: a name or names for it, given in the same commit; a tag that exists moves. Likewise.
            updates: what the optimizers did since the save before (`training.OptimizerStep`), for step diffs, which
                only a writer with `diffs` makes. With a `DiffOptions.batch` above 1, everything that waits is written.
            progress: called as bytes are copied, from other threads; the total is the bytes of the state, or of this
                rank's share. True: a line on stderr.

        Raises:
            UnsupportedStateError: something in `state` cannot be stored; names its key path. Nothing was written.
            StepOrderError: the step exists, or is not above the parent's. Nothing was written.
            UsageError: `metadata` or `tags` cannot be stored; or a signal handler calls this while the same thread is
                inside `save`, `save_async` or `begin`. Nothing was written.
            RankError: the ranks could not save this step, which the classes below it tell apart. Nothing was
                committed, and the next step may be saved.
            StorageError: the medium failed. The checkpoint does not exist; the writer may be used again.
            FencedError: a newer term exists. This writer is finished.
            CommitUnknownError: the checkpoint may or may not exist. This writer is finished.
        """
        refuse_within(self, self._WAIT)
        return self._save(state, step_number(step), Labels.of(metadata, tags), updates, as_progress(progress))

    @warns_last
    def save_async(
        self,
        state: Any,
        step: int,
        *,
        metadata: Mapping[str, Any] | None = None,
        tags: str | Sequence[str] = (),
        updates: Updates | None = None,
    ) -> PendingSave:
        """Copy `state` to host memory and make it durable in the background; the state may change when this returns.

        Args:
            state, step, metadata, tags: as for `save`.
            updates: as for `save`; gradients are copied, too.

        Waits while `max_in_flight` earlier saves are not durable yet, and while `memory` is spent (`on_metrics` is told
        how long); a step diff that waits for its batch does not count. One of many ranks waits for the others, if they
        have to agree anew who writes what (the first save). An error that nobody asked for with `result` is raised by
        the next call, or on leaving the ``with``.

        Raises:
            as `save`; what concerns the medium and other ranks comes from `PendingSave.result`.
        """
        refuse_within(self, self._WAIT)
        return self._save_async(state, step_number(step), Labels.of(metadata, tags), updates)

    @abstractmethod
    def _save(
        self, state: Any, step: int, labels: Labels, updates: Updates | None, progress: Progress | None
    ) -> CheckpointInfo:
        """See `save`."""

    @abstractmethod
    def _save_async(self, state: Any, step: int, labels: Labels, updates: Updates | None) -> PendingSave:
        """See `save_async`."""

    def prepare(self, state: Any) -> None:
        """Say what `save_async` will be given, so that it finds its memory ready. Returns at once, and writes nothing.

        Memory that nobody has used yet costs several times what copying to it does, so the first `save_async` of a run
        keeps training waiting for longer than the others. Call this when the state is complete (the optimizer's moments
        are there) and something else is to be done still: the memory is touched in the background. A second time does
        nothing. A writer of many ranks does nothing.

        Args:
            state: as for `save`; only its tensors' names, types and shapes matter.

        Raises:
            UnsupportedStateError: something in `state` cannot be stored.
            WriterClosedError, FencedError: as `save`.
        """

    @warns_last
    def begin(self, state: Any, step: int, layers: Mapping[str, Sequence[str]], *, direct: bool = False) -> LayeredSave:
        """Begin a save whose snapshot is filled layer by layer, as layers are updated (LightCheck, section III-B).

        `training.LayerwiseSnapshots` does this for torch's optimizers. One at a time: it is finished or abandoned
        before the next save.

        Args:
            state: as for `save_async`; the tensors of `layers` may still change, each until it is `ready`. Of others
                only dtype and shape are looked at here.
            step: as for `save`.
            layers: names of tensors (`FlatState.tensors`) by the name of the layer that they belong to.
            direct: copy straight into mapped segments of a medium that has them (``pmem://``), through no host memory.
                Only without `deltas` and `diffs`, and not by an agent.

        Waits while `max_in_flight` earlier snapshots are not durable yet.

        Raises:
            as `save_async`.
            UsageError: a tensor is in two layers, or not in the state; the medium cannot be copied into; or this is a
                writer of many ranks.
            StorageError: `direct`, and the medium failed or is full.
        """
        refuse_within(self, self._WAIT)
        return self._begin_layers(state, step_number(step), layers, direct=direct)

    def _begin_layers(self, state: Any, step: int, layers: Mapping[str, Sequence[str]], *, direct: bool) -> LayeredSave:
        """See `begin`."""
        del state, step, layers, direct
        raise UsageError("begin: ranks that save together copy their states whole: call save_async")

    # -- what was given

    @property
    def _needs_caller(self) -> bool:
        """Whether a save that waits holds what other calls of its thread may need."""
        return True

    @warns_last
    def wait(self) -> None:
        """Return when everything given so far is durable: what is in flight, and what waits for its batch, which is
        written now.

        Raises:
            StorageError, FencedError, CommitUnknownError: what stopped a `save_async` of which nobody has been told
                yet, with a note of every other one; no later call raises it again.
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
        """Answer now what other processes ask for (`Store.merge`, `tag`, `retire` ... beside this writer), and fold the
        log if that is due. A writer does it by itself after every save, and every `poll_seconds`; of many ranks the
        first does.

        What goes wrong fails no save: it is warned of, once, or the next save says so.

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

        Raises `CorruptLogError`, `StorageError`: the store's own log cannot be read.
        """
        return None

    @warns_last
    def tag(self, name: str, ref: str | int | CheckpointInfo = "latest") -> CheckpointInfo:
        """Name a checkpoint, of this term or an earlier one; a tag that exists moves. Of many ranks the first does.

        If the checkpoint waits for its batch, that is written first.

        Args:
            name: 1-128 letters, digits and ``_.+/-``, beginning with a letter, digit or ``_``.
            ref: ``latest``, a step, ``STEP@TERM``, ``tag:NAME``, or a checkpoint.

        Returns:
            the checkpoint, with its tags.

        Raises:
            UsageError: no tag name; or another rank than the first.
            CheckpointNotFoundError: nothing answers to `ref`.
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
            UsageError: another rank than the first.
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
        """Go back: begin a new term that continues from an earlier checkpoint, in place of the present one.

        What was saved since stays in the store, as a branch; what is on its way is finished first. The next checkpoint
        is a full, and its step may be any above that of `ref`. All ranks call it with the same `ref`, and all of them
        go back, or all raise.

        Args:
            ref: ``latest``, a step, ``STEP@TERM``, ``tag:NAME``, or a checkpoint.

        Returns:
            the checkpoint that the new term continues from, to be loaded; `parent` and `term` say so, too.

        Raises:
            UsageError: `ref` is no REF; the present term stays open.
            CheckpointNotFoundError: there is none of that name; the present term stays open.
            RankMismatchError: the ranks name different checkpoints; the present term stays open.
            MissingRankError: a rank did not come in time; the present term stays open, unless rank 0 died.
            FailedRankError: what stopped another rank; there what stopped it.
            FencedError: a newer term exists, which is not fenced by this. This writer is finished.
            StorageError: the medium failed; if a term has been opened all the same, the next save says so.
            and what a `save_async` raised unseen, before anything is done.
        """
        refuse_within(self, self._WAIT)
        if ref is None:  # Prevents: a term that continues from nothing, which fences the present one.
            raise UsageError(
                "rollback takes a checkpoint to go back to; to begin from nothing open a writer with parent=None"
            )
        return self._rollback(ref)  # as it is: a checkpoint says more than its name

    @abstractmethod
    def _rollback(self, ref: str | int | CheckpointInfo) -> CheckpointInfo:
        """See `rollback`."""

    # -- the end

    @abstractmethod
    def close(self) -> None:
        """Wait for every save, then end; a second time does nothing. Raises what a `save_async` raised unseen."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Who ends a run wonders what it waits for.
        self._interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
        try:
            self.close()
        except BaseException as lost:
            if error is None:
                raise
            note_lost(error, self.url, lost)


Writer._WAIT = codes_of(Writer.save, Writer.save_async, Writer.begin)
