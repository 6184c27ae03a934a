"""How a step is stored, as rank 0 decides it for all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from ckptstore.formats.records import CheckpointId, Node
from ckptstore.write.ranks.parts import pack, unpack

__all__ = ["FULL_ORDER", "Order"]


@dataclass(frozen=True, slots=True)
class Order:
    """How a step is stored, on all ranks alike.

    Attributes:
        base: what it is a delta against; None: a full, or a step diff.
        gap: checkpoints between the two.
        keep: it may be a base of later deltas.
        forget: checkpoints that are no bases of deltas any more once it is written.
        after: it is a step diff, against this step; None: it is none.
        last: it is a step diff, and with it its batch is written.
    """

    base: CheckpointId | None = None
    gap: int = 0
    keep: bool = False
    forget: tuple[Node, ...] = ()
    after: int | None = None
    last: bool = False

    @property
    def kind(self) -> str:
        """Of the encoding."""
        if self.after is not None:
            return "gradient"
        return "full" if self.base is None else "delta"

    def packed(self) -> bytes:
        """As a letter."""
        base = None if self.base is None else list(self.base)
        return pack([base, self.gap, self.keep, [list(node) for node in self.forget], self.after, self.last])

    @classmethod
    def unpacked(cls, letter: bytes) -> Order:
        """The inverse of `packed`."""
        base, gap, keep, forget, after, last = unpack(letter, "order")
        nodes = tuple((term, step) for term, step in forget)
        return cls(None if base is None else CheckpointId(*base), gap, keep, nodes, after, last)


FULL_ORDER = Order()
"""A full on which nothing is built."""
