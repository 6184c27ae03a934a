"""One of the training nodes of `tools.papers.xor.nodes`: sends its checkpoints to its neighbour over a slow link.

``python -m tools.papers.xor.node DESCRIPTOR`` has a listening socket, and reads a line of JSON: where its two states
are, its neighbour's port, the link's bytes a second. It prints its measurements as JSON.
"""

from __future__ import annotations

import json
import shutil
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

import ckptstore
from ckptstore.write.policy.delta_interval import RestoreBound
from ckptstore.write.policy.delta_options import DeltaOptions

_PIECE: Final = 1 << 16


def send(link: socket.socket, data: bytes, rate: float) -> None:
    """Send with its length, at most `rate` bytes a second."""
    link.sendall(struct.pack("<q", len(data)))
    began = time.monotonic()
    view = memoryview(data)
    for at in range(0, len(data), _PIECE):
        link.sendall(view[at : at + _PIECE])
        ahead = (at + len(view[at : at + _PIECE])) / rate - (time.monotonic() - began)
        if ahead > 0:
            time.sleep(ahead)


def receive(link: socket.socket) -> bytearray:
    """What `send` sent."""
    (length,) = struct.unpack("<q", _exactly(link, 8))
    return _exactly(link, length)


def _exactly(link: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    while len(view):
        got = link.recv_into(view)
        if not got:
            raise ConnectionError("the neighbour has ended")
        view = view[got:]
    return data


def files(folder: Path) -> dict[str, bytes]:
    """The files below a folder, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def packed(found: dict[str, bytes]) -> bytes:
    """Files as one message."""
    head = json.dumps({name: len(data) for name, data in found.items()}).encode()
    return struct.pack("<q", len(head)) + head + b"".join(found.values())


def unpack(message: bytes, folder: Path) -> None:
    """Write the files of a message."""
    (length,) = struct.unpack_from("<q", message)
    at = 8 + length
    for name, size in json.loads(bytes(message[8:at])).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(message[at : at + size])
        at += size


class Neighbour(threading.Thread):
    """Receives the other node's checkpoints, and restores them from its replica of that node's store."""

    def __init__(self, listening: socket.socket, replica: Path) -> None:
        super().__init__()
        self.listening, self.replica = listening, replica
        self.decompress = 0.0
        self.equal = 0

    def run(self) -> None:
        link, _ = self.listening.accept()
        with link:
            raw = np.frombuffer(bytes(receive(link)), np.uint32)
            link.sendall(b"k")
            message = bytes(receive(link))
            link.sendall(b"k")
            began = time.thread_time()
            unpack(message, self.replica)
            with ckptstore.open(self.replica) as store:
                found = store.load(2, framework="numpy")["state"]
            self.decompress = time.thread_time() - began
            self.equal = int(np.array_equal(_flat(found), raw))


def _flat(state: Any) -> np.ndarray:
    return np.concatenate([np.asarray(state[name]).reshape(-1).view(np.uint32) for name in sorted(state)])


def main() -> None:
    listening = socket.socket(fileno=int(sys.argv[1]))
    asked = json.loads(sys.stdin.readline())
    folder = Path(asked["folder"])
    first, last = (dict(np.load(path)) for path in asked["states"])
    options = DeltaOptions(interval=1, form="paper", bound=RestoreBound(times=None, depth=1))
    with (
        ckptstore.open(folder / "store", create=True) as store,
        store.writer(deltas=options, poll_seconds=None) as writer,
    ):
        writer.save({"state": first}, 1)
        shutil.copytree(folder / "store", asked["replica"])
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.readline()  # all nodes are ready
        other = Neighbour(listening, Path(asked["receives"]))
        other.start()
        raw = _flat(last).tobytes()
        with socket.create_connection(("127.0.0.1", asked["port"])) as link:
            began = time.monotonic()
            send(link, raw, asked["rate"])
            _exactly(link, 1)
            plain = time.monotonic() - began
            had = files(folder / "store")
            began, busy = time.monotonic(), time.process_time()
            writer.save({"state": last}, 2)
            compress, processor = time.monotonic() - began, time.process_time() - busy
            message = packed({name: data for name, data in files(folder / "store").items() if had.get(name) != data})
            began = time.monotonic()
            send(link, message, asked["rate"])
            _exactly(link, 1)
            delta = time.monotonic() - began
        other.join()
    report = {"raw": len(raw), "sent": len(message), "raw_s": plain, "delta_s": delta, "compress_s": compress}
    report |= {"processor_s": processor, "decompress_s": other.decompress, "equal": other.equal}
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
