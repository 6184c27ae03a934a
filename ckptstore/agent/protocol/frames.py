"""Sends and receives messages over a Unix socket: a length, JSON, and at most one file descriptor.

A frame is a length (4 bytes, big-endian, at most `LIMIT`) and that many bytes of JSON, an object. A descriptor comes
with the first bytes of its frame. Nothing that arrives is trusted: memory grows as bytes arrive, not by the length that
was announced.
"""

from __future__ import annotations

import array
import contextlib
import enum
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from ckptstore.errors import AgentError, FormatError
from ckptstore.formats import jsontext
from ckptstore.host.threads import started_pool

__all__ = ["LIMIT", "PATIENCE", "PROTOCOL", "Channel", "End", "Message", "peer_of"]

PROTOCOL: Final = 2
"""The version of the messages. A trainer and an agent of different ones refuse each other."""
"""The version of the messages that trainer and agent exchange (docs/agent.md)."""
LIMIT: Final = 64 << 20
"""Most bytes of a frame: a state tree of the largest size, and the other members of its message."""
PATIENCE: Final = 60.0
"""Seconds that a frame may make no progress once it has begun. After that the peer counts as broken."""
_PIECE: Final = 1 << 20
_PEER: Final = struct.Struct("3i")
_PF_EXITING: Final = 0x4


class End(enum.Enum):
    """Why `Channel.receive` returned no message."""

    GONE = "gone"
    """The peer has closed the connection, or its process has ended."""
    WOKEN = "woken"
    """The descriptor `Channel.wake` is readable."""


@dataclass(slots=True)
class Message:
    """A received message: a JSON object, and a descriptor that the receiver has to close (None: none came)."""

    body: dict[str, Any]
    descriptor: int | None = None

    def close(self) -> None:
        """Close the descriptor, unless it was taken out."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class _Letter:
    """A message that is sent, perhaps in parts.

    Attributes:
        begun: a part was sent, and not all.
    """

    def __init__(self, data: bytes, descriptor: int | None) -> None:
        """Take ownership of the descriptor that is sent with the first byte; None: none is."""
        self._left = memoryview(data)
        self._descriptor = descriptor
        self.begun = False

    def sent(self, connection: socket.socket) -> bool:
        """Send what the socket takes now -> whether that was all. Raises `OSError`."""
        while self._left:
            fds = [] if self._descriptor is None else [self._descriptor]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                count = connection.sendmsg([self._left], rights, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            self._left = self._left[count:]
            self.begun = bool(self._left)
            self.close()
        return True

    def close(self) -> None:
        """Close the descriptor: it was sent, or will not be."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of the peer, from the kernel (SO_PEERCRED)."""
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


