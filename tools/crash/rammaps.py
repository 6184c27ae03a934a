"""Shared mappings of the files of a `RamPosix`: real memory that a backend writes, and the stores made there."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator
from typing import Final

from ckptstore.backends.local_disk.posix import address_of
from tools.crash.disk import LINE

__all__ = ["SharedMaps"]

_ZEROS: Final = bytes(1 << 16)


class _Memory:
    """The pages of one mapped file: several mappings of it see one another's stores."""

    def __init__(self, contents: bytes | bytearray) -> None:
        self.fd = os.memfd_create("mapped")
        weakref.finalize(self, os.close, self.fd)
        self.size = 0
        self.grow(len(contents))
        os.pwrite(self.fd, contents, 0)

    def grow(self, size: int) -> None:
        # It never shrinks when the file is truncated: a store past the end must be noticed, not crash the tests.
        if size > self.size:
            os.ftruncate(self.fd, size)
            self.size = size

    def clear(self, begin: int) -> None:
        while begin < self.size:
            begin += os.pwrite(self.fd, _ZEROS[: self.size - begin], begin)


class SharedMaps:
    """Which memory belongs to which file. Not thread-safe: its owner has a lock."""

    def __init__(self) -> None:
        self._files: dict[int, _Memory] = {}
        self._maps: dict[int, tuple[int, int, int]] = {}  # address -> node, offset, size

    @property
    def nodes(self) -> list[int]:
        """Mapped files."""
        return list(self._files)

    def map(self, node: int, contents: bytes | bytearray, offset: int, size: int) -> memoryview:
        """Map `size` bytes of the file `node` from `offset` on."""
        if node not in self._files:
            self._files[node] = _Memory(contents)
        memory = memoryview(mmap.mmap(self._files[node].fd, size, offset=offset))
        self._maps[address_of(memory)] = node, offset, size
        return memory

    def unmap(self, memory: memoryview) -> None:
        """Unmap a whole mapping; the last one also removes the file."""
        node, _, _ = self._maps.pop(address_of(memory))
        if all(other != node for other, _, _ in self._maps.values()):
            del self._files[node]

    def place(self, memory: memoryview) -> tuple[int, int]:
        """The file and offset of a part of a mapping. Raises `KeyError`."""
        address = address_of(memory)
        for begin, (node, offset, size) in self._maps.items():
            if begin <= address and address + len(memory) <= begin + size:
                return node, offset + address - begin
        raise KeyError(address)

    def write(self, node: int, offset: int, data: bytes) -> None:
        """Note a write to the file by other means, if it is mapped."""
        if node in self._files:
            self._files[node].grow(offset + len(data))
            os.pwrite(self._files[node].fd, data, offset)

    def resize(self, node: int, size: int) -> None:
        """Note a new length of the file, if it is mapped."""
        if node in self._files:
            self._files[node].grow(size)
            self._files[node].clear(size)

    def stored(self, node: int, contents: bytes | bytearray, bounds: tuple[int, ...]) -> Iterator[tuple[int, bytes]]:
        """Runs of lines in which the memory of a file differs from `contents`, divided at `bounds`."""
        held = os.pread(self._files[node].fd, len(contents), 0)
        if held == contents:
            return
        begin: int | None = None
        for line in range(0, len(contents) + LINE, LINE):
            differs = held[line : line + LINE] != contents[line : line + LINE]
            if begin is not None and (not differs or any(line <= bound < line + LINE for bound in bounds)):
                yield begin, held[begin:line]
                begin = None
            if differs and begin is None:
                begin = line
