"""Models a file system and the operations that change it: the vocabulary of the crash tools.

Folders and files are numbered *nodes*; node 0 is ``/``. A name in a folder points to a node, and several names may
point to one file. `Tree` is a file system in use, `Image` a frozen one, an `Operation` a change to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = 0
LINE = 64
"""Size of a cache line in bytes: stores to mapped memory reach the medium in whole lines, each at its own time."""


@dataclass(frozen=True, slots=True)
class Write:
    """Write `data` at `offset` of a file."""

    node: int
    offset: int
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Truncate:
    """Set a file's size to `size`; where the file grows, it is filled with zeros."""

    node: int
    size: int


@dataclass(frozen=True, slots=True)
class Allocate:
    """Extend a file to at least `size` bytes with zeros (``fallocate``)."""

    node: int
    size: int


@dataclass(frozen=True, slots=True)
class Store:
    """Store `data` at `offset` of a mapped file. No line is durable before a `Drain`. A store never extends the file.

    `number` identifies the store.
    """

    node: int
    offset: int
    data: bytes = field(repr=False)
    number: int = 0


@dataclass(frozen=True, slots=True)
class Drain:
    """These stores have reached the medium, by a fence or msync. The file's length and name need a `Sync`."""

    stores: frozenset[int]


@dataclass(frozen=True, slots=True)
class Name:
    """Create a name for a new file or a new folder, or (``link``) a second name for a file."""

    folder: int
    name: str
    node: int
    kind: Literal["file", "folder", "link"] = "link"


@dataclass(frozen=True, slots=True)
class Unname:
    """Remove a name (``unlink``)."""

    folder: int
    name: str
    node: int


@dataclass(frozen=True, slots=True)
class Rename:
    """Replace a name by another in the same folder, atomically."""

    folder: int
    name: str
    target: str
    node: int


@dataclass(frozen=True, slots=True)
class Sync:
    """fsync or fdatasync of a file (contents and size), or fsync of a folder (its names)."""

    node: int


@dataclass(frozen=True, slots=True)
class SyncFailed:
    """A sync that reported an error. The data that it should have saved may be lost, even if a later sync succeeds."""

    node: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Not an operation: the harness notes that from here on `label` is promised to survive."""

    label: Hashable


ContentOperation = Write | Truncate | Allocate | Store
NameOperation = Name | Unname | Rename
Operation = ContentOperation | NameOperation | Sync | SyncFailed | Drain | Acknowledge


@dataclass(frozen=True, slots=True)
class Blob:
    """A file's bytes, hashed once."""

    data: bytes = field(repr=False)
    digest: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", hashlib.blake2b(self.data, digest_size=16).digest())


EMPTY_FILE = Blob(b"")


@dataclass(frozen=True, slots=True)
class Image:
    """A frozen file system. Nodes without a name are not part of it.

    Attributes:
        folders: names and nodes in each folder.
        files: contents of each file.
    """

    folders: Mapping[int, Mapping[str, int]] = field(default_factory=lambda: {ROOT: {}})
    files: Mapping[int, Blob] = field(default_factory=dict)

    def walk(self, folder: int = ROOT, path: str = "") -> Iterator[tuple[str, Blob | None]]:
        """Every absolute path with the file's contents, or None for a folder; sorted, a folder before its entries."""
        for name, node in sorted(self.folders[folder].items()):
            if node in self.folders:
                yield f"{path}/{name}", None
                yield from self.walk(node, f"{path}/{name}")
            else:
                yield f"{path}/{name}", self.files[node]

    def digest(self) -> bytes:
        """Equal for images with the same paths and contents, whatever the nodes' numbers."""
        state = hashlib.blake2b(digest_size=16)
        for path, blob in self.walk():
            state.update(f"{path}\0{'/' if blob is None else len(blob.data)}\0".encode())
            state.update(b"" if blob is None else blob.digest)
        return state.digest()

    def materialize(self, target: Path) -> None:
        """Write everything below the existing folder `target` of a real file system."""
        for path, blob in self.walk():
            place = target / path[1:]
            if blob is None:
                place.mkdir()
            else:
                place.write_bytes(blob.data)


class Tree:
    """A file system in use. Starts as `image`, and copies contents only when they are written."""

    def __init__(self, image: Image) -> None:
        self.folders = {node: dict(names) for node, names in image.folders.items()}
        self.files: dict[int, Blob | bytearray] = dict(image.files)

    def contents(self, node: int) -> bytes | bytearray:
        """The file's bytes; do not change them."""
        held = self.files[node]
        return held.data if isinstance(held, Blob) else held

    def _writable(self, node: int) -> bytearray:
        held = self.files[node]
        if isinstance(held, Blob):
            self.files[node] = held = bytearray(held.data)
        return held

    def apply(self, operation: Operation) -> None:
        """Carry out one operation."""
        match operation:
            case Write(node, offset, data):
                held = self._writable(node)
                grow(held, offset)
                held[offset : offset + len(data)] = data
            case Truncate(node, size):
                held = self._writable(node)
                del held[size:]
                grow(held, size)
            case Allocate(node, size):
                grow(self._writable(node), size)
            case Store(node, offset, data):
                put(self._writable(node), offset, data)
            case Name() | Unname() | Rename():
                if isinstance(operation, Name):
                    give_birth(operation, self.folders, self.files)
                rename(self.folders[operation.folder], operation)
            case Sync() | SyncFailed() | Drain() | Acknowledge():
                pass

    def freeze(self) -> Image:
        """An image of the present state."""
        files = {node: held if isinstance(held, Blob) else Blob(bytes(held)) for node, held in self.files.items()}
        return Image({node: dict(names) for node, names in self.folders.items()}, files)


def grow(data: bytearray, size: int) -> None:
    """Extend `data` to at least `size` bytes with zeros."""
    if len(data) < size:
        data.extend(bytes(size - len(data)))


def put(held: bytearray, offset: int, data: bytes) -> None:
    """Replace bytes of `held` without extending it."""
    end = min(offset + len(data), len(held))
    if offset < end:
        held[offset:end] = data[: end - offset]


def give_birth(operation: Name, folders: dict[int, dict[str, int]], files: dict[int, Any]) -> None:
    """Add the new, empty file or folder to the nodes, if the operation makes one."""
    if operation.kind == "file":
        files[operation.node] = EMPTY_FILE
    elif operation.kind == "folder":
        folders[operation.node] = {}


def rename(names: dict[str, int], operation: NameOperation) -> None:
    """Carry out one operation on a folder's names. A name that a crash removed is ignored."""
    match operation:
        case Name(_, name, node, _):
            names[name] = node
        case Unname(_, name, node):
            if names.get(name) == node:
                del names[name]
        case Rename(_, name, target, node):
            if names.get(name) == node:
                del names[name]
                names[target] = node
