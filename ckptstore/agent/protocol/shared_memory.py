"""Shared memory: a file without a name (memfd), whose size nobody can change, mapped by whoever has its descriptor."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Final

import numpy as np

from ckptstore.errors import AgentError
from ckptstore.host.buffers import Bytes
from ckptstore.host.pages import BLOCK

__all__ = ["SharedMemory"]

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory:
    """Memory that two processes have. It lives as long as anybody has it.

    Attributes:
        memory: all of it; page-aligned, zeros at first.
        descriptor: to be passed on; closed with `close`.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        """Map a sealed memfd, taking its descriptor over.

        Raises:
            AgentError: it is shorter than `nbytes`, or could become so: reading it would then kill this process.
        """
        self.descriptor = descriptor
        try:
            size = os.fstat(descriptor).st_size
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError as error:
            os.close(descriptor)
            raise AgentError(f"what came in place of shared memory is none: {error.strerror}") from error
        if not sealed or size < max(nbytes, 1):
            os.close(descriptor)
            raise AgentError(f"shared memory of {size} bytes in place of {nbytes}, or one that may shrink")
        region = mmap.mmap(descriptor, size, mmap.MAP_SHARED)
        self.memory: Bytes = np.frombuffer(region, np.uint8)

    @classmethod
    def made(cls, nbytes: int) -> SharedMemory:
        """New memory of at least so many bytes.

        Raises:
            MemoryError: there is not so much.
        """
        size = max(1, -(-nbytes // BLOCK)) * BLOCK
        descriptor = os.memfd_create("ckptstore", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            os.close(descriptor)
            raise MemoryError(f"{size} bytes of shared memory are not to be had: {error.strerror}") from error
        return cls(descriptor, nbytes)

    def close(self) -> None:
        """Let go of the descriptor; what is mapped lives as long as views of it do."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
