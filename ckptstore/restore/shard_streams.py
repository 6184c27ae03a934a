"""Streams the image of a sharded tensor from the first byte to the last, without the whole tensor in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptstore.formats import dtypes
from ckptstore.formats.segment_files.boxes import Box, boxes_of, common_elements, elements_of
from ckptstore.formats.segment_files.layout import CHUNK, chunk_extents
from ckptstore.formats.segment_files.segment import TensorEntry
from ckptstore.host.buffers import SLACK, Bytes, aligned
from ckptstore.restore.box_reads import Part
from ckptstore.restore.chains.chain import Chain, decode_chunk

__all__ = ["iterate_parts"]


def iterate_parts(tensor: TensorEntry, parts: Sequence[Part], *, verify: bool = True) -> Iterator[tuple[int, Bytes]]:
    """The chunks of a whole tensor in order, one at a time: (offset within the tensor, bytes valid until the next one).

    Elements of a shard have the same order as in the tensor. So each shard is read once, from its beginning, and a
    chunk of it is in memory as long as the current position in the tensor is within it.

    Args:
        tensor: the whole tensor, as `formats.segment_files.shards.combine_shards` describes it.
        parts: its shards, which cover it.

    Raises:
        CorruptSegmentError, StorageError: as `decode_chunk`.
    """
    itemsize = dtypes.get(tensor.dtype).itemsize
    scratch = aligned(CHUNK + SLACK)
    streams = [_Stream(chain, box, tensor.shape, itemsize) for chain, box in parts]
    chunk_memory = aligned(min(CHUNK, tensor.nbytes))
    for start, length in chunk_extents(tensor.nbytes):
        out = chunk_memory[:length]
        first, stop = start // itemsize, (start + length) // itemsize
        for stream in streams:
            stream.take(first, stop, out, scratch, verify)
        streams = [stream for stream in streams if not stream.done]
        yield start, out


class _Stream:
    """One shard, as far as it has been read. Places count elements in the whole tensor's image."""

    def __init__(self, chain: Chain, box: Box, shape: tuple[int, ...], itemsize: int) -> None:
        self._chain = chain
        self._box = box
        self._whole = Box.whole(shape)
        self._itemsize = itemsize
        self._next = 0  # chunk
        self._loaded: Bytes = aligned(0)
        self._start = 0  # elements of the shard before the loaded ones
        self._last = -1  # place of the last loaded element
        self._first = self._place(0)
        self.done = False

    def take(self, first: int, stop: int, out: Bytes, scratch: Bytes, verify: bool) -> None:
        """Copy its elements of [first, stop) of the tensor to `out`, which holds that range."""
        while self._first < stop:
            if self._last >= first:
                self._copy(first, stop, out)
            if self._last + 1 >= stop:
                return
            if self._next == len(self._chain.tensor.chunks):
                self.done = True
                self._loaded = aligned(0)
                return
            self._load(scratch, verify)

    def _load(self, scratch: Bytes, verify: bool) -> None:
        chunk = self._chain.tensor.chunks[self._next]
        self._start = self._next * CHUNK // self._itemsize
        if len(self._loaded) < chunk.logical:
            self._loaded = aligned(chunk.logical)
        self._loaded = self._loaded[: chunk.logical]
        decode_chunk(self._chain, self._next, self._loaded, scratch, verify=verify)
        self._last = self._place(self._start + chunk.logical // self._itemsize - 1)
        self._next += 1

    def _copy(self, first: int, stop: int, out: Bytes) -> None:
        elements, data = elements_of(out, self._itemsize), elements_of(self._loaded, self._itemsize)
        at = 0
        for target in boxes_of(self._whole, first, stop):
            array = elements[at : at + target.size].reshape(target.shape)
            for index, block in common_elements(data, self._start, self._box, target):
                array[index] = block
            at += target.size

    def _place(self, element: int) -> int:
        """The position in the tensor's image of an element of the shard's image."""
        found, scale = 0, 1
        for offset, length, limit in zip(
            reversed(self._box.offset), reversed(self._box.shape), reversed(self._whole.shape), strict=True
        ):
            element, within = divmod(element, length)
            found += (offset + within) * scale
            scale *= limit
        return found
