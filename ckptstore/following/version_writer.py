"""Writes the files of one published version: the tensors, an index, the model's other files, and the manifest at last.

A full is a folder of Hugging Face's. A delta has a safetensors file of the changed tensors, in one of two layouts:

``hf``
    Each changed tensor whole, under its name. Applying one needs a reader of safetensors and nothing else.
``slime``
    The format of slime's delta weight sync (``docs/en/advanced/delta-weight-sync.md`` of https://github.com/THUDM/slime):
    of each changed tensor a zstd frame of its bytes XOR those of the version before, as U8; XXH3-128 of the new bytes
    in the file's ``__metadata__``; version, base, encoding, compression and kind of checksum in the index.

A delta is written in one pass: the header's place is reserved, because only the bytes say which tensors changed and
how long their frames are. Memory: one tensor, and in ``slime`` its frame.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import xxhash
import zstandard

from ckptstore.errors import CkptError
from ckptstore.exchange.export import PrefixSelection, chosen_tensors, file_metadata, shards
from ckptstore.following.manifests import Encoding, Manifest, PublishedTensor, folder_of, sha256
from ckptstore.formats import dtypes
from ckptstore.formats.segment_files.layout import TensorSpec, order
from ckptstore.formats.segment_files.segment import TensorEntry
from ckptstore.host.buffers import BLOCK_BYTES, Bytes, Staging, aligned
from ckptstore.host.crash_points import crash_point
from ckptstore.host.pages import BLOCK
from ckptstore.host.progress import Tally
from ckptstore.host.threads import workers
from ckptstore.restore.tensor_streams import streams
from ckptstore.segments.block_stream import BlockStream

if TYPE_CHECKING:
    from ckptstore.backends.base import Backend
    from ckptstore.host.progress import Progress
    from ckptstore.restore.restore_source import RestoreSource

__all__ = ["LAYOUTS", "BaseUnusableError", "Layout", "VersionContent", "write_version"]

Layout = Literal["hf", "slime"]
LAYOUTS: Final[tuple[Layout, ...]] = ("hf", "slime")

_LEVEL: Final = 1
"""Level of zstd, as slime uses it."""
_THREADS: Final = 2
_ENTRY_BYTES: Final = 160
"""Most bytes of a header's entry besides name and shape: dtype, offsets, checksum, punctuation."""


class BaseUnusableError(Exception):
    """The base of a delta cannot be read, or has other bytes than were published: a full is written instead."""


@dataclass
class VersionContent:
    """What a version is made of.

    Attributes:
        found: the open checkpoint.
        selection: the tensors to publish.
        layout: how a delta is written.
        base: the manifest that a delta builds on; None: a full is written.
        base_source: opens the base's checkpoint, for ``slime``.
        files: the model's other files.
        digests: whether each tensor gets a SHA-256.
        max_shard_bytes: most bytes of tensors in a file.
        progress: called with the bytes of tensors that are read.
        names: name in the files -> the tensor's name in the checkpoint.
        entries: name in the files -> the tensor, under that name.
        tied: see `Manifest.tied`.
    """

    found: RestoreSource
    selection: str | Sequence[str] | PrefixSelection | None
    layout: Layout
    base: Manifest | None
    base_source: Callable[[], RestoreSource] | None
    files: Mapping[str, bytes]
    digests: bool
    max_shard_bytes: int
    progress: Progress | None = None
    names: dict[str, str] = field(init=False)
    entries: dict[str, TensorEntry] = field(init=False)
    tied: tuple[tuple[str, str], ...] = field(init=False)

    def __post_init__(self) -> None:
        """Choose the tensors. Raises as `chosen_tensors`."""
        names, _, self.tied = chosen_tensors(self.found, self.selection)
        self.names = {name: tensor for tensor, name in names.items()}
        self.entries = {name: replace(self.found.tensors[tensor], name=name) for name, tensor in self.names.items()}

    @property
    def kinds(self) -> tuple[Any, ...]:
        """See `Manifest.kinds`."""
        tensors = sorted((name, *_stored(entry)) for name, entry in self.entries.items())
        return tensors, self.tied, sorted((name, sha256(data)) for name, data in self.files.items())


