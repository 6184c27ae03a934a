"""Prefault memory before it is needed: the first write to a fresh page costs many times as much as the copy.

Linux 5.14 can populate memory with one system call that changes no byte (``MADV_POPULATE_WRITE``). It may run while
the memory is in use. Without that call a byte of every page is written, which is only safe for unused memory.
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

__all__ = ["Prefault", "populate"]

_POPULATE_WRITE: Final = 23
_PIECE: Final = 32 << 20
"""Bytes populated per call. Prefaulting can be stopped between two calls."""

_libc: Final = ctypes.CDLL(None, use_errno=True)  # its calls let other threads of Python run


def populate(memory: Bytes) -> bool:
    """Have the kernel allocate every page of `memory` without changing its bytes.

    Args:
        memory: its address is a multiple of 4096.

    Returns:
        Whether it worked. False: this kernel cannot do it.

    Raises:
        MemoryError: there is not enough memory.
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
            raise MemoryError(f"cannot prefault {len(memory)} bytes: {os.strerror(number)}")
        return False  # EINVAL: an older kernel. No other error is a reason to fail, either
    return True


class Prefault:
    """Prefaults a buffer piece by piece, in the thread that calls `run`.

    Attributes:
        touched: bytes prefaulted so far, from the start of the buffer.
    """

    def __init__(self, memory: Bytes, populate: Callable[[Bytes], bool] = populate) -> None:
        self.touched = 0
        self._memory: Bytes | None = memory
        self._populate = populate
        self._in_use = False
        self._lock = threading.Lock()  # held while `_write` writes bytes

    def use(self) -> None:
        """Note that the memory is in use from now on: `run` must not write to it any more."""
        if self._in_use:
            return
        with self._lock:
            self._in_use = True

    def stop(self) -> None:
        """Stop prefaulting and drop the reference to the memory."""
        self._memory = None

    def run(self) -> None:
        """Prefault until all is done or `stop` is called; without the system call, until `use` is called.

        Raises nothing.
        """
        while (memory := self._memory) is not None and self.touched < len(memory):
            piece = memory[self.touched : self.touched + _PIECE]
            try:
                if not self._populate(piece) and not self._write(piece):
                    break
            except MemoryError:
                break  # the code that needs the memory reports the error
            self.touched += len(piece)
        self._memory = None

    def _write(self, piece: Bytes) -> bool:
        with self._lock:
            if self._in_use:
                return False
            piece[::BLOCK] = 0
            return True
