"""A store: where the state of one training run lives. Reading takes no lock."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from ckptstore.backends import open_backend
from ckptstore.backends.base import Backend
from ckptstore.errors import (
    UsageError,
)
from ckptstore.formats.records import FormatFile
from ckptstore.log import refs
from ckptstore.log.checkpoints import CheckpointInfo, TermInfo, describe_all, describe_terms, look_up
from ckptstore.log.journal import Journal
from ckptstore.log.reading import View, read
from ckptstore.restore.plan import Plan, plan

if TYPE_CHECKING:
    import numpy.typing as npt

    from ckptstore.formats.records import SegmentEntry
    from ckptstore.formats.segment import SegmentDoc, TensorEntry
    from ckptstore.host.progress import Progress
    from ckptstore.maintenance.verify.verification import VerificationReport
    from ckptstore.write.deltas import DeltaOptions
    from ckptstore.write.steps.batcher import DiffOptions
    from ckptstore.write.writer import Writer

__all__ = ["Store", "open", "verify"]

Framework = Literal["torch", "numpy"]


def open(url: str | os.PathLike[str], *, create: bool | None = None) -> Store:
    """Open the store at a path or URL.

    Args:
        url: a directory, ``file:///…`` or ``memory://name``.
        create: True: create it now if there is none. False: it must exist. None (default): the first `Store.writer`
            creates it, and reading what does not exist raises.

    Raises:
        StoreNotFoundError: `create` is False and there is no store.
        UsageError: the path holds something that is not a store, or the URL's scheme is unknown.
        FormatError, CorruptLogError, StorageError: the FORMAT file cannot be used.

    Example:
        >>> store = open("memory://example")
        >>> with store.writer() as writer:
        ...     info = writer.save({"weight": 1.5}, step=1)
        >>> store.load("latest")
        {'weight': 1.5}
    """
    store = Store(open_backend(url, create=create is not False))
    if create is True:
        store.create()
    elif create is False:
        store.format  # noqa: B018  # raises when there is none
    return store


def verify(
    store: Store | str | os.PathLike[str],
    *,
    deep: bool = False,
    progress: Progress | None = None,
    threads: int | None = None,
) -> VerificationReport:
    """`Store.verify` of a store, or of the store at a path or URL."""
    opened = store if isinstance(store, Store) else open(store)
    return opened.verify(deep=deep, progress=progress, threads=threads)


class Store:
    """One run's checkpoints on one medium.

    Every method reads the log afresh, so a `Store` always shows what is committed now.
    """

    def __init__(self, backend: Backend) -> None:
        """Read nothing yet. `open` takes a path or URL."""
        self.journal = Journal(backend)

    @property
    def backend(self) -> Backend:
        """The medium."""
        return self.journal.backend

    def __repr__(self) -> str:
        return f"ckptstore.open({self.url!r})"

    def close(self) -> None:
        """Give up the handle of the store's folder, so that its disk can be unmounted. Close writers before.

        Letting go of the `Store` does the same, sooner or later. Whatever is called afterwards fails.
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
        """Create the store if there is none.

        Raises:
            UsageError: the place holds other things.
            ReadOnlyError, StorageError, UnsupportedBackendError: it cannot be written, or not safely.
        """
        self.journal.create()

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

    def terms(self) -> list[TermInfo]:
        """Every term, oldest first."""
        return describe_terms(self.view().catalog)

    def plan(self, ref: str | int = "latest") -> Plan:
        """How `ref` would be restored: the cheapest chain of encodings."""
        catalog = self.view().catalog
        return plan(catalog, refs.resolve(catalog, ref).id)

    def writer(
        self,
        parent: str | int | CheckpointInfo | None = "latest",
        *,
        staging_bytes: int | None = None,
        threads: int = 2,
        max_in_flight: int = 1,
        poll_seconds: float | None = 5.0,
        deltas: DeltaOptions | Literal["auto"] | int | None = None,
        diffs: DiffOptions | None = None,
    ) -> Writer:
        """Open the store for writing: begins a new term, which fences every earlier writer.

        Args:
            parent: what this term continues from: a REF, or None for a run from nothing. ``latest`` in an empty store
                is None. Going back to an earlier checkpoint forks: nothing newer is lost or overwritten. A writer that
                is open goes back with `Writer.rollback`.
            staging_bytes: host memory between state and medium (default 64 MiB).
            threads: threads that write blocks.
            max_in_flight: snapshots that `Writer.save_async` may hold at once, each as large as the state.
            poll_seconds: how often to look for requests of other processes; None: only after saves.
            deltas: store checkpoints as deltas against earlier ones: ``auto`` (the interval follows what is measured,
                and a restore reads at most four times a full), a fixed interval, or `DeltaOptions`. None: fulls only.
            diffs: store consecutive steps as gradient diffs (see `Writer.save`'s `updates`) between fulls, or between
                what `deltas` makes of those.

        Raises:
            CheckpointNotFoundError: no such parent.
            CorruptLogError: the log is damaged; name an explicit parent to write on.
            ReadOnlyError, StorageError, UnsupportedBackendError: the medium cannot be written, or not safely.
        """
        from ckptstore.host import exiting

        exiting.check()  # before the rest, of which some cannot even be imported when the interpreter is ending
        from ckptstore.host.buffers import DEFAULT_BUDGET  # numpy: only those who save need it
        from ckptstore.write.deltas import DeltaOptions
        from ckptstore.write.opening import open_writer
        from ckptstore.write.steps.batcher import DiffOptions
        from ckptstore.write.writer import WriterOptions

        if deltas is not None and not isinstance(deltas, DeltaOptions):
            deltas = DeltaOptions(interval=deltas)
        if diffs is not None and not isinstance(diffs, DiffOptions):
            raise UsageError(f"diffs: {diffs!r}; it takes a DiffOptions, as in diffs=DiffOptions(full_every=100)")
        staging_bytes = DEFAULT_BUDGET if staging_bytes is None else staging_bytes
        options = WriterOptions(staging_bytes, threads, max_in_flight, poll_seconds, deltas, diffs)
        return open_writer(self.journal, parent, options)

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
        progress: Progress | None = None,
    ) -> Any:
        """Restore the state of a checkpoint, bit for bit.

        Args:
            ref: ``latest``, a step, ``STEP@TERM`` or ``tag:NAME``.
            framework: ``torch`` or ``numpy``; by default torch when this process has imported it. Arrays that were
                saved as numpy arrays (numpy's RNG state, say) always come back as numpy arrays.
            into: a state of the same structure whose tensors are overwritten in place, without a second copy in
                memory; what is not a tensor is taken from the checkpoint. The result's tensors are those of `into`.
            select: names of tensors, or globs (``model.*``); the others are left out of the result.
            device: where torch tensors go.
            mmap: map uncompressed fulls instead of reading them: tensors are private, copy-on-write views of the file.
            verify: compare every byte read with its checksum. Turning it off is on you.
            threads: reading threads; default: the number of cores, at most 4.
            progress: told (bytes done, bytes in all) of the tensors that are restored, from any thread, one call at a
                time.

        Raises:
            CheckpointNotFoundError, TensorNotFoundError: no such checkpoint, or nothing matches `select`.
            CorruptSegmentError: a checksum differs; nothing is returned. Tensors of `into` may have been overwritten,
                with verified bytes only.
            UsageError: `into` has other tensors, dtypes or shapes; nothing was overwritten.
            StorageError: the medium failed.
        """
        from ckptstore.restore.load import LoadOptions, load  # numpy: only those who load need it

        options = LoadOptions(framework, into, select, device, mmap, verify, threads, progress)
        return load(self.journal, ref, options)

    def verify(
        self, *, deep: bool = False, progress: Progress | None = None, threads: int | None = None
    ) -> VerificationReport:
        """Check every byte of the store, and what its segments say.

        Args:
            deep: decode and replay every checkpoint, too, each chain once. Memory: the descriptions of what builds on
                one full, and for each thread a payload and a few chunks.
            progress: told (bytes done, bytes in all) of what is checked, from any thread, one call at a time.
            threads: threads that read and decode; None: up to four.

        Raises:
            StoreNotFoundError: there is none.
            StorageError: the medium failed where nothing else can be said (a listing, the log).
        """
        from ckptstore.maintenance.verify.verification import verify

        return verify(self.journal, deep=deep, progress=progress, threads=threads)

    def describe(self, ref: str | int = "latest") -> list[tuple[SegmentEntry, SegmentDoc]]:
        """The segments that restoring `ref` reads, base first, each with its verified description."""
        from ckptstore.restore.load import describe

        return describe(self.journal, ref)

    def tensors(self, ref: str | int = "latest") -> dict[str, TensorEntry]:
        """name -> entry of every tensor of the checkpoint, in access order."""
        from ckptstore.restore.load import tensors

        return tensors(self.journal, ref)

    def tree(self, ref: str | int = "latest") -> Any:
        """The typed JSON tree of the checkpoint's state."""
        from ckptstore.restore.load import tree

        return tree(self.journal, ref)

    def chunks(self, ref: str | int, name: str, *, verify: bool = True) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """One tensor's logical bytes, chunk by chunk: (offset, uint8 array valid until the next one).

        Raises:
            TensorNotFoundError, CorruptSegmentError, StorageError.
        """
        from ckptstore.restore.load import chunks

        return chunks(self.journal, ref, name, verify)

    def read_tensor(self, ref: str | int, name: str, *, verify: bool = True) -> npt.NDArray[Any]:
        """One tensor's logical bytes (1-D uint8). Reads only that tensor's bytes.

        Raises:
            TensorNotFoundError, CorruptSegmentError, StorageError.
        """
        from ckptstore.restore.load import read_tensor

        return read_tensor(self.journal, ref, name, verify)
