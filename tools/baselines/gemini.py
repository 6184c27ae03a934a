"""Gemini's mechanism, as its paper describes it: the newest state is in the memory of another machine."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import torch

from tools.baselines import medium
from tools.baselines.checkfreq import CheckFreqLike
from tools.baselines.gemini_peer import HEAD, NAME, digest, received
from tools.baselines.skeleton import described, filled, nbytes, raw
from tools.baselines.strategy import Ledger, Options
from tools.bench.training.training_loop import State, Trainer, on_savers, tensors

__all__ = ["GeminiLike", "connected"]

_ROOT: Final = Path(__file__).parents[2]
_WAIT: Final = 30.0
"""Seconds for a peer to start."""


class GeminiLike(CheckFreqLike):
    """The snapshot overlaps the next forward and backward, and is sent to a peer: one at a time.

    The peer is a process on this machine, reached over loopback, which is faster than any network of the papers. It
    survives the trainer, not the machine: nothing is on a disk.
    """

    label = "Gemini-like"

    def __init__(self, folder: Path, trainer: Trainer, options: Options, ledger: Ledger) -> None:
        super().__init__(folder, trainer, options, ledger)
        self._peer = connected(folder) or _started(folder)

    def persist(self, step: int, whole: State) -> None:
        began, text = time.monotonic(), described(whole)
        parts = [raw(tensor) for _, tensor in tensors(whole)]
        self._peer.sendall(b"P" + HEAD.pack(step, len(text), sum(map(len, parts)), digest(text, *parts)))
        self._peer.sendall(text)
        for part in parts:
            self._peer.sendall(part)
        answer = bytearray(1)
        if not received(self._peer, memoryview(answer)):
            raise ConnectionError("the peer is gone")
        medium.sent(sum(map(len, parts)), began)

    def close(self) -> None:
        super().close()
        self._peer.close()

    @staticmethod
    def restore(folder: Path, trainer: Trainer) -> int | None:
        peer = connected(folder)
        if peer is None:
            return None
        with peer:
            peer.sendall(b"G")
            head = bytearray(HEAD.size)
            received(peer, memoryview(head))
            step, length, size, told = HEAD.unpack(head)
            if step < 0:
                return None
            data = bytearray(length + size)
            received(peer, memoryview(data))
        if digest(data) != told:
            raise ConnectionError("what the peer sent is not what it got")
        at = length

        def read(tensor: torch.Tensor) -> None:
            nonlocal at
            raw(tensor)[:] = data[at : at + nbytes(tensor)]
            at += nbytes(tensor)

        trainer.load(filled(data[:length], read))
        return int(step)


def connected(folder: Path) -> socket.socket | None:
    """A connection to the folder's peer; None: it has none."""
    try:
        port = json.loads((folder / NAME).read_text())["port"]
        return socket.create_connection(("127.0.0.1", port), timeout=_WAIT)
    except (OSError, ValueError):
        return None


def _started(folder: Path) -> socket.socket:
    """Start a peer, which outlives this process -> a connection."""
    (folder / NAME).unlink(missing_ok=True)
    with on_savers():
        subprocess.Popen(
            [sys.executable, "-m", "tools.baselines.gemini_peer", str(folder.resolve())],
            cwd=_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    end = time.monotonic() + _WAIT
    while time.monotonic() < end:
        if (found := connected(folder)) is not None:
            return found
        time.sleep(0.01)
    raise ConnectionError(f"no peer came within {_WAIT:g} s")
