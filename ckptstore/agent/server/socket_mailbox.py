"""The mailbox of a job's agents: rank 0's agent serves it, the others use it over sockets. It outlives the trainers.

A request is a length (4 bytes, big-endian), an operation (1 byte), a number of keys (2 bytes), each key with its length
(2 bytes), and a value. The answer is a length, a byte (0: no value; 1: a value), and the value. A connection carries
one request at a time. Before the first one both ends prove that they know the job's token, which neither sends
(HMAC-SHA256 of the other's nonce). The peer on a Unix socket also has to be the same user, which the kernel tells.
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
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, Self

from ckptstore.agent.protocol.frames import peer_of
from ckptstore.errors import AgentLostError, MailboxError
from ckptstore.host import background_threads
from ckptstore.write.ranks.messages.key_value_store import PIECE, LocalMailbox, found_all

__all__ = ["RemoteMailbox", "ServedMailbox"]

_LENGTH: Final = struct.Struct(">I")
_HEAD: Final = struct.Struct(">BH")
_KEY: Final = struct.Struct(">H")
_NONCE: Final = 32
_LIMIT: Final = 4 * PIECE
"""Most bytes of a request: a value, and the keys of a thousand ranks."""
_PATIENCE: Final = 30.0
"""Seconds that a message may make no progress once it has begun. After that the peer counts as broken."""
_BEGINNING: Final = 120.0
"""Seconds that rank 0's agent may take to start."""
_SET, _GET, _HAS, _DELETE, _LEAVE = range(5)


class ServedMailbox:
    """Rank 0's side: holds the values, and answers each peer that knows the token.

    Attributes:
        box: the mailbox, for this process.
        here: ranks whose agents are connected.
    """

    def __init__(self, listener: socket.socket, token: bytes, size: int, lost: Callable[[str], None]) -> None:
        """Take ownership of a listening socket.

        Args:
            size: number of ranks of the job, this one included.
            lost: called once, by a thread, with the reason, if another agent is lost.
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
        """Raise `AgentLostError` if the agent of a rank is gone: it will send nothing more."""
        if self._why is not None:
            raise AgentLostError(self._why)

    def close(self) -> None:
        """Close the listener and all connections. The other agents see that this agent is gone."""
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
            with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
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
            pass  # the peer is gone, or sends no valid request: both end the connection
        finally:
            self._connections.discard(connection)
        if rank is None:
            return
        self.here.discard(rank)
        if not left and not self._closed:
            self._is_lost(f"the agent of rank {rank} is gone")

    def _met(self, connection: socket.socket) -> int:
        """Check that the peer belongs to this job -> its rank. Raises `MailboxError`."""
        ours = secrets.token_bytes(_NONCE)
        connection.sendall(ours)
        theirs = _exactly(connection, _NONCE)
        rank = int(_LENGTH.unpack(_exactly(connection, _LENGTH.size))[0])
        if not hmac.compare_digest(_exactly(connection, _NONCE), _proof(self._token, b"rank", ours, rank)):
            raise MailboxError("the peer does not know the token of this job")
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
    """The side of another rank, a `write.ranks.messages.key_value_store.Mailbox`.

    Any thread may call it; calls wait for each other.
    """

    def __init__(self, connection: socket.socket, token: bytes, rank: int, lost: Callable[[str], None]) -> None:
        """Take ownership of a connected socket.

        Args:
            lost: called once, by a thread, with the reason, if the connection is lost.

        Raises:
            MailboxError: the peer is not the agent of this job.
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
                raise MailboxError("the process at rank 0's address is not the agent of this job")
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

    def set_all(self, values: Mapping[str, bytes]) -> None:
        """See `Mailbox.set_all`."""
        for key, value in values.items():
            self.set(key, value)

    def get_all(self, keys: list[str]) -> list[bytes] | None:
        """See `Mailbox.get_all`."""
        return found_all(self, keys)

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
        """See `Mailbox.clone`: returns itself."""
        return self

    def close(self, *, farewell: bool) -> None:
        """Disconnect.

        Args:
            farewell: this rank has nothing left to do. False: the disconnection counts as its agent's death.
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
                    self._socket.shutdown(socket.SHUT_RDWR)  # `_watch` reports it
                raise MailboxError(f"{self._why}: {error}") from error

    def _watch(self) -> None:
        """Report the loss of the peer, even while no call is under way."""
        poll = select.poll()
        try:
            poll.register(self._socket.fileno(), select.POLLRDHUP)
            poll.poll()
        except (OSError, ValueError):
            pass  # closed
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
