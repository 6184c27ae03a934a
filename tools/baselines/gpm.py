"""GPM's mechanism, as the papers describe it: the state is copied straight into mapped persistent memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import torch

from tools.baselines import medium
from tools.baselines.skeleton import described, filled, nbytes
from tools.baselines.strategy import Ledger, Options, Strategy
from tools.bench.machine import filesystem_type
from tools.bench.storage.pagecache import fsync
from tools.bench.training.training_loop import State, Trainer, tensors
from tools.crash.media import assuming, obstacle

__all__ = ["GpmLike"]

_FILE: Final = "gpm.pm"
_ROOT: Final = 4096
_ALIGNED: Final = 4096
_SLOTS: Final = 2


class GpmLike(Strategy):
    """Training waits while its state is copied into one of two slots of a mapped region, and while that is persisted.

    On a file system in memory the region is persistent memory as far as it can be simulated: libpmem's flushes and
    fences. Elsewhere it is a mapped file and msync, as in PCcheck's comparison. The root is one aligned word: it names
    the valid slot, and is written when that slot is durable.
    """

    label = "GPM-like"

    def __init__(self, folder: Path, trainer: Trainer, options: Options, ledger: Ledger) -> None:
        super().__init__(folder, trainer, options, ledger)
        self.region: _Region | None = None

    def save(self, step: int) -> None:
        state = self.trainer.state()
        self.trainer.synchronize()
        if self.region is None:
            self.region = _Region.made(self.folder / _FILE, state)
        medium.taken(self.region.save(state))
        self.ledger.done(step)

    @staticmethod
    def restore(folder: Path, trainer: Trainer) -> int | None:
        if not (folder / _FILE).exists():
            return None
        found = _Region(folder / _FILE).load()
        if found is None:
            return None
        step, state = found
        trainer.load(state)
        return step


class _Region:
    """A mapped file: the root, and two slots of a description, with its length, and the tensors."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._memory = memoryview(self._map)
        self._root = np.frombuffer(self._memory, np.int64, 1)  # one store of a word is never torn
        self._slot = (len(self._memory) - _ROOT) // _SLOTS
        self.persist = self._persisting(path)

    @classmethod
    def made(cls, path: Path, state: State) -> _Region:
        """A region for states of this size; an existing one of that size is used further."""
        room = _rounded(4 * len(described(state)) + 8)
        size = _ROOT + _SLOTS * (room + _rounded(sum(_rounded_tensor(one) for _, one in tensors(state))))
        if not path.exists() or path.stat().st_size != size:
            partial = path.with_suffix(".partial")
            with partial.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
                os.fsync(file.fileno())
            partial.rename(path)
            fsync(path.parent)
        return cls(path)

    def _persisting(self, path: Path) -> Callable[[int, int], None]:
        """A function that makes bytes from begin to end durable."""
        library = assuming() if filesystem_type(path.parent) == "tmpfs" and not obstacle("pmem") else None
        if library is None:
            return lambda begin, end: self._map.flush(begin // _ALIGNED * _ALIGNED, end - begin // _ALIGNED * _ALIGNED)

        def persist(begin: int, end: int) -> None:
            library.flush(self._memory[begin:end])
            library.drain()

        return persist

    def save(self, state: State) -> int:
        """Save a state -> the bytes that were stored."""
        slot = 1 - self._valid() if self._root[0] else 0
        begin = _ROOT + slot * self._slot
        text = described(state)
        at = begin + _rounded(4 * len(text) + 8)
        for _, tensor in tensors(state):
            self._view(at, tensor).copy_(tensor)
            at += _rounded_tensor(tensor)
        if at > begin + self._slot:
            raise ValueError("the state has grown since its region was made")
        room = np.array([len(text)], np.int64).tobytes() + text
        self._memory[begin : begin + len(room)] = room
        self.persist(begin, at)
        self._root[0] = 1 + slot
        self.persist(0, 8)
        return at - begin

    def _valid(self) -> int:
        return int(self._root[0]) - 1

    def _view(self, at: int, like: torch.Tensor) -> torch.Tensor:
        if not like.numel():
            return torch.empty(like.shape, dtype=like.dtype)
        return torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=at).view(like.shape)

    def load(self) -> tuple[int, State] | None:
        """The step and state of the valid slot; its tensors are copies."""
        if not self._root[0]:
            return None
        begin = _ROOT + self._valid() * self._slot
        length = int(np.frombuffer(self._memory, np.int64, 1, begin)[0])
        text = bytes(self._memory[begin + 8 : begin + 8 + length])
        at = begin + _rounded(4 * length + 8)

        def read(tensor: torch.Tensor) -> None:
            nonlocal at
            tensor.copy_(self._view(at, tensor))
            at += _rounded_tensor(tensor)

        state = filled(text, read)
        return state["step"], state


def _rounded(number: int) -> int:
    return -(-number // _ALIGNED) * _ALIGNED


def _rounded_tensor(tensor: torch.Tensor) -> int:
    return -(-nbytes(tensor) // 64) * 64
