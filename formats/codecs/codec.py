"""The interface of a codec, including the properties that other modules need, so that no module keeps its own list.

A codec is a small frozen value: a name and parameters, both stored in a segment's metadata. Its class says whether it
needs a base, which parameters suit a tensor, whether its deltas add up, and which names and colours analyses use.
`codec_table` lists the classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np

from ckptstore.formats import dtypes
from ckptstore.formats.codecs.kernels import Bytes, Words
from ckptstore.formats.codecs.plane_coder import Cursor

__all__ = ["Bound", "Buffer", "Codec", "CodecDefaults", "Method", "Sample", "word_size"]

Buffer: TypeAlias = "bytes | bytearray | memoryview | np.ndarray[Any, Any]"


@dataclass(frozen=True, slots=True)
class Bound:
    """The entropy that a method is compared with.

    Attributes:
        name: its name in analyses.
        entropy: returns bits per word, given the tensor's words and the base's words (without a base: the tensor's
            words again).
    """

    name: str
    entropy: Callable[[Words, Words], float]


@dataclass(frozen=True, slots=True)
class Method:
    """One way of using a codec, as analyses, plots and tables show it.

    Attributes:
        name: the label: the codec's name, perhaps with a variant (``sub-context``).
        colour: ``#rrggbb``.
        rank: of two methods with about the same size, the lower rank is recommended: it is simpler and faster. No two
            methods have the same rank.
        marker: matplotlib's marker. Methods with a marker are compared over training, and for sending a checkpoint.
        bound: the entropy to compare with; None: none.
        context: whether it needs ``Policy(context=True)``.
    """

    name: str
    colour: str
    rank: int
    marker: str = ""
    bound: Bound | None = None
    context: bool = False


class Codec(Protocol):
    """One way to encode a tensor's bytes. Implementations are frozen, hashable and stateless."""

    name: ClassVar[str]
    base_ratio: ClassVar[int]
    """Bytes of base per byte of chunk: 0 for a codec without a base, 1 for a delta, 2 for a half-width copy."""
    methods: ClassVar[tuple[Method, ...]]
    """The ways to use it; at least one."""
    tried: ClassVar[bool]
    """Whether a writer tries it if its policy names no codecs."""

    def __hash__(self) -> int:
        """Equal codecs, by class and parameters, have equal hashes."""

    @property
    def word(self) -> int:
        """Bytes of one word. Trailing bytes of a chunk that make no whole word are stored unchanged."""

    @property
    def params(self) -> dict[str, Any]:
        """JSON parameters. ``codec(name, params)`` makes an equal codec."""

    @property
    def method(self) -> str:
        """The name of the one of `methods` that its parameters select."""

    @property
    def additive(self) -> bool:
        """Whether its deltas add up: decoding onto zeros gives the amount that decoding adds to any base."""

    @staticmethod
    def parse(params: Mapping[str, Any]) -> Codec:
        """Make the codec of JSON parameters. Raises ``FormatError``."""

    @staticmethod
    def suited(dtype: str, samples: Sequence[Sample], *, context: bool) -> list[Codec]:
        """The codecs of this class to try on a tensor, best guess first. Empty if the class does not suit the dtype.

        Args:
            dtype: logical dtype.
            samples: ranges of the tensor, with the base that the class needs.
            context: whether to include codecs that need ``Policy(context=True)``.
        """

    def sum_up(self, later: Words, into: Words) -> None:
        """Add a later sum of deltas to an earlier one, in place. Only for codecs that are `additive`."""

    def write(self, block: Bytes, base: Bytes, out: Bytes, at: int, level: int) -> int:
        """Encode one block to ``out[at:]``. Returns the end, at most ``at + len(block) + OVERHEAD`` (`blocks`: 16).

        Args:
            block: at most ``BLOCK`` bytes (1 MiB); the last bytes of it may make no whole word.
            base: ``base_ratio`` times as many bytes.
            level: ``FAST``, ``THRIFTY`` or a level of zstd, as in `codecs.encode`. A codec that has one way ignores it.
        """

    def read(self, cursor: Cursor, base: Bytes, out: Bytes) -> None:
        """Decode one block into ``out``, which may be ``base`` itself. Raises ``CorruptSegmentError``."""


class CodecDefaults:
    """Defaults for codec classes: one method, tried only if a policy names it, not additive."""

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
    """One range of a tensor: its bytes, the same range of the base tensor, the same elements of the fp32 master."""

    data: Buffer
    base: Buffer | None = None
    master: Buffer | None = None

    def base_for(self, codec: Codec | type[Codec]) -> Buffer | None:
        """The base that ``encode`` needs for this codec; None if the sample lacks it or the codec has no base."""
        return (None, self.base, self.master)[codec.base_ratio]


def word_size(dtype: str) -> int:
    """Bytes of one number of a logical dtype; for complex dtypes, of the real part. Raises ``FormatError``."""
    found = dtypes.get(dtype)
    return found.itemsize // (2 if found.trailing else 1)
