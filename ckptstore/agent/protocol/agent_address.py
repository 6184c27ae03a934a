"""Where agents are found: the runtime folder of the user, a socket and a lock for each run and trainer.

The folder is the user's alone (0700), and so is a socket (0600); whoever connects is asked for by the kernel's word
(SO_PEERCRED). The lock is held by the agent as long as it lives: a socket without one is stale.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import tempfile
import time
from pathlib import Path
from typing import Final

from ckptstore.errors import AgentBusyError, AgentError
from ckptstore.formats.checksums import xxh3_128

__all__ = ["AgentAddress", "runtime_folder"]

_VARIABLE: Final = "CKPTSTORE_RUNTIME_DIR"
_BACKLOG: Final = 8


def runtime_folder() -> Path:
    """``$CKPTSTORE_RUNTIME_DIR``, or ``ckptstore`` in ``$XDG_RUNTIME_DIR``, or ``/tmp/ckptstore-UID``; made
    if it is not there.

    Raises:
        AgentError: it is another user's, or others may enter it: they could take the place of an agent.
    """
    if given := os.environ.get(_VARIABLE):
        folder = Path(given)
    elif runtime := os.environ.get("XDG_RUNTIME_DIR"):
        folder = Path(runtime) / "ckptstore"
    else:
        folder = Path(tempfile.gettempdir()) / f"ckptstore-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise AgentError(f"{folder}: no place for an agent's socket: {error.strerror}; set {_VARIABLE}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise AgentError(
            f"{folder}: no place for an agent's socket: it has to be a folder of user {os.getuid()} that nobody else "
            f"may enter (0700), and it is {stat.filemode(found.st_mode)} of user {found.st_uid}; set {_VARIABLE}"
        )
    return folder


class AgentAddress:
    """Where the agent of one trainer is found.

    Attributes:
        name: of the files, without their endings.
    """

    def __init__(self, url: str, name: str) -> None:
        """
        Args:
            url: where the store is; absolute.
            name: which of the run's trainers it is.
        """
        self._folder = os.open(runtime_folder(), os.O_DIRECTORY | os.O_CLOEXEC)
        self.name = xxh3_128(f"{url}\0{name}".encode())
        self._lock = -1

    def _path(self, ending: str) -> str:
        """By the folder's descriptor: a path may be longer than a socket's name, and may lead elsewhere by now."""
        return f"/proc/self/fd/{self._folder}/{self.name}.{ending}"

    def connect(self, ending: str = "sock") -> socket.socket | None:
        """A connection to the agent; None: there is none.

        Args:
            ending: of the socket, of those that it may have.

        Raises:
            AgentError: the socket cannot be reached, or is another user's.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            found = os.lstat(self._path(ending))
            if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.getuid():
                raise AgentError(f"{self.name}.{ending}: no socket of user {os.getuid()}")
            connection.connect(self._path(ending))
        except (FileNotFoundError, ConnectionRefusedError, ConnectionResetError):
            connection.close()
            return None
        except OSError as error:
            connection.close()
            raise AgentError(f"{self.name}.{ending}: cannot be reached: {error.strerror}") from error
        except BaseException:
            connection.close()
            raise
        return connection

    def log(self) -> int:
        """A descriptor of the file for what an agent says (`stderr`), emptied; the caller closes it."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(f"{self.name}.log", flags, 0o600, dir_fd=self._folder)

    def last_words(self, most: int = 2000) -> str:
        """The end of that file."""
        try:
            descriptor = os.open(f"{self.name}.log", os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._folder)
        except OSError:
            return ""
        with os.fdopen(descriptor, "rb") as file:
            file.seek(max(0, os.fstat(descriptor).st_size - most))
            return file.read(most).decode("utf-8", "replace").strip()

    def claim(self, seconds: float) -> None:
        """Become the agent that is found here: no other is, before `vacate` or this process's end.

        Raises:
            AgentBusyError: another one is, and does not end within so many seconds.
        """
        until = time.monotonic() + seconds
        while not self._try_lock():
            if time.monotonic() >= until:
                raise AgentBusyError(
                    "another agent serves this run and trainer (the same store and name): two trainers never share "
                    "one: end that process, or give each trainer a store of its own (or agent.writer(name=...))"
                )
            time.sleep(0.02)

    def _try_lock(self) -> bool:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open(f"{self.name}.lock", flags, 0o600, dir_fd=self._folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            there = os.stat(f"{self.name}.lock", dir_fd=self._folder, follow_symlinks=False)
            if there.st_ino == os.fstat(lock).st_ino:  # else whoever had it has removed it on leaving
                self._lock = lock
                return True
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(lock)
        return False

    def taken(self) -> bool:
        """Whether an agent is here: one that is found, is beginning or ending."""
        try:
            lock = os.open(f"{self.name}.lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False

    def listen(self, ending: str = "sock") -> socket.socket:
        """A socket that others connect to; a stale one is removed. That of successors (``sock``) after `claim`."""
        self._remove(ending)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        before = os.umask(0o177)
        try:
            listener.bind(self._path(ending))
        finally:
            os.umask(before)
        listener.listen(_BACKLOG)
        return listener

    def vacate(self) -> None:
        """Not to be found any more, and leave nothing behind. Another may claim the place from now on."""
        if self._lock < 0:
            return
        for ending in ("sock", "box", "log", "lock"):  # the lock last: until then nobody else makes any of them
            self._remove(ending)
        os.close(self._lock)
        self._lock = -1

    def _remove(self, ending: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.name}.{ending}", dir_fd=self._folder)

    def close(self) -> None:
        """Let go of the folder."""
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1
