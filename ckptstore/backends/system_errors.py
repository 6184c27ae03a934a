"""From the system's errors to the project's."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

from ckptstore.errors import CkptError, KeyNotFoundError, ReadOnlyError, StorageError

REFUSALS: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
"""What the system says when it could but may not."""
ABSENCES: Final = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""What the system raises when nothing, or no file, has this name."""

ON_THE_WAY: Final = errno.EREMOTEIO
"""What fails between this machine and a medium elsewhere (a server, a network, a file system of fsspec's): it says
nothing of what is there, as EIO does."""
_BAD_MEDIUM: Final = frozenset({errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN})
"""What a system says when it got through to the medium and this place of it cannot be read any more: a bad sector, or
a checksum of the file system's own that differs."""


def is_bad_medium(error: StorageError) -> bool:
    """Whether what could not be read is lost, as far as anybody can tell. Everything else may be there tomorrow."""
    return error.errno in _BAD_MEDIUM


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Raise `KeyNotFoundError` for absence and `StorageError` for every other `OSError`."""
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
    """Raise `ReadOnlyError` for refusals and `StorageError` for every other `OSError`."""
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
    """Creating an object, of which it matters when it fails whether its name may have come into being.

    Used in a ``with``: what is raised within before `naming` is called has `StorageError.unsent`.
    """

    def __init__(self) -> None:
        self._named = False

    def naming(self) -> None:
        """From now on the object may exist, whatever is raised."""
        self._named = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError) and not self._named:
            error.unsent = True  # type: ignore[attr-defined]
