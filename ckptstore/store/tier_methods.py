"""What a store does with its remote."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ckptstore.errors import StorageError
from ckptstore.host.progress import as_progress
from ckptstore.store.store_handle import Handle

if TYPE_CHECKING:
    from ckptstore.host.progress import Progress
    from ckptstore.tiers.store_sync import Synced
    from ckptstore.write.second_tier import Lag

__all__ = ["SecondTier", "restore_if_empty"]


class SecondTier(Handle):
    """The part of `Store` that has to do with its second tier."""

    def lag(self) -> Lag | None:
        """How far the remote is behind, by the logs of both; None: the store has no remote.

        Raises:
            StoreNotFoundError, CorruptLogError, StorageError: one of them cannot be read.
        """
        from ckptstore.tiers.drain import lag_of

        pair = self._pair()
        return None if pair is None else lag_of(pair)

    def sync(
        self,
        remote: str | os.PathLike[str] | None = None,
        *,
        remote_options: Mapping[str, Any] | None = None,
        bandwidth: float | None = None,
        anew: bool = False,
        progress: Progress | bool | None = None,
    ) -> Synced:
        """Bring to the remote what it lacks, once, in the order of the log. May run beside a writer.

        Interrupted, it is gone on with by the next call, or by the next writer.

        Args:
            remote: URL or path, where a second tier is made if there is none. None: the one that the store
                remembers. That one must be there, also if it is named.
            remote_options, bandwidth: as for `open`; None: as the store was opened with.
            anew: if a part of the remote is gone, delete what is left of it first; if all of it is, make it again. A
                remote that is whole (FORMAT, log, every segment in its length; bytes are not read) is left as it is.
                Nothing is deleted that this store could not bring there.
            progress: told (bytes done, bytes in all).

        Raises:
            UsageError: there is no remote, or something else is there; or `anew`, and the remote has what this store
                has not: another run, a newer term, segments.
            RemoteLostError: the remote was deleted or replaced, in part or as a whole: see `anew`.
            CorruptionError: this store is damaged. What was brought so far stays.
            StorageError: a medium failed; the same.
        """
        from ckptstore.tiers.store_sync import sync

        self.format  # noqa: B018 - raises when there is none
        pair = self._pair_with(remote, remote_options, bandwidth)
        if not anew:
            pair.check_there()
        return sync(pair, as_progress(progress), anew=anew)

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
            RemoteLostError: the remote was deleted or replaced, in part or as a whole: see `sync`.
            CorruptionError: this store is damaged.
        """
        from ckptstore.tiers.store_sync import follow

        self.format  # noqa: B018 - raises when there is none
        pair = self._pair_with(remote, remote_options, bandwidth)
        pair.check_there()
        return follow(pair, every, on_failure=on_failure)


def restore_if_empty(store: SecondTier) -> None:
    """Bring the remote's newest checkpoint into a store that has none; nothing where there is no remote."""
    from ckptstore.tiers.remote_fetch import restore_newest

    if (pair := store._pair()) is not None:
        with pair.reaching("nothing was restored"):
            restore_newest(pair)
