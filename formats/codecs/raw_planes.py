"""The codecs without a base: ``raw`` stores the bytes, ``planes`` compresses byte planes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ckptstore.formats.codecs import kernels
from ckptstore.formats.codecs.block_loops import Fields
from ckptstore.formats.codecs.blocks import read_group, write_group
from ckptstore.formats.codecs.codec import Bound, Codec, CodecDefaults, Method, Sample, word_size
from ckptstore.formats.codecs.entropy import best_entropy
from ckptstore.formats.codecs.kernels import WORDS, Bytes, Words
from ckptstore.formats.codecs.plane_coder import Cursor

WORD_SIZES = (1, 2, 4, 8)
MAPS = ("none", "rotate", "fold")
_FORWARD: dict[str, Callable[[Words, Words], None]] = {"rotate": kernels.rotate_left, "fold": kernels.zigzag}
_SIGNED = {"I8", "I16", "I32", "I64"}
_BACKWARD = {"none": kernels.PUT, "rotate": kernels.ROTATE, "fold": kernels.UNZIGZAG}


@dataclass(frozen=True, slots=True)
class Raw(CodecDefaults):
    """Stores the bytes unchanged."""

    name: ClassVar[str] = "raw"
    base_ratio: ClassVar[int] = 0
    word: ClassVar[int] = 1
    methods: ClassVar[tuple[Method, ...]] = (Method("raw", "#999999", rank=0),)

    @property
    def params(self) -> dict[str, Any]:
        """See `Codec.params`."""
        return {}

    @staticmethod
    def parse(params: Mapping[str, Any]) -> Raw:
        """Make the codec. It has no JSON parameters. Raises ``FormatError`` for any."""
        Fields(Raw.name, params).finish()
        return Raw()

    @staticmethod
    def suited(dtype: str, samples: Sequence[Sample], *, context: bool) -> list[Codec]:
        """See `Codec.suited`."""
        del dtype, samples, context
        return [Raw()]

    def write(self, block: Bytes, base: Bytes, out: Bytes, at: int, level: int) -> int:
        """See `Codec.write`."""
        del base, level
        out[at : at + len(block)] = block
        return at + len(block)

    def read(self, cursor: Cursor, base: Bytes, out: Bytes) -> None:
        """See `Codec.read`."""
        del base
        out[:] = cursor.take(len(out))


@dataclass(frozen=True, slots=True)
class Planes(CodecDefaults):
    """Compresses the byte planes of the numbers.

    ``word`` is the size of one number in bytes (of a complex number's real part). ``map`` is applied first: ``rotate``
    moves a float's sign below its lowest bit, so that the exponent fills the top plane. ``fold`` (zigzag) maps small
    negative integers to small numbers. ``none`` suits unsigned integers, and floats that are all positive.
    """

    word: int
    map: str = "none"
    name: ClassVar[str] = "planes"
    base_ratio: ClassVar[int] = 0
    tried: ClassVar[bool] = True
    methods: ClassVar[tuple[Method, ...]] = (
        Method("planes", "#E69F00", 20, "D", Bound("bound", lambda new, _: best_entropy(new))),
    )

    @property
    def params(self) -> dict[str, Any]:
        """See `Codec.params`."""
        return {"word": self.word} | ({} if self.map == "none" else {"map": self.map})

    @staticmethod
    def parse(params: Mapping[str, Any]) -> Planes:
        """Make the codec of JSON parameters. Raises ``FormatError``."""
        fields = Fields(Planes.name, params)
        codec = Planes(fields.integer("word", None, WORD_SIZES), fields.choice("map", "none", MAPS))
        fields.finish()
        return codec

    @staticmethod
    def suited(dtype: str, samples: Sequence[Sample], *, context: bool) -> list[Codec]:
        """See `Codec.suited`."""
        del samples, context
        plain = Planes(word_size(dtype))
        if plain.word == 1 and dtype not in _SIGNED:
            return [plain]
        return [plain, replace(plain, map="fold" if dtype in _SIGNED else "rotate")]

    def write(self, block: Bytes, base: Bytes, out: Bytes, at: int, level: int) -> int:
        """See `Codec.write`."""
        del base
        words, tail = words_of(block, self.word)
        mapped = words
        if self.map != "none":
            mapped = kernels.scratch("mapped", len(words), self.word)
            _FORWARD[self.map](words, mapped)
        return write_tail(tail, out, write_group(mapped, out, at, level) if len(words) else at)

    def read(self, cursor: Cursor, base: Bytes, out: Bytes) -> None:
        """See `Codec.read`."""
        del base
        words, tail = words_of(out, self.word)
        if len(words):
            read_group(cursor, self.word, _BACKWARD[self.map], words, words)
        tail[:] = cursor.take(len(tail))


def words_of(block: Bytes, word: int) -> tuple[Words, Bytes]:
    """Split a block into its whole words and the trailing bytes (of a pooled or damaged tensor; usually none)."""
    whole = len(block) // word * word
    return block[:whole].view(WORDS[word]), block[whole:]


def write_tail(tail: Bytes, out: Bytes, at: int) -> int:
    """Copy the trailing bytes that make no whole word to ``out[at:]``. Returns the end."""
    out[at : at + len(tail)] = tail
    return at + len(tail)
