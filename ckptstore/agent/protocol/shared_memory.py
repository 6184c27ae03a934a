"""Shared memory: a sealed memfd, whose size nobody can change, mapped by each process that has its descriptor."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Final

import numpy as np

from ckptstore.errors import AgentError
from ckptstore.host.buffers import Bytes, MappedRegion
from ckptstore.host.pages import BLOCK

__all__ = ["SharedMemory"]

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory:
    """Memory that two processes share. It lives as long as one of them maps it.

    Attributes:
        memory: all of it, page-aligned; zeros at first.
        descriptor: for the other process; `close` closes it.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        """Map a sealed memfd, and take ownership of its descriptor.

        Raises:
            AgentError: it is shorter than `nbytes`, or may shrink. Reading memory that shrank would kill this process.
        """
        self.descriptor = descriptor
        try:
            size = os.fstat(descriptor).st_size
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError as error:
            os.close(descriptor)
            raise AgentError(f"the descriptor received is not shared memory: {error.strerror}") from error
        if not sealed or size < max(nbytes, 1):
            os.close(descriptor)
            raise AgentError(f"shared memory of {size} bytes, {nbytes} needed; or it is not sealed and may shrink")
        region = MappedRegion(mmap.mmap(descriptor, size, mmap.MAP_SHARED), shared=True)
        self.memory: Bytes = np.asarray(region)

    @classmethod
    def made(cls, nbytes: int) -> SharedMemory:
        """Allocate at least `nbytes` bytes.

        Raises:
            MemoryError: there is not enough memory.
        """
        size = max(1, -(-nbytes // BLOCK)) * BLOCK
        descriptor = os.memfd_create("ckptstore", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            os.close(descriptor)
            raise MemoryError(f"cannot allocate {size} bytes of shared memory: {error.strerror}") from error
        return cls(descriptor, nbytes)

    def close(self) -> None:
        """Close the descriptor. The mapping lives as long as views of it do."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
