"""Opens, verifies or repairs a store by its path or URL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from ckptstore.backends import open_backend
from ckptstore.host.progress import as_progress
from ckptstore.store.store import Store
from ckptstore.store.tier_methods import restore_if_empty
from ckptstore.tiers.store_pair import Remote

if TYPE_CHECKING:
    from ckptstore.host.progress import Progress
    from ckptstore.maintenance.repair import Repaired
    from ckptstore.maintenance.verify.verification import VerificationReport

__all__ = ["open", "repair", "verify"]


def open(
    url: str | os.PathLike[str],
    *,
    create: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any = None,
    remote: str | os.PathLike[str] | Literal[False] | None = None,
    remote_options: Mapping[str, Any] | None = None,
    bandwidth: float | None = None,
    lag_bytes: int | None = None,
) -> Store:
    """Open the store at a path or URL.

    Args:
        url: a directory, ``file:///…``, ``memory://name``, ``s3://bucket/prefix`` (``gs://``, ``az://``), or a URL of
            another scheme that fsspec knows.
        create: True: create it now if there is none. False: it must exist. None (default): the first `Store.writer`
            creates it, and reading a store that does not exist raises.
        storage_options: how to reach an object store, with fsspec's names (docs/object-stores.md): ``key``,
            ``secret``, ``token``, ``profile``, ``anon``, ``endpoint_url``, ``client_kwargs={"region_name": …}``. The
            environment gives the rest (``AWS_ACCESS_KEY_ID``, …). Credentials are kept only in memory.
        filesystem: an fsspec file system; `url` is then a path in it. To write, it must support exclusive creation.
        remote: URL or path of a second tier (docs/tiers.md): a store of the same run on another machine's medium.
            The writer copies its commits there, and what is missing here is read from there. If this store is empty,
            the remote's newest checkpoint is restored at once. The store remembers the URL. None: the remembered
            one; False: ignore the remote, and let a writer open a term only in this store.
        remote_options: `storage_options` of the remote; kept only in memory.
        bandwidth: at most this many bytes a second are sent to the remote.
        lag_bytes: a writer's save waits while the remote lacks more bytes than this. It bounds what is stored on
            only this machine or is still in flight. `StorageError` if the remote has failed for a minute by then.

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
    second = Remote.given(remote, remote_options, bandwidth, lag_bytes)
    store = Store(open_backend(url, create is not False, storage_options, filesystem), second)
    if second.url and create is not False:
        restore_if_empty(store)
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
    """Build a new store from the intact parts of a damaged one. The damaged store is only read.

    Keeps every checkpoint that can still be restored: those that the log promises, and where the log is damaged or
    lost those that the segments describe. Every byte is compared with its hash and every state is decoded before it
    is kept. Segments do not record tags, metadata or retirements. So where the log is lost, tags and metadata are
    lost, and retired checkpoints that gc had not deleted come back. No writer and no gc should run there.

    Args:
        source: path or URL of the damaged store.
        target: where to build the new store: an empty place, or the unfinished result of an interrupted call for the
            same source, which this call continues.
        run: the run's uuid, or the beginning of it: needed if there are objects of several runs.
        progress: called with (bytes done, total bytes) of the bytes that are read, decoded and copied.
        threads: number of threads; None: up to four.

    Returns:
        for each checkpoint, whether it is kept, and if it is lost, why.

    Raises:
        StoreNotFoundError: there is no part of a store.
        UsageError: there are objects of several runs, or the target is not empty.
        IncompatibleFormatError: a newer version wrote it.
        StorageError: a medium failed, other than by places of the source that can no longer be read.
    """
    from ckptstore.maintenance.repair import repair

    return repair(
        open_backend(source, create=False),
        open_backend(target, create=True),
        run=run,
        progress=as_progress(progress),
        threads=threads,
    )
