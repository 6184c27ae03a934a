"""What a codec is, and what it says of itself, so that nobody else keeps a list of codecs.

A codec is a small frozen value: a name and parameters, both of which go into a segment's metadata. A class of codecs
carries what others need to know: whether it has a base, which parameters suit a tensor, whether its deltas add up, and
under which names and colours analyses show it. `codec_table` lists the classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np

from ckptstore.formats import dtypes
from ckptstore.formats.codecs.kernels import Bytes, Words
from ckptstore.formats.codecs.plane_coder import Cursor

__all__ = ["Bound", "Buffer", "Codec", "Kind", "Method", "Sample", "word_size"]

Buffer: TypeAlias = "bytes | bytearray | memoryview | np.ndarray[Any, Any]"


@dataclass(frozen=True, slots=True)
class Bound:
    """The entropy that a method is measured against.

    Attributes:
        name: how analyses call it.
        entropy: bits a word, of the tensor's words and its base's (the same words again where there is no base).
    """

    name: str
    entropy: Callable[[Words, Words], float]


@dataclass(frozen=True, slots=True)
class Method:
    """One way of using a codec, as analyses, plots and tables show it.

    Attributes:
        name: the label: the codec's name, or that with a variant (``sub-context``).
        colour: ``#rrggbb``.
        rank: where two methods store about the same, the lower one is recommended: simpler and faster.
        marker: matplotlib's mark. Methods that have one are compared over training, and when a checkpoint is sent.
        bound: what it is measured against; None: nothing.
        context: it needs ``Policy(context=True)``.
    """

    name: str
    colour: str
    rank: int
    marker: str = ""
    bound: Bound | None = None
    context: bool = False


class Codec(Protocol):
    """One way of coding a tensor's bytes. Implementations are frozen, hashable and free of state."""

    name: ClassVar[str]
    base_ratio: ClassVar[int]
    """Bytes of base per byte of chunk: 0 for a codec without a base, 1 for a delta, 2 for a half-width copy."""
    methods: ClassVar[tuple[Method, ...]]
    """How it may be used; at least one."""
    tried: ClassVar[bool]
    """Whether a writer tries it where its policy names no codecs."""

    @property
    def word(self) -> int:
        """Bytes of one number; a chunk's last bytes that make no number are stored as they are."""

    @property
    def params(self) -> dict[str, Any]:
        """JSON parameters; ``codec(name, params)`` makes an equal codec of them."""

    @property
    def method(self) -> str:
        """The name of that of `methods` which its parameters make it."""

    @property
    def additive(self) -> bool:
        """Whether its deltas add up: decoding onto zeros gives what decoding onto anything adds."""

    @staticmethod
    def parse(params: Mapping[str, Any]) -> Codec:
        """The codec of JSON parameters. Raises ``FormatError``."""

    @staticmethod
    def suited(dtype: str, samples: Sequence[Sample], *, context: bool) -> list[Codec]:
        """The codecs of this class worth trying on a tensor, best guess first; none: it does not suit the dtype.

        Args:
            dtype: logical dtype.
            samples: ranges of the tensor, with the base that the class needs.
            context: also those that need ``Policy(context=True)``.
        """

    def sum_up(self, later: Words, into: Words) -> None:
        """Add a later sum of deltas to an earlier one, if the codec is `additive`."""

    def write(self, block: Bytes, base: Bytes, out: Bytes, at: int, level: int) -> int:
        """Encode one block to ``out[at:]``; returns the end, at most ``at + len(block) + OVERHEAD``."""

    def read(self, cursor: Cursor, base: Bytes, out: Bytes) -> None:
        """Decode one block into ``out``, which may be ``base`` itself. Raises ``CorruptSegmentError``."""


class Kind:
    """What most codecs say of themselves: one method, tried only where a policy names it, and no sums."""

    __slots__ = ()

    name: ClassVar[str]
    methods: ClassVar[tuple[Method, ...]]
    tried: ClassVar[bool] = False

    @property
    def method(self) -> str:
        """See `Codec.method`."""
        return self.methods[0].name

    @property
    def additive(self) -> bool:
        """See `Codec.additive`."""
        return False

    def sum_up(self, later: Words, into: Words) -> None:
        """See `Codec.sum_up`. Raises `ValueError`."""
        del later, into
        raise ValueError(f"deltas of {self.name} do not add up")


@dataclass(frozen=True, slots=True)
class Sample:
    """One range of a tensor: its bytes, the same range of the base tensor, the same elements of an fp32 master."""

    data: Buffer
    base: Buffer | None = None
    master: Buffer | None = None

    def base_for(self, codec: Codec | type[Codec]) -> Buffer | None:
        """What ``encode`` wants as this codec's base."""
        return (None, self.base, self.master)[codec.base_ratio]


def word_size(dtype: str) -> int:
    """Bytes of one number of a logical dtype: of the real part, for complex numbers. Raises ``FormatError``."""
    found = dtypes.get(dtype)
    return found.itemsize // (2 if found.trailing else 1)
