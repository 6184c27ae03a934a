"""The methods of `Store` that work with its remote (second tier)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ckptstore.errors import StorageError
from ckptstore.host.progress import as_progress
from ckptstore.store.store_handle import StoreHandle

if TYPE_CHECKING:
    from ckptstore.host.progress import Progress
    from ckptstore.tiers.store_sync import Synced
    from ckptstore.write.second_tier import Lag

__all__ = ["TierMethods", "restore_if_empty"]


class TierMethods(StoreHandle):
    """The methods of `Store` that work with its second tier."""

    def lag(self) -> Lag | None:
        """How far the remote is behind, by the logs of both; None: the store has no remote.

        Raises:
            StoreNotFoundError, CorruptLogError, StorageError: one of the logs cannot be read.
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
        """Copy to the remote what it lacks, once, in the order of the log. May run while a writer is open.

        The next call, or the next writer, continues an interrupted one.

        Args:
            remote: URL or path; if there is no second tier yet, it is created there. None: the remote that the store
                remembers. A remembered remote must exist, also if this argument names it.
            remote_options, bandwidth: as for `open`; None: as the store was opened with.
            anew: if a part of the remote is missing, delete the rest of it and build it again; if all of it is
                missing, build it again. A complete remote (FORMAT, log, every segment with its length; bytes are not
                read) is left unchanged. Nothing is deleted that this store could not copy there again.
            progress: called with (bytes done, total bytes).

        Raises:
            UsageError: there is no remote, or something else is there; or `anew` is set and the remote has what this
                store lacks: another run, a newer term, segments.
            RemoteLostError: the remote was deleted or replaced, in part or as a whole: see `anew`.
            CorruptionError: this store is damaged. What was copied so far stays.
            StorageError: a medium failed. What was copied so far stays.
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
        """Copy each commit to the remote as it is made: for a separate process, if the writers do not drain themselves
        (many ranks, the agent). Yields the result of every pass that copied something.

        Ends when the run was continued elsewhere; the last result says so.

        Args:
            remote, remote_options, bandwidth: as for `sync`.
            every: seconds between two polls of the log.
            on_failure: called when a medium failed. The pass is retried after a while.

        Raises:
            UsageError: there is no remote, or something else is there.
            RemoteLostError: the remote was deleted or replaced, in part or as a whole: see `sync`.
            CorruptionError: this store is damaged.
        """
        from ckptstore.tiers.store_sync import sync_continuously

        self.format  # noqa: B018 - raises when there is none
        pair = self._pair_with(remote, remote_options, bandwidth)
        pair.check_there()
        return sync_continuously(pair, every, on_failure=on_failure)


def restore_if_empty(store: TierMethods) -> None:
    """Restore the remote's newest checkpoint into a store that has none; does nothing without a remote."""
    from ckptstore.tiers.remote_fetch import restore_newest

    if (pair := store._pair()) is not None:
        with pair.reaching("nothing was restored"):
            restore_newest(pair)
