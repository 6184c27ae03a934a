"""How a store is written to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from ckptstore.errors import UsageError
from ckptstore.host.progress import as_progress
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.log.journal import Journal
from ckptstore.store.store_handle import Handle
from ckptstore.tiers.store_pair import RemoteRememberedError, open_without_remote

if TYPE_CHECKING:
    from pathlib import Path

    from ckptstore.exchange.import_files import ImportedFile
    from ckptstore.host.progress import Progress
    from ckptstore.maintenance.compact.idle_compaction import CompactOptions
    from ckptstore.write.deltas import DeltaOptions
    from ckptstore.write.local import LocalWriter
    from ckptstore.write.metrics import OnMetrics
    from ckptstore.write.options import WriterOptions
    from ckptstore.write.ranks.options import RankOptions
    from ckptstore.write.ranks.writer import RankWriter
    from ckptstore.write.steps.batcher import DiffOptions
    from ckptstore.write.writer import Writer

__all__ = ["Writing"]


class Writing(Handle):
    """The part of `Store` that opens writers."""

    @overload
    def writer(
        self,
        parent: str | int | CheckpointInfo | None = ...,
        *,
        group: None = ...,
        ranks: RankOptions | None = ...,
        staging_bytes: int | None = ...,
        threads: int = ...,
        max_in_flight: int = ...,
        poll_seconds: float | None = ...,
        deltas: DeltaOptions | Literal["auto"] | int | None = ...,
        diffs: DiffOptions | None = ...,
        memory: int | None = ...,
        on_metrics: OnMetrics | None = ...,
        keep: Sequence[str] | None = ...,
        compact: CompactOptions | None = ...,
    ) -> Writer: ...

    @overload
    def writer(
        self,
        parent: str | int | CheckpointInfo | None = ...,
        *,
        group: Any,
        ranks: RankOptions | None = ...,
        staging_bytes: int | None = ...,
        threads: int = ...,
        max_in_flight: int = ...,
        poll_seconds: float | None = ...,
        deltas: DeltaOptions | Literal["auto"] | int | None = ...,
        diffs: DiffOptions | None = ...,
        on_metrics: OnMetrics | None = ...,
        keep: Sequence[str] | None = ...,
    ) -> RankWriter: ...

    def writer(
        self,
        parent: str | int | CheckpointInfo | None = "latest",
        *,
        group: Any = None,
        ranks: RankOptions | None = None,
        staging_bytes: int | None = None,
        threads: int = 2,
        max_in_flight: int = 1,
        poll_seconds: float | None = 5.0,
        deltas: DeltaOptions | Literal["auto"] | int | None = None,
        diffs: DiffOptions | None = None,
        memory: int | None = None,
        on_metrics: OnMetrics | None = None,
        keep: Sequence[str] | None = None,
        compact: CompactOptions | None = None,
    ) -> Writer:
        """Open the store for writing: begins a new term, which fences every earlier writer.

        Args:
            parent: what this term continues from: a REF, or None for a run from nothing. ``latest`` in an empty store
                is None (a `FreshStartWarning` tells if earlier terms hold checkpoints). Going back to an earlier one
                forks: nothing newer is lost. A writer that is open goes back with `Writer.rollback`.
            group: a `torch.distributed` process group (``dist.group.WORLD``): each of its ranks calls this and saves
                its own tensors, and rank 0 commits them as one checkpoint. Or a `Group`. None: this process alone.
            ranks: how the ranks of `group` save together.
            staging_bytes: host memory between state and medium (default 64 MiB).
            threads: those that write blocks of one checkpoint.
            max_in_flight: saves that `Writer.save_async` may have on their way at once. Plain fulls are made durable at
                the same time, each by `threads` threads; deltas and step diffs one after the other.
            poll_seconds: how often to look for requests of other processes; None: only after saves.
            deltas: store checkpoints as deltas against earlier ones: ``auto`` (the interval follows what is measured,
                and a restore reads at most four times a full), a fixed interval, or `DeltaOptions`. None: fulls only.
            diffs: store consecutive steps as step diffs (`Writer.save`'s `updates`) between what `deltas` makes.
            memory: bytes of host memory (48 MiB on) for what `Writer.save_async` has copied and the medium has not;
                training waits while it is spent. With `deltas` or `diffs`: beside the base. None: see docs/writer.md.
            on_metrics: is told of every save that ended, with a `SaveMetrics`, by a thread; what it raises harms none.
            keep: rules of retention for the store from now on, as in `keep`; an empty list: every checkpoint stays.
                None: those that it has, which every writer keeps to. A writer retires; files are deleted by `gc`, or
                when a save finds no space. Call `gc` now and then, as a `Checkpointer` does.
            compact: store what is kept anew while no save is on its way, as `compact` does; not with `group`.

        Raises:
            CheckpointNotFoundError: no such parent.
            StoreNotFoundError: the store was deleted while it was open (`create` begins another), or has lost FORMAT.
            CorruptLogError: the log is damaged; name an explicit parent to write on.
            ReadOnlyError, StorageError, UnsupportedBackendError: the medium cannot be written, or not safely.
        """
        from ckptstore.host import interpreter_exit

        interpreter_exit.check()  # first: some of the rest cannot even be imported when the interpreter is ending
        from ckptstore.host.buffers import DEFAULT_BUDGET
        from ckptstore.write.options import WriterOptions

        budget = DEFAULT_BUDGET if staging_bytes is None else staging_bytes
        coding = (_delta_options(deltas), _diff_options(diffs))
        options = WriterOptions(budget, threads, max_in_flight, poll_seconds, *coding, memory, on_metrics, keep)
        if group is None and ranks is None:
            return self._open_writer(parent, options, compact)
        return _opened_together(self._of_ranks(compact), parent, group, options, ranks)

    def _of_ranks(self, compact: CompactOptions | None) -> Journal:
        """The journal, for ranks that save together."""
        if compact is not None:
            raise UsageError("compact: not with group=, whose checkpoints are stored in shards")
        if self._remote.url:
            raise UsageError(f"{self.url}: remote= is for one process; for ranks there is `ckpt sync --follow`")
        return self.journal

    def _open_writer(
        self, parent: str | int | CheckpointInfo | None, options: WriterOptions, compact: CompactOptions | None
    ) -> LocalWriter:
        """A writer of this process alone, of one tier or of two; compacted in its idle time, if wanted."""
        if compact is not None:
            from ckptstore.maintenance.compact.idle_compaction import CompactOptions

            if not isinstance(compact, CompactOptions):
                raise UsageError(f"compact: {compact!r:.80}; it takes CompactOptions, as compact=CompactOptions()")
        writer = self._of_tiers(parent, options)
        if compact is not None:
            from ckptstore.maintenance.compact.idle_compaction import begin

            begin(self.journal, writer, compact)
        return writer

    def _of_tiers(self, parent: str | int | CheckpointInfo | None, options: WriterOptions) -> LocalWriter:
        from ckptstore.write.opening import open_writer

        if self._remote.url is None and self._remote.lag_bytes is not None:
            self._pair_with(None, None, None)  # raises where there is no remote, which nothing could lag behind
        if self._remote.url is False:
            return open_writer(self.journal, parent, options)
        if self._remote.url is None:
            try:
                return open_writer(self.journal, parent, options, opener=open_without_remote)
            except RemoteRememberedError:
                if self._pair() is None:  # it is the remote itself: what was brought here remembers it, too
                    return open_writer(self.journal, parent, options)
        from ckptstore.tiers.tiered_term import open_tiered_writer

        return open_tiered_writer(self._pair_with(None, None, None), parent, options)

    def import_files(
        self,
        files: Sequence[str | Path],
        step: int | Literal["auto"] = "auto",
        *,
        parent: str | None = "latest",
        leave_out: Sequence[str] = (),
        deltas: DeltaOptions | None = None,
        progress: Progress | bool | None = None,
    ) -> list[ImportedFile]:
        """Store files of other tools as checkpoints, in one new term, ascending by step. Creates the store.

        Every file is opened and checked before the store is touched. Pickled code is never run.

        Args:
            files: ``.safetensors``, an ``.index.json`` of shards, ``.pt``; or folders that hold one of these, of which
                everything becomes one state (model, optimizer, scheduler, rng, ...).
            step: of a single file; ``auto`` takes it from each name, and gives a single file without one the step after
                the parent's.
            parent: REF that the new term continues from; None for none.
            leave_out: globs of names in a folder that are not to be taken.
            deltas: store a series as deltas; None: every file becomes a full.
            progress: told (bytes done, bytes in all).

        Returns:
            each file and its checkpoint, ascending by step.

        Raises:
            UsageError: no step can be told, or two files have the same.
            StepOrderError: a step is not above the parent's.
            FormatError, UnsupportedStateError: a file, or something in a folder, cannot be imported; nothing was.
            StorageError: the medium failed; files before that one are checkpoints by then, as a note on the error says.
        """
        from ckptstore.exchange.import_files import import_files

        return import_files(
            self.journal, files, step, parent=parent, leave_out=leave_out, deltas=deltas, progress=as_progress(progress)
        )


def _delta_options(deltas: DeltaOptions | Literal["auto"] | int | None) -> DeltaOptions | None:
    from ckptstore.write.deltas import DeltaOptions

    return deltas if deltas is None or isinstance(deltas, DeltaOptions) else DeltaOptions(interval=deltas)


def _diff_options(diffs: DiffOptions | None) -> DiffOptions | None:
    from ckptstore.write.steps.batcher import DiffOptions

    if diffs is not None and not isinstance(diffs, DiffOptions):
        raise UsageError(f"diffs: {diffs!r}; it takes a DiffOptions, as in diffs=DiffOptions(full_every=100)")
    return diffs


def _opened_together(
    journal: Journal,
    parent: str | int | CheckpointInfo | None,
    group: Any,
    options: WriterOptions,
    ranks: RankOptions | None,
) -> RankWriter:
    from ckptstore.write.ranks.opening import open_rank_writer, to_group
    from ckptstore.write.ranks.options import RankOptions

    if group is None:
        raise UsageError("ranks= says how the ranks of a group save together: give group=, too")
    return open_rank_writer(journal, parent, to_group(group), options, ranks or RankOptions())
