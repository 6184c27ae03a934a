"""Defines the moves of a compaction. One record of the log commits each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ckptstore.formats.history.records import Node
from ckptstore.host.option_checks import seconds, whole

__all__ = ["CompactLimits", "Kind", "Move", "Planned", "Rewrite", "Unmet"]

Kind = Literal["drop", "materialize", "re-encode", "merge"]


@dataclass(frozen=True, slots=True)
class CompactLimits:
    """What a compaction has to reach.

    Attributes:
        max_depth: maximum number of deltas and steps that a restore of a kept checkpoint applies to its full; None:
            any number.
        max_restore_seconds: maximum time of such a restore; None: no limit.
        target_bytes: size of all segments below which no more bytes are saved at the cost of time; None: save as many
            as possible.
        plain: REFs of checkpoints that become uncompressed fulls, or stay such.
        compress_plain: fulls that an earlier compaction wrote for its `plain` may be compressed again.

    Raises:
        UsageError: an attribute is invalid.
    """

    max_depth: int | None = None
    max_restore_seconds: float | None = None
    target_bytes: int | None = None
    plain: Sequence[str | int] = ()
    compress_plain: bool = False

    def __post_init__(self) -> None:
        if self.max_depth is not None:
            whole("max_depth", self.max_depth, 0)
        if self.target_bytes is not None:
            whole("target_bytes", self.target_bytes, 0)
        seconds("max_restore_seconds", self.max_restore_seconds)

    def exceeded(self, depth: int, time: float) -> str:
        """Describe the limit that a restore of `depth` and `time` exceeds; empty: none."""
        if self.max_depth is not None and depth > self.max_depth:
            return f"{depth} links on its full, {self.max_depth} are allowed"
        if self.max_restore_seconds is not None and time > self.max_restore_seconds:
            return f"restored in {time:.3g} s, {self.max_restore_seconds:g} s are allowed"
        return ""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A rewrite of a kept checkpoint.

    Attributes:
        node: (term, step).
        base: the kept checkpoint that becomes its base; None: it becomes a full. For a copy, its present base.
        nbytes: estimated size in bytes.
        plain: it becomes an uncompressed full, which other programs can map.
    """

    node: Node
    base: Node | None
    nbytes: int
    plain: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """One step of a compaction: what is written and what is dropped, in one record.

    Attributes:
        kind: ``drop``: nothing needs it; ``materialize``: re-encoded apart from what it built on; ``re-encode``: a
            full becomes a delta, or a compressed full; ``merge``: stored chunks are copied into one segment.
        why: the reason, for people.
        rewrites: in this order: a base comes before what builds on it. Empty for a drop.
        drops: ids of the segments to drop.
        required: a limit requires it, whatever it costs in bytes; otherwise it has to free more than it writes.
        bytes_before, bytes_after: bytes of all segments of the store, before the move and after it.
        seconds_before, seconds_after: restore time of the slowest rewritten checkpoint; 0 for a drop.
        spared: kept checkpoints that lose an encoding with the drops, and have another: they are not rewritten.
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
    """A limit that a compaction cannot reach. `ref`: the checkpoint that exceeds it; empty: the whole store."""

    ref: str
    why: str


@dataclass(frozen=True, slots=True)
class Planned:
    """The moves of a compaction in order, and their effect.

    Attributes:
        bytes_before, bytes_after: bytes of all segments of the store.
        seconds_before, seconds_after: of the kept checkpoint that takes longest to restore.
        unmet: limits that stay exceeded, and why.
    """

    moves: tuple[Move, ...]
    bytes_before: int
    bytes_after: int
    seconds_before: float
    seconds_after: float
    unmet: tuple[Unmet, ...]
