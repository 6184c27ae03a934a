"""An `Order` tells a writer and all ranks how to store one checkpoint: as a full, a delta or a step diff."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ckptstore.formats.history.records import CheckpointId

__all__ = ["FULL_ORDER", "Order"]


@dataclass(frozen=True, slots=True)
class Order:
    """How one checkpoint is stored.

    Attributes:
        base: the checkpoint that a delta is compressed against; None: a full, or a step diff.
        gap: checkpoints between the two.
        keep: the state stays in memory as a base of later deltas.
        forget: bases that no delta needs once this checkpoint is committed.
        after: the step that a step diff is compressed against; None: it is not a step diff.
        last: whether this step diff ends its batch, which is then written.
    """

    base: CheckpointId | None = None
    gap: int = 0
    keep: bool = False
    forget: tuple[CheckpointId, ...] = ()
    after: int | None = None
    last: bool = False

    @property
    def kind(self) -> str:
        """The kind of its encoding: ``full``, ``delta`` or ``gradient``."""
        if self.after is not None:
            return "gradient"
        return "full" if self.base is None else "delta"


FULL_ORDER: Final = Order()
"""A full that is not kept as a base."""
