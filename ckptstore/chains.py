"""Restoring tensors through chains: the full's bytes, and every delta folded onto them, chunk by chunk.

Each chunk of a tensor has its own chain of layers, the oldest self-contained, the others deltas on the one before.
Threads take whole chunks: read a layer, check its hash, fold it into place, read the next. No state between the base
and the target ever exists, and memory beyond the target is one payload per thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

from ckptstore.backends.base import BLOCK
from ckptstore.formats import codecs, hashing
from ckptstore.formats.codecs import Codec
from ckptstore.formats.errors import CorruptSegmentError, FormatError
from ckptstore.formats.layout import CHUNK
from ckptstore.formats.segment import RAW, TensorEntry
from ckptstore.reading import Progress, SegmentReader, run_all
from ckptstore.staging import BLOCK_BYTES, Bytes, Staging, aligned

__all__ = ["Chain", "Layer", "decode_chunk", "fold_tensors", "iterate_chain", "master_of"]

_JOB_BYTES = 2 << 20
"""Logical bytes of neighbouring small chunks that one thread takes at once."""


@dataclass(frozen=True)  # no slots: the codec is made once, not for every chunk
class Layer:
    """One tensor of one encoding, in the segment that holds it."""

    tensor: TensorEntry
    reader: SegmentReader

    @cached_property
    def codec(self) -> Codec:
        """How its chunks are coded. Raises `FormatError` for a codec that this version does not know."""
        try:
            return codecs.codec(self.tensor.codec, {k: v for k, v in self.tensor.params.items() if k != "of"})
        except FormatError as error:
            raise FormatError(f"{self.reader.entry.key}: tensor {self.tensor.name!r}: {error}") from error


@dataclass(frozen=True, slots=True)
class Chain:
    """What restores one tensor: layers in the order of application; the first needs no base.

    Attributes:
        layers: at least one.
        master: the chain of the tensor that the first layer derives from (codec ``derive``), or None.
    """

    layers: tuple[Layer, ...]
    master: Chain | None = None

    @property
    def tensor(self) -> TensorEntry:
        """The tensor as the last layer describes it."""
        return self.layers[-1].tensor

    @property
    def raw(self) -> bool:
        """Whether its bytes lie in a segment as they are."""
        return len(self.layers) == 1 and self.tensor.codec == RAW

    @property
    def stored(self) -> int:
        """Stored bytes that restoring it reads."""
        own = sum(layer.tensor.stored for layer in self.layers)
        return own if self.master is None else own + self.master.stored

    @property
    def where(self) -> str:
        """Names segment and tensor in errors."""
        return f"{self.layers[-1].reader.entry.key}: tensor {self.tensor.name!r}"


def master_of(tensor: TensorEntry) -> str | None:
    """Name of the tensor of the same step that `tensor` is a rounded copy of, or None."""
    return str(tensor.params["of"]) if tensor.codec == "derive" and "of" in tensor.params else None


def decode_chunk(chain: Chain, index: int, out: Bytes, scratch: Bytes, *, verify: bool = True) -> None:
    """Restore chunk `index` of a tensor into `out`, exactly as long as the chunk.

    Args:
        scratch: memory for one payload; contents do not matter.
        verify: check every payload and the result. Without it, damage may give wrong bytes, or an error.

    Raises:
        CorruptSegmentError: a payload or the result is not what was written; names segment, tensor and offset.
        StorageError: the medium failed.
    """
    for number, layer in enumerate(chain.layers):
        codec = layer.codec
        base: Bytes | None = out if codec.base_ratio else None
        if not number and codec.base_ratio:
            if chain.master is None:
                raise CorruptSegmentError(f"{chain.where}: its chain begins with a delta")
            base = _master_bytes(chain.master, index, 2 * len(out), scratch, verify)
        payload = _payload(layer, index, scratch, verify)
        try:
            codecs.decode(codec, payload, len(out), base, out)
        except (CorruptSegmentError, FormatError, ValueError) as error:
            raise CorruptSegmentError(f"{chain.where}: chunk {index} of {layer.reader.entry.key}: {error}") from error
    _check(chain, index, out, verify)


def _master_bytes(master: Chain, index: int, length: int, scratch: Bytes, verify: bool) -> Bytes:
    """The `length` bytes of a master from which chunk `index` of its copy, half as long, is rounded."""
    whole = aligned(length)
    begin = 2 * index * CHUNK
    at = 0
    for number in range(begin // CHUNK, len(master.tensor.chunks)):
        logical = master.tensor.chunks[number].logical
        if at == length:
            break
        decode_chunk(master, number, whole[at : at + logical], scratch, verify=verify)
        at += logical
    return whole


def _payload(layer: Layer, index: int, scratch: Bytes, verify: bool) -> Bytes:
    chunk = layer.tensor.chunks[index]
    if chunk.length > BLOCK_BYTES + BLOCK:
        raise CorruptSegmentError(f"{layer.reader.entry.key}: a chunk of {chunk.length} stored bytes")
    # Memory that agrees with the file modulo the page size lets the backend read past the cache.
    phase = chunk.offset % BLOCK
    payload = scratch[phase : phase + chunk.length]
    if len(payload) != chunk.length:
        raise CorruptSegmentError(
            f"{layer.reader.entry.key}: {chunk.length} stored bytes for a chunk of {chunk.logical}"
        )
    layer.reader.source.read_into(chunk.offset, payload.data)
    if verify and hashing.chunk_hash(payload.data) != chunk.stored_hash:
        raise CorruptSegmentError(
            f"{layer.reader.entry.key}: tensor {layer.tensor.name!r}: checksum mismatch in bytes "
            f"{chunk.offset}..{chunk.offset + chunk.length} of the file"
        )
    return payload


def _check(chain: Chain, index: int, out: Bytes, verify: bool) -> None:
    expected = chain.tensor.chunks[index].decoded_hash
    if verify and expected is not None and hashing.chunk_hash(out.data) != expected:
        raise CorruptSegmentError(f"{chain.where}: chunk {index}: its chain gives other bytes than were saved")


def fold_tensors(
    targets: Mapping[str, tuple[Chain, Callable[[int, Bytes], None] | Bytes]],
    pool: ThreadPoolExecutor,
    staging: Staging,
    *,
    verify: bool = True,
    progress: Progress | None = None,
) -> None:
    """Restore tensors in parallel.

    Args:
        targets: name -> its chain, and where it goes: memory of its size, or a function called with (offset within the
            tensor, bytes), from several threads, for bytes that were verified.
        pool: threads.
        staging: at least two blocks for every thread.
        progress: called with the number of logical bytes just restored.
    """
    work = [_job(group, staging, verify, progress) for group in _groups(targets)]
    run_all(pool, work)


_Piece = tuple[Chain, int, int, int, "Callable[[int, Bytes], None] | Bytes"]  # chain, chunk, start, length, target


def _groups(targets: Mapping[str, tuple[Chain, Callable[[int, Bytes], None] | Bytes]]) -> Iterator[list[_Piece]]:
    group: list[_Piece] = []
    filled = 0
    for chain, target in targets.values():
        start = 0
        for index, chunk in enumerate(chain.tensor.chunks):
            if group and filled + chunk.logical > _JOB_BYTES:
                yield group
                group, filled = [], 0
            group.append((chain, index, start, chunk.logical, target))
            filled += chunk.logical
            start += chunk.logical
    if group:
        yield group


def _job(group: Sequence[_Piece], staging: Staging, verify: bool, progress: Progress | None) -> Callable[[], None]:
    def work() -> None:
        with staging.block() as scratch, staging.block() as room:
            for chain, index, start, length, target in group:
                if callable(target):
                    out = room[:length]
                    decode_chunk(chain, index, out, scratch, verify=verify)
                    target(start, out)
                else:
                    decode_chunk(chain, index, target[start : start + length], scratch, verify=verify)
                if progress is not None:
                    progress(length)

    return work


def iterate_chain(chain: Chain, *, verify: bool = True) -> Iterator[tuple[int, Bytes]]:
    """The tensor's chunks in order, one at a time: (offset within the tensor, bytes valid until the next)."""
    longest = max((chunk.logical for chunk in chain.tensor.chunks), default=0)
    room = aligned(longest)
    scratch = aligned(min(BLOCK_BYTES, 2 * longest + BLOCK) + 2 * BLOCK)
    start = 0
    for index, chunk in enumerate(chain.tensor.chunks):
        out = room[: chunk.logical]
        decode_chunk(chain, index, out, scratch, verify=verify)
        yield start, out
        start += chunk.logical
