"""From the system's errors to the project's."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

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
        raise kind(error.errno, f"cannot write: {error.strerror}", path) from error
