"""A store in a folder of a POSIX file system.

Create-if-absent (SPEC 10), on which every log slot depends:

1. Write the bytes to a temporary file in the same folder and fsync it.
2. `os.link` it to its name: atomic, and refused if the name exists. Without hard links: `renameat2(RENAME_NOREPLACE)`;
   without that: `UnsupportedBackendError`.
3. fsync the folder. Only now is the slot acknowledged.
4. Unlink the temporary file.

A segment is written under its final name, which is unique (it contains a UUID). It counts once a record names it. Its
blocks may be those of a segment that gc released (`spare_files`).

Only regular files are objects of a store. Anything else is refused, whatever its name, and opening it never blocks.
That includes links to files and folders. Only the store's folder itself may be reached through a link.
"""

from __future__ import annotations

import errno
import os
import stat
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from ckptstore.backends.base import (
    OBJECT_LIMIT,
    Backend,
    SegmentSink,
    SegmentSource,
    checked_folder,
    checked_key,
    too_long,
)
from ckptstore.backends.local_disk.directio import FileSink, FileSource, open_direct
from ckptstore.backends.local_disk.folders import Folders, kind_of
from ckptstore.backends.local_disk.overwriting import LOCAL, Recycling, chosen_mode
from ckptstore.backends.local_disk.posix import SYSTEM, Posix, write_some
from ckptstore.backends.local_disk.room import Room
from ckptstore.backends.local_disk.spare_files import FULL, SpareFiles
from ckptstore.backends.sharing import SaveSpace
from ckptstore.backends.space_bound import Limit, SpaceBound
from ckptstore.backends.store_names import canonical
from ckptstore.backends.system_errors import ABSENCES, Attempt, reading, writing
from ckptstore.errors import (
    CkptError,
    CorruptSegmentError,
    ForeignObjectError,
    KeyExistsError,
    StorageError,
    UnsupportedBackendError,
)
from ckptstore.host.crash_points import crash_point
from ckptstore.host.pages import BLOCK

_NO_HARD_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
_NO_EXCLUSIVE_RENAME: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})
_TEMPORARY: Final = ".tmp-"
_DEEPEST: Final = 8
"""Maximum depth of folders that are listed; no key of the format has more than two."""
_in_flight: set[str] = set()
"""Temporary files that this process is using. All backends share this set, so none takes another's file for a stray."""


_TRIES: Final = 8
"""Maximum number of reclaims for one save: other saves write and delete at the same time."""


def absolute(path: str | os.PathLike[str]) -> str:
    """The absolute path, as the system resolves it. Links stay in it, unless ``..`` follows one.

    ``..`` after a link is the parent of the link's target, not the folder that contains the link.
    """
    parts = Path(path).absolute().parts
    # Prevents: a run that is saved to another place than the one that other programs find under the same path.
    if ".." in parts:
        last = len(parts) - parts[::-1].index("..")
        return str(Path(os.path.realpath(Path(*parts[:last])), *parts[last:]))
    return str(Path(*parts))


