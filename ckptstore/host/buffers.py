"""Aligned host memory between a state and the disk, as blocks under a byte budget.

O_DIRECT needs memory on 4096-byte boundaries. Anonymous mappings have it, and huge pages make the first touch cheap.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import numpy as np

from ckptstore.errors import UsageError
from ckptstore.formats.segment_files.layout import CHUNK
from ckptstore.host.pages import BLOCK

__all__ = ["BLOCK_BYTES", "DEFAULT_BUDGET", "SLACK", "Bytes", "MappedRegion", "Staging", "aligned", "region_of"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
"""One-dimensional bytes."""

BLOCK_BYTES: Final = 16 << 20
"""Bytes of one disk read or write. Smaller ones lose throughput (measured: 16 MiB 1.9 GB/s, 4 MiB 1.5 GB/s).

This is a property of the machine. It equals the chunk size by coincidence: code that holds chunks uses `CHUNK`."""

SLACK: Final = 2 * BLOCK
"""Extra bytes of every block. A chunk that begins and ends inside a page is read with both whole pages. A payload that
its codec could not shorten is a few bytes longer than the decoded chunk."""

DEFAULT_BUDGET: Final = 64 << 20
"""Default budget of `Staging`, in bytes."""


class MappedRegion:
    """Mapped memory. It is unmapped when no array refers to it any more.

    Attributes:
        nbytes: size, whole pages.
        address: first address.
    """

    def __init__(self, mapping: mmap.mmap, *, shared: bool = False) -> None:
        """
        Args:
            shared: the mapping is shared with other processes.
        """
        self._mapping = mapping
        self._shared = shared
        self.nbytes = len(mapping)
        self.address: int = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
        self.__array_interface__: dict[str, Any] = {
            "data": (self.address, False),
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def before_unmapping(self, call: Callable[[], object]) -> None:
        """Call `call` once, just before the memory is unmapped. It is not called at interpreter exit."""
        weakref.finalize(self, call).atexit = False

    def stay_out_of_forks(self) -> None:
        """Exclude this memory from processes that are forked from now on, unless a fork shares it without a copy."""
        if not self._shared:
            self._mapping.madvise(mmap.MADV_DONTFORK)


def region_of(memory: Bytes) -> MappedRegion | None:
    """The region of an array over a `MappedRegion`, or of a part of one. None: it is other memory."""
    owner: object = memory
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return owner if isinstance(owner, MappedRegion) else None


def aligned(nbytes: int) -> Bytes:
    """Map `nbytes` writable bytes at a multiple of 4096. They are untouched, and unmapped with their last view.

    Raises:
        MemoryError: the system does not have enough memory.
    """
    if nbytes == 0:
        return np.empty(0, np.uint8)
    try:
        mapping = mmap.mmap(-1, -(-nbytes // BLOCK) * BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"cannot allocate {nbytes} bytes of memory: {error}") from error
    if nbytes >= 4 << 20:
        with suppress(OSError):  # a kernel built without huge pages refuses; the memory works nevertheless
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.asarray(MappedRegion(mapping))[:nbytes]


class Staging:
    """A pool of aligned blocks. `take` waits when the budget is used up. Returned blocks are reused.

    Args:
        budget: most bytes of host memory; at least two blocks.
        block_bytes: bytes of a block; None: `BLOCK_BYTES`.

    Attributes:
        blocks: largest number of blocks.
        block_bytes: bytes of a block.

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
        """Make a pool of blocks that hold any chunk or payload, and one disk read or write.

        Args:
            blocks: smallest number of blocks.
            budget: bytes of the pool, if that makes more blocks.

        Raises:
            UsageError: both arguments make less than two blocks.
        """
        block_bytes = max(BLOCK_BYTES, CHUNK)
        return cls(max(budget, blocks * block_bytes), block_bytes)

    def take(self) -> Bytes:
        """Take a block of `block_bytes + SLACK` bytes with arbitrary contents. Waits until one is free.

        Raises:
            MemoryError: the system does not have enough memory.
        """
        with self._condition:
            while not self._free:
                if self._made < self.blocks:
                    block = aligned(self.block_bytes + SLACK)  # may raise MemoryError, so count it afterwards
                    self._made += 1
                    return block
                self._condition.wait()
            return self._free.pop()

    def give(self, block: Bytes) -> None:
        """Return a block that `take` returned."""
        with self._condition:
            self._free.append(block)
            self._condition.notify()

    @contextmanager
    def block(self) -> Iterator[Bytes]:
        """Take a block for the length of a ``with`` block."""
        block = self.take()
        try:
            yield block
        finally:
            self.give(block)
