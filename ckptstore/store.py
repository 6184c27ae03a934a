"""A store: where the state of one training run lives. Reading takes no lock."""

from __future__ import annotations

import contextlib
import os
import platform
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from ckptstore import refs
from ckptstore._version import __version__
from ckptstore.backends import open_backend
from ckptstore.backends.base import Backend
from ckptstore.checkpoint import CheckpointInfo, TermInfo, describe_all, describe_checkpoint
from ckptstore.formats.catalog import CLOSED, Catalog
from ckptstore.formats.errors import (
    CheckpointNotFoundError,
    FencedError,
    KeyExistsError,
    KeyNotFoundError,
    ReadOnlyError,
    StoreNotFoundError,
    UsageError,
)
from ckptstore.formats.records import FORMAT_KEY, CheckpointEntry, CheckpointId, FormatFile
from ckptstore.formats.texts import SLOT_LIMIT, decode_format, encode_format
from ckptstore.log import Term, open_term
from ckptstore.planner import Plan, plan
from ckptstore.remarks import warn
from ckptstore.view import View, read

if TYPE_CHECKING:
    import numpy.typing as npt

    from ckptstore.deltas import DeltaOptions
    from ckptstore.diffs import DiffOptions
    from ckptstore.formats.records import SegmentEntry
    from ckptstore.formats.segment import SegmentDoc, TensorEntry
    from ckptstore.reading import Progress
    from ckptstore.writer import Writer

__all__ = ["DeterminismWarning", "LossyWarning", "LostStepsWarning", "Store", "open_store"]

Framework = Literal["torch", "numpy"]


class DeterminismWarning(UserWarning):
    """Something that decides a run's bits differs from what the parent's term recorded."""


class LostStepsWarning(UserWarning):
    """The term before ended without closing, and steps that waited for their batch then are not in the store."""


class LossyWarning(UserWarning):
    """What was restored is not what training had: it was stored so on request (`DiffOptions.accumulate`)."""


def open_store(url: str | os.PathLike[str], *, create: bool | None = None) -> Store:
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
        >>> store = open_store("memory://example")
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


