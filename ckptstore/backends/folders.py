"""Which folders' names survive a power cut: making folders and syncing them.

On POSIX a name is durable only once the folder that holds it was fsynced, that folder's own name only once *its* parent
was, and so on up. `Folders` keeps that account for one backend.
"""

from __future__ import annotations

import errno
import os
import threading

from ckptstore.backends.posix import Posix
from ckptstore.backends.system_errors import REFUSALS
from ckptstore.formats.errors import StorageError, UnsupportedBackendError


class Folders:
    """The folders of the store at `root`. Thread-safe. Raises `OSError`, or `StorageError` where it knows better."""

    def __init__(self, root: str, posix: Posix) -> None:
        self._root = root
        self._posix = posix
        self._durable = {"/"}
        self._doubtful: set[str] = set()
        self._syncing = threading.Lock()

    def make(self, folder: str) -> None:
        """Make `folder` exist and its whole path survive a power cut.

        Folders are made from the top down, each synced into its parent before the next. Those that exist are synced
        once as well: the user's ``mkdir`` a moment ago is no safer than ours.
        """
        if folder in self._durable:
            return
        parent = folder.rpartition("/")[0] or "/"
        self.make(parent)
        try:
            self._posix.mkdir(folder)
            made = True
        except FileExistsError:
            made = False
        # Prevents: a power cut that forgets this folder's name and with it every durable object inside. Also when the
        # folder was there already: the process that made it may not have come to its fsync yet.
        self.sync(parent, ours=made or f"{parent}/".startswith(f"{self._root}/"))
        self._durable.add(folder)

    def sync(self, folder: str, *, ours: bool = True) -> None:
        """Make the names in `folder` survive a power cut.

        A failed fsync is never repeated: the system may drop what it could not write, and report success the next time.
        The folder stays doubtful for the life of this object, and nothing more is acknowledged in it.

        Args:
            folder: absolute path.
            ours: False for a folder above the store in which we made nothing; if we may not sync it, it is passed over.

        Raises:
            StorageError: an earlier fsync of this folder failed.
            UnsupportedBackendError: the file system cannot sync folders.
        """
        with self._syncing:  # so that no thread's success overtakes another thread's failure
            if folder in self._doubtful:
                raise StorageError(errno.EIO, "an earlier fsync of this folder failed; open the store again", folder)
            try:
                descriptor = self._posix.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            except OSError as error:
                if not ours and error.errno in REFUSALS:
                    return
                raise
            try:
                self._fsync(descriptor, folder, ours)
            finally:
                self._posix.close(descriptor)

    def _fsync(self, descriptor: int, folder: str, ours: bool) -> None:
        try:
            self._posix.fsync(descriptor)
        except OSError as error:
            if not ours and error.errno in REFUSALS | {errno.EINVAL}:
                return
            if error.errno == errno.EINVAL:
                raise UnsupportedBackendError(error.errno, "the file system cannot sync folders", folder) from error
            self._doubtful.add(folder)
            raise