def _stored(entry: TensorEntry) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape in the header of a safetensors file."""
    dtype = dtypes.get(entry.dtype)
    return dtype.storage, tuple(dtypes.storage_shape(dtype, entry.shape))


def write_version(target: Backend, version: int, content: VersionContent) -> tuple[list[PublishedTensor], int]:
    """Write all files of a version but its manifest -> its tensors in the order of the state, and the bytes written.

    Raises:
        BaseUnusableError: see there. What was written is to be removed.
        StorageError, CorruptionError: the medium failed, or the checkpoint is damaged.
    """
    with workers(_THREADS, "publish") as threads:
        writer = _VersionWriter(target, version, content, threads.pool)
        writer.write()
    return [writer.tensors[name] for name in content.entries], writer.written


class _VersionWriter:
    def __init__(self, target: Backend, version: int, content: VersionContent, pool: ThreadPoolExecutor) -> None:
        self.tensors: dict[str, PublishedTensor] = {}
        self.written = 0
        self._target = target
        self._folder = folder_of(version)
        self._version = version
        self._content = content
        self._pool = pool
        self._staging = Staging(3 * BLOCK_BYTES)
        self._chunks = streams(content.found)
        self._tally = Tally(content.progress, sum(entry.nbytes for entry in content.entries.values()))
        base = content.base
        self._before = {} if base is None else {tensor.name: tensor for tensor in base.tensors}
        self._base_chunks: Callable[[str], Iterator[Bytes]] | None = None

    def write(self) -> None:
        entries, limit = self._content.entries, self._content.max_shard_bytes
        groups = shards(entries, limit)
        for number, names in enumerate(groups, 1):
            self._shard(f"model-{number:05d}-of-{len(groups):05d}.safetensors", [entries[name] for name in names])
        where = {name: tensor.file for name, tensor in self.tensors.items() if tensor.file is not None}
        index = {"metadata": self._index_metadata(), "weight_map": where}
        self._create("model.safetensors.index.json", json.dumps(index).encode())
        if self._content.base is None:
            for name, data in self._content.files.items():
                self._create(name, data)

    def _index_metadata(self) -> dict[str, Any]:
        """The metadata of the index. That of a delta says how slime's receiver applies it, or that it cannot."""
        base = self._content.base
        if base is None:
            return {"total_size": sum(tensor.nbytes for tensor in self.tensors.values())}
        slime = self._content.layout == "slime"
        return {
            "version": f"{self._version:06d}",
            "base_version": f"{base.version:06d}",
            "delta_encoding": "xor" if slime else "replace",
            "compression_format": "zstd" if slime else "none",
            "checksum_format": "xxh3-128",
        }

    def _create(self, name: str, data: bytes) -> None:
        self._target.create(f"{self._folder}/{name}", data)
        self.written += len(data)

    def _shard(self, file: str, entries: Sequence[TensorEntry]) -> None:
        """Write the tensors of one file, those of a delta only if they changed. No file is left if none did."""
        specs = order([TensorSpec(entry.name, entry.dtype, tuple(entry.shape)) for entry in entries])
        start = _reserved(specs)
        size = start + sum(spec.nbytes for spec in specs)
        sink = self._target.open_sink(f"{self._folder}/{file}", size if self._content.base is None else 0)
        stream = BlockStream(sink, self._staging, self._pool, start)
        try:
            header: dict[str, Any] = {}
            for spec in specs:
                begin = stream.position - start
                tensor = self._tensor(self._content.entries[spec.name], file, stream)
                self.tensors[spec.name] = tensor
                if tensor.encoding == "base":
                    continue
                end = stream.position - start
                kind = ("U8", (end - begin,)) if tensor.encoding == "xor" else (tensor.dtype, tensor.shape)
                header[spec.name] = {"dtype": kind[0], "shape": list(kind[1]), "data_offsets": [begin, end]}
            if not header:
                stream.drain()
                sink.abort()
                return
            end = stream.finish()
            crash_point("publish.before-header")
            sink.write(0, _head(self._metadata(header), header, start).data)
            sink.seal(end)
            self.written += end
        except BaseException:
            stream.drain()
            sink.abort()
            raise

    def _metadata(self, names: Iterable[str]) -> dict[str, str]:
        if self._content.base is not None and self._content.layout == "slime":
            return {name: self.tensors[name].xxh3 for name in names}
        return file_metadata(self._content.found.ref, [], [self._content.entries[name] for name in names])

    def _tensor(self, entry: TensorEntry, file: str, stream: BlockStream) -> PublishedTensor:
        """Append a tensor's bytes to the file, or those of its delta, or none."""
        name = entry.name
        digests, before = _Digests(self._content.digests), self._before.get(name)
        if before is None:
            for chunk in self._chunks(self._content.names[name]):
                digests.update(chunk)
                stream.append(chunk)
                self._tally.advance(len(chunk))
            return self._made(entry, "raw", file, digests)
        image, at = np.empty(entry.nbytes, np.uint8), 0
        for chunk in self._chunks(self._content.names[name]):
            image[at : at + len(chunk)] = chunk
            at += len(chunk)
            self._tally.advance(len(chunk))
        digests.update(image)
        if digests.xxh3 == before.xxh3:
            return self._made(entry, "base", None, digests)
        if self._content.layout == "hf":
            stream.append(image)
            return self._made(entry, "raw", file, digests)
        self._subtract(image, before)
        frame = zstandard.ZstdCompressor(level=_LEVEL).compress(image.data)
        stream.append(np.frombuffer(frame, np.uint8))
        return self._made(entry, "xor", file, digests)

    def _subtract(self, image: Bytes, before: PublishedTensor) -> None:
        """XOR the base's bytes into `image`. Raises `BaseUnusableError`."""
        digests, at = _Digests(sha=False), 0
        try:
            for chunk in self._base(before.name):
                digests.update(chunk)
                np.bitwise_xor(image[at : at + len(chunk)], chunk, out=image[at : at + len(chunk)])
                at += len(chunk)
        except (CkptError, KeyError, ValueError) as error:
            raise BaseUnusableError(str(error)) from error
        # Prevents: a delta on other bytes than those that consumers have.
        if digests.xxh3 != before.xxh3:
            raise BaseUnusableError(f"{before.name}: the store has other bytes than version {self._version - 1}")

    def _base(self, name: str) -> Iterator[Bytes]:
        if self._base_chunks is None:
            assert self._content.base_source is not None
            found = self._content.base_source()
            tensors = {short: tensor for tensor, short in chosen_tensors(found, self._content.selection)[0].items()}
            chunks = streams(found)
            self._base_chunks = lambda one: chunks(tensors[one])
        return self._base_chunks(name)

    def _made(self, entry: TensorEntry, encoding: Encoding, file: str | None, digests: _Digests) -> PublishedTensor:
        dtype, shape = _stored(entry)
        return PublishedTensor(entry.name, dtype, shape, entry.nbytes, encoding, digests.xxh3, file, digests.sha256)


