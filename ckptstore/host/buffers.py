"""Host memory between a state and the disk: aligned blocks under a byte budget.

O_DIRECT wants memory on 4096-byte boundaries; anonymous mappings give it, and huge pages make their first touch cheap.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ckptstore.errors import UsageError
from ckptstore.formats.layout import CHUNK
from ckptstore.host.pages import BLOCK

__all__ = ["BLOCK_BYTES", "DEFAULT_BUDGET", "SLACK", "Bytes", "Region", "Staging", "aligned", "region_of"]

Bytes = npt.NDArray[np.uint8]
"""One-dimensional bytes."""

BLOCK_BYTES: Final = 16 << 20
"""Bytes that go to the disk, or come from it, at once: below it disks lose throughput (measured: 16 MiB 1.9 GB/s,
4 MiB 1.5). It is a number of the machine's, as large as a chunk by chance: what holds chunks asks for `CHUNK`."""

SLACK: Final = 2 * BLOCK
"""Extra bytes of every block: a chunk that begins and ends inside a page is read with both whole pages, and a payload
that its codec could not shorten is a few bytes longer than what it restores."""

DEFAULT_BUDGET: Final = 64 << 20


class Region:
    """Mapped memory. It is unmapped when no array shows any of it.

    Attributes:
        nbytes: whole pages.
        address: where it begins.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self.nbytes = len(mapping)
        self.address: int = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
        self.__array_interface__: dict[str, Any] = {
            "data": (self.address, False),
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def before_unmapping(self, call: Callable[[], object]) -> None:
        """Call this once, just before the memory is unmapped; not where the interpreter ends first."""
        weakref.finalize(self, call).atexit = False

    def stay_out_of_forks(self) -> None:
        """A process that is forked from now on does not have this memory."""
        self._mapping.madvise(mmap.MADV_DONTFORK)


def region_of(memory: Bytes) -> Region | None:
    """What a part of an array that `aligned` made lies in; None: it is other memory."""
    owner: object = memory
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return owner if isinstance(owner, Region) else None


def aligned(nbytes: int) -> Bytes:
    """`nbytes` writable bytes whose address is a multiple of 4096, not yet touched; freed with their last view."""
    if nbytes == 0:
        return np.empty(0, np.uint8)
    try:
        mapping = mmap.mmap(-1, -(-nbytes // BLOCK) * BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{nbytes} bytes of memory are not to be had: {error}") from error
    if nbytes >= 4 << 20:
        with suppress(OSError):  # a kernel that was built without huge pages refuses; the memory is as good
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.asarray(Region(mapping))[:nbytes]


class Staging:
    """A pool of aligned blocks; `take` waits when the budget is spent. Blocks stay warm for reuse.

    Args:
        budget: bytes of host memory at most; two blocks at least.
        block_bytes: what a block holds; None: `BLOCK_BYTES`.

    Attributes:
        blocks: how many there are at most.
        block_bytes: what each of them holds.

    Raises:
        UsageError: the budget is below two blocks.
    """

    def __init__(self, budget: int = DEFAULT_BUDGET, block_bytes: int | None = None) -> None:
        self.block_bytes = BLOCK_BYTES if block_bytes is None else block_bytes
        if budget < 2 * self.block_bytes:
            raise UsageError(f"staging budget {budget} bytes: at least {2 * self.block_bytes} are needed")
        self.blocks = budget // self.block_bytes
        self._made = 0
        self._free: list[Bytes] = []
        self._condition = threading.Condition()

    @classmethod
    def for_chunks(cls, blocks: int = 0, budget: int = 0) -> Staging:
        """At least so many blocks, each for any chunk or payload, and for what the disk is asked for at once.

        Args:
            budget: bytes to use if that is more.

        Raises:
            UsageError: both are below two blocks.
        """
        block_bytes = max(BLOCK_BYTES, CHUNK)
        return cls(max(budget, blocks * block_bytes), block_bytes)

    def take(self) -> Bytes:
        """A block of `block_bytes + SLACK` bytes with arbitrary contents; waits until one is free."""
        with self._condition:
            while not self._free:
                if self._made < self.blocks:
                    block = aligned(self.block_bytes + SLACK)  # counted once it is there: without memory this raises
                    self._made += 1
                    return block
                self._condition.wait()
            return self._free.pop()

    def give(self, block: Bytes) -> None:
        """Return a block that `take` gave."""
        with self._condition:
            self._free.append(block)
            self._condition.notify()

    @contextmanager
    def block(self) -> Iterator[Bytes]:
        """A block for the length of a ``with``."""
        block = self.take()
        try:
            yield block
        finally:
            self.give(block)
