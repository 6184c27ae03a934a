"""The peer of `tools.baselines.gemini`: a process that keeps the newest whole state of a trainer in its memory.

``python -m tools.baselines.gemini_peer FOLDER`` listens on loopback and writes its port to FOLDER/peer.json. It has two
buffers: a state that arrives never overwrites the newest whole one. It ends when FOLDER is gone, or when no trainer has
been connected for a minute.

A trainer sends ``P`` with a header, a description and the tensors, and gets ``K`` when the peer has all of it. Or it
sends ``G``, and gets the same of the newest state; a header of step -1: there is none.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Final

import xxhash

__all__ = ["HEAD", "NAME", "digest", "main", "received"]

NAME: Final = "peer.json"
HEAD: Final = struct.Struct("<qQQ16s")
"""Step, bytes of the description, bytes of the tensors, hash of both."""
_LINGER: Final = 60.0
_LOOK: Final = 0.5


def received(connection: socket.socket, target: memoryview) -> bool:
    """Fill the memory from a connection -> whether all of it came."""
    at = 0
    while at < len(target):
        count = connection.recv_into(target[at:])
        if not count:
            return False
        at += count
    return True


def digest(*parts: memoryview | bytes) -> bytes:
    """The hash of a state in transit."""
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part)
    return hasher.digest()


class _Peer:
    """What the process holds: the newest whole state, and the buffer for the next one."""

    def __init__(self) -> None:
        self.head = HEAD.pack(-1, 0, 0, b"")
        self.whole = bytearray()
        self.next = bytearray()

    def serve(self, connection: socket.socket) -> None:
        """Until the trainer is gone."""
        command = bytearray(1)
        while received(connection, memoryview(command)):
            if command == b"P":
                if not self._take(connection):
                    return
            else:
                connection.sendall(self.head)
                connection.sendall(self.whole)

    def _take(self, connection: socket.socket) -> bool:
        head = bytearray(HEAD.size)
        if not received(connection, memoryview(head)):
            return False
        _, text, data, told = HEAD.unpack(head)
        if len(self.next) != text + data:
            self.next = bytearray(text + data)
        if not received(connection, memoryview(self.next)) or digest(self.next) != told:
            return False  # Prevents: half a state, of a trainer that was killed as it sent it.
        self.head, self.whole, self.next = bytes(head), self.next, self.whole
        connection.sendall(b"K")
        return True


def main() -> None:
    """Run the process: see the module."""
    folder, peer = Path(sys.argv[1]), _Peer()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_LOOK)
        partial = folder / f"{NAME}.partial"
        partial.write_text(json.dumps({"port": server.getsockname()[1], "pid": os.getpid()}))
        partial.rename(folder / NAME)
        last = time.monotonic()
        while folder.exists() and time.monotonic() - last < _LINGER:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            with connection:
                connection.settimeout(None)
                with contextlib.suppress(ConnectionError):  # the trainer was killed
                    peer.serve(connection)
            last = time.monotonic()


if __name__ == "__main__":
    main()
