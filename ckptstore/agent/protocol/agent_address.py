"""The address of an agent: a socket and a lock in the user's runtime folder, for each run and trainer.

Only the user may enter the folder (0700) and connect to a socket (0600). The agent asks the kernel for the user of each
peer (SO_PEERCRED). It holds the lock as long as it lives; a socket whose lock is free is stale.
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
    """Return ``$CKPTSTORE_RUNTIME_DIR``, or ``ckptstore`` in ``$XDG_RUNTIME_DIR``, or ``/tmp/ckptstore-UID``.

    Creates the folder if it does not exist.

    Raises:
        AgentError: it belongs to another user, or others may enter it: they could impersonate an agent.
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
        raise AgentError(f"{folder}: unusable for an agent's socket: {error.strerror}; set {_VARIABLE}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise AgentError(
            f"{folder}: unusable for an agent's socket: it has to be a folder of user {os.getuid()} that nobody else "
            f"may enter (0700), and it is {stat.filemode(found.st_mode)} of user {found.st_uid}; set {_VARIABLE}"
        )
    return folder


class AgentAddress:
    """The address of one trainer's agent.

    Attributes:
        name: name of its files, without their endings.
    """

    def __init__(self, url: str, name: str) -> None:
        """
        Args:
            url: the store's absolute URL.
            name: which of the run's trainers the agent serves.
        """
        self._folder = os.open(runtime_folder(), os.O_DIRECTORY | os.O_CLOEXEC)
        self.name = xxh3_128(f"{url}\0{name}".encode())
        self._lock = -1

    def _path(self, ending: str) -> str:
        """A path through the folder's descriptor: its own path may be too long for a socket, or lead elsewhere now."""
        return f"/proc/self/fd/{self._folder}/{self.name}.{ending}"

    def connect(self, ending: str = "sock") -> socket.socket | None:
        """Connect to the agent; None: there is no agent.

        Args:
            ending: ending of the socket.

        Raises:
            AgentError: the socket cannot be reached, or belongs to another user.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            found = os.lstat(self._path(ending))
            if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.getuid():
                raise AgentError(f"{self.name}.{ending}: not a socket of user {os.getuid()}")
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
        """Open the file for the agent's output. The caller closes the descriptor."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(f"{self.name}.log", flags, 0o600, dir_fd=self._folder)

    def last_words(self, most: int = 2000) -> str:
        """The last bytes of that file, at most `most`."""
        try:
            descriptor = os.open(f"{self.name}.log", os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._folder)
        except OSError:
            return ""
        with os.fdopen(descriptor, "rb") as file:
            file.seek(max(0, os.fstat(descriptor).st_size - most))
            return file.read(most).decode("utf-8", "replace").strip()

    def claim(self, seconds: float) -> None:
        """Take the lock: become the agent of this address until `vacate`, or until this process ends.

        Raises:
            AgentBusyError: another agent holds the lock and does not end within `seconds`.
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
            if there.st_ino == os.fstat(lock).st_ino:  # else its last holder removed the file on leaving
                self._lock = lock
                return True
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(lock)
        return False

    def taken(self) -> bool:
        """Whether an agent holds the lock: one that runs, starts or ends."""
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
        """Listen at a socket; removes a stale one. The socket for successors (``sock``) needs `claim` first."""
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
        """Remove all files and release the lock: another agent may claim the address from now on."""
        if self._lock < 0:
            return
        for ending in ("sock", "box", "log", "lock"):  # the lock last: until then no other agent creates any of them
            self._remove(ending)
        os.close(self._lock)
        self._lock = -1

    def _remove(self, ending: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.name}.{ending}", dir_fd=self._folder)

    def close(self) -> None:
        """Close the folder."""
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1
