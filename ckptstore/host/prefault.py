"""Touching memory before it is needed: the first write to a page of fresh memory costs many times the copy itself.

Linux 5.14 populates memory by one system call that changes no byte (``MADV_POPULATE_WRITE``), so it may run while the
memory is in use. Without it a byte of every page is written, which only memory that nobody uses yet can bear.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from typing import Final

from ckptstore.host.buffers import Bytes
from ckptstore.host.pages import BLOCK

__all__ = ["Touching", "populate"]

_POPULATE_WRITE: Final = 23
_PIECE: Final = 32 << 20
"""Bytes at once: between two pieces it may be stopped."""

_libc: Final = ctypes.CDLL(None, use_errno=True)  # its calls let other threads of Python run


def populate(memory: Bytes) -> bool:
    """Have the system give every page of `memory` a place of its own; its bytes stay -> False: the system cannot.

    Args:
        memory: at a multiple of 4096.

    Raises:
        MemoryError: there is not so much.
    """
    if not len(memory):
        return True
    address = memory.__array_interface__["data"][0]
    call = _libc.madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    while call(address, len(memory), _POPULATE_WRITE):
        number = ctypes.get_errno()
        if number == errno.EINTR:
            continue
        if number == errno.ENOMEM:
            raise MemoryError(f"{len(memory)} bytes cannot be touched: {os.strerror(number)}")
        return False  # EINVAL: an older system; or whatever else it says, which is no reason to fail
    return True


class Touching:
    """Touches one piece of memory after the other, in a thread of the caller's choice.

    Attributes:
        touched: bytes so far, from the beginning.
    """

    def __init__(self, memory: Bytes, populate: Callable[[Bytes], bool] = populate) -> None:
        self.touched = 0
        self._memory: Bytes | None = memory
        self._populate = populate
        self._in_use = False
        self._lock = threading.Lock()  # held while bytes are written

    def use(self) -> None:
        """Somebody writes to the memory from now on."""
        if self._in_use:
            return
        with self._lock:
            self._in_use = True

    def stop(self) -> None:
        """Touch no more, and let go of the memory."""
        self._memory = None

    def run(self) -> None:
        """Touch all of it, or until it is stopped, or in use where that counts. Raises nothing."""
        while (memory := self._memory) is not None and self.touched < len(memory):
            piece = memory[self.touched : self.touched + _PIECE]
            try:
                if not self._populate(piece) and not self._write(piece):
                    break
            except MemoryError:
                break  # whoever needs it will say so
            self.touched += len(piece)
        self._memory = None

    def _write(self, piece: Bytes) -> bool:
        with self._lock:
            if self._in_use:
                return False
            piece[::BLOCK] = 0
            return True