class Channel:
    """One connection. One thread receives. Any thread posts, and never blocks: a separate thread sends what the socket
    does not take at once.

    Attributes:
        pid: the peer's process; 0: it is not visible from here.
        uid: the peer's user.
        wake: see `__init__`.
    """

    def __init__(
        self, connection: socket.socket, *, pid: int | None = None, wake: int | None = None, patience: float = PATIENCE
    ) -> None:
        """Take ownership of a connected socket.

        Args:
            pid: the peer's process, if the kernel does not know it (of a socket pair it names the creator).
            wake: a descriptor; while it is readable, `receive` returns `End.WOKEN` between two messages.
            patience: see `PATIENCE`.
        """
        connection.setblocking(False)
        self.pid, self.uid = peer_of(connection)
        if pid is not None:
            self.pid = pid
        self._socket = connection
        self.wake = wake
        self._patience = patience
        self._death = _death_of(self.pid)
        self._sender: ThreadPoolExecutor = started_pool(1, "ckptstore-agent-send")
        self._unsent = 0  # messages that the sender has not sent to their end
        self._sending = threading.Lock()
        self._closed = False

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._socket.fileno()

    def alive(self) -> bool:
        """Whether the peer is still there. Any thread may call it.

        A killed peer is gone as soon as its main thread is exiting. Its pidfd would say so only seconds later, once the
        kernel has freed the memory of a large process.
        """
        poll = select.poll()
        try:
            poll.register(self._socket.fileno(), select.POLLRDHUP)
            if (death := self._death) is not None:
                poll.register(death, select.POLLIN)
        except ValueError:
            return False  # closed
        return not poll.poll(0) and not _exiting(self.pid)

    # -- receiving

    def receive(self, pulse: Callable[[], None] | None = None, seconds: float = 1.0) -> Message | End:
        """Return the next message, or why there is none.

        What a peer sent before it ended is received first, even if a child process of it keeps the connection open.

        Args:
            pulse: called every `seconds` while nothing arrives.

        Raises:
            AgentError: the bytes that came are not a message, or stopped in the middle of one.
        """
        found = self._wait(pulse, seconds)
        if found is not None:
            return found
        head, descriptor = self._exactly(4, first=True)
        message = Message({}, descriptor)
        try:
            if not head:
                return End.GONE
            (length,) = struct.unpack(">I", head)
            if not 0 < length <= LIMIT:
                raise AgentError(f"process {self.pid} announced a message of {length} bytes; 1 to {LIMIT} are allowed")
            text, _ = self._exactly(length)
            body = jsontext.loads(text, what=f"message of process {self.pid}", max_bytes=LIMIT)
            if not isinstance(body, dict):
                raise AgentError(f"process {self.pid} sent {type(body).__name__} in place of an object")
        except FormatError as error:
            message.close()
            raise AgentError(str(error)) from error
        except BaseException:
            message.close()
            raise
        message.body = body
        return message

    def _wait(self, pulse: Callable[[], None] | None, seconds: float) -> End | None:
        """Return None once there is something to read."""
        while True:
            ready = self._poll(None if pulse is None else seconds, wake=self.wake)
            if not ready and pulse is not None and not self._closed:
                pulse()
                continue
            if self._closed:
                return End.GONE
            if self._socket.fileno() in ready:
                return None
            if self.wake in ready:
                return End.WOKEN
            if self._death in ready:
                return End.GONE

    def _exactly(self, length: int, *, first: bool = False) -> tuple[bytes, int | None]:
        """Read `length` bytes, and a descriptor that came with them. No bytes: `first`, and the peer has closed."""
        data = bytearray()
        descriptor: int | None = None
        try:
            while len(data) < length:
                try:
                    piece, found, _, _ = socket.recv_fds(
                        self._socket, min(length - len(data), _PIECE), 4, socket.MSG_CMSG_CLOEXEC
                    )
                except BlockingIOError:
                    ready = self._poll(self._patience)
                    if self._socket.fileno() not in ready:
                        raise AgentError(f"process {self.pid} stopped in the middle of a message") from None
                    continue
                except OSError as error:
                    raise AgentError(f"process {self.pid} cannot be reached: {error.strerror}") from error
                descriptor = _one_of(found, descriptor)
                if not piece:
                    if first and not data:
                        break
                    raise AgentError(f"process {self.pid} ended in the middle of a message")
                data += piece
        except BaseException:
            _one_of([descriptor] if descriptor is not None else [], None, keep=False)
            raise
        return bytes(data), descriptor

    def _poll(self, seconds: float | None, *, wake: int | None = None) -> set[int]:
        poll = select.poll()
        if self._closed:
            return set()
        poll.register(self._socket.fileno(), select.POLLIN)
        for other in (self._death, wake):
            if other is not None:
                poll.register(other, select.POLLIN)
        return {number for number, _ in poll.poll(None if seconds is None else seconds * 1000)}

    # -- sending

    def post(self, body: dict[str, Any], descriptor: int | None = None) -> None:
        """Send a message after those that were posted before. A failure to send closes the connection.

        If the socket takes all of it, it is sent when this returns: the peer receives it even if this process is killed
        then.

        Args:
            body: what `jsontext.dumps` takes.
            descriptor: sent with the message, as a copy; the caller keeps its own.

        Raises:
            AgentError: the message is longer than `LIMIT`.
        """
        text = jsontext.dumps(body)
        if len(text) > LIMIT:
            raise AgentError(f"a message of {len(text)} bytes; at most {LIMIT} are allowed")
        letter = _Letter(struct.pack(">I", len(text)) + text, None if descriptor is None else os.dup(descriptor))
        with self._sending:
            try:
                # Prevents: several steps that a killed trainer had given, and that its sender had not sent, because on
                # a busy machine that thread had not run yet.
                if not self._unsent and letter.sent(self._socket):
                    return
                self._sender.submit(self._send, letter)
                self._unsent += 1
            except RuntimeError:  # closed meanwhile: `receive` says so
                letter.close()
            except (OSError, ValueError):
                letter.close()
                self.hang_up()
            except BaseException:  # Ctrl-C
                letter.close()
                if letter.begun:  # Prevents: the next message being read as the rest of this one.
                    self.hang_up()
                raise

    def _send(self, letter: _Letter) -> None:
        try:
            while not letter.sent(self._socket):
                if not select.select([], [self._socket], [], self._patience)[1]:
                    raise TimeoutError(f"process {self.pid} takes no messages")
        except (OSError, ValueError):
            self.hang_up()
        finally:
            letter.close()
            with self._sending:
                self._unsent -= 1

    # -- ending

    def hang_up(self) -> None:
        """Shut the connection down, for both ends. The thread that receives then closes it."""
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def finish(self, seconds: float = 5.0) -> None:
        """Send what was posted, if the peer takes it within `seconds`, and close."""
        if self._closed:
            return
        done = self._sender.submit(lambda: None)
        until = time.monotonic() + seconds
        while not done.done() and time.monotonic() < until:
            time.sleep(0.001)
        self.close()

    def close(self) -> None:
        """Shut the connection down and close it. Call it in the receiving thread, or after that has ended."""
        if self._closed:
            return
        self.hang_up()
        self._sender.shutdown(cancel_futures=True)
        self._closed = True
        self._socket.close()
        if self._death is not None:
            os.close(self._death)
            self._death = None

    def leave(self) -> None:
        """Close the copies of a forked process; the connection itself stays the parent's."""
        self._closed = True
        self._socket.close()
        if self._death is not None:
            os.close(self._death)
            self._death = None


def _death_of(pid: int) -> int | None:
    """Open a descriptor that is readable once the process has ended; None: the system has none."""
    try:
        return os.pidfd_open(pid) if pid > 0 else None
    except OSError:
        return None  # it has ended, which the connection shows; or Linux is older than 5.3


def _exiting(pid: int) -> bool:
    """Whether the main thread of a process is exiting; False if the system does not say."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            flags = int(stat.read().rpartition(b")")[2].split()[6])  # the process name before may hold any byte
    except (OSError, IndexError, ValueError):
        return False
    return bool(flags & _PF_EXITING)


def _one_of(found: list[int], before: int | None, *, keep: bool = True) -> int | None:
    """Keep at most one descriptor for a message, and close the others."""
    kept = before
    for one in found:
        if keep and kept is None:
            kept = one
        else:
            os.close(one)
    return kept
