"""What a compaction means to do: moves, each of which one record of the log commits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckptstore.formats.records import Node
from ckptstore.host.option_checks import seconds, whole

__all__ = ["Kind", "Limits", "Move", "Planned", "Rewrite", "Unmet"]

Kind = Literal["drop", "materialize", "re-encode", "merge"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a compaction is to reach.

    Attributes:
        max_depth: deltas and steps that the restore of a kept checkpoint may apply to its full; None: any number.
        max_restore_seconds: how long such a restore may take; None: as long as it does.
        target_bytes: bytes of all segments at which it is enough to save bytes at the cost of time; None: as few as can
            be had.

    Raises:
        UsageError: one is no such number.
    """

    max_depth: int | None = None
    max_restore_seconds: float | None = None
    target_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.max_depth is not None:
            whole("max_depth", self.max_depth, 0)
        if self.target_bytes is not None:
            whole("target_bytes", self.target_bytes, 0)
        seconds("max_restore_seconds", self.max_restore_seconds)

    def exceeded(self, depth: int, time: float) -> str:
        """What a restore of `depth` and `time` exceeds, for people; empty: nothing."""
        if self.max_depth is not None and depth > self.max_depth:
            return f"{depth} links on its full, {self.max_depth} are allowed"
        if self.max_restore_seconds is not None and time > self.max_restore_seconds:
            return f"restored in {time:.3g} s, {self.max_restore_seconds:g} s are allowed"
        return ""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A kept checkpoint that is stored anew.

    Attributes:
        node: (term, step).
        base: the kept checkpoint that it is coded against; None: a full. Of a copy: the one that it has.
        nbytes: about how many bytes that takes.
    """

    node: Node
    base: Node | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class Move:
    """One step of a compaction: what is written, what goes, in one record.

    Attributes:
        kind: ``drop``: nothing needs it; ``materialize``: coded anew, apart from what it built on; ``re-encode``: a
            full becomes a delta, or a compressed full; ``merge``: stored chunks copied into one segment.
        why: for people.
        rewrites: in this order; a base among them comes before who builds on it. None of a drop.
        drops: ids of the segments that go.
        required: a limit asks for it, whatever it costs in bytes; else it has to free more than it writes.
        bytes_before, bytes_after: of all segments of the store, before the move and after it.
        seconds_before, seconds_after: how long the slowest of the rewritten takes to restore; 0 of a drop.
        spared: kept checkpoints that lose an encoding with the drops, and have another: they are not stored anew.
    """

    kind: Kind
    why: str
    rewrites: tuple[Rewrite, ...]
    drops: tuple[str, ...]
    required: bool
    bytes_before: int
    bytes_after: int
    seconds_before: float
    seconds_after: float
    spared: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Unmet:
    """What a compaction cannot reach. `ref`: the checkpoint that it is about; empty: the whole store."""

    ref: str
    why: str


@dataclass(frozen=True, slots=True)
class Planned:
    """Moves, in the order in which they are to be made, and what they lead to.

    Attributes:
        bytes_before, bytes_after: of all segments of the store.
        seconds_before, seconds_after: of the kept checkpoint that takes longest to restore.
        unmet: limits that stay exceeded, and why.
    """

    moves: tuple[Move, ...]
    bytes_before: int
    bytes_after: int
    seconds_before: float
    seconds_after: float
    unmet: tuple[Unmet, ...]
