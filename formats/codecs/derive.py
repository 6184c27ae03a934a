"""The codec ``derive``: a bf16 or fp16 tensor that is the rounded copy of an fp32 master. An exact copy needs no bytes.

Mixed-precision training keeps both tensors. The decoder rounds the master again (to nearest, ties to even, in integer
arithmetic, so that no processor mode matters) and adds the stored difference. The difference is empty if the copy is
exact. Otherwise it has the exceptions, encoded as in ``sub``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ckptstore.formats.codecs import kernels, rounding
from ckptstore.formats.codecs.block_loops import Fields
from ckptstore.formats.codecs.blocks import read_group, write_group
from ckptstore.formats.codecs.codec import Codec, CodecDefaults, Method, Sample
from ckptstore.formats.codecs.kernels import Bytes, Words
from ckptstore.formats.codecs.plane_coder import Cursor
from ckptstore.formats.codecs.raw_planes import words_of, write_tail

_ROUND: dict[str, Callable[[Words, Words], None]] = {"BF16": rounding.to_bfloat16, "F16": rounding.to_float16}
TARGETS = tuple(_ROUND)


@dataclass(frozen=True, slots=True)
class Derive(CodecDefaults):
    """The base is an fp32 tensor of the same shape, so it has twice the bytes. ``to`` is the dtype to round to."""

    to: str
    name: ClassVar[str] = "derive"
    base_ratio: ClassVar[int] = 2
    word: ClassVar[int] = 2
    tried: ClassVar[bool] = True
    methods: ClassVar[tuple[Method, ...]] = (Method("derive", "#000000", rank=10),)

    @property
    def params(self) -> dict[str, Any]:
        """See `Codec.params`."""
        return {"to": self.to}

    @staticmethod
    def parse(params: Mapping[str, Any]) -> Derive:
        """Make the codec of JSON parameters. Raises ``FormatError``."""
        fields = Fields(Derive.name, params)
        codec = Derive(fields.choice("to", "", TARGETS))
        fields.finish()
        return codec

    @staticmethod
    def suited(dtype: str, samples: Sequence[Sample], *, context: bool) -> list[Codec]:
        """See `Codec.suited`."""
        del samples, context
        return [Derive(dtype)] if dtype in TARGETS else []

    def write(self, block: Bytes, base: Bytes, out: Bytes, at: int, level: int) -> int:
        """See `Codec.write`."""
        words, tail = words_of(block, 2)
        master, _ = words_of(base, 4)
        delta = kernels.scratch("mapped", len(words), 2)
        rounded = kernels.scratch("rounded", len(words), 2)
        _ROUND[self.to](master, rounded)
        kernels.difference(words, rounded, delta)
        return write_tail(tail, out, write_group(delta, out, at, level) if len(words) else at)

    def read(self, cursor: Cursor, base: Bytes, out: Bytes) -> None:
        """See `Codec.read`."""
        words, tail = words_of(out, 2)
        master, _ = words_of(base, 4)
        if len(words):
            _ROUND[self.to](master, words)
            read_group(cursor, 2, kernels.ADD, words, words)
        tail[:] = cursor.take(len(tail))
