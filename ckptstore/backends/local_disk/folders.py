"""Open, create and sync the folders of a store through handles.

**Handles.** The store's folder is opened once. Everything below it is opened relative to that descriptor, one folder at
a time, never through a link. So a store that is moved (``mv run run.old``) stays usable for processes that have it
open, and they never write to another store that takes its place. If a folder *below* is moved or replaced, `Folders`
detects it: folders in which this process has created something stay open, so that no other folder can get their inode
number, and are compared.

**Durability.** On POSIX a name is durable only once the folder that holds it was fsynced. The name of that folder is
durable only once *its* parent was fsynced, and so on up. `Folders` keeps track of this for one backend.
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

from ckptstore.backends.local_disk.posix import Posix
from ckptstore.backends.system_errors import ABSENCES, REFUSALS
from ckptstore.errors import ForeignObjectError, StorageError, StoreNotFoundError, UnsupportedBackendError, UsageError

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY


class Folders:
    """The folders of the store at `root`. Thread-safe. Raises `OSError`, or a `CkptError` with a better explanation.

    A folder is named by its path from the root; the root is ``""``. Handles are closed by `close` or with this object.
    Forked children share the handles and each child closes its own copy.
    """

    def __init__(self, root: str, posix: Posix) -> None:
        self.root = root
        self._posix = posix
        self._opening = threading.Lock()
        self._kept: list[int] = []
        self._root: int | None = None
        self._closed = False
        self._made: dict[str, tuple[int, int]] = {}
        self._held: dict[str, int] = {}  # handles of those right in the root
        self._above_synced = False
        self._doubtful: set[str] = set()
        self._syncing = threading.Lock()
        weakref.finalize(self, _close_all, posix, self._kept).atexit = False

    def close(self) -> None:
        """Close the handles. A second call is harmless; any other call after it raises `UsageError`."""
        self._closed = True
        self._root = -1
        self._held.clear()
        _close_all(self._posix, self._kept)

    # Reaching folders

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"{self.root}: this Store was closed; open the store again")

    def attach(self) -> bool:
        """Open the store's folder if it exists -> whether it is open. This object then keeps to that folder."""
        self._check_open()
        with self._opening:
            if self._root is None:
                try:
                    self._root = self._posix.open(self.root, _FOLDER)  # the root itself may be a link
                except ABSENCES:
                    return False
                self._kept.append(self._root)
            return True

    def writable(self) -> bool:
        """Whether this process may write to the store's folder; True if the folder does not exist."""
        return self._root is None or self._posix.writable(self._root)

    @contextmanager
    def opened(self, folder: str) -> Iterator[int]:
        """A handle of a folder of the store, valid during the ``with``.

        Raises:
            FileNotFoundError, NotADirectoryError: there is no such folder.
            ForeignObjectError: it is a symbolic link, or its path contains one.
            StoreNotFoundError: the store was deleted, also if this happens within the ``with``.
        """
        try:
            held = self._held.get(folder)
            if held is not None and self._is_still(folder):
                yield held
                return
            handle = self._known(folder) if folder in self._made else None
            if handle is None:
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
        """Entries of a folder of the store, as `Posix.scandir` returns them. Raises as `opened`."""
        with self.opened(folder) as handle:
            own = self._posix.open(".", _FOLDER, handle)  # the root's handle, and its read position, is shared
            try:
                found = self._posix.scandir(own)
            finally:
                self._posix.close(own)
        if not found:
            self.check_present()  # listing a deleted folder returns nothing and no error
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

    def _known(self, folder: str) -> int | None:
        """A handle of a folder that this object has made or made durable, if its path still leads there."""
        try:
            handle = self._posix.open(folder, _FOLDER | os.O_NOFOLLOW, self._root)
        except OSError:
            return None
        # A link on the way leads to another folder.
        if _identity(self._posix.fstat(handle)) == self._made.get(folder):
            return handle
        self._posix.close(handle)
        return None

    def _step(self, above: int, name: str) -> int:
        try:
            return self._posix.open(name, _FOLDER | os.O_NOFOLLOW, above)
        except OSError as error:
            try:
                if error.errno in (errno.ENOTDIR, errno.ELOOP):
                    kind = self._posix.stat(name, above, follow=False).st_mode
                    if not stat.S_ISREG(kind):  # a regular file has nothing below it: the key is absent
                        raise ForeignObjectError(f"{self.root}: {name} is {kind_of(kind)}, not a folder") from error
            finally:
                if above != self._root:
                    self._posix.close(above)
            raise

    def check_present(self) -> None:
        """Raise `StoreNotFoundError` if the opened folder was deleted."""
        if self.deleted():
            raise StoreNotFoundError.at(self.root, ": the folder of the store was deleted while it was open")

    def deleted(self) -> bool:
        """Whether the opened folder was deleted, so that no name leads to it. A moved folder is not deleted."""
        self._check_open()
        return self._root is not None and self._posix.fstat(self._root).st_nlink == 0

    # Making folders

    @contextmanager
    def made(self, folder: str) -> Iterator[int]:
        """A handle of a folder that exists and whose whole path survives a power cut. Creates it if it is missing.

        Folders are created from the top down, and each is synced into its parent before the next. Existing folders are
        synced once, too: a folder that the user has just made with ``mkdir`` may not be durable yet.

        Raises:
            StorageError: the folder in which this object created something was removed or replaced.
        """
        self._check_open()
        self._make(folder)
        if folder not in self._held and (known := self._known(folder) if folder else None) is not None:
            try:
                yield known
            finally:
                self._posix.close(known)
            return
        if not self._is_still(folder):
            if "/" not in folder:
                raise self._replaced(folder)
            self._made.pop(folder, None)  # someone removed a term's folder: reading its objects will fail later
            self._make(folder)
        if (held := self._held.get(folder)) is not None:
            yield held
            return
        with self.opened(folder) as handle:
            yield handle

    def _is_still(self, folder: str) -> bool:
        """Whether this is the folder that this object created or made durable."""
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
        """Raise `StorageError` unless the path `folder` leads to the folder of `handle`."""
        same = handle == self._held.get(folder) or self._made.get(folder) == _identity(self._posix.fstat(handle))
        if folder and not (same and self._is_still(folder)):
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
            # Prevents: a power cut that removes this folder's name, and with it every durable object inside. Sync an
            # existing folder, too: the process that created it may not have reached its fsync.
            self.sync(above, parent)
        handle = self._enter(folder)
        try:
            self._made[folder] = _identity(self._posix.fstat(handle))
        finally:
            if parent:
                self._posix.close(handle)
            else:  # hold it open, so that no other folder can get its inode number and be mistaken for it
                self._kept.append(handle)
                self._held[folder] = handle

    def _make_root(self) -> None:
        """Create the store's folder if it is missing, and make its whole path durable, once."""
        if self._above_synced:
            return
        existed = self.attach()
        # A store that was moved meanwhile has other parent folders. The process that moved it must make them durable.
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
            # Prevents: a power cut that removes the store's own name.
            self.sync(handle, parent, ours=made)
        finally:
            self._posix.close(handle)

    # Syncing

    def sync(self, handle: int, folder: str, *, ours: bool = True) -> None:
        """Make the names in a folder survive a power cut.

        A failed fsync is never repeated: the system may drop the pages that it could not write and report success the
        next time. The folder stays doubtful for the life of this object, and nothing more is acknowledged in it.

        Args:
            handle: handle of the folder.
            folder: its path from the root, or the absolute path of a folder above the root.
            ours: False for a folder above the store in which we created nothing; it is skipped if we may not sync it.

        Raises:
            StorageError: an earlier fsync of this folder failed.
            UnsupportedBackendError: the file system cannot sync folders.
        """
        path = folder if folder.startswith("/") else f"{self.root}/{folder}".rstrip("/")
        with self._syncing:  # one thread's success must not hide another thread's failure
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
    """The kind of file in words, for messages; `mode` as in `os.stat_result.st_mode`."""
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
