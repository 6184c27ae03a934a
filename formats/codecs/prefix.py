"""The codec ``prefix``: the XOR paper's encoding of optimizer moments (section 3.3, figures 7 and 8).

Small numbers have few different prefixes of sign and exponent bits. The ``bits`` highest bits of each word become an
index into a dictionary of the prefixes that occur, as narrow as the dictionary allows. The lower bits follow unchanged.
If every ``group`` consecutive words have their own dictionary, the indices are narrower still (at best zero bits).
``planes`` encodes the same prefixes with a Huffman code and is smaller and faster on every tensor measured. This codec
exists to reproduce the paper, and to analyze data.

A block is one form byte and a body (SPEC section 5.4.6)::

    0   the words, unencoded
    1   sizes       dictionary size less 1 of every group, ``bits`` bits each
        entries     the dictionaries, ascending, one group after another, ``bits`` bits each
        indices     for every width k from 1 to ``bits``: the indices of all groups whose dictionary has more than
                    2**(k-1) and at most 2**k entries, in order, k bits each
        suffixes    the lower bits of all words

Every section is packed by ``bitpacking.pack_bits``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ckptstore.errors import CorruptSegmentError, FormatError
from ckptstore.formats.codecs import bitpacking
from ckptstore.formats.codecs.block_loops import Fields
from ckptstore.formats.codecs.codec import Codec, CodecDefaults, Method, Sample, word_size
from ckptstore.formats.codecs.kernels import WORDS, Bytes, Words
from ckptstore.formats.codecs.plane_coder import Cursor
from ckptstore.formats.codecs.raw_planes import WORD_SIZES, words_of, write_tail

BITS = range(1, 13)
GROUPS = (0, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True)
class Prefix(CodecDefaults):
    """Encodes the ``bits`` highest bits of each word with a dictionary per ``group`` words (0: per block)."""

    word: int
    bits: int = 9
    group: int = 0
    name: ClassVar[str] = "prefix"
    base_ratio: ClassVar[int] = 0
    methods: ClassVar[tuple[Method, ...]] = (
        Method("prefix", "#CC79A7", rank=50),
        Method("prefix-grouped", "#AA4499", rank=60),
    )

    @property
    def params(self) -> dict[str, Any]:
        """See `Codec.params`."""
        return {"word": self.word, "bits": self.bits} | ({"group": self.group} if self.group else {})

    @staticmethod
    def parse(params: Mapping[str, Any]) -> Prefix:
        """Make the codec of JSON parameters. Raises ``FormatError``."""
        fields = Fields(Prefix.name, params)
        word, bits = fields.integer("word", None, WORD_SIZES), fields.integer("bits", None, BITS)
        group = fields.integer("group", 0, GROUPS)
        fields.finish()
        if bits >= 8 * word:
            raise FormatError(f"codec prefix: {word}-byte words have no prefix of {bits} bits below a suffix")
        return Prefix(word, bits, group)

    @property
    def method(self) -> str:
        """See `Codec.method`."""
        return self.methods[bool(self.group)].name

    @staticmethod
    def suited(dtype: str, samples: Sequence[Sample], *, context: bool) -> list[Codec]:
        """See `Codec.suited`."""
        del samples, context
        word = word_size(dtype)
        if word == 1:
            return []
        return [Prefix(word, bits, group) for bits in (8, 9, 10, 12) for group in (0, 256, 1024, 4096)]

    def write(self, block: Bytes, base: Bytes, out: Bytes, at: int, level: int) -> int:
        """See `Codec.write`."""
        del base, level
        words, tail = words_of(block, self.word)
        if len(words):
            pieces = self._sections(words)
            if sum(map(len, pieces)) < words.nbytes:
                out[at] = 1
                at += 1
                for piece in pieces:
                    out[at : at + len(piece)] = piece
                    at += len(piece)
            else:
                out[at] = 0
                out[at + 1 : at + 1 + words.nbytes] = words.view(np.uint8)
                at += 1 + words.nbytes
        return write_tail(tail, out, at)

    def _sections(self, words: Words) -> list[Bytes]:
        suffix = 8 * self.word - self.bits
        prefixes = (words >> suffix).astype(np.intp)
        groups, owner = self._groups(len(words))
        slots = (owner << self.bits) + prefixes
        present = np.zeros(groups << self.bits, np.bool_)
        present[slots] = True
        table = present.reshape(groups, -1)
        sizes = table.sum(axis=1)
        ranks = table.cumsum(axis=1, dtype=np.uint16).reshape(-1)
        indices = ranks[slots] - np.uint16(1)
        entries = (np.flatnonzero(present) & ((1 << self.bits) - 1)).astype(np.uint16)
        sections = [
            bitpacking.pack_bits((sizes - 1).astype(np.uint16), self.bits),
            bitpacking.pack_bits(entries, self.bits),
        ]
        widths = _widths(sizes)[owner]
        for width in range(1, self.bits + 1):
            chosen = indices[widths == width]
            if len(chosen):
                sections.append(bitpacking.pack_bits(chosen, width))
        return [*sections, bitpacking.pack_bits(words, suffix)]

    def read(self, cursor: Cursor, base: Bytes, out: Bytes) -> None:
        """See `Codec.read`."""
        del base
        words, tail = words_of(out, self.word)
        if len(words):
            form = cursor.byte()
            if form > 1:
                raise CorruptSegmentError(f"unknown form {form} of a prefix block")
            if form:
                self._read_sections(cursor, words)
            else:
                np.copyto(words.view(np.uint8), cursor.take(words.nbytes))
        tail[:] = cursor.take(len(tail))

    def _read_sections(self, cursor: Cursor, words: Words) -> None:
        groups, owner = self._groups(len(words))
        sizes = _unpack(cursor, groups, self.bits).astype(np.intp) + 1
        total = int(sizes.sum())
        entries = _unpack(cursor, total, self.bits)
        starts = np.cumsum(sizes) - sizes
        widths = _widths(sizes)[owner]
        indices = np.zeros(len(words), np.intp)
        for width in range(1, self.bits + 1):
            chosen = np.flatnonzero(widths == width)
            if len(chosen):
                indices[chosen] = _unpack(cursor, len(chosen), width)
        if (indices >= sizes[owner]).any():
            raise CorruptSegmentError("a prefix index points past its dictionary")
        suffix = 8 * self.word - self.bits
        packed = cursor.take(bitpacking.packed_size(len(words), suffix))
        np.copyto(words, bitpacking.unpack_bits(packed, len(words), suffix, self.word))
        np.bitwise_or(words, entries[starts[owner] + indices].astype(WORDS[self.word]) << suffix, out=words)

    def _groups(self, count: int) -> tuple[int, npt.NDArray[np.intp]]:
        """The number of groups of ``count`` words, and the group of each word."""
        if not self.group:
            return 1, np.zeros(count, np.intp)
        return -(-count // self.group), np.arange(count) // self.group


def distinct_prefixes(words: Words, bits: int) -> int:
    """The number of different prefixes of ``bits`` bits in the words (the paper's figure 7)."""
    present = np.zeros(1 << bits, np.bool_)
    present[words >> (8 * words.itemsize - bits)] = True
    return int(np.count_nonzero(present))


def _widths(sizes: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """The bits of an index into dictionaries of these sizes; 0 for one entry."""
    return np.searchsorted(1 << np.arange(17), sizes).astype(np.intp)


def _unpack(cursor: Cursor, count: int, bits: int) -> npt.NDArray[np.uint16]:
    packed = cursor.take(bitpacking.packed_size(count, bits))
    return bitpacking.unpack_bits(packed, count, bits, 2).astype(np.uint16)
