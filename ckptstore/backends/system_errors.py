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
