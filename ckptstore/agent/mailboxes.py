"""The mailbox of the agents of a job: rank 0's agent has it, the others ask it over sockets. It outlives the trainers.

A request is a length (4 bytes, big-endian), an operation (1 byte), a number of keys (2), each key with its length (2),
and a value; the answer is a length, a byte (0: no value; 1: one), and the value. One request at a time on a connection.
Before the first one both ends prove that they know the job's token, which neither sends (HMAC-SHA256 of the other's
nonce). Whoever connects through a Unix socket has to be the same user besides, by the kernel's word.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable
from functools import partial
from typing import Final, Self

from ckptstore.agent.frames import peer_of
from ckptstore.errors import AgentLostError, MailboxError
from ckptstore.host import background_threads
from ckptstore.write.ranks.messages.key_value_store import PIECE, LocalMailbox

__all__ = ["RemoteMailbox", "ServedMailbox"]

_LENGTH: Final = struct.Struct(">I")
_HEAD: Final = struct.Struct(">BH")
_KEY: Final = struct.Struct(">H")
_NONCE: Final = 32
_LIMIT: Final = 4 * PIECE
"""Bytes of a request: a value, and what the keys of a thousand ranks take."""
_PATIENCE: Final = 30.0
"""Seconds that a message may stand still once it has begun. After that whoever sends it is broken."""
_BEGINNING: Final = 120.0
"""Seconds that rank 0's agent may take to begin."""
_SET, _GET, _HAS, _DELETE, _LEAVE = range(5)


class ServedMailbox:
    """Rank 0's side: the values are here, and whoever knows the token may ask.

    Attributes:
        box: for this process.
        here: ranks whose agents are connected.
    """

    def __init__(self, listener: socket.socket, token: bytes, size: int, lost: Callable[[str], None]) -> None:
        """Take a listening socket over.

        Args:
            size: ranks of the job, this one included.
            lost: is told why the job's agents are not complete any more, once, by a thread.
        """
        self.box = LocalMailbox()
        self._listener = listener
        self._token = token
        self._size = size
        self._lost = lost
        self._why: str | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self.here: set[int] = set()
        background_threads.start(self._accept, "agent-mailbox")

    def check(self) -> None:
        """Raise `AgentLostError` if the agent of a rank is gone: what it has not sent will never come."""
        if self._why is not None:
            raise AgentLostError(self._why)

    def close(self) -> None:
        """Take nobody any more. Those who are here hear that this agent is gone."""
        self._closed = True
        for one in (self._listener, *self._connections.copy()):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            with contextlib.suppress(RuntimeError):  # the interpreter is going
                background_threads.start(partial(self._serve, connection), "agent-mailbox-rank")

    def _serve(self, connection: socket.socket) -> None:
        rank: int | None = None
        left = False
        self._connections.add(connection)
        try:
            with connection:
                if connection.family == socket.AF_UNIX and peer_of(connection)[1] != os.getuid():
                    return
                connection.settimeout(_PATIENCE)
                rank = self._met(connection)
                self.here.add(rank)
                while not left:
                    connection.settimeout(None)
                    head = _exactly(connection, _LENGTH.size)
                    connection.settimeout(_PATIENCE)
                    request = _exactly(connection, _bounded(head))
                    left = request[:1] == bytes([_LEAVE])
                    connection.sendall(_framed(self._answer(request)))
        except (OSError, MailboxError, struct.error, ValueError):
            pass  # it is gone, or what it sends is no request: the same to us
        finally:
            self._connections.discard(connection)
        if rank is None:
            return
        self.here.discard(rank)
        if not left and not self._closed:
            self._is_lost(f"the agent of rank {rank} is gone")

    def _met(self, connection: socket.socket) -> int:
        """The rank at the other end, which has shown that it is of this job. Raises `MailboxError`."""
        ours = secrets.token_bytes(_NONCE)
        connection.sendall(ours)
        theirs = _exactly(connection, _NONCE)
        rank = int(_LENGTH.unpack(_exactly(connection, _LENGTH.size))[0])
        if not hmac.compare_digest(_exactly(connection, _NONCE), _proof(self._token, b"rank", ours, rank)):
            raise MailboxError("somebody who is not of this job")
        if not 0 < rank < self._size:
            raise MailboxError(f"rank {rank} of {self._size}")
        connection.sendall(_proof(self._token, b"host", theirs, rank))
        return rank

    def _is_lost(self, why: str) -> None:
        with self._lock:
            if self._why is not None:
                return
            self._why = why
        self._lost(why)

    def _answer(self, request: bytes) -> bytes:
        operation, count = _HEAD.unpack_from(request)
        at, keys = _HEAD.size, []
        for _ in range(count):
            (length,) = _KEY.unpack_from(request, at)
            at += _KEY.size
            keys.append(request[at : at + length].decode())
            at += length
        if not keys and operation in (_SET, _GET, _DELETE):
            raise MailboxError(f"operation {operation} without a key")
        if operation == _SET:
            self.box.set(keys[0], request[at:])
        elif operation == _GET:
            value = self.box.get(keys[0])
            return b"\0" if value is None else b"\1" + value
        elif operation == _HAS:
            return b"\1" if self.box.has(keys) else b"\0"
        elif operation == _DELETE:
            self.box.delete(keys[0])
        elif operation != _LEAVE:
            raise MailboxError(f"operation {operation}")
        return b"\0"


