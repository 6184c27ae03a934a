"""A store and its remote: finds the remote's URL and opens it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from ckptstore.backends import Backend, open_backend
from ckptstore.backends.exclusion import root_of
from ckptstore.backends.store_names import canonical
from ckptstore.errors import (
    CorruptionError,
    NotFoundError,
    RemoteLostError,
    StorageError,
    StoreNotFoundError,
    UsageError,
)
from ckptstore.formats.history.catalog import REMOTE, Catalog
from ckptstore.formats.history.records import CheckpointId
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import read
from ckptstore.log.term import Term, open_term
from ckptstore.tiers.remote_check import check_first_slot, lost

__all__ = ["Remote", "RemoteRememberedError", "StorePair", "configured", "open_without_remote"]

_LONGEST_URL: Final = 4096


@dataclass(frozen=True, slots=True)
class Remote:
    """What the caller specifies about a store's second tier.

    Attributes:
        url: URL of the remote store, without credentials: it is written to the log. None: the one that the store
            remembers; False: no remote, even if the store remembers one.
        options: how to reach it; may hold credentials, and is never shown or stored.
        bandwidth: at most this many bytes a second are sent there; None: no limit.
        lag_bytes: number of bytes that it may lack before a save waits; None: no limit.
    """

    url: str | Literal[False] | None = None
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    bandwidth: int | None = None
    lag_bytes: int | None = None

    @classmethod
    def given(
        cls,
        url: str | os.PathLike[str] | Literal[False] | None,
        options: Mapping[str, Any] | None,
        bandwidth: float | None,
        lag_bytes: int | None = None,
    ) -> Remote:
        """From the arguments of `open`. A path is made absolute: the store remembers it.

        Raises:
            UsageError: not a URL, or one that contains a user name or password; `bandwidth` or `lag_bytes` is not a
                number of bytes.
        """
        number = isinstance(bandwidth, int | float) and not isinstance(bandwidth, bool)
        if bandwidth is not None and not (number and 1 <= bandwidth < 1e15):
            raise UsageError(f"bandwidth: {bandwidth!r}; it takes bytes per second, 1 or more")
        whole = isinstance(lag_bytes, int) and not isinstance(lag_bytes, bool)
        if lag_bytes is not None and not (whole and lag_bytes >= 0):
            raise UsageError(f"lag_bytes: {lag_bytes!r}; it takes bytes, 0 or more")
        if lag_bytes is not None and url is False:
            raise UsageError("lag_bytes: it has no meaning with remote=False")
        if not (url is None or url is False or isinstance(url, str | os.PathLike)):
            raise UsageError(f"remote: {url!r}; it takes a path or URL, False, or None")
        text = url if url is None or url is False else _checked(os.fsdecode(url))
        return cls(text, dict(options or {}), None if bandwidth is None else int(bandwidth), lag_bytes)


def _checked(url: str) -> str:
    if "://" not in url:
        return str(Path(url).expanduser().absolute())
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None or parts.query:
        raise UsageError(
            "remote: the URL holds credentials or options, which the store would remember; give them with "
            "remote_options= or in the environment"
        )
    if len(url) > _LONGEST_URL:
        raise UsageError(f"remote: a URL of {len(url)} characters; at most {_LONGEST_URL} are allowed")
    return url


def configured(catalog: Catalog) -> str | None:
    """The remote that a store remembers, from its newest OPEN."""
    opened = catalog.terms.get(catalog.term)
    url = None if opened is None else opened.extra.get(REMOTE)
    return url if isinstance(url, str) and 0 < len(url) <= _LONGEST_URL else None


class RemoteRememberedError(Exception):
    """The store remembers a remote, in which a term must be opened first. `Store.writer` does that."""


def open_without_remote(
    journal: Journal, parent: Callable[[Catalog], CheckpointId | None], about: Mapping[str, Any]
) -> Term:
    """`open_term` for a store that remembers no remote; this is checked without reading its log once more.

    Raises as `open_term`, and `RemoteRememberedError`; no term was opened then.
    """

    def choose(catalog: Catalog) -> CheckpointId | None:
        if configured(catalog) is not None:
            raise RemoteRememberedError
        return parent(catalog)

    return open_term(journal, choose, about)


def _place(backend: Backend) -> str:
    """What all names of one place have in common. A relative path is that of the time when the store was opened."""
    return backend.address or canonical(backend.url)


@dataclass(frozen=True, slots=True)
class StorePair:
    """A store and its remote."""

    local: Journal
    remote: Journal
    bandwidth: int | None = None
    lag_bytes: int | None = None

    @classmethod
    def of(cls, local: Journal, remote: Remote) -> StorePair | None:
        """Open the remote that is given, or that the store remembers; None: neither.

        Raises as `open_backend`, and `UsageError` if it is the store itself.
        """
        url = remote.url
        if url is None:
            with contextlib.suppress(NotFoundError, CorruptionError):
                url = configured(read(local).catalog)
        if not url:
            return None
        theirs = open_backend(url, True, remote.options or None)
        if _place(theirs) == _place(local.backend) or root_of(theirs) == root_of(local.backend) is not None:
            if remote.url is None:  # this is the remote itself, opened by its own URL
                return None
            raise UsageError(f"{url}: a store is not its own remote")
        return cls(local, Journal(theirs), remote.bandwidth, remote.lag_bytes)

    def check_there(self) -> None:
        """Raise `RemoteLostError` if the remote holds no store, although terms of this run were opened in it.

        Prevents: mistaking a disk that is not mounted, or a folder that is gone, for a new remote. It would not know
        who continued the run, and would acknowledge checkpoints that are only on this machine.
        """
        with contextlib.suppress(NotFoundError, CorruptionError):
            known = configured(read(self.local).catalog)
            if known is None or canonical(known) != canonical(self.remote.url):
                return
            there = Journal(self.remote.backend)
            try:
                there.format  # noqa: B018 - the property reads the file
            except StoreNotFoundError as error:
                what = "no store is there any more, although this run was drained to it (not mounted, moved, deleted?)"
                raise lost(self.local.url, self.remote.url, what) from error
            check_first_slot(self.local.url, there)

    @contextlib.contextmanager
    def reaching(self, what: str) -> Iterator[None]:
        """In the ``with``: add to errors of the remote's medium what they mean, and how to write without the remote.

        Args:
            what: what was not done, for the message.
        """
        try:
            yield
        except RemoteLostError as error:
            raise RemoteLostError(
                f"{what}: {error} To write without it, on what may become a branch, open the store with remote=False"
            ) from error
        except StorageError as error:
            if self.remote.url in str(error):
                raise StorageError(
                    error.errno or errno.EIO,
                    f"{what}: the remote cannot be reached, and its log decides who writes ({error}). To write without "
                    "it, on what may become a branch, open the store with remote=False",
                    self.local.url,
                ) from error
            raise
