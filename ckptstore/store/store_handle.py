"""A store at hand: its medium, its journal, its remote."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NoReturn, Self

from ckptstore.backends.base import Backend
from ckptstore.errors import CkptError, UsageError
from ckptstore.formats.records import FormatFile
from ckptstore.log.checkpoint_info import look_up
from ckptstore.log.journal import Journal
from ckptstore.tiers.store_pair import Pair, Remote

__all__ = ["Handle"]


class Handle:
    """What every part of `Store` works on: the journal, and the remote once it is reached."""

    def __init__(self, backend: Backend, remote: Remote | None = None) -> None:
        """Read nothing yet. `open` takes a path or URL."""
        self.journal = Journal(backend)
        self._remote = remote or Remote()
        self._reached: Pair | None = None
        # Whoever writes by this handle and finds no space has what is retired deleted, and tries again.
        backend.reclaim_with(_reclaimed)

    @property
    def backend(self) -> Backend:
        """The medium."""
        return self.journal.backend

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

    def close(self) -> None:
        """Give up the handle of the store's folder, so that its disk can be unmounted. Close writers before.

        Letting go of the `Store` does the same, sooner or later. Whatever needs the folder afterwards raises
        `UsageError`.
        """
        self.backend.close()

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: options may hold credentials, and a handle is of this process.

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

    def _pair(self) -> Pair | None:
        """The store and its remote, which is reached the first time; None: it has none."""
        if self._reached is None or self._reached.local is not self.journal:
            self._reached = Pair.of(self.journal, self._remote)
        return self._reached

    def _remote_that_has(self, ref: str | int | None) -> str | None:
        """The URL of the remote, if a REF names a checkpoint there; None: it does not, or nobody can tell."""
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
    ) -> Pair:
        told = self._remote
        if remote is not None or remote_options is not None or bandwidth is not None:
            given = Remote.given(remote, remote_options, bandwidth)
            rate = given.bandwidth or told.bandwidth
            told = Remote(given.url or told.url, given.options or told.options, rate, told.lag_bytes)
        pair = Pair.of(self.journal, told)
        if pair is None:
            raise UsageError(f"{self.url}: the store has no remote: name one")
        return pair


def _reclaimed(backend: Backend) -> int:
    """Delete what nothing needs any more -> its bytes."""
    from ckptstore.maintenance.garbage_collection import collect

    # Prevents: a writer that outlives the handle it was opened by (`with ckptstore.open(path).writer()`), and fails
    # for want of space that is there to be freed: its log is read anew.
    return collect(Journal(backend)).nbytes