class LocalBackend(Backend):
    """The store in the folder `path`, which the first write creates if it is missing.

    Args:
        path: the folder, relative or absolute.
        posix: the system calls; crash tests pass their own.
        url: the path or URL that the user passed, for messages; None: `path`.
        direct: whether segments bypass the page cache where the file system allows it.
        recycle: ``auto``: new segments overwrite deleted ones if a measurement shows that this is faster; ``always``,
            ``never``; None: the value of ``CKPTSTORE_RECYCLE``, else ``auto``. Other values raise `UsageError`.
    """

    cheap_looks = True
    anchored = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        posix: Posix = SYSTEM,
        *,
        url: str | None = None,
        direct: bool = True,
        recycle: str | None = None,
    ) -> None:
        self.root = absolute(path)
        self.url = os.fspath(path) if url is None else url
        self._posix = posix
        self._direct = direct
        self._folders = Folders(self.root, posix)
        self._recycling = Recycling(self._folders, posix, chosen_mode(recycle))
        self._spare = SpareFiles(self._folders, posix, self._recycling)
        self._room = Room(self._folders, posix, self._spare)
        with reading(self.root):
            self._folders.attach()
            self.read_only = not self._folders.writable()

    def close(self) -> None:
        """See `Backend.close`."""
        self._folders.close()

    def deleted(self) -> bool:
        """See `Backend.deleted`."""
        return self._folders.deleted()

    def above(self) -> Sequence[tuple[str, Callable[[], Backend]]]:
        """See `Backend.above`. Uses the real path of the folder: a link may lead into a store."""
        place = Path(self.root).resolve()
        within = [one for one in (place, *place.parents) if one != one.parent]
        return [(one.name, partial(self._beside, str(one.parent))) for one in within]

    def _beside(self, path: str) -> LocalBackend:
        return LocalBackend(path, self._posix, recycle="never")

    def reopened(self) -> LocalBackend:
        """See `Backend.reopened`."""
        mode = self._recycling.mode
        found = LocalBackend(self.root, self._posix, url=self.url, direct=self._direct, recycle=mode)
        if self._reclaim is not None:
            found.reclaim_with(self._reclaim)
        return found

    @property
    def address(self) -> str:
        """See `Backend.address`. A path is the real path at the time when the store was opened."""
        return canonical(self.url) if "://" in self.url else os.path.realpath(self.root)

    @property
    def recycling(self) -> str:
        """See `Backend.recycling`."""
        return str(self._recycling)

    def medium(self) -> str:
        """See `Backend.medium`."""
        return f"folder ({'O_DIRECT' if self._direct and self._takes_direct() else 'through the page cache'})"

    def _takes_direct(self) -> bool:
        with suppress(OSError, CkptError), self._folders.opened("") as handle:
            for name in self._own_files():
                descriptor = open_direct(self._posix, name, os.O_RDONLY | os.O_NONBLOCK, handle)
                if descriptor is not None:
                    self._posix.close(descriptor)
                return descriptor is not None
        return False

    def _own_files(self) -> list[str]:
        """Names of the files in the store's folder itself: a sample of its objects. Raises `OSError`."""
        return sorted(name for name, is_folder in self._folders.entries("") if not (is_folder or name.startswith(".")))

    def _path(self, key: str) -> str:
        return f"{self.root}/{checked_key(key)}"

    def locate(self, key: str) -> str:
        """See `Backend.locate`."""
        return os.path.realpath(self._path(key))

    def get(self, key: str, limit: int = OBJECT_LIMIT) -> bytes:
        """See `Backend.get`."""
        with FileSource(self._folders, checked_key(key), self._posix, direct=False) as source:
            if source.size > limit:
                raise too_long(self._path(key), source.size, limit)
            data = bytearray(source.size)
            source.read_into(0, memoryview(data))
        return bytes(data)

    def size(self, key: str) -> int:
        """See `Backend.size`."""
        folder, _, name = checked_key(key).rpartition("/")
        with reading(path := self._path(key)), self._folders.opened(folder) as handle:
            status = self._posix.stat(name, handle, follow=False)
            if not stat.S_ISREG(status.st_mode):
                raise ForeignObjectError(f"{path} is {kind_of(status.st_mode)}, not a file of a store")
            return status.st_size

    def create(self, key: str, data: bytes) -> None:
        """See `Backend.create`."""
        with writing(self._path(key)):
            self._create(key, data)

    def _create(self, key: str, data: bytes) -> None:
        try:
            self._create_once(key, data)
        except OSError as error:
            if not (getattr(error, "unsent", False) and self._room.give_up_reserve(error)):
                raise
            self._create_once(key, data)

    def _create_once(self, key: str, data: bytes) -> None:
        folder, _, name = key.rpartition("/")
        with Attempt() as attempt, self._folders.made(folder) as handle, self._temporary(handle) as temporary:
            self._write(temporary, data, handle)
            crash_point("create.before-link")
            attempt.naming()
            self._name(temporary, name, handle)
            crash_point("create.linked")
            # Prevents: an acknowledged slot that a power cut removes, so that the next writer uses its number again.
            self._folders.sync(handle, folder)
            crash_point("create.synced")
            # Prevents: an acknowledged slot in a folder that was meanwhile moved out of the store.
            self._folders.check_still(folder, handle)

    @contextmanager
    def _temporary(self, folder: int) -> Iterator[str]:
        """The name of a temporary file of this process, which is removed at the end if it still exists."""
        temporary = f"{_TEMPORARY}{os.getpid()}-{os.urandom(12).hex()}"
        _in_flight.add(temporary)
        try:
            yield temporary
        finally:
            with suppress(OSError):  # a stray is harmless; after a rename the file is gone
                self._posix.unlink(temporary, folder)
            _in_flight.discard(temporary)

    def _write(self, name: str, data: bytes, folder: int) -> None:
        try:
            self._write_once(name, data, folder)
        except OSError as error:
            # Free space before a commit fails, then write a new file: a sync of the old one may have failed.
            if error.errno not in FULL or not self._room.make():
                raise
            self._posix.unlink(name, folder)
            self._write_once(name, data, folder)

    def _write_once(self, name: str, data: bytes, folder: int) -> None:
        descriptor = self._posix.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder)
        try:
            done, view = 0, memoryview(data)
            while done < len(view):
                done += write_some(self._posix, descriptor, view[done:], done)
            crash_point("create.temp-written")
            # Prevents: a name on disk before its bytes: an empty or torn slot that can never be replaced, or a torn
            # pin, which looks like damage and stops gc. If the sync fails, drop the file: a retry writes a new one.
            self._posix.fsync(descriptor)
        finally:
            self._posix.close(descriptor)

    def _name(self, temporary: str, name: str, folder: int) -> None:
        try:
            try:
                self._posix.link(temporary, name, folder)
            except OSError as error:
                if error.errno not in _NO_HARD_LINKS:
                    raise
                self._posix.rename_exclusive(temporary, name, folder)
        except FileExistsError as error:
            raise KeyExistsError(errno.EEXIST, "the object exists already", name) from error
        except OSError as error:
            if error.errno not in _NO_EXCLUSIVE_RENAME:
                error.unsent = error.errno in FULL and self._says_so_before(folder)  # type: ignore[attr-defined]
                raise
            why = "the file system has neither hard links nor RENAME_NOREPLACE: writers cannot exclude each other"
            raise UnsupportedBackendError(error.errno, why, self.root) from error

    def _says_so_before(self, folder: int) -> bool:
        """Whether ENOSPC for a name proves that the name was not created: true of ext4, XFS and tmpfs.

        (Btrfs may detect it after the name is in its transaction; for NFS and FUSE the other machine decides.)
        """
        with suppress(OSError):
            return self._posix.file_system(folder) in LOCAL
        return False

    def replace(self, key: str, data: bytes) -> None:
        """See `Backend.replace`."""
        with writing(self._path(key)):
            folder, _, name = key.rpartition("/")
            with self._folders.made(folder) as handle, self._temporary(handle) as temporary:
                self._write(temporary, data, handle)
                self._posix.replace(temporary, name, handle)

    def delete(self, key: str) -> None:
        """See `Backend.delete`."""
        folder, _, name = checked_key(key).rpartition("/")
        absent = suppress(FileNotFoundError, NotADirectoryError)
        with writing(self._path(key)), absent, self._folders.opened(folder) as handle:
            self._posix.unlink(name, handle)

    def release(self, key: str) -> None:
        """See `Backend.release`."""
        folder, _, name = checked_key(key).rpartition("/")
        kept = False
        with writing(self._path(key)), suppress(FileNotFoundError, NotADirectoryError):
            kept = self._spare.keep(folder, name)
        if not kept:
            self.delete(key)

    def shrink_spare(self, limit: int) -> int:
        """See `Backend.shrink_spare`."""
        self._spare.shrink(limit if self._recycling.possible() else 0)
        return self._spare.nbytes()

    def check_space(self, nbytes: int) -> None:
        """See `Backend.check_space`. Checks only file systems that do not compress."""
        super().check_space(nbytes)
        with writing(self.root), self._folders.made("") as handle:
            status = self._posix.statvfs(handle)
            if not self._recycling.local(handle) or not status.f_blocks:  # 0 blocks: a tmpfs without a limit
                return
            if not self._has_space(handle, nbytes, status):
                free = self._free(handle) + self._spare.nbytes()
                why = f"{nbytes:,} bytes are needed at least and {free:,} are free; delete files, or run ckpt gc"
                raise StorageError(errno.ENOSPC, why, self.root)

    def _has_space(self, handle: int, nbytes: int, status: os.statvfs_result) -> bool:
        """Whether `nbytes` are free for this thread's save, which claims them.

        Args:
            status: of the file system, just now.
        """
        sharing = self._room.sharing
        if sharing.claim(nbytes, lambda: _free_of(status)):
            return True

        def spare() -> int:
            return self._free(handle) + self._spare.nbytes()

        def claimed() -> bool:
            return sharing.claim(nbytes, lambda: self._free(handle)) or sharing.claim(nbytes, spare)

        return sharing.claim_patiently(claimed, self._room.collect, _TRIES)

    def begin_save(self) -> SaveSpace:
        """See `Backend.begin_save`."""
        return self._room.sharing.begin()

    def _free(self, handle: int) -> int:
        """Free bytes. For root they include the blocks that are reserved for root."""
        return _free_of(self._posix.statvfs(handle))

    def reclaim_with(self, reclaim: Callable[[Backend], int]) -> None:
        """See `Backend.reclaim_with`."""
        self._reclaim = reclaim
        self._room.reclaiming.reclaim = partial(_reclaimed, weakref.ref(self), reclaim)

    def limit_space(self, limit: Limit | None, retire: Callable[[], object] = lambda: None) -> None:
        """See `Backend.limit_space`. Spare files count as free: they are deleted before new blocks are allocated."""
        room = self._room
        self.bound = room.bound = (
            None
            if limit is None
            else SpaceBound(limit, self.segments_nbytes, room.sharing, room.reclaiming.collect, retire, self.url)
        )

    def segments_nbytes(self) -> int:
        """See `Backend.segments_nbytes`. Counts whole blocks of the length of each file."""
        total = 0
        for folder, names in self._walk("seg/"):
            with reading(f"{self.root}/{folder}"), suppress(*ABSENCES), self._folders.opened(folder[:-1]) as handle:
                for name in names:
                    with suppress(FileNotFoundError):
                        total += -(-self._posix.stat(name, handle, follow=False).st_size // BLOCK) * BLOCK
        return total

    def upkeep(self) -> AbstractContextManager[None]:
        """See `Backend.upkeep`."""
        return self._room.upkeep()

    def keep_reserve(self) -> None:
        """See `Backend.keep_reserve`."""
        if not self.read_only:
            self._room.keep_reserve()

    def free_bytes(self) -> int | None:
        """See `Backend.free_bytes`. As ``df`` reports it: blocks reserved for root are not free."""
        with suppress(OSError, CkptError), self._folders.opened("") as handle:
            status = self._posix.statvfs(handle)
            return status.f_bavail * status.f_frsize if status.f_blocks else None
        return None

    def list(self, prefix: str) -> list[str]:
        """See `Backend.list`. Omits names that begin with a dot, and does not follow links."""
        names = (f"{folder}{name}" for folder, files in self._walk(checked_folder(prefix)) for name in files)
        return sorted(key for key in names if not key.rpartition("/")[2].startswith("."))

    def folders(self, prefix: str) -> Sequence[str]:
        """See `Backend.folders`."""
        with reading(f"{self.root}/{checked_folder(prefix)}".rstrip("/")):
            try:
                entries = self._folders.entries(prefix.rstrip("/"))
            except ABSENCES as error:
                if isinstance(error, CkptError):
                    raise
                return []
        return sorted(name for name, is_folder in entries if is_folder)

    def _walk(self, prefix: str) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield `prefix` ("" or ending in "/") and every folder below it, with the names of its files.

        At the maximum depth a folder's name is yielded as that of a file. Folders that begin with a dot are skipped.
        """
        with reading(f"{self.root}/{prefix}".rstrip("/")):
            try:
                entries = self._folders.entries(prefix.rstrip("/"))
            except ABSENCES as error:
                if isinstance(error, CkptError):
                    raise
                return  # nothing was created there yet, or it has been removed
        deep = prefix.count("/") >= _DEEPEST
        yield prefix, tuple(name for name, is_folder in entries if not is_folder or deep)
        for name, is_folder in entries:
            if is_folder and not deep and not name.startswith("."):
                yield from self._walk(f"{prefix}{name}/")

    def settle(self, prefix: str) -> None:
        """See `Backend.settle`."""
        for folder, _ in self._walk(checked_folder(prefix)):
            name = folder.rstrip("/")
            with writing(f"{self.root}/{name}"), self._folders.made(name) as handle:
                # Prevents: acting on a name that a power cut removes (gc deletes what a lost slot had dropped).
                self._folders.sync(handle, name)

    def open_sink(self, key: str, size_hint: int) -> SegmentSink:
        """See `Backend.open_sink`."""
        with writing(self._path(key)), self._folders.made(key.rpartition("/")[0]) as folder:
            return FileSink(
                self._folders,
                key,
                self._posix,
                size_hint,
                direct=self._direct,
                spare=self._spare,
                room=self._room,
                folder=folder,
            )

    def open_source(self, key: str) -> SegmentSource:
        """See `Backend.open_source`."""
        try:
            return FileSource(self._folders, checked_key(key), self._posix, direct=self._direct, hold=True)
        except ForeignObjectError as error:
            raise CorruptSegmentError(str(error)) from error

    def probe(self) -> None:
        """See `Backend.probe`. Uses a temporary name, which `list` omits."""
        with writing(self.root), self._folders.made("") as handle, self._temporary(handle) as name:
            self._create(name, b"first")
            with suppress(KeyExistsError):
                self._create(name, b"second")
                why = "creating a file twice succeeded: writers cannot exclude each other here"
                raise UnsupportedBackendError(errno.EOPNOTSUPP, why, self.root)

    def stray_temporaries(self) -> tuple[str, ...]:
        """Keys of temporary files that a killed process left; `discard_stray` removes one.

        They are harmless. Files that a live process of this machine is using are not listed. A file that another
        machine is using may be listed. If it is removed, that machine's create fails without effect, and the commit
        protocol repeats it.
        """
        return tuple(sorted(f"{folder}{name}" for folder, files in self._walk("") for name in files if _is_stray(name)))

    def discard_stray(self, key: str) -> None:
        """Remove one of `stray_temporaries`. Raises `StorageError`."""
        folder, _, name = key.rpartition("/")
        with writing(f"{self.root}/{key}"), suppress(FileNotFoundError), self._folders.opened(folder) as handle:
            self._posix.unlink(name, handle)


def _free_of(status: os.statvfs_result) -> int:
    return (status.f_bavail if os.geteuid() else status.f_bfree) * status.f_frsize


def _reclaimed(reference: weakref.ref[LocalBackend], reclaim: Callable[[Backend], int]) -> int:
    backend = reference()
    return 0 if backend is None else reclaim(backend)


def _is_stray(name: str) -> bool:
    if not name.startswith(_TEMPORARY):
        return False
    owner = name.removeprefix(_TEMPORARY).partition("-")[0]
    if owner == str(os.getpid()):
        return name not in _in_flight
    return not Path(f"/proc/{owner}").exists()
