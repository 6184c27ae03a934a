"""A trainer that implements the protocol of docs/agent.md independently, well or badly; it imports nothing of
ckptstore."""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any, Self

from tests import warmth
from tools.warm import Script

WRITER = {"staging_bytes": 64 << 20, "threads": 2, "max_in_flight": 1, "poll_seconds": None}
OPTIONS = WRITER | {"deltas": None, "diffs": None, "keep": None, "space": None}
VERSION = 2
"""Of docs/agent.md."""


class Shim:
    """One connection to an agent."""

    def __init__(self, connection: socket.socket, agent: Script | None = None) -> None:
        connection.settimeout(60)
        self.socket = connection
        self.agent = agent
        self.number = 0
        self.descriptors: list[int] = []

    @classmethod
    def started(cls, url: Path, **other: Any) -> tuple[Self, dict[str, Any]]:
        """Start an agent -> the connection, and its answer."""
        ours, its = socket.socketpair()
        # A warm fork gets only the standard streams: its standard input is the connection.
        command = [sys.executable, "-m", "ckptstore.agent.process", "0"]
        agent = warmth.start(command, stdin=its.fileno())
        its.close()
        shim = cls(ours, agent)
        start = {"url": str(url), "name": "", "parent": "latest", "options": OPTIONS, "environment": {}}
        return shim, shim.ask("start", protocol=VERSION, linger_seconds=120, **start | other)

    @classmethod
    def connected(cls, runtime: Path) -> Self:
        """Connect to the running agent of a runtime folder."""
        (path,) = runtime.glob("*.sock")
        folder = os.open(runtime, os.O_DIRECTORY)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(f"/proc/self/fd/{folder}/{path.name}")  # the path may be longer than a socket's name
        os.close(folder)
        return cls(connection)

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """Send a request, and wait for the answer; events are skipped."""
        self.number += 1
        self.send({"do": do, "id": self.number, **fields})
        while "re" not in (answer := self.hear()):
            if answer.get("event") == "broken":
                return answer
        return answer

    def send(self, body: Any) -> None:
        text = json.dumps(body).encode()
        self.socket.sendall(struct.pack(">I", len(text)) + text)

    def hear(self) -> dict[str, Any]:
        """The next message; its descriptor is added to `descriptors`."""
        head, fds, _, _ = socket.recv_fds(self.socket, 4, 1)
        self.descriptors += fds
        if not head:
            raise EOFError
        (length,) = struct.unpack(">I", head)
        text = b""
        while len(text) < length:
            text += self.socket.recv(length - len(text))
        found: dict[str, Any] = json.loads(text)
        return found

    def event(self) -> dict[str, Any]:
        """The next event."""
        while "event" not in (found := self.hear()):
            pass
        return found

    def filled(self, byte: int, nbytes: int = 5000) -> tuple[dict[str, Any], mmap.mmap]:
        """A buffer filled with one byte -> the members of a ``save`` message, and the memory."""
        layout = self.ask("layout", tensors=[["x", "U8", [nbytes], "numpy", None, None]])
        lent = self.ask("buffer", layout=layout["layout"])
        memory = mmap.mmap(self.descriptors[-1], lent["nbytes"])
        (start,) = layout["offsets"]
        memory[start : start + nbytes] = bytes([byte]) * nbytes
        return {"buffer": lent["buffer"], "layout": layout["layout"], "tree": {"x": {"$a": "x"}}}, memory

    def close(self) -> None:
        self.socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()
