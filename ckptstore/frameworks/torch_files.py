"""Load files that ``torch.save`` wrote, with restricted unpickling and memory-mapped tensors."""

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

from ckptstore.errors import CkptError, CorruptionError, FormatError, StorageError, UnsupportedStateError
from ckptstore.frameworks.inert_pickles import KeyChoice
from ckptstore.frameworks.pickled_arrays import ALLOWED, global_name
from ckptstore.frameworks.pickled_objects import ALLOWED_OBJECTS, DefaultDicts
from ckptstore.frameworks.torch_keyed_files import load_keys

__all__ = ["load", "load_as_saved", "load_image"]

_READ: Final = 1 << 20
_loading = threading.Lock()
"""Serializes loads, because torch's set of allowed globals belongs to the whole process."""


@contextlib.contextmanager
def _allowing(dicts: DefaultDicts) -> Iterator[None]:
    """Allow the stand-ins of `pickled_arrays` and `pickled_objects`, and remove other globals of the same names.

    transformers, for example, allows numpy's own functions while it loads. torch keeps one unordered set, and of two
    entries with the same name uses whichever comes last. That may be numpy's function, for which it may then refuse a
    state.
    """
    ours: list[Any] = [*ALLOWED, *ALLOWED_OBJECTS, (dicts.make, "collections.defaultdict")]
    names = {global_name(allowed) for allowed in ours}
    taken = [allowed for allowed in torch.serialization.get_safe_globals() if global_name(allowed) in names]
    theirs: AbstractContextManager[None] = torch.serialization.safe_globals(taken)
    theirs.__exit__(None, None, None)  # `__exit__` removes them at once; clearing all would break other loads
    try:
        with torch.serialization.safe_globals(ours):
            yield
    finally:
        theirs.__enter__()


def load(path: Path, choice: KeyChoice | None = None) -> Any:
    """Load the object in a ``.pt`` file. Its tensors are on the CPU and, for a zip archive, mapped from the file.

    numpy arrays of numbers become `PickledArray`. All other objects must be allowed by torch or `pickled_objects`, or
    be of the kinds that `torch_keyed_files` makes.

    Args:
        path: the file.
        choice: parts that are left out or taken as values; None: no part is.

    Raises:
        UnsupportedStateError: loading would run pickled code (it names the keys, except in the older form of files), or
            the file is a TorchScript archive, or `choice` was given for a file of the older form.
        CorruptionError: the checksum of a record of the archive is wrong.
        FormatError: the file is not a torch file, or damaged.
        StorageError: the file cannot be read.
    """
    archived = zipfile.is_zipfile(path)
    if choice and not archived:
        raise UnsupportedStateError(
            f"{path}: is of torch.save's older form (before torch 1.6), whose parts cannot be told apart: load it "
            "and save it again"
        )
    if choice:
        with _errors_of(path):
            _refuse_script(path)
            _check_sums(path)
            return load_keys(path, choice)
    dicts = DefaultDicts()
    try:
        return dicts.restored(_load(path, "cpu", mmap=True, allowing=_allowing(dicts)))
    except (UnsupportedStateError, FormatError) as error:
        if not archived or not isinstance(error.__cause__, pickle.UnpicklingError):
            raise
        return _load_by_key(path, error, None, choice)


def _load_by_key(path: Path | str, refusal: CkptError, image: bytes | None, choice: KeyChoice | None = None) -> Any:
    """Load what torch's unpickler refuses, if nothing in it needs code; else raise an error that names the keys."""
    try:
        return load_keys(path, KeyChoice() if choice is None else choice, image)
    except UnsupportedStateError as error:
        raise error from refusal.__cause__
    except (FormatError, OSError, zipfile.BadZipFile):
        raise refusal from None


def load_as_saved(path: Path, *, map_location: Any, mmap: bool) -> Any:
    """As ``torch.load(path, weights_only=True)``, but checksums are verified, and errors are those of `load`.

    Args:
        map_location, mmap: as for ``torch.load``. Only a zip archive can be mapped.
    """
    return _load(path, map_location, mmap=mmap, allowing=contextlib.nullcontext())


def _load(path: Path, map_location: Any, *, mmap: bool, allowing: AbstractContextManager[None]) -> Any:
    with _errors_of(path), _loading, warnings.catch_warnings(), allowing:
        warnings.simplefilter("ignore")  # torch warns about its own storage classes and file versions
        if zipfile.is_zipfile(path):
            _refuse_script(path)
            _check_sums(path)
            return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
        with _Bounded(io.FileIO(path)) as file:
            if file.peek(2)[:2] == b"PK":
                raise FormatError(f"{path}: truncated: the directory at the end of the archive is missing")
            return torch.load(file, map_location=map_location, weights_only=True)


