"""A store: where the state of one training run lives. Reading takes no lock."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, overload

from ckptstore.backends import open_backend
from ckptstore.backends.base import Backend
from ckptstore.errors import CkptError, CorruptionError, NotFoundError, StorageError, StoreNotFoundError, UsageError
from ckptstore.formats.records import FormatFile
from ckptstore.host.progress import told
from ckptstore.log import refs
from ckptstore.log.checkpoints import CheckpointInfo, TermInfo, describe_all, describe_terms, look_up
from ckptstore.log.journal import Journal
from ckptstore.log.reading import View, read
from ckptstore.restore.plan import Plan, plan
from ckptstore.tiers.pair import Pair, Remote, RemoteRememberedError, open_without_remote

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from ckptstore.exchange.exporting import ExportResult
    from ckptstore.exchange.importing import ImportedFile
    from ckptstore.following.follower import Follower
    from ckptstore.formats.records import SegmentEntry
    from ckptstore.formats.segment import SegmentDoc, TensorEntry
    from ckptstore.host.progress import Progress
    from ckptstore.maintenance.compact import CompactReport
    from ckptstore.maintenance.copies import Copied
    from ckptstore.maintenance.gc import Collected
    from ckptstore.maintenance.merge import Merged
    from ckptstore.maintenance.pruning import Pruned
    from ckptstore.maintenance.repair import Repaired
    from ckptstore.maintenance.retiring import Retired
    from ckptstore.maintenance.verify.verification import VerificationReport
    from ckptstore.reports.bisecting import Bisected, Predicate, Probe
    from ckptstore.reports.comparison import StateDifference, TensorDifference
    from ckptstore.reports.explaining import Explanation
    from ckptstore.reports.inspection import CheckpointDescription, TensorStatistics
    from ckptstore.reports.lineage import Lineage
    from ckptstore.reports.request_costs import RequestCosts
    from ckptstore.reports.run_status import RunStatus
    from ckptstore.reports.stats import StoreStats
    from ckptstore.tiers.syncing import Synced
    from ckptstore.write.deltas import DeltaOptions
    from ckptstore.write.metrics import OnMetrics
    from ckptstore.write.options import WriterOptions
    from ckptstore.write.ranks.options import RankOptions
    from ckptstore.write.ranks.writer import RankWriter
    from ckptstore.write.second_tier import Lag
    from ckptstore.write.steps.batcher import DiffOptions
    from ckptstore.write.writer import Writer

__all__ = ["Store", "open", "repair", "verify"]

Framework = Literal["torch", "numpy"]


def open(
    url: str | os.PathLike[str],
    *,
    create: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any = None,
    remote: str | os.PathLike[str] | Literal[False] | None = None,
    remote_options: Mapping[str, Any] | None = None,
    bandwidth: float | None = None,
) -> Store:
    """Open the store at a path or URL.

    Args:
        url: a directory, ``file:///…``, ``memory://name``, ``s3://bucket/prefix`` (``gs://``, ``az://``), or a URL of
            another scheme that fsspec knows.
        create: True: create it now if there is none. False: it must exist. None (default): the first `Store.writer`
            creates it, and reading what does not exist raises.
        storage_options: how an object store is reached, in fsspec's words (docs/object-stores.md): ``key``, ``secret``,
            ``token``, ``profile``, ``anon``, ``endpoint_url``, ``client_kwargs={"region_name": …}``. What is left out
            the environment says (``AWS_ACCESS_KEY_ID``, …). Credentials are kept nowhere but in memory.
        filesystem: an fsspec file system; `url` is then a path in it. Writing needs one that creates exclusively.
        remote: URL or path of a second tier (docs/tiers.md): the same run's store on another machine's medium, to which
            the writer brings what it commits, and from which is read what is missing here. Into an empty place the
            remote's newest checkpoint is restored at once. The store remembers the URL. None: what it remembers; False:
            leave it aside, and let a writer open a term here alone.
        remote_options: `storage_options` of the remote; kept nowhere but in memory.
        bandwidth: bytes a second that go to the remote at most.

    Raises:
        StoreNotFoundError: `create` is False and there is no store.
        UsageError: the path holds something that is not a store, or the URL's scheme or an option is unknown.
        MissingDependencyError: the scheme needs a package that is not installed.
        FormatError, CorruptLogError, StorageError: the FORMAT file cannot be used.

    Example:
        >>> store = open("memory://example")
        >>> with store.writer() as writer:
        ...     info = writer.save({"weight": 1.5}, step=1)
        >>> store.load("latest")
        {'weight': 1.5}
    """
    second = Remote.given(remote, remote_options, bandwidth)
    store = Store(open_backend(url, create is not False, storage_options, filesystem), second)
    if second.url and create is not False:
        store._restore_if_empty()
    if create is True:
        store.create()
    elif create is False:
        store.format  # noqa: B018  # raises when there is none
    return store


def verify(
    store: Store | str | os.PathLike[str],
    ref: str | int | None = None,
    *,
    deep: bool = False,
    progress: Progress | bool | None = None,
    threads: int | None = None,
) -> VerificationReport:
    """`Store.verify` of a store, or of the store at a path or URL."""
    opened = store if isinstance(store, Store) else open(store)
    return opened.verify(ref, deep=deep, progress=progress, threads=threads)


def repair(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    run: str | None = None,
    progress: Progress | bool | None = None,
    threads: int | None = None,
) -> Repaired:
    """Make a store of what is intact of a damaged one. The damaged one is only read.

    Keeps every checkpoint that can still be restored: what the log promises, and where the log is damaged or gone what
    segments, which describe themselves, make up. Every byte is compared with its hash and every state decoded before it
    is kept. Segments do not tell of tags, metadata, and which checkpoints were retired: where the log is lost, so are
    the first two, and of the last those come back that gc had not deleted. No writer and no gc should be at work there.

    Args:
        source: path or URL of what is left.
        target: where to: nothing, or what an interrupted call for the same source has left, which is gone on with.
        run: the run's uuid, or its beginning: needed where objects of several are there.
        progress: told (bytes done, bytes in all) of what is read, decoded and copied.
        threads: None: up to four.

    Returns:
        what is kept, and what is lost and why, checkpoint by checkpoint.

    Raises:
        StoreNotFoundError: nothing of a store is there.
        UsageError: objects of several runs are there; or the target is not empty.
        IncompatibleFormatError: a newer version wrote it.
        StorageError: a medium failed, otherwise than by a place that cannot be read any more.
    """
    from ckptstore.maintenance.repair import repair

    return repair(
        open_backend(source, create=False),
        open_backend(target, create=True),
        run=run,
        progress=told(progress),
        threads=threads,
    )


class Store:
    """One run's checkpoints on one medium.

    Whatever takes ``progress`` also takes True: a line on stderr then says how far it is.

    Every method reads the log afresh, so a `Store` always shows what is committed now.
    """

    def __init__(self, backend: Backend, remote: Remote | None = None) -> None:
        """Read nothing yet. `open` takes a path or URL."""
        self.journal = Journal(backend)
        self._remote = remote or Remote()
        self._reached: Pair | None = None

    @property
    def backend(self) -> Backend:
        """The medium."""
        return self.journal.backend

    def __repr__(self) -> str:
        return f"ckptstore.open({self.url!r})"

    def _repr_html_(self) -> str:
        from ckptstore.reports.notebooks import store_html

        return store_html(self.journal)

    def close(self) -> None:
        """Give up the handle of the store's folder, so that its disk can be unmounted. Close writers before.

        Letting go of the `Store` does the same, sooner or later. Whatever needs the folder afterwards raises
        `UsageError`.
        """
        self.backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """What the store was opened with."""
        return self.journal.url

    @property
    def run(self) -> str:
        """The run's uuid, 32 hex digits."""
        return self.journal.run

    @property
    def format(self) -> FormatFile:
        """The store's FORMAT file.

        Raises:
            StoreNotFoundError: there is no store here.
            CorruptLogError, FormatError: the file is damaged, or of an unknown format.
        """
        return self.journal.format

    def create(self) -> None:
        """Create the store if there is none, or was deleted while it was open: another then, of another run.

        Raises:
            UsageError: the place holds other things.
            ReadOnlyError, StorageError, UnsupportedBackendError: it cannot be written, or not safely.
        """
        self.journal.create(anew=True)

    def _pair(self) -> Pair | None:
        """The store and its remote, which is reached the first time; None: it has none."""
        if self._reached is None or self._reached.local is not self.journal:
            self._reached = Pair.of(self.journal, self._remote)
        return self._reached

    def _restore_if_empty(self) -> None:
        from ckptstore.tiers.filling import restore_newest

        if (pair := self._pair()) is not None:
            with pair.reaching("nothing was restored"):
                restore_newest(pair)

    @property
    def remote(self) -> Store | None:
        """The second tier, as a store; None: there is none.

        Raises as `open`.
        """
        pair = self._pair()
        return None if pair is None else Store(pair.remote.backend, Remote(False))

    def lag(self) -> Lag | None:
        """How far the remote is behind, by the logs of both; None: the store has no remote.

        Raises:
            StoreNotFoundError, CorruptLogError, StorageError: one of them cannot be read.
        """
        from ckptstore.tiers.draining import lag_of

        pair = self._pair()
        return None if pair is None else lag_of(pair)

    def sync(
        self,
        remote: str | os.PathLike[str] | None = None,
        *,
        remote_options: Mapping[str, Any] | None = None,
        bandwidth: float | None = None,
        progress: Progress | bool | None = None,
    ) -> Synced:
        """Bring to the remote what it lacks, once, in the order of the log. May run beside a writer.

        Interrupted, it is gone on with by the next call, or by the next writer.

        Args:
            remote: URL or path, where a second tier is made if there is none; None: the store's, which must be there.
            remote_options, bandwidth: as for `open`; None: as the store was opened with.
            progress: told (bytes done, bytes in all).

        Raises:
            UsageError: there is no remote, or something else is there.
            CorruptionError: this store is damaged. What was brought so far stays.
            StorageError: a medium failed; the same.
        """
        from ckptstore.tiers.syncing import sync

        self.format  # noqa: B018 - raises when there is none
        pair = self._pair_with(remote, remote_options, bandwidth)
        if remote is None:
            pair.check_there()
        return sync(pair, told(progress))

    def sync_forever(
        self,
        remote: str | os.PathLike[str] | None = None,
        *,
        every: float = 2.0,
        remote_options: Mapping[str, Any] | None = None,
        bandwidth: float | None = None,
        on_failure: Callable[[StorageError], object] = lambda _error: None,
    ) -> Iterator[Synced]:
        """Bring to the remote whatever is committed, as it is: for a process beside writers that have no drain of
        their own (many ranks, the agent). Tells what each pass did that did something.

        Ends when the run was continued elsewhere, which the last one says.

        Args:
            remote, remote_options, bandwidth: as for `sync`.
            every: seconds between two looks at the log.
            on_failure: told of a medium that failed. It is tried again, after a while.

        Raises:
            UsageError: there is no remote, or something else is there.
            CorruptionError: this store is damaged.
        """
        from ckptstore.tiers.syncing import follow

        self.format  # noqa: B018 - raises when there is none
        pair = self._pair_with(remote, remote_options, bandwidth)
        if remote is None:
            pair.check_there()
        return follow(pair, every, on_failure=on_failure)

    def _pair_with(
        self,
        remote: str | os.PathLike[str] | None,
        remote_options: Mapping[str, Any] | None,
        bandwidth: float | None,
    ) -> Pair:
        told = self._remote
        if remote is not None or remote_options is not None or bandwidth is not None:
            given = Remote.given(remote, remote_options, bandwidth)
            told = Remote(given.url or told.url, given.options or told.options, given.bandwidth or told.bandwidth)
        pair = Pair.of(self.journal, told)
        if pair is None:
            raise UsageError(f"{self.url}: the store has no remote: name one")
        return pair

    def view(self, *, look_above: bool | None = None) -> View:
        """The log as it is now (READ). `look_above`: see `ckptstore.log.reading.read`."""
        return read(self.journal, look_above=look_above)

    def checkpoints(self) -> list[CheckpointInfo]:
        """Every promised checkpoint, by term and step."""
        return describe_all(self.view().catalog)

    def checkpoint(self, ref: str | int = "latest") -> CheckpointInfo:
        """The checkpoint that `ref` names.

        Raises:
            CheckpointNotFoundError: nothing answers to it.
            CorruptLogError: the log is damaged where ``latest`` would be decided; names the last intact checkpoint.
        """
        return look_up(self.journal, ref)

    def latest_step(self) -> int | None:
        """The step of ``latest``; None in a store without checkpoints, or where there is no store yet.

        Raises:
            StoreNotFoundError: there was one: it was deleted while it was open, or has lost its FORMAT file.
            CorruptLogError: the log is damaged where ``latest`` would be decided; names the last intact checkpoint.
        """
        try:
            latest = self.view().catalog.latest()
        except StoreNotFoundError:
            # Prevents: a run that begins from nothing, because somebody removed what it would have continued from.
            if self.backend.deleted() or self.journal.rooms():
                raise
            return None
        return None if latest is None else latest.step

    def terms(self) -> list[TermInfo]:
        """Every term, oldest first."""
        return describe_terms(self.view().catalog)

    def plan(self, ref: str | int = "latest") -> Plan:
        """How `ref` would be restored: the cheapest chain of encodings."""
        catalog = self.view().catalog
        return plan(catalog, refs.resolve(catalog, ref).id)

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
    ) -> Writer | RankWriter:
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
                the same time, each by `threads` threads; deltas and gradient diffs one after the other.
            poll_seconds: how often to look for requests of other processes; None: only after saves.
            deltas: store checkpoints as deltas against earlier ones: ``auto`` (the interval follows what is measured,
                and a restore reads at most four times a full), a fixed interval, or `DeltaOptions`. None: fulls only.
            diffs: store consecutive steps as gradient diffs (`Writer.save`'s `updates`) between what `deltas` makes.
            memory: bytes of host memory (48 MiB on) for what `Writer.save_async` has copied and the medium has not;
                training waits while it is spent. With `deltas` or `diffs`: beside the base. None: see docs/writer.md.
            on_metrics: is told of every save that ended, with a `SaveMetrics`, by a thread; what it raises harms none.
            keep: rules of retention for the store from now on, as in `keep`; an empty list: every checkpoint stays.
                None: those that it has, which every writer keeps to.

        Raises:
            CheckpointNotFoundError: no such parent.
            StoreNotFoundError: the store was deleted while it was open (`create` begins another), or has lost FORMAT.
            CorruptLogError: the log is damaged; name an explicit parent to write on.
            ReadOnlyError, StorageError, UnsupportedBackendError: the medium cannot be written, or not safely.
        """
        from ckptstore.host import exiting

        exiting.check()  # before the rest, of which some cannot even be imported when the interpreter is ending
        from ckptstore.host.buffers import DEFAULT_BUDGET
        from ckptstore.write.options import WriterOptions

        budget = DEFAULT_BUDGET if staging_bytes is None else staging_bytes
        coding = (_delta_options(deltas), _diff_options(diffs))
        options = WriterOptions(budget, threads, max_in_flight, poll_seconds, *coding, memory, on_metrics, keep)
        if group is None and ranks is None:
            return self._open_writer(parent, options)
        return _opened_together(self._of_ranks(), parent, group, options, ranks)

    def _of_ranks(self) -> Journal:
        """The journal, for ranks that save together."""
        if self._remote.url:
            raise UsageError(f"{self.url}: remote= is for one process; for ranks there is `ckpt sync --follow`")
        return self.journal

    def _open_writer(self, parent: str | int | CheckpointInfo | None, options: WriterOptions) -> Writer:
        """A writer of this process alone, of one tier or of two."""
        from ckptstore.write.opening import open_writer

        if self._remote.url is False:
            return open_writer(self.journal, parent, options)
        if self._remote.url is None:
            try:
                return open_writer(self.journal, parent, options, opener=open_without_remote)
            except RemoteRememberedError:
                pass
        from ckptstore.tiers.opening import open_tiered_writer

        return open_tiered_writer(self._pair_with(None, None, None), parent, options)

    def load(
        self,
        ref: str | int = "latest",
        *,
        framework: Framework | None = None,
        into: Any = None,
        select: str | Sequence[str] | None = None,
        device: Any = None,
        mmap: bool = False,
        verify: bool = True,
        threads: int | None = None,
        progress: Progress | bool | None = None,
        rank: int | None = None,
    ) -> Any:
        """Restore the state of a checkpoint, bit for bit.

        Args:
            ref: ``latest``, a step, ``STEP@TERM`` or ``tag:NAME``.
            framework: ``torch`` or ``numpy``; by default torch when this process has imported it. Arrays that were
                saved as numpy arrays (numpy's RNG state, say) always come back as numpy arrays.
            into: a state of the same structure whose tensors are overwritten in place, without a second copy in
                memory; what is not a tensor is taken from the checkpoint. The result's tensors are those of `into`. Of
                a DTensor this rank's part is filled, however the tensor was cut when it was saved, and by how many
                ranks; of the store no more is read than the chunks that have it.
            select: names of tensors, or globs (``model.*``); the others are left out of the result.
            device: where torch tensors go.
            mmap: map uncompressed fulls instead of reading them: tensors are private, copy-on-write views of the file.
                Tensors that are stored in shards are read and put together.
            verify: compare every byte read with its checksum. Turning it off is on you.
            threads: reading threads; default: the number of cores, at most 4.
            progress: told (bytes done, bytes in all) of the tensors that are restored, from any thread, one call at a
                time.
            rank: of a checkpoint that many ranks saved, give what this rank saved where they differ (random numbers,
                data loader): of rank modulo their number, if they were fewer. None: all tensors that any rank had, and
                of the rest the first rank's.

        Raises:
            CheckpointNotFoundError, TensorNotFoundError: no such checkpoint, or nothing matches `select`.
            CorruptSegmentError: a checksum differs; nothing is returned. Tensors of `into` may have been overwritten,
                with verified bytes only.
            UsageError: `into` has other tensors, dtypes or shapes; nothing was overwritten.
            StorageError: the medium failed.
        """
        from ckptstore.restore.load import LoadOptions, load  # numpy: only those who load need it

        options = LoadOptions(framework, into, select, device, mmap, verify, threads, told(progress), rank)
        try:
            return load(self.journal, ref, options)
        except (NotFoundError, CorruptionError) as error:
            try:
                pair = self._pair()
            except CkptError as why:
                error.add_note(f"nor can the remote be reached: {why}")
                raise error from why
            if pair is None:
                raise
        from ckptstore.tiers.filling import reading

        return reading(pair, ref, lambda journal, one: load(journal, one, options))

    def follow(
        self,
        after: str | int | None = None,
        *,
        into: Any = None,
        select: str | Sequence[str] | None = None,
        framework: Framework | None = None,
        device: Any = None,
        rank: int | None = None,
        out: str | os.PathLike[str] | None = None,
        each: bool = False,
        poll: float = 2.0,
        timeout: float | None = None,
        stop: threading.Event | None = None,
        threads: int | None = None,
        progress: Progress | bool | None = None,
    ) -> Follower:
        """Keep up with a run that another process or machine writes: an iterator over its checkpoints as they come.

        The first is the newest there is; then whenever there is another ``latest``, also one that the run went back to
        (`Followed.branched`). What is handed over is held in memory, so that the next is made of it: only the deltas or
        steps between are read, and everything is compared with its hash. Where no chain of them leads from what is held
        (the base was retired, the run went back) it is read whole. Memory: what is followed (with an optimizer's steps
        also the moments that they move) twice, and the tensors that are handed over.

        Args:
            after: the REF that was handed over last, before: only what is newer comes. If `into` still has its bits,
                they are not read again.
            into: a state whose tensors are overwritten in place, when everything new is in memory, complete and
                verified: damage or a lost connection leaves them as they are.
            select, framework, device, rank, threads: as for `load`.
            out: a ``.safetensors`` or ``.pt`` file that each checkpoint replaces, whole and durable, instead of a
                state. A ``.safetensors`` file that is there already tells where to go on, and is not read again.
            each: hand over every checkpoint, in order, and not only the newest of those that came meanwhile.
            poll: seconds between two looks, 0.01 to 86,400.
            timeout: seconds without a new checkpoint after which the iteration ends; None: it does not.
            stop: ends the iteration when it is set, by whatever thread.
            progress: told (bytes done, bytes in all) of the tensors of each checkpoint.

        Raises:
            UsageError, CheckpointNotFoundError, TensorNotFoundError: as `load`.
            StoreNotFoundError, StoreReplacedError, CorruptLogError: as `watch`.
            CorruptSegmentError: something is damaged, and there is no other way. Nothing was handed over; the next call
                of ``next`` tries again.
            StorageError: the medium failed; likewise.

        Example:
            >>> store = open("memory://followed")
            >>> with store.writer() as writer:
            ...     info = writer.save({"weight": 1.5}, step=1)
            >>> followed = next(store.follow())
            >>> followed.info.ref, followed.state
            ('1@1', {'weight': 1.5})
        """
        from ckptstore.following.follower import Follower, FollowOptions

        options = FollowOptions(
            into, select, framework, device, rank, each, poll, timeout, stop, threads, told(progress), out
        )
        return Follower(self.journal, after, options)

    def verify(
        self,
        ref: str | int | None = None,
        *,
        deep: bool = False,
        progress: Progress | bool | None = None,
        threads: int | None = None,
    ) -> VerificationReport:
        """Check every byte of the store, and what its segments say.

        Args:
            ref: of the segments check only those that this checkpoint can be restored from; the log is checked whole.
            deep: decode and replay every checkpoint, too, each chain once. Memory: the descriptions of what builds on
                one full, and for each thread a payload and a few chunks.
            progress: told (bytes done, bytes in all) of what is checked, from any thread, one call at a time.
            threads: threads that read and decode; None: up to four.

        Raises:
            StoreNotFoundError, CheckpointNotFoundError: there is none.
            StorageError: the medium failed where nothing else can be said (a listing, the log).
        """
        from ckptstore.maintenance.verify.verification import verify

        return verify(self.journal, ref, deep=deep, progress=told(progress), threads=threads)

    def export(
        self,
        ref: str | int,
        out: str | os.PathLike[str],
        *,
        format: Literal["safetensors", "pt"] | None = None,
        select: str | Sequence[str] | None = None,
        strip: str | None = None,
        overwrite: bool = False,
        max_shard_bytes: int | None = None,
        progress: Progress | bool | None = None,
    ) -> ExportResult:
        """Write a checkpoint to a file for other tools, verifying every byte that is read.

        A ``.safetensors`` file carries the rest of the state in its metadata. A ``.pt`` file loads with
        ``torch.load(weights_only=True)`` as the nested state that was saved; torch is not needed to write it. The file
        appears under its name complete and durable, or not at all.

        Args:
            ref: the checkpoint.
            out: the file; with shards, the name they and the index are derived from.
            format: ``safetensors`` or ``pt``; None: what the name of `out` says, else safetensors.
            select: only tensors at places that match one of these patterns, as in `load`.
            strip: only tensors whose names begin with this (``model.``), which is dropped from them: a flat dict, as
                ``load_state_dict`` takes it, without the rest of the state.
            overwrite: replace files that exist.
            max_shard_bytes: start another safetensors file before one grows beyond this; a larger tensor stands alone.
            progress: told (bytes done, bytes in all).

        Returns:
            which files there are, and what could not be written as it was.

        Raises:
            UsageError: `out` exists, is inside a store or no regular file, its folder does not exist, its name is one
                of another kind of file (``.onnx``), or shards of a ``.pt`` file are asked for; without `strip` a tensor
                had no name that a file can have (none, or one that begins with a dot).
            CheckpointNotFoundError, TensorNotFoundError, CorruptionError: as `load`.
            UnsupportedStateError: a state that has no place in such a file.
            StorageError: the output cannot be written. Nothing is left behind then.
        """
        from ckptstore.exchange.exporting import Below, export

        if os.fspath(out).endswith(os.sep):
            raise UsageError(f"{out} is the name of a folder: name the file to write")
        chosen = _format_of(out) if format is None else format
        which = select if strip is None else Below(strip, select)
        return export(self.journal, ref, os.fspath(out), chosen, which, overwrite, max_shard_bytes, told(progress))

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
        from ckptstore.exchange.importing import import_files

        return import_files(
            self.journal, files, step, parent=parent, leave_out=leave_out, deltas=deltas, progress=told(progress)
        )

    def gc(
        self,
        *,
        dry_run: bool = False,
        wait: float = 0.0,
        pin_ttl: float | None = None,
        progress: Progress | bool | None = None,
    ) -> Collected:
        """Delete the segments that nothing needs. May run at any time, beside writers and readers.

        Args:
            dry_run: delete nothing, and say what would go.
            wait: seconds to look again while readers pin what nothing else needs.
            pin_ttl: seconds without renewal after which a reader is dead (at least 60; needs a `wait` as long).
                None: 600.
            progress: told (bytes deleted, bytes to delete).

        Returns:
            what was deleted, and what stays because of whom.

        Raises:
            UsageError: `wait` is no time, or `pin_ttl` is so short that living readers would be taken for dead.
            ReadOnlyError: the store cannot be written (except with `dry_run`).
            CorruptLogError: the log cannot be read.
            StorageError: the medium failed. What was deleted is gone, the rest goes another time.
        """
        from ckptstore.log.pins import DEAD_AFTER
        from ckptstore.maintenance.gc import collect_patiently

        dead_after = DEAD_AFTER if pin_ttl is None else pin_ttl
        return collect_patiently(
            self.journal, wait=wait, dead_after=dead_after, dry_run=dry_run, progress=told(progress)
        )

    def merge(
        self,
        steps: str,
        *,
        keep_steps: bool = False,
        dry_run: bool = False,
        take_over: bool = False,
        timeout: float | None = 60.0,
        progress: Progress | bool | None = None,
        on_loss: Callable[[tuple[str, ...]], object] | None = None,
    ) -> Merged:
        """Fold the diffs of a range of checkpoints into one segment, beside a live writer or instead of one.

        Args:
            steps: ``A..B``, two REFs of one term: the checkpoints with A <= step <= B.
            keep_steps: every checkpoint of the range stays. Without it B alone of its diffs does.
            dry_run: write nothing; do the work, and say what would become of it.
            take_over: open a term and commit there, which fences a live writer. Without it the live writer is asked.
            timeout: seconds to wait for the live writer's answer; None or infinity: as long as it takes.
            progress: told (bytes done, bytes in all).
            on_loss: told which checkpoints can no longer be restored afterwards, if any, before anything is written;
                what it raises is raised here.

        Returns:
            what became of the range; `Merged.answer` says whether it was committed.

        Raises:
            UsageError: not a range, or there is nothing to merge.
            CheckpointNotFoundError: A or B is not there.
            CorruptionError: what is stored is not what was saved. Nothing was changed.
            ReadOnlyError, StorageError: the medium cannot be written, or failed.
            FencedError, CommitUnknownError: another writer took the store over; whether it was committed is not known.
        """
        from ckptstore.maintenance.merge import merge

        return merge(
            self.journal,
            steps,
            keep_steps=keep_steps,
            take_over=take_over,
            dry_run=dry_run,
            timeout=timeout,
            progress=told(progress),
            on_loss=on_loss,
        )

    def compact(
        self,
        *,
        max_depth: int | None = None,
        max_restore_seconds: float | None = None,
        target_bytes: int | None = None,
        bandwidth: int | None = None,
        dry_run: bool = False,
        take_over: bool = False,
        timeout: float | None = 60.0,
        progress: Progress | bool | None = None,
    ) -> CompactReport:
        """Store what is kept anew, so that what is only a base can go: beside a live writer, or instead of one.

        Every checkpoint that is there stays, bit for bit: what was written is read back and compared before anything
        is given up. `gc` then frees the space. One move after the other is committed; if this is stopped, the next
        call goes on with what is left.

        Args:
            max_depth: deltas and steps that the restore of any checkpoint may apply to its full; None: any number.
            max_restore_seconds: how long any restore may take on this machine; None: as long as it does.
            target_bytes: bytes of all segments at which no more bytes are saved at the cost of restore time; None: as
                few as can be had.
            bandwidth: bytes of state decoded, coded and read back in a second at most; None: as fast as it goes.
            dry_run: change nothing; say what would be done. Sizes are guessed from samples.
            take_over: open a term and commit there, which fences a live writer. Without it the live writer is asked.
            timeout: seconds to wait for the live writer's answer to each move; None or infinity: as long as it takes.
            progress: told (bytes done, bytes in all).

        Returns:
            what was done, what was not, and why.

        Raises:
            UsageError: an option is none.
            CorruptLogError: the log is damaged. Nothing was changed.
            ReadOnlyError, StorageError: the medium cannot be written, or failed. Moves before stay made.
            FencedError, CommitUnknownError: another writer took the store over; whether it was committed is not known.
        """
        from ckptstore.maintenance.compact import Limits, compact

        return compact(
            self.journal,
            Limits(max_depth, max_restore_seconds, target_bytes),
            bandwidth=bandwidth,
            dry_run=dry_run,
            take_over=take_over,
            timeout=timeout,
            progress=told(progress),
        )

    def retire(
        self, *refs: str | int, dry_run: bool = False, take_over: bool = False, timeout: float | None = 60.0
    ) -> Retired:
        """Promise checkpoints no longer. What others build on stays stored; `gc` deletes what nothing needs.

        A live writer is asked, which looks for requests every 5 s (`Store.writer`'s `poll_seconds`) and after each
        save; it is never fenced by this.

        Args:
            refs: the checkpoints, of any term. Not the latest one, and none that a tag names.
            dry_run: change nothing, and say what would become of them.
            take_over: no writer is alive: open a term and commit there, which fences a writer that is.
            timeout: seconds to wait for the live writer's answer; None or infinity: as long as it takes.

        Returns:
            what was retired, what of it stays stored, and what is dropped.

        Raises:
            UsageError: no REF, the latest checkpoint, or one that a tag names.
            CheckpointNotFoundError: nothing answers to a REF.
            RequestRefusedError: the writer refused. Nothing was changed.
            RequestTimeoutError: no answer came in time. The request stays, and may still be accepted.
            ReadOnlyError, StorageError: the medium cannot be written, or failed.
            FencedError, CommitUnknownError: only with `take_over`: another writer took the store over meanwhile.
        """
        from ckptstore.maintenance.retiring import retire

        return retire(self.journal, refs, dry_run=dry_run, take_over=take_over, timeout=timeout)

    def rules(self) -> tuple[str, ...]:
        """The store's rules of retention, as `keep` takes them; none: every checkpoint is kept."""
        from ckptstore.maintenance.pruning import rules

        return rules(self.journal)

    def keep(
        self, *rules: str, everything: bool = False, take_over: bool = False, timeout: float | None = 60.0
    ) -> tuple[str, ...]:
        """Have the store keep checkpoints by these rules from now on -> the rules. `rules` says which there are.

        They are a union, and every writer keeps to them: what a save makes superfluous it retires. The newest
        checkpoint stays in any case, and so does what a tag names. A live writer is asked, as in `retire`.

        Args:
            rules: ``last:N``: the N newest of the line of the newest. ``every:N``: each whose step is a multiple of N.
                ``best:METRIC:N``: the N of that line whose metadata have the lowest METRIC (``best:METRIC:N:max``: the
                highest). ``newer-than:7d``: those saved in the 7 days (s, m, h, d, w) before the newest was.
                ``branches``: those that are not on the line of the newest, because a run went back. ``tagged``:
                nothing but what stays in any case.
            everything: no rules any more: every checkpoint is kept.
            take_over, timeout: as for `retire`.

        Raises:
            UsageError: one is no rule, none is given without `everything`, or nobody has ever written to the store.
            RequestRefusedError, RequestTimeoutError and the others: as `retire`.
        """
        from ckptstore.maintenance.pruning import set_rules

        if everything == bool(rules):
            raise UsageError("keep: give rules, or everything=True to have none; rules() says which there are")
        if not all(isinstance(rule, str) for rule in rules):
            raise UsageError("keep: rules are texts, each an argument of its own: keep('last:10', 'every:100')")
        return set_rules(self.journal, rules, take_over=take_over, timeout=timeout)

    def prune(
        self,
        *rules: str,
        dry_run: bool = False,
        take_over: bool = False,
        timeout: float | None = 60.0,
    ) -> Pruned:
        """Retire what no rule keeps; `gc` then deletes what nothing needs. A live writer is asked, as in `retire`.

        Args:
            rules: see `keep`; instead of the store's, this time. None given: the store's.
            dry_run: change nothing, and say what would become of the store.
            take_over, timeout: as for `retire`.

        Returns:
            what each rule keeps, what is retired, and what of that stays because others build on it.

        Raises:
            UsageError: one is no rule, or there are none.
            CorruptLogError: the log is damaged. Nothing was changed.
            RequestRefusedError, RequestTimeoutError and the others: as `retire`.
        """
        from ckptstore.maintenance.pruning import prune

        drained = None
        if not dry_run and (pair := self._pair()) is not None:
            from ckptstore.tiers.syncing import drained_catalog

            with pair.reaching("nothing was pruned"):
                drained = drained_catalog(pair)
        return prune(
            self.journal, rules or None, dry_run=dry_run, take_over=take_over, timeout=timeout, drained=drained
        )

    def tag(
        self, name: str, ref: str | int = "latest", *, take_over: bool = False, timeout: float | None = 60.0
    ) -> CheckpointInfo:
        """Name a checkpoint of any term, ``tag:NAME`` from then on; a tag that exists moves.

        A live writer is asked, as in `retire`; in the process that has the writer use `Writer.tag`.

        Args:
            name: 1-128 letters, digits and ``_.+/-``, beginning with a letter, digit or ``_``.
            ref: the checkpoint, as it is now.
            take_over, timeout: as for `retire`.

        Returns:
            the checkpoint, with its tags.

        Raises:
            UsageError: no tag name.
            CheckpointNotFoundError: nothing answers to `ref`.
            RequestRefusedError, RequestTimeoutError and the others: as `retire`.
        """
        from ckptstore.maintenance.tagging import tag

        return tag(self.journal, name, ref, take_over=take_over, timeout=timeout)

    def untag(self, name: str, *, take_over: bool = False, timeout: float | None = 60.0) -> None:
        """Remove a tag; the checkpoint stays.

        Args:
            take_over, timeout: as for `retire`.

        Raises:
            CheckpointNotFoundError: there is no such tag.
            RequestRefusedError, RequestTimeoutError and the others: as `retire`.
        """
        from ckptstore.maintenance.tagging import untag

        untag(self.journal, name, take_over=take_over, timeout=timeout)

    def copy(
        self,
        target: str | os.PathLike[str] | Store,
        refs: Sequence[str | int] = (),
        *,
        form: Literal["stored", "full"] = "stored",
        progress: Progress | bool | None = None,
        threads: int | None = None,
    ) -> Copied:
        """Copy checkpoints to another place, on whatever medium: same run, terms, states, tags and metadata.

        Every byte is compared with its hash on the way. Beside a live writer what is copied is what the log said at one
        instant. A copy that was interrupted is gone on with by the same call; one that is complete takes what is new.

        Args:
            target: a path, a URL or a `Store`: an empty place, or a copy of this run that nobody wrote to.
            refs: the checkpoints, each with what it builds on (which is not promised there); none: everything that is
                promised, with every encoding, and every term.
            form: ``stored``: segments byte for byte. ``full``: each checkpoint decoded, and stored uncompressed.
            progress: told (bytes done, bytes in all).
            threads: segments that are copied at once; None: up to four.

        Returns:
            what is there now, and what was copied this time.

        Raises:
            UsageError: the target is something else, lies in this store, or went on by itself.
            CheckpointNotFoundError: nothing answers to a REF.
            CorruptionError: this store is damaged (`repair` copies what is intact).
            ReadOnlyError, StorageError: a medium failed, or cannot be written.
        """
        from ckptstore.maintenance.copies import copy

        there = target.backend if isinstance(target, Store) else open_backend(target, create=True)
        return copy(self.journal, there, refs, form=form, progress=told(progress), threads=threads)

    def tags(self) -> dict[str, CheckpointInfo]:
        """Every tag, by name, and the checkpoint that it names."""
        from ckptstore.maintenance.tagging import tags

        return tags(self.journal)

    def fate(self, step: int, term: int | None = None) -> str | None:
        """What became of a checkpoint that is promised no longer: ``75@2 was dropped by a merge into 90@2``.

        Args:
            term: None: of whichever term.

        Returns:
            None: the log does not say, or not any more (a fold took the place of the record).

        Raises:
            CorruptLogError: nothing of the log can be read.
            StorageError: the medium failed.
        """
        from ckptstore.reports.fates import fate

        return fate(self.journal, step, term)

    def lineage(self, limit: int | None = None, term: int | None = None, by: str | None = None) -> Lineage:
        """The checkpoints as a forest, newest first: who continues from whom, and what is wrong with the log.

        Args:
            limit: at most so many checkpoints, the newest; None: all.
            term: only the checkpoints of this term.
            by: order by the number of this name in the metadata, lowest first, instead of newest first; ``NAME:max``:
                highest first. Those without one come last.

        Raises:
            NotFoundError: no checkpoint has a number of that name.
            CorruptLogError: nothing of the log can be read.
            StorageError: the medium failed.
        """
        from ckptstore.reports.lineage import lineage

        return lineage(self.journal, limit, term, by)

    def inspect(self, ref: str | int = "latest", select: str | Sequence[str] | None = None) -> CheckpointDescription:
        """Take a checkpoint apart: its tensors and how each is stored, its chain, the rest of its state.

        Reads and verifies the headers of its chain, no tensor.

        Args:
            select: describe only tensors that match one of these globs.

        Raises:
            CheckpointNotFoundError, TensorNotFoundError: nothing answers to `ref`, or matches `select`.
            CorruptionError: a segment of the chain is missing or its header is damaged.
        """
        from ckptstore.reports.inspection import inspect

        return inspect(self.journal, ref, select)

    def statistics(self, ref: str | int, tensor: str, *, progress: Progress | bool | None = None) -> TensorStatistics:
        """Count, range, mean, norm and magnitudes of one tensor's values, in one pass. Bytes are verified.

        Args:
            tensor: its name.
            progress: told (bytes done, bytes in all).

        Raises:
            CheckpointNotFoundError, TensorNotFoundError: there is none.
            CorruptionError: its bytes are damaged.
        """
        from ckptstore.reports.inspection import statistics

        return statistics(self.journal, ref, tensor, told(progress))

    def stats(self) -> StoreStats:
        """Where the store's bytes are: by kind, term and class of tensor; growth; what prune and gc would free.

        Reads the log, lists the segments, and reads the headers of the newest checkpoint's chain.

        Raises:
            CorruptLogError: nothing of the log can be read.
            CorruptionError: the newest checkpoint's chain is damaged.
        """
        from ckptstore.maintenance.gc import collect
        from ckptstore.maintenance.pruning import prunable_nbytes
        from ckptstore.reports.stats import stats

        garbage = collect(self.journal, dry_run=True)
        return stats(
            self.journal,
            prunable_nbytes=prunable_nbytes(self.journal),
            garbage_nbytes=garbage.nbytes + garbage.pinned_nbytes,
        )

    def watch(
        self, every: float = 2.0, *, metric: str = "loss", wait: bool = False, quiet: bool = False
    ) -> Iterator[RunStatus]:
        """Follow the run: how it is doing now, and from then on whenever something has changed. Ends with an error.

        Takes no lock and no pin, and reads no segment. A look fetches only what is new: of a store at rest it takes
        four requests, and one more for each record that came.

        Args:
            every: seconds between two looks, 0.01 to 86,400.
            metric: name of a number in the metadata (or in their ``metrics``) to follow.
            wait: where there is no store yet, wait until there is one.
            quiet: give the status after every look, whether something has changed or not.

        Raises:
            UsageError: at once: `every` is no such time, or `metric` no name.
            StoreNotFoundError: there is no store here; or it was deleted or moved away.
            StoreReplacedError: it was, and another run's, or another history of the run, is in its place.
            CorruptLogError: the log is damaged where the newest is decided, or what was read of it is gone.
            FormatError, StorageError: FORMAT or a record cannot be used; the medium failed.

        Example:
            >>> store = open("memory://watched")
            >>> with store.writer() as writer:
            ...     info = writer.save({"weight": 1.5}, step=1, metadata={"loss": 0.5})
            >>> status = next(store.watch())
            >>> status.latest, status.values
            ('1@1', ((1, 0.5),))
        """
        from ckptstore.reports.watching import watch

        return watch(self.journal, every, metric, wait=wait, quiet=quiet)

    def explain(self, ref: str | int = "latest", select: str | Sequence[str] | None = None) -> Explanation:
        """What restoring a checkpoint (or the tensors of it that `select` names) will read and decode, and how long
        that should take here.

        Reads headers, and at most 16 MiB to measure the medium; no tensor is restored.

        Raises:
            as `load`.
        """
        from ckptstore.reports.explaining import explain

        return explain(self.journal, ref, select)

    def compare(
        self,
        ref_a: str | int,
        ref_b: str | int,
        select: str | Sequence[str] | None = None,
        *,
        other: Store | None = None,
        progress: Progress | bool | None = None,
    ) -> list[TensorDifference]:
        """How two checkpoints differ, tensor by tensor: bits, elements, norms.

        Tensors of equal hash are the same and are not read; the others are read chunk by chunk and verified. Tensors in
        shards are compared as whole ones, however each side is cut.

        Args:
            select: only tensors at places that match one of these patterns, in either checkpoint.
            other: the store that `ref_b` is in; None: this one.
            progress: told (bytes done, bytes in all).

        Returns:
            a difference for each tensor, the same ones included, in the order of B's state; what only A has comes last.

        Raises:
            CheckpointNotFoundError, TensorNotFoundError, CorruptionError.
        """
        from ckptstore.reports.comparison import compare

        return compare(self.journal, ref_a, ref_b, select, told(progress), None if other is None else other.journal)

    def compare_state(self, ref_a: str | int, ref_b: str | int, *, other: Store | None = None) -> list[StateDifference]:
        """How two checkpoints differ in what is not a tensor: numbers, strings, RNG states.

        Args:
            other: the store that `ref_b` is in; None: this one.

        Raises:
            CheckpointNotFoundError, CorruptionError, FormatError.
        """
        from ckptstore.reports.comparison import compare_state

        return compare_state(self.journal, ref_a, ref_b, None if other is None else other.journal)

    def bisect(
        self,
        predicate: Predicate | str,
        *,
        ref: str | int = "latest",
        select: str | Sequence[str] | None = None,
        good: str | int | None = None,
        bad: str | int | None = None,
        checks: int = 0,
        on_probe: Callable[[Probe], object] | None = None,
    ) -> Bisected:
        """Find the checkpoint at which something began, by binary search: 14 restores for 10,000 checkpoints.

        Searched is the history of one checkpoint: of a fork its own line alone. What is damaged is skipped.

        Args:
            predicate: called with each state, arrays of numpy: True if it is bad, False if it is good, None if that
                cannot be said. Or a shell command that gets a safetensors file as ``$1``, and exits with 0 (good), 125
                (cannot be said) or another code up to 127 (bad).
            ref: the end of the history.
            select: restore only tensors at places that match one of these patterns.
            good: a checkpoint that is known to be good: only what is after it is searched.
            bad: one that is known to be bad: only what is before it is; instead of `ref`.
            checks: look at so many checkpoints more on either side: does it go on, once it began?
            on_probe: told of every checkpoint that was looked at.

        Raises:
            CheckpointNotFoundError, TensorNotFoundError: there is none.
            UsageError: `good` is not before the end; or the command was killed, or exited with more than 127.
            StorageError: the medium failed. And anything that `predicate` raises.
        """
        from ckptstore.reports.bisecting import bisect, judged
        from ckptstore.reports.predicates import commanded

        if isinstance(predicate, str):
            ask = commanded(predicate, lambda one, path: self.export(one, path, format="safetensors", select=select))
        else:
            ask = judged(lambda one: self.load(one, framework="numpy", select=select), predicate)
        return bisect(self.journal, ask, ref=ref, good=good, bad=bad, checks=checks, on_probe=on_probe)

    def request_costs(
        self, ref: str | int = "latest", select: str | Sequence[str] | None = None
    ) -> RequestCosts | None:
        """What restoring a checkpoint (or the tensors of it that `select` names) takes of an object store, and what
        this handle has spent so far; None: requests of this medium cost nothing.

        Reads headers; no tensor is restored.

        Raises:
            as `load`.
        """
        from ckptstore.reports.request_costs import request_costs

        return request_costs(self.journal, ref, select)

    def describe(self, ref: str | int = "latest") -> list[tuple[SegmentEntry, SegmentDoc]]:
        """The segments that restoring `ref` reads, base first, each with its verified description."""
        from ckptstore.restore.load import describe

        return describe(self.journal, ref)

    def tensors(self, ref: str | int = "latest") -> dict[str, TensorEntry]:
        """name -> entry of every tensor of the checkpoint, in access order."""
        from ckptstore.restore.load import tensors

        return tensors(self.journal, ref)

    def tree(self, ref: str | int = "latest") -> Any:
        """The typed JSON tree of the checkpoint's state; of many ranks that saved it together (SPEC 3.3), all of it."""
        from ckptstore.restore.load import tree

        return tree(self.journal, ref)

    def chunks(self, ref: str | int, name: str, *, verify: bool = True) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """One tensor's logical bytes, chunk by chunk: (offset, uint8 array valid until the next one).

        Raises:
            TensorNotFoundError, CorruptSegmentError, StorageError.
        """
        from ckptstore.restore.load import chunks

        return chunks(self.journal, ref, name, verify)

    def read_tensor(
        self, ref: str | int, name: str, *, box: Sequence[slice] | slice | None = None, verify: bool = True
    ) -> npt.NDArray[Any]:
        """One tensor's logical bytes, or those of a box of it (1-D uint8). Reads only the chunks that have them.

        Args:
            box: slices, one for each dimension from the first on, as in ``numpy.s_[0:10, :]``: the elements of this box
                in C order. Chunks of 16 MiB are read whole, because they are verified so.

        Raises:
            TensorNotFoundError, CorruptSegmentError, StorageError.
            UsageError: `box` is not of slices of neighbours, or has more of them than the tensor dimensions.
        """
        from ckptstore.restore.load import read_tensor

        return read_tensor(self.journal, ref, name, verify, box)


_PICKLES: Final = (".pt", ".pth", ".bin", ".ckpt")
_OTHERS: Final = (
    *(".onnx", ".gguf", ".ggml", ".npz", ".npy", ".h5", ".hdf5", ".keras", ".tflite", ".pb", ".msgpack", ".mlmodel"),
    *(".json", ".pkl", ".pickle", ".zip", ".tar", ".gz", ".zst", ".distcp", ".parquet"),
)
"""Names of files that other tools would take for something else than what is written."""


def _format_of(path: str | os.PathLike[str]) -> Literal["safetensors", "pt"]:
    name = os.fspath(path).lower()
    if name.endswith(_OTHERS):
        known = ", ".join((".safetensors", *_PICKLES))
        raise UsageError(f"{path}: this writes no such file; its name ends with one of {known}, or say format=")
    return "pt" if name.endswith(_PICKLES) else "safetensors"


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