class Store:
    """One run's checkpoints on one medium.

    Every method reads the log afresh, so a `Store` always shows what is committed now.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._format: FormatFile | None = None

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
        return self.backend.url

    @property
    def run(self) -> str:
        """The run's uuid, 32 hex digits."""
        return self.format.run

    @property
    def format(self) -> FormatFile:
        """The store's FORMAT file.

        Raises:
            StoreNotFoundError: there is no store here.
            CorruptLogError, FormatError: the file is damaged, or of an unknown format.
        """
        if self._format is None:
            try:
                self._format = decode_format(self.backend.get(FORMAT_KEY, SLOT_LIMIT))
            except KeyNotFoundError as error:
                raise StoreNotFoundError(f"{self.url}: there is no checkpoint store here (no FORMAT file)") from error
        return self._format

    def create(self) -> None:
        """Create the store if there is none.

        Raises:
            UsageError: the place holds other things.
            ReadOnlyError, StorageError, UnsupportedBackendError: it cannot be written, or not safely.
        """
        if self.backend.deleted():  # its writers and readers keep the old handle, which reaches nothing any more
            self.backend = self.backend.reopened()
            self._format = None
        try:
            self.format  # noqa: B018  # the property reads the file
        except StoreNotFoundError:
            pass
        else:
            return
        if self.backend.read_only:
            raise ReadOnlyError(f"{self.url}: read-only, cannot create a store")
        if strangers := [key for key in self.backend.list("") if not key.startswith("probe/")]:
            raise UsageError(
                f"{self.url}: not a checkpoint store, and not empty (it holds {strangers[0]!r}); give an empty place"
            )
        self.backend.probe()
        # Two creators: one wins, both read what it wrote.
        with contextlib.suppress(KeyExistsError):
            self.backend.create(FORMAT_KEY, encode_format(FormatFile(run=uuid.uuid4().hex)))
        self.format  # noqa: B018

    def view(self, *, look_above: bool | None = None) -> View:
        """The log as it is now (READ). `look_above`: see `ckptstore.view.read`."""
        return read(self.backend, self.format, look_above=look_above)

    def checkpoints(self) -> list[CheckpointInfo]:
        """Every promised checkpoint, by term and step."""
        return describe_all(self.view().catalog)

    def checkpoint(self, ref: str | int = "latest") -> CheckpointInfo:
        """The checkpoint that `ref` names.

        Raises:
            CheckpointNotFoundError: nothing answers to it.
            CorruptLogError: the log is damaged where ``latest`` would be decided; names the last intact checkpoint.
        """
        catalog, entry = self._find(ref)
        return describe_checkpoint(catalog, entry)

    def terms(self) -> list[TermInfo]:
        """Every term, oldest first."""
        catalog = self.view().catalog
        return [
            TermInfo(
                number,
                opened.parent and opened.parent.ref,
                opened.time,
                catalog.checkpoints.holds(number),
                dict(opened.writer),
            )
            for number, opened in sorted(catalog.terms.items())
        ]

    def plan(self, ref: str | int = "latest") -> Plan:
        """How `ref` would be restored: the cheapest chain of encodings."""
        catalog, entry = self._find(ref)
        return plan(catalog, entry.id)

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
        from ckptstore import exiting

        exiting.check()  # before the rest, of which some cannot even be imported when the interpreter is ending
        from ckptstore.deltas import DeltaOptions
        from ckptstore.diffs import DiffOptions
        from ckptstore.loading import open_base
        from ckptstore.staging import DEFAULT_BUDGET  # numpy: only those who save need it
        from ckptstore.writer import Writer, WriterOptions

        if deltas is not None and not isinstance(deltas, DeltaOptions):
            deltas = DeltaOptions(interval=deltas)
        if diffs is not None and not isinstance(diffs, DiffOptions):
            raise UsageError(f"diffs: {diffs!r}; it takes a DiffOptions, as in diffs=DiffOptions(full_every=100)")
        staging_bytes = DEFAULT_BUDGET if staging_bytes is None else staging_bytes
        options = WriterOptions(staging_bytes, threads, max_in_flight, poll_seconds, deltas, diffs)
        self.create()
        if self.backend.read_only:
            raise ReadOnlyError(f"{self.url}: read-only, cannot open it for writing")
        self.backend.probe()
        about = _about_this_process(diffs, max_in_flight)
        term, info = self._open_term(_parent_chooser(parent), about)
        return Writer(
            self.backend,
            self.format,
            term,
            info,
            options,
            reopen=lambda identity: open_base(self, identity),
            begin=lambda ref, after: self._open_term(_parent_chooser(ref, after), about),
        )

    def _open_term(
        self, parent: Callable[[Catalog], CheckpointId | None], about: Mapping[str, Any]
    ) -> tuple[Term, CheckpointInfo | None]:
        term = open_term(self.backend, self.format, parent, about)
        if term.parent is None:
            return term, None
        _warn_of_other_environment(term.catalog, term.parent, term.number)
        _warn_of_lost_steps(term.catalog, term.parent)
        return term, describe_checkpoint(term.catalog, term.catalog.checkpoints[term.parent.node])

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
            progress: called with the number of bytes just read, from several threads.

        Raises:
            CheckpointNotFoundError, TensorNotFoundError: no such checkpoint, or nothing matches `select`.
            CorruptSegmentError: a checksum differs; nothing is returned. Tensors of `into` may have been overwritten,
                with verified bytes only.
            UsageError: `into` has other tensors, dtypes or shapes; nothing was overwritten.
            StorageError: the medium failed.
        """
        from ckptstore.loading import LoadOptions, load  # numpy: only those who load need it

        options = LoadOptions(framework, into, select, device, mmap, verify, threads, progress)
        return load(self, ref, options)

    def describe(self, ref: str | int = "latest") -> list[tuple[SegmentEntry, SegmentDoc]]:
        """The segments that restoring `ref` reads, base first, each with its verified description."""
        from ckptstore.loading import describe

        return describe(self, ref)

    def tensors(self, ref: str | int = "latest") -> dict[str, TensorEntry]:
        """name -> entry of every tensor of the checkpoint, in access order."""
        from ckptstore.loading import tensors

        return tensors(self, ref)

    def tree(self, ref: str | int = "latest") -> Any:
        """The typed JSON tree of the checkpoint's state."""
        from ckptstore.loading import tree

        return tree(self, ref)

    def chunks(self, ref: str | int, name: str, *, verify: bool = True) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """One tensor's logical bytes, chunk by chunk: (offset, uint8 array valid until the next one).

        Raises:
            TensorNotFoundError, CorruptSegmentError, StorageError.
        """
        from ckptstore.loading import chunks

        return chunks(self, ref, name, verify)

    def read_tensor(self, ref: str | int, name: str, *, verify: bool = True) -> npt.NDArray[Any]:
        """One tensor's logical bytes (1-D uint8). Reads only that tensor's bytes.

        Raises:
            TensorNotFoundError, CorruptSegmentError, StorageError.
        """
        from ckptstore.loading import read_tensor

        return read_tensor(self, ref, name, verify)

    def _find(self, ref: str | int) -> tuple[Catalog, CheckpointEntry]:
        catalog = self.view().catalog
        return catalog, refs.resolve(catalog, ref)