class _Digests:
    """The hashes of a tensor's bytes."""

    def __init__(self, sha: bool) -> None:
        self._xxh3 = xxhash.xxh3_128()
        self._sha256 = hashlib.sha256() if sha else None

    def update(self, data: Bytes) -> None:
        self._xxh3.update(data.data)
        if self._sha256 is not None:
            self._sha256.update(data.data)

    @property
    def xxh3(self) -> str:
        return str(self._xxh3.hexdigest())

    @property
    def sha256(self) -> str | None:
        return None if self._sha256 is None else self._sha256.hexdigest()


def _reserved(specs: Sequence[TensorSpec]) -> int:
    """Bytes that are enough for the header of a file with these tensors: a multiple of 4096."""
    each = [3 * len(json.dumps(json.dumps(spec.name))) + 22 * (len(spec.shape) + 1) + _ENTRY_BYTES for spec in specs]
    return -(-(4096 + sum(each)) // BLOCK) * BLOCK


def _head(metadata: Mapping[str, str], header: Mapping[str, Any], size: int) -> Bytes:
    """The first `size` bytes of a safetensors file: the header, padded with spaces as the format allows."""
    text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":")).encode()
    assert 8 + len(text) <= size, (len(text), size)
    block = aligned(size)
    block[:8] = np.frombuffer(struct.pack("<Q", size - 8), np.uint8)
    block[8 : 8 + len(text)] = np.frombuffer(text, np.uint8)
    block[8 + len(text) :] = ord(" ")
    return block
