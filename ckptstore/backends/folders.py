"""The folders of a store: reached through handles, made, and synced.

**Handles.** The store's folder is opened once, and everything below it is reached from that descriptor, one folder at a
time, never through a link. So a store that is moved away (``mv run run.old``) keeps who has it open, and a store that
takes its place is never written to by mistake. A folder *below* that is moved or replaced is noticed: those in which
this process has made something stay open, so that no other can have their number, and are compared.

**Durability.** On POSIX a name is durable only once the folder that holds it was fsynced, that folder's own name only
once *its* parent was, and so on up. `Folders` keeps that account for one backend.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from ckptstore.backends.posix import Posix
from ckptstore.backends.system_errors import ABSENCES, REFUSALS
from ckptstore.errors import ForeignObjectError, StorageError, StoreNotFoundError, UnsupportedBackendError, UsageError

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY


class Folders:
    """The folders of the store at `root`. Thread-safe. Raises `OSError`, or one of our errors where it knows better.

    A folder is named by its path from the root, ``""`` for the root itself. Handles are closed by `close`, or with this
    object; they are shared with forked children, each of which closes its own.
    """

    def __init__(self, root: str, posix: Posix) -> None:
        self.root = root
        self._posix = posix
        self._opening = threading.Lock()
        self._kept: list[int] = []
        self._root: int | None = None
        self._closed = False
        self._made: dict[str, tuple[int, int]] = {}
        self._above_synced = False
        self._doubtful: set[str] = set()
        self._syncing = threading.Lock()
        weakref.finalize(self, _close_all, posix, self._kept).atexit = False

    def close(self) -> None:
        """Close the handles. Harmless a second time; whatever else is called afterwards raises `UsageError`."""
        self._closed = True
        self._root = -1
        _close_all(self._posix, self._kept)

    # Reaching folders

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"{self.root}: this Store was closed; open the store again")

    def attach(self) -> bool:
        """Open the store's folder if it exists -> whether it is open. From then on it is this folder, for good."""
        self._check_open()
        with self._opening:
            if self._root is None:
                try:
                    self._root = self._posix.open(self.root, _FOLDER)  # which may itself be reached by a link
                except ABSENCES:
                    return False
                self._kept.append(self._root)
            return True

    def writable(self) -> bool:
        """Whether this process may write into the store's folder; True while there is none."""
        return self._root is None or self._posix.writable(self._root)

    @contextmanager
    def opened(self, folder: str) -> Iterator[int]:
        """A handle of a folder of the store, for the length of a ``with``.

        Raises:
            FileNotFoundError, NotADirectoryError: there is none.
            ForeignObjectError: it is a symbolic link, or reached through one.
            StoreNotFoundError: the store was deleted, within the ``with`` as well.
        """
        try:
            handle = self._enter(folder)
            try:
                yield handle
            finally:
                if handle != self._root:
                    self._posix.close(handle)
        except FileNotFoundError:
            self.check_present()
            raise

    def entries(self, folder: str) -> list[tuple[str, bool]]:
        """What a folder of the store holds, as `Posix.scandir` gives it. Raises as `opened`."""
        with self.opened(folder) as handle:
            own = self._posix.open(".", _FOLDER, handle)  # the root's handle is shared, and with it the place in a list
            try:
                found = self._posix.scandir(own)
            finally:
                self._posix.close(own)
        if not found:
            self.check_present()  # listing a deleted folder is no error, it is only empty
        return found

    def _enter(self, folder: str) -> int:
        if not self.attach():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.root)
        assert self._root is not None
        handle = self._root
        for name in folder.split("/") if folder else ():
            above, handle = handle, self._step(handle, name)
            if above != self._root:
                self._posix.close(above)
        return handle

    def _step(self, above: int, name: str) -> int:
        try:
            return self._posix.open(name, _FOLDER | os.O_NOFOLLOW, above)
        except OSError as error:
            try:
                if error.errno in (errno.ENOTDIR, errno.ELOOP):
                    kind = self._posix.stat(name, above, follow=False).st_mode
                    if not stat.S_ISREG(kind):  # below a file there is nothing, and nothing wrong with that
                        raise ForeignObjectError(f"{self.root}: {name} is {kind_of(kind)}, not a folder") from error
            finally:
                if above != self._root:
                    self._posix.close(above)
            raise

    def check_present(self) -> None:
        """Raise `StoreNotFoundError` if the folder that was opened has been deleted."""
        if self.deleted():
            raise StoreNotFoundError(f"{self.root}: the folder of the store was deleted while it was open")

    def deleted(self) -> bool:
        """Whether the folder that was opened is gone: no name leads to it. Moved is not deleted."""
        self._check_open()
        return self._root is not None and self._posix.fstat(self._root).st_nlink == 0

    # Making folders

    @contextmanager
    def made(self, folder: str) -> Iterator[int]:
        """A handle of a folder that exists and whose whole path survives a power cut; makes it if need be.

        Folders are made from the top down, each synced into its parent before the next. Those that exist are synced
        once as well: the user's ``mkdir`` a moment ago is no safer than ours.

        Raises:
            StorageError: the folder in which this object made something before is not there any more, or another is.
        """
        self._check_open()
        self._make(folder)
        if not self._is_still(folder):
            if "/" not in folder:
                raise self._replaced(folder)
            self._made.pop(folder, None)  # a term's folder, which someone removed: what was in it will be missed
            self._make(folder)
        with self.opened(folder) as handle:
            yield handle

    def _is_still(self, folder: str) -> bool:
        """Whether this is the folder that this object made, or made durable."""
        if not folder:
            return True
        try:
            return _identity(self._posix.stat(folder, self._root, follow=False)) == self._made.get(folder)
        except ABSENCES:
            self.check_present()
            return False

    def _replaced(self, folder: str) -> StorageError:
        why = "the folder was moved, deleted or replaced while the store was open; open the store again"
        return StorageError(errno.ESTALE, why, f"{self.root}/{folder}")

    def check_still(self, folder: str, handle: int) -> None:
        """Raise `StorageError` unless `folder` of the store is, by name, the folder that `handle` is of."""
        if folder and (not self._is_still(folder) or self._made.get(folder) != _identity(self._posix.fstat(handle))):
            raise self._replaced(folder)

    def _make(self, folder: str) -> None:
        if not folder:
            self._make_root()
            return
        if folder in self._made:
            return
        parent, _, name = folder.rpartition("/")
        with self.made(parent) as above:
            with suppress(FileExistsError):
                self._posix.mkdir(name, above)
            # Prevents: a power cut that forgets this folder's name and with it every durable object inside. Also when
            # the folder was there already: the process that made it may not have come to its fsync yet.
            self.sync(above, parent)
        handle = self._enter(folder)
        try:
            self._made[folder] = _identity(self._posix.fstat(handle))
        finally:
            if parent:
                self._posix.close(handle)
            else:  # held open: while it is, no other folder can have its number and pass for it
                self._kept.append(handle)

    def _make_root(self) -> None:
        if self._above_synced:
            return
        existed = self.attach()
        # A store that was moved meanwhile has other folders above it, which whoever moved it has to answer for.
        if not existed or self._in_place():
            self._make_above(self.root)
        self.attach()
        self._above_synced = True

    def _in_place(self) -> bool:
        assert self._root is not None
        try:
            return _identity(self._posix.stat(self.root)) == _identity(self._posix.fstat(self._root))
        except ABSENCES:
            return False

    def _make_above(self, path: str) -> None:
        if path == "/":
            return
        parent = path.rpartition("/")[0] or "/"
        self._make_above(parent)
        made = False
        if self._root is None:
            with suppress(FileExistsError):
                self._posix.mkdir(path)
                made = True
        try:
            handle = self._posix.open(parent, _FOLDER)
        except OSError as error:
            if not made and error.errno in REFUSALS:
                return
            raise
        try:
            # Prevents: a power cut that forgets the store's own name, as below.
            self.sync(handle, parent, ours=made)
        finally:
            self._posix.close(handle)

    # Syncing

    def sync(self, handle: int, folder: str, *, ours: bool = True) -> None:
        """Make the names in a folder survive a power cut.

        A failed fsync is never repeated: the system may drop what it could not write, and report success the next time.
        The folder stays doubtful for the life of this object, and nothing more is acknowledged in it.

        Args:
            handle: of the folder.
            folder: its name from the root, or the absolute path of one above.
            ours: False for a folder above the store in which we made nothing; if we may not sync it, it is passed over.

        Raises:
            StorageError: an earlier fsync of this folder failed.
            UnsupportedBackendError: the file system cannot sync folders.
        """
        path = folder if folder.startswith("/") else f"{self.root}/{folder}".rstrip("/")
        with self._syncing:  # so that no thread's success overtakes another thread's failure
            if folder in self._doubtful:
                raise StorageError(errno.EIO, "an earlier fsync of this folder failed; open the store again", path)
            try:
                self._posix.fsync(handle)
            except OSError as error:
                if not ours and error.errno in REFUSALS | {errno.EINVAL}:
                    return
                if error.errno == errno.EINVAL:
                    raise UnsupportedBackendError(error.errno, "the file system cannot sync folders", path) from error
                self._doubtful.add(folder)
                raise


def kind_of(mode: int) -> str:
    """What a file that is not what it should be is, for messages; `mode` as in `os.stat_result.st_mode`."""
    kinds = {
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "a file")


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _close_all(posix: Posix, handles: list[int]) -> None:
    while handles:
        with suppress(OSError):
            posix.close(handles.pop())