class RemoteMailbox:
    """Another rank's side, for all threads of a process: one call at a time.

    A `write.ranks.messages.key_value_store.Mailbox`.
    """

    def __init__(self, connection: socket.socket, token: bytes, rank: int, lost: Callable[[str], None]) -> None:
        """Take a connected socket over.

        Args:
            lost: is told why nothing can be sent or heard any more, once, by a thread.

        Raises:
            MailboxError: at the other end is no agent of this job.
        """
        self._socket = connection
        self._lock = threading.Lock()
        self._lost = lost
        self._why: str | None = None
        self._left = False
        try:
            connection.settimeout(_BEGINNING)
            theirs = _exactly(connection, _NONCE)
            ours = secrets.token_bytes(_NONCE)
            connection.sendall(ours + _LENGTH.pack(rank) + _proof(token, b"rank", theirs, rank))
            if not hmac.compare_digest(_exactly(connection, _NONCE), _proof(token, b"host", ours, rank)):
                raise MailboxError("what answers at rank 0's address is not the agent of this job")
            connection.settimeout(_PATIENCE)
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError):
                raise MailboxError(f"the agent of rank 0 cannot be reached: {error}") from error
            raise
        background_threads.start(self._watch, "agent-mailbox")

    def set(self, key: str, value: bytes) -> None:
        """See `Mailbox.set`."""
        if len(value) > PIECE + 64:
            raise MailboxError(f"{key}: {len(value)} bytes are too many for one value")
        self._ask(_SET, [key], value)

    def get(self, key: str) -> bytes | None:
        """See `Mailbox.get`."""
        answer = self._ask(_GET, [key])
        return answer[1:] if answer[:1] == b"\1" else None

    def has(self, keys: list[str]) -> bool:
        """See `Mailbox.has`."""
        return not keys or self._ask(_HAS, keys)[:1] == b"\1"

    def delete(self, key: str) -> None:
        """See `Mailbox.delete`."""
        self._ask(_DELETE, [key])

    def clone(self) -> Self:
        """See `Mailbox.clone`: itself."""
        return self

    def close(self, *, farewell: bool) -> None:
        """Ask for nothing any more.

        Args:
            farewell: this rank has nothing left to do; else its end counts as its agent's death.
        """
        self._left = True
        with contextlib.suppress(MailboxError):
            if farewell:
                self._ask(_LEAVE, [])
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _ask(self, operation: int, keys: list[str], value: bytes = b"") -> bytes:
        names = [key.encode() for key in keys]
        request = _HEAD.pack(operation, len(names)) + b"".join(_KEY.pack(len(name)) + name for name in names) + value
        with self._lock:
            if self._why is not None:
                raise MailboxError(self._why)
            try:
                self._socket.sendall(_framed(request))
                return _exactly(self._socket, _bounded(_exactly(self._socket, _LENGTH.size)))
            except (OSError, MailboxError) as error:
                self._why = "the agent of rank 0 is gone"
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)  # `_watch` says so
                raise MailboxError(f"{self._why}: {error}") from error

    def _watch(self) -> None:
        """Say so when the other end is gone, also while nobody asks for anything."""
        poll = select.poll()
        try:
            poll.register(self._socket.fileno(), select.POLLRDHUP)
            poll.poll()
        except (OSError, ValueError):
            pass  # it is closed
        with self._lock:
            self._why = self._why or "the agent of rank 0 is gone"
            self._socket.close()
        if not self._left:
            self._lost("the agent of rank 0 is gone")


def _proof(token: bytes, side: bytes, nonce: bytes, rank: int) -> bytes:
    return hmac.digest(token, side + nonce + _LENGTH.pack(rank), "sha256")


def _framed(message: bytes) -> bytes:
    return _LENGTH.pack(len(message)) + message


def _bounded(head: bytes) -> int:
    (length,) = _LENGTH.unpack(head)
    if not 0 < length <= _LIMIT:
        raise MailboxError(f"a message of {length} bytes")
    return int(length)


def _exactly(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        piece = connection.recv(length - len(data))
        if not piece:
            raise MailboxError("the connection has ended")
        data += piece
    return bytes(data)
