"""A store by its path or URL."""

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
        lag_bytes: a writer's save waits while the remote lacks more bytes than that: what is on this machine alone is
            bounded by it, and what is on its way. `StorageError` where the remote has failed for a minute by then.

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
        progress=as_progress(progress),
        threads=threads,
    )