def load_image(where: str, image: bytes) -> Any:
    """Load the object that ``torch.save`` wrote as `image`, which is a part of a file.

    Args:
        where: the file and the part, for errors.

    Raises:
        as `load`, but for `StorageError`.
    """
    try:
        return _load_image(where, image)
    except (UnsupportedStateError, FormatError) as error:
        if not isinstance(error.__cause__, pickle.UnpicklingError) or not zipfile.is_zipfile(io.BytesIO(image)):
            raise
        return _load_by_key(where, error, image)


def _load_image(where: str, image: bytes) -> Any:
    dicts = DefaultDicts()
    with _errors_of(where), _loading, warnings.catch_warnings(), _allowing(dicts):
        warnings.simplefilter("ignore")
        if zipfile.is_zipfile(io.BytesIO(image)):
            _check_records(where, io.BytesIO(image), len(image))
        return dicts.restored(torch.load(io.BytesIO(image), map_location="cpu", weights_only=True))


@contextlib.contextmanager
def _errors_of(path: Path | str) -> Iterator[None]:
    """Raise errors of loading a file as ours."""
    try:
        yield
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
        raise FormatError(f"{path}: {error}") from error  # from an array, which does not know the file
    except Exception as error:
        # torch reports damage with many kinds of errors, assertions included. The first line says what is wrong, the
        # rest is advice for programmers.
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FormatError(f"{path}: torch cannot load it: {first:.200}") from error


def _refuse_script(path: Path) -> None:
    """Raise `UnsupportedStateError` for a file of ``torch.jit.save``: it is a program that includes its weights."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.partition("/")[2] for name in archive.namelist()]
    except (zipfile.BadZipFile, OSError):
        return  # the load reports the error
    if "constants.pkl" in names and any(name.startswith("code/") for name in names):
        refused = UnsupportedStateError(f"{path}: a TorchScript archive: it has a program, which ckptstore never runs")
        refused.add_note(
            'make a file of its weights: python -c "import torch; '
            f"torch.save(torch.jit.load({str(path)!r}).state_dict(), 'weights.pt')\""
        )
        raise refused


def _check_sums(path: Path) -> None:
    """Compare the records of an archive with their CRC-32, which torch itself does not check."""
    status = path.stat()
    _check_sums_of(path, status.st_ino, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=1024)
def _check_sums_of(path: Path, _inode: int, size: int, _changed: int) -> None:
    """As `_check_sums`, once per version of a file, because a file is opened once to check it and once to read it."""
    _check_records(path, path, size)


def _check_records(path: Path | str, archive_file: Path | io.BytesIO, size: int) -> None:
    with zipfile.ZipFile(archive_file) as archive:
        records = archive.infolist()
        # Prevents: a small file that unpacks to terabytes, or lists one record a million times.
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise FormatError(f"{path}: a record is compressed, which torch.save never does")
        if sum(record.file_size for record in records) > size:
            raise FormatError(f"{path}: its records are longer than the file")
        for record in records:
            if not record.CRC:  # torch can be configured to compute no CRC
                continue
            try:
                with archive.open(record) as file:
                    while file.read(_READ):
                        pass
            except zipfile.BadZipFile as error:
                raise CorruptionError(f"{path}: damaged: {error}") from error


class _Bounded(io.BufferedReader):
    """A file that limits reads to its size: a damaged pickle may state huge lengths, and a read allocates them."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Read at most `size` bytes, and no more than the file has."""
        left = os.fstat(self.fileno()).st_size - self.tell()
        return super().read(left if size is None or size < 0 else min(size, max(left, 0)))

    def readline(self, size: int | None = -1, /) -> bytes:
        """Read a whole line. Raises `EOFError` for a truncated line, which could be read as another name."""
        line = super().readline(size)
        if not line.endswith(b"\n"):
            raise EOFError
        return line


def _refused(path: Path | str, error: pickle.UnpicklingError) -> UnsupportedStateError | FormatError:
    named = re.search(r"GLOBAL (\S+)", str(error))
    if named is None and "Unsupported class" not in str(error):
        detail = str(error).strip().splitlines()[-1]
        return FormatError(f"{path}: not a file of torch.save, or damaged: {detail:.200}")
    what = f" (it refers to {named[1]})" if named else ""
    refused = UnsupportedStateError(f"{path}: loading it would run pickled code{what}, which is never done here")
    refused.add_note("save it again with only tensors, dicts, lists and numbers in it, for example a state_dict()")
    return refused