def _parent_chooser(
    parent: str | int | CheckpointInfo | None, after: int | None = None
) -> Callable[[Catalog], CheckpointId | None]:
    """Looks the parent up in whatever view the OPEN is built on: it must be live there.

    Args:
        after: the term that has to be the newest there; None: whichever is.
    """

    def choose(catalog: Catalog) -> CheckpointId | None:
        if after is not None and catalog.term != after:
            # Prevents: a writer that is over, and fences the one that took its place.
            raise FencedError(f"term {after} is over: term {catalog.term} was opened after it")
        if parent is None:
            return None
        if isinstance(parent, CheckpointInfo):
            found = refs.resolve(catalog, parent.ref)
            if found.state != parent.state:
                raise CheckpointNotFoundError(f"{parent.ref} is another checkpoint now: the store was replaced")
            return found.id
        if parent == "latest":
            latest = catalog.latest()
            return None if latest is None else latest.id
        return refs.resolve(catalog, parent).id

    return choose


def _about_this_process(diffs: DiffOptions | None, max_in_flight: int) -> dict[str, Any]:
    from ckptstore import torch_seam

    waiting: dict[str, Any] = {}
    if diffs is not None and diffs.waits:
        # What is in flight waits, too, to be put to the batch. None: it changes.
        waiting = {"batch": diffs.batch + max_in_flight - 1 if diffs.controller is None else None}
    return waiting | {
        "version": __version__,
        "host": platform.node(),
        "pid": os.getpid(),
        "environment": torch_seam.environment(),
    }


def _warn_of_other_environment(catalog: Catalog, parent: CheckpointId, term: int) -> None:
    before = catalog.terms[parent.term].writer.get("environment") if parent.term in catalog.terms else None
    now = catalog.terms[term].writer.get("environment")
    if not before or not now:
        return
    from ckptstore.training.environment import environment_differences

    if differences := environment_differences(before, now):
        warn(
            f"resuming {parent.ref}: the run will not be bit-identical to one that never stopped: "
            + "; ".join(differences),
            DeterminismWarning,
        )


def _warn_of_lost_steps(catalog: Catalog, parent: CheckpointId) -> None:
    """Say which steps a term that was killed may have computed and not written."""
    before = catalog.terms.get(parent.term)
    if before is None or "batch" not in before.writer or before.extra.get(CLOSED):
        return
    batch = before.writer["batch"]
    some = f"up to {batch} steps" if isinstance(batch, int) else "steps"
    highest = catalog.checkpoints.highest(parent.term)
    if highest is not None and highest[1] > parent.step:
        return  # going back on purpose
    warn(
        f"term {parent.term} ended without closing: {some} after {parent.step} that waited for their "
        f"batch ({parent.step + 1} and following) are not in the store; training continues from {parent.ref}",
        LostStepsWarning,
    )
