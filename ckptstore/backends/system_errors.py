"""Translate the system's errors to the project's."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

from ckptstore.errors import CkptError, KeyNotFoundError, ReadOnlyError, StorageError

REFUSALS: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
"""Errors of an operation that is possible but not permitted."""
ABSENCES: Final = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors of the system when nothing, or no file, has this name."""

ON_THE_WAY: Final = errno.EREMOTEIO
"""Error number for failures between this machine and a remote medium (a server, a network, an fsspec file system).
Unlike EIO, it says nothing about the stored data."""
_BAD_MEDIUM: Final = frozenset({errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN})
"""Error numbers for damage of the medium itself: the system reached it and cannot read this place (a bad sector), or a
checksum of the file system differs."""


def is_bad_medium(error: StorageError) -> bool:
    """Whether the unreadable data is lost, as far as the error shows. After other errors it may be readable later."""
    return error.errno in _BAD_MEDIUM


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Raise `KeyNotFoundError` for an absent file and `StorageError` for every other `OSError`."""
    try:
        yield
    except CkptError:
        raise
    except ABSENCES as error:
        raise KeyNotFoundError(f"{path} does not exist") from error
    except OSError as error:
        raise StorageError(error.errno, f"cannot read: {error.strerror}", path) from error


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Raise `ReadOnlyError` if permission is refused and `StorageError` for every other `OSError`."""
    try:
        yield
    except CkptError:
        raise
    except OSError as error:
        kind = ReadOnlyError if error.errno in REFUSALS else StorageError
        told = kind(error.errno, f"cannot write: {error.strerror}", path)
        told.unsent = getattr(error, "unsent", False)
        raise told from error


class Attempt:
    """Track whether a failed create may have made the object's name.

    Used in a ``with``: errors raised within it before the call of `naming` have `StorageError.unsent` set.
    """

    def __init__(self) -> None:
        self._named = False

    def naming(self) -> None:
        """From now on the object may exist, whatever error is raised."""
        self._named = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError) and not self._named:
            error.unsent = True  # type: ignore[attr-defined]
