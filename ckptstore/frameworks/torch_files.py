"""Loading files that ``torch.save`` wrote: restricted unpickling only, tensors mapped rather than read."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import re
import struct
import threading
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import torch

from ckptstore.errors import CorruptionError, FormatError, StorageError, UnsupportedStateError
from ckptstore.frameworks.pickled_arrays import ALLOWED, named

__all__ = ["load"]

_READ: Final = 1 << 20
_loading = threading.Lock()
"""What torch allows is one set for the whole process: nobody else here takes it back meanwhile."""


@contextlib.contextmanager
def _allowing() -> Iterator[None]:
    """Allow the stand-ins, and of what the process allows itself only what has another name.

    transformers, for one, allows numpy's own functions while it loads. torch keeps one set and takes whichever of two
    of one name comes last in it, in no order: sometimes numpy's, to which it may then refuse a state.
    """
    names = {named(allowed) for allowed in ALLOWED}
    taken = [allowed for allowed in torch.serialization.get_safe_globals() if named(allowed) in names]
    theirs: AbstractContextManager[None] = torch.serialization.safe_globals(taken)
    theirs.__exit__(None, None, None)  # leaving takes them out, at once: clearing all would let another load fail
    try:
        with torch.serialization.safe_globals(ALLOWED):
            yield
    finally:
        theirs.__enter__()


def load(path: Path) -> Any:
    """The object in a ``.pt`` file, its tensors on the CPU and, in a zip archive, mapped from the file.

    numpy's arrays of numbers are `PickledArray`; of everything else, only what torch allows is made.

    Raises:
        UnsupportedStateError: loading it would run pickled code, or it is a TorchScript archive.
        CorruptionError: a record of the archive does not have its checksum.
        FormatError: it is no torch file, or damaged.
        StorageError: it cannot be read.
    """
    try:
        with _loading, warnings.catch_warnings(), _allowing():
            warnings.simplefilter("ignore")  # torch remarks on its own storage classes and file versions
            if zipfile.is_zipfile(path):
                _refuse_script(path)
                _check_sums(path)
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            with _Bounded(io.FileIO(path)) as file:
                if file.peek(2)[:2] == b"PK":
                    raise FormatError(f"{path}: truncated: the directory of the archive, which is its end, is missing")
                return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _refused(path, error) from error
    except OSError as error:
        raise StorageError(error.errno, error.strerror, str(path)) from error
    except (EOFError, struct.error) as error:
        raise FormatError(f"{path}: truncated: it ends in the middle of a pickle") from error
    except (MemoryError, CorruptionError, UnsupportedStateError):
        raise
    except FormatError as error:
        if str(path) in str(error):
            raise
        raise FormatError(f"{path}: {error}") from error  # of an array, which knows no file
    except Exception as error:
        # torch reports damage by whatever error comes first, assertions included; the first line of what it says tells
        # what, the rest is advice for programmers.
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FormatError(f"{path}: torch cannot load it: {first:.200}") from error


def _refuse_script(path: Path) -> None:
    """Raise `UnsupportedStateError` for what ``torch.jit.save`` wrote: a program, with its weights in it."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.partition("/")[2] for name in archive.namelist()]
    except (zipfile.BadZipFile, OSError):
        return  # the load says what is wrong
    if "constants.pkl" in names and any(name.startswith("code/") for name in names):
        refused = UnsupportedStateError(f"{path}: a TorchScript archive: it holds a program, which is not run here")
        refused.add_note(
            'make a file of its weights: python -c "import torch; '
            f"torch.save(torch.jit.load({str(path)!r}).state_dict(), 'weights.pt')\""
        )
        raise refused


def _check_sums(path: Path) -> None:
    """Compare the records of an archive with their CRC-32, which torch itself never looks at."""
    status = path.stat()
    _check_sums_of(path, status.st_ino, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=1024)
def _check_sums_of(path: Path, _inode: int, size: int, _changed: int) -> None:
    """Once for each version of a file: it is opened to be looked at, and again to be read."""
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        # Prevents: a small file that unpacks to terabytes, or names one record a million times.
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise FormatError(f"{path}: a record is compressed, which torch.save never does")
        if sum(record.file_size for record in records) > size:
            raise FormatError(f"{path}: its records are longer than the file")
        for record in records:
            if not record.CRC:  # torch was told to compute none
                continue
            try:
                with archive.open(record) as file:
                    while file.read(_READ):
                        pass
            except zipfile.BadZipFile as error:
                raise CorruptionError(f"{path}: damaged: {error}") from error


class _Bounded(io.BufferedReader):
    """A file that gives no more than it has: a pickle says how long its texts are, and memory is taken for that."""

    def read(self, size: int | None = -1, /) -> bytes:
        """At most `size` bytes."""
        left = os.fstat(self.fileno()).st_size - self.tell()
        return super().read(left if size is None or size < 0 else min(size, max(left, 0)))

    def readline(self, size: int | None = -1, /) -> bytes:
        """A whole line: half of one would read as another name. Raises `EOFError`."""
        line = super().readline(size)
        if not line.endswith(b"\n"):
            raise EOFError
        return line


def _refused(path: Path, error: pickle.UnpicklingError) -> UnsupportedStateError | FormatError:
    named = re.search(r"GLOBAL (\S+)", str(error))
    if named is None and "Unsupported class" not in str(error):
        detail = str(error).strip().splitlines()[-1]
        return FormatError(f"{path}: not a file of torch.save, or a damaged one: {detail:.200}")
    what = f" (it refers to {named[1]})" if named else ""
    refused = UnsupportedStateError(f"{path}: loading it would run pickled code{what}, which is never done here")
    refused.add_note("save it again with only tensors, dicts, lists and numbers in it, for instance a state_dict()")
    return refused
