"""The base class of the parts of `Store`: its medium, its journal, its remote."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from ckptstore.backends.base import Backend
from ckptstore.errors import CkptError, CorruptionError, NotFoundError, UsageError
from ckptstore.formats.history.records import FormatFile
from ckptstore.log.checkpoint_info import look_up
from ckptstore.log.journal import Journal
from ckptstore.tiers.store_pair import Remote, StorePair

if TYPE_CHECKING:
    from ckptstore.log.log_reader import View

__all__ = ["StoreHandle"]

_T = TypeVar("_T")


class StoreHandle:
    """What every part of `Store` uses: the journal, and the remote once it is reached."""

    def __init__(self, backend: Backend, remote: Remote | None = None) -> None:
        """Read nothing yet. `open` takes a path or URL."""
        self.journal = Journal(backend)
        self._remote = remote or Remote()
        self._reached: StorePair | None = None
        # If a write through this handle finds no space, retired segments are deleted and the write is tried again.
        backend.reclaim_with(_Reclaim())

    @property
    def backend(self) -> Backend:
        """The medium."""
        return self.journal.backend

    @property
    def url(self) -> str:
        """The path or URL that the store was opened with."""
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
        """Create the store if there is none. If it was deleted while it was open, this creates a store of another run.

        Raises:
            UsageError: the place is not empty.
            ReadOnlyError, StorageError, UnsupportedBackendError: the medium cannot be written, or not safely.
        """
        self.journal.create(anew=True)

    def close(self) -> None:
        """Release the handle of the store's folder, so that its disk can be unmounted. Close writers first.

        Dropping the last reference to the `Store` has the same effect, sooner or later. Every later use of the folder
        raises `UsageError`.
        """
        self.backend.close()

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: options may hold credentials, and a handle belongs to one process.

        Raises `UsageError`.
        """
        raise UsageError(
            f"{self.url}: a Store cannot be pickled or copied (it holds connections, perhaps credentials): give the "
            "other process its URL, and call ckptstore.open(URL) there"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _pair(self) -> StorePair | None:
        """The store and its remote, which the first call connects to; None: the store has no remote."""
        if self._reached is None or self._reached.local is not self.journal:
            self._reached = StorePair.of(self.journal, self._remote)
        return self._reached

    def _with_remote_fallback(self, ref: str | int, work: Callable[[Journal, str | int], _T]) -> _T:
        """The result of `work` on this store; if data is missing or damaged here and the remote has it, on both."""
        try:
            return work(self.journal, ref)
        except (NotFoundError, CorruptionError) as error:
            try:
                pair = self._pair()
            except CkptError as why:
                error.add_note(f"the remote cannot be reached either: {why}")
                raise error from why
            if pair is None:
                raise
        from ckptstore.tiers.remote_fetch import read_from_either

        return read_from_either(pair, ref, work)

    def _remote_url_with(self, ref: str | int | None) -> str | None:
        """The URL of the remote, if a REF names a checkpoint there; None: it does not, or the remote is unreachable."""
        try:
            pair = self._pair()
            if pair is None or ref is None:
                return None
            look_up(pair.remote, ref)
        except CkptError:
            return None
        return pair.remote.url

    def _pair_with(
        self,
        remote: str | os.PathLike[str] | None,
        remote_options: Mapping[str, Any] | None,
        bandwidth: float | None,
    ) -> StorePair:
        told = self._remote
        if remote is not None or remote_options is not None or bandwidth is not None:
            given = Remote.given(remote, remote_options, bandwidth)
            rate = given.bandwidth or told.bandwidth
            told = Remote(given.url or told.url, given.options or told.options, rate, told.lag_bytes)
        pair = StorePair.of(self.journal, told)
        if pair is None:
            raise UsageError(f"{self.url}: the store has no remote: name one")
        return pair


class _Reclaim:
    """Deletes segments that nothing needs. Kept by a backend, for all handles on it."""

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Backend], View] | None = None

    def __call__(self, backend: Backend) -> int:
        """Delete segments that nothing needs -> freed bytes."""
        from ckptstore.log.log_reader import read
        from ckptstore.maintenance.garbage_collection import collect

        # Prevents: a writer that outlives the handle that opened it (`with ckptstore.open(path).writer()`) and fails
        # for lack of space although space could be freed. So this reads the log itself.
        journal = Journal(backend)
        if backend.bound is None or not backend.bound.active:
            return collect(journal).nbytes
        # Under a limit almost every save collects: read only what is new in the log.
        since = self._last[1] if self._last is not None and self._last[0]() is backend else None
        view = read(journal, since)
        self._last = weakref.ref(backend), view
        return collect(journal, since=view).nbytes
