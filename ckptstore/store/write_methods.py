"""The methods of `Store` that open writers and import files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, overload

from ckptstore.errors import UsageError
from ckptstore.host.option_checks import texts
from ckptstore.host.progress import as_progress
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.log.journal import Journal
from ckptstore.store.store_handle import StoreHandle
from ckptstore.tiers.store_pair import RemoteRememberedError, open_without_remote

if TYPE_CHECKING:
    from pathlib import Path

    from ckptstore.exchange.import_files import ImportedFile
    from ckptstore.host.progress import Progress
    from ckptstore.maintenance.compact.idle_compaction import CompactOptions
    from ckptstore.write.local_writer import LocalWriter
    from ckptstore.write.policy.delta_options import DeltaOptions
    from ckptstore.write.policy.diff_options import DiffOptions
    from ckptstore.write.ranks.rank_options import RankOptions
    from ckptstore.write.ranks.rank_writer import RankWriter
    from ckptstore.write.saves.save_metrics import OnMetrics
    from ckptstore.write.writer import Writer
    from ckptstore.write.writer_options import WriterOptions

__all__ = ["WriteMethods"]


class WriteMethods(StoreHandle):
    """The methods of `Store` that open writers and import files."""

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
        space: int | str | None = ...,
        compact: CompactOptions | None = ...,
        reuse: bool = ...,
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
        space: int | str | None = ...,
        reuse: bool = ...,
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
        space: int | str | None = None,
        compact: CompactOptions | None = None,
        reuse: bool = False,
    ) -> Writer:
        """Open the store for writing. This begins a new term, which fences every earlier writer.

        Args:
            parent: the checkpoint that this term continues from: a REF, or None to start from scratch. ``latest`` in an
                empty store is None (with a `FreshStartWarning` if earlier terms hold checkpoints). An earlier one
                forks the run: nothing newer is lost. An open writer goes back with `Writer.rollback`.
            group: a `torch.distributed` process group (``dist.group.WORLD``): each of its ranks calls this and saves
                its own tensors, and rank 0 commits them as one checkpoint. Or a `Group`. None: this process alone.
            ranks: how the ranks of `group` save together.
            staging_bytes: bytes of host memory between state and medium (default 64 MiB).
            threads: number of threads that write the blocks of one checkpoint.
            max_in_flight: number of `save_async` saves in flight at once. Plain fulls become durable in parallel,
                each by `threads` threads; deltas and step diffs one after the other.
            poll_seconds: seconds between two polls for requests of other processes; None: only after saves.
            deltas: store checkpoints as deltas against earlier ones: ``auto`` (measurements choose the interval; a
                restore reads at most four times a full), a fixed interval, or `DeltaOptions`. None: fulls only.
            diffs: store consecutive steps as step diffs (`Writer.save`'s `updates`) between those of `deltas`.
            memory: bytes of host memory (48 MiB or more) for data that `Writer.save_async` has copied and that is not
                on the medium yet; training waits while it is used up. The base's memory is extra. None: docs/writer.md.
            on_metrics: a thread calls it with a `SaveMetrics` after every save; an exception that it raises is ignored.
            keep: the store's retention rules from now on, as in `keep`; an empty list: every checkpoint stays. None:
                its current rules. A writer retires checkpoints; `gc`, which a `Checkpointer` calls, deletes the files.
            space: the most space for all checkpoints, in bytes (``4GB``) or states (``3 states``): docs/retention.md.
            compact: while no save is in flight, store kept checkpoints again, as `compact` does; not with `group`.
            reuse: return the writer that this process opened in this way for the same store and `group`, if it can
                still save; else open one. Callers share it: leave it open, until the interpreter exits.

        Raises:
            CheckpointNotFoundError: no such parent.
            UsageError: an option is invalid, or differs from that of the writer that `reuse` finds.
            StoreNotFoundError: the store was deleted while it was open (`create` begins another), or has lost FORMAT.
            CorruptLogError: the log is damaged; name an explicit parent to write anyway.
            ReadOnlyError, StorageError, UnsupportedBackendError: the medium cannot be written, or not safely.
        """
        budget = _staging_budget(staging_bytes)
        from ckptstore.write.writer_options import WriterOptions

        coding = (_delta_options(deltas), _diff_options(diffs))
        options = WriterOptions(budget, threads, max_in_flight, poll_seconds, *coding, memory, on_metrics, keep, space)
        opened = self._shared_writer if reuse else self._new_writer
        return opened(parent, group, ranks, options, compact)

    def _new_writer(
        self,
        parent: str | int | CheckpointInfo | None,
        group: Any,
        ranks: RankOptions | None,
        options: WriterOptions,
        compact: CompactOptions | None,
    ) -> Writer:
        if group is None and ranks is None:
            return self._open_writer(parent, options, compact)
        return _open_for_ranks(self._rank_journal(compact), parent, group, options, ranks)

    def _shared_writer(
        self,
        parent: str | int | CheckpointInfo | None,
        group: Any,
        ranks: RankOptions | None,
        options: WriterOptions,
        compact: CompactOptions | None,
    ) -> Writer:
        from ckptstore.store.shared_writers import WriterRequest, shared_writer

        address = self.backend.address or (self.url if "://" in self.url else None)
        if address is None:
            raise UsageError(f"{self.url}: reuse: a filesystem= has no name by which a writer can be found again")
        every = {one.name: getattr(options, one.name) for one in fields(options)}
        request = WriterRequest(group, parent, {**every, "ranks": ranks, "compact": compact, "remote": self._remote})
        # A handle of its own: the caller may close this one, and must not find what it remembers of a replaced store.
        own = type(self)(self.backend.reopened(), self._remote)
        return shared_writer(
            address,
            own.journal,
            request,
            lambda: own._new_writer(parent, group, ranks, options, compact),
        )

    def _rank_journal(self, compact: CompactOptions | None) -> Journal:
        """The journal for ranks that save together; raises for options that they do not have."""
        if compact is not None:
            raise UsageError("compact: not with group=, whose checkpoints are stored in shards")
        if self._remote.url:
            raise UsageError(f"{self.url}: remote= is for one process; for ranks there is `ckpt sync --follow`")
        return self.journal

    def _open_writer(
        self, parent: str | int | CheckpointInfo | None, options: WriterOptions, compact: CompactOptions | None
    ) -> LocalWriter:
        """A writer of this process alone, with one tier or two, which compacts while idle if `compact` is given."""
        if compact is not None:
            from ckptstore.maintenance.compact.idle_compaction import CompactOptions

            if not isinstance(compact, CompactOptions):
                raise UsageError(f"compact: {compact!r:.80}; it takes CompactOptions, as compact=CompactOptions()")
        writer = self._open_local_or_tiered(parent, options)
        if compact is not None:
            from ckptstore.maintenance.compact.idle_compaction import begin

            begin(self.journal, writer, compact)
        return writer

    def _open_local_or_tiered(self, parent: str | int | CheckpointInfo | None, options: WriterOptions) -> LocalWriter:
        from ckptstore.write.writer_opening import open_writer

        if self._remote.url is None and self._remote.lag_bytes is not None:
            self._pair_with(None, None, None)  # raises if there is no remote: then `lag_bytes` has no meaning
        if self._remote.url is False:
            return open_writer(self.journal, parent, options)
        if self._remote.url is None:
            try:
                return open_writer(self.journal, parent, options, opener=open_without_remote)
            except RemoteRememberedError:
                if self._pair() is None:  # this is the remote itself: its copied log names it as the remote, too
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
        leave_out_keys: Sequence[str] = (),
        objects: Sequence[str] = (),
        deltas: DeltaOptions | None = None,
        progress: Progress | bool | None = None,
    ) -> list[ImportedFile]:
        """Store files of other tools as checkpoints, in one new term, ascending by step. Creates the store if needed.

        Every file is opened and checked before the store is touched. Pickled code is never run.

        Args:
            files: ``.safetensors``, an ``.index.json`` of shards, ``.pt``; or folders of such files, each of which
                becomes one state (model, optimizer, scheduler, rng, ...).
            step: the step of a single file; ``auto`` takes it from each name, and gives a single file whose name has no
                step the step after the parent's.
            parent: REF that the new term continues from; None for none.
            leave_out: globs of names in a folder that are not imported.
            leave_out_keys: globs of keys in torch files, joined by dots, that are not imported (``hyper_parameters``).
            objects: globs of names of classes (``train.Config``) whose objects in torch files are taken as values: the
                fields of a dataclass or of another object, the value of an `Enum`. They load as `Foreign`, or as the
                class if it is registered.
            deltas: store a series as deltas; None: every file becomes a full.
            progress: called with (bytes done, total bytes).

        Returns:
            each file and its checkpoint, ascending by step.

        Raises:
            UsageError: a step cannot be determined, or two files have the same.
            StepOrderError: a step is not above the parent's.
            FormatError, UnsupportedStateError: a file, or an object in a folder, cannot be imported; none was.
            StorageError: the medium failed. Earlier files are checkpoints by then; a note on the error lists them.
        """
        from ckptstore.exchange.import_files import import_files
        from ckptstore.frameworks.inert_pickles import KeyChoice

        return import_files(
            self.journal,
            files,
            step,
            parent=parent,
            leave_out=leave_out,
            keys=KeyChoice(texts("leave_out_keys", leave_out_keys), texts("objects", objects)),
            deltas=deltas,
            progress=as_progress(progress),
        )


def _staging_budget(staging_bytes: int | None) -> int:
    """The bytes of `Store.writer`. Raises `WriterClosedError` if the interpreter is exiting."""
    from ckptstore.host import interpreter_exit

    interpreter_exit.check()  # first: some imports fail then
    from ckptstore.host.buffers import DEFAULT_BUDGET

    return DEFAULT_BUDGET if staging_bytes is None else staging_bytes


def _delta_options(deltas: DeltaOptions | Literal["auto"] | int | None) -> DeltaOptions | None:
    if deltas is None:
        return None
    from ckptstore.write.policy.delta_options import DeltaOptions

    return deltas if isinstance(deltas, DeltaOptions) else DeltaOptions(interval=deltas)


def _diff_options(diffs: DiffOptions | None) -> DiffOptions | None:
    if diffs is None:
        return None
    from ckptstore.write.policy.diff_options import DiffOptions

    if not isinstance(diffs, DiffOptions):
        raise UsageError(f"diffs: {diffs!r}; it takes a DiffOptions, as in diffs=DiffOptions(full_every=100)")
    return diffs


def _open_for_ranks(
    journal: Journal,
    parent: str | int | CheckpointInfo | None,
    group: Any,
    options: WriterOptions,
    ranks: RankOptions | None,
) -> RankWriter:
    from ckptstore.write.ranks.rank_options import RankOptions
    from ckptstore.write.ranks.rank_writer_factory import open_rank_writer, to_group

    if group is None:
        raise UsageError("ranks= says how the ranks of a group save together: give group=, too")
    return open_rank_writer(journal, parent, to_group(group), options, ranks or RankOptions())
