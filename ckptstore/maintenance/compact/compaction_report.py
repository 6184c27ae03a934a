"""Defines the report of a compaction, made or planned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckptstore.formats.html_tables import HtmlTable, counted, table
from ckptstore.maintenance.compact.moves import Kind, Unmet

__all__ = ["CompactMove", "CompactReport", "Result"]

Result = Literal["planned", "done", "refused", "waiting", "left"]


@dataclass(frozen=True, slots=True)
class CompactMove(HtmlTable):
    """The result of one move.

    Attributes:
        kind: ``drop``: segments that nothing needs are given up; ``materialize``: a kept checkpoint is re-encoded apart
            from what it built on; ``re-encode``: a kept full becomes a delta, or is compressed; ``merge``: diffs are
            copied into one segment.
        why: the reason.
        stored: REF of each rewritten checkpoint -> REF of its new base; empty: it is a full.
        result: ``planned``: a dry run; ``done``; ``refused``: it changed nothing; ``waiting``: there is no answer yet,
            and it may still be done; ``left``: not begun, because an earlier one had no answer.
        reason: why it was refused, or what is known of it; else empty.
        bytes_before, bytes_after: bytes of all segments of the store, without this move and with it. Their difference
            is the move's own. Before it is done: estimates.
        seconds_before, seconds_after: to restore the slowest of `stored`, at the rates of this machine.
        written: keys of the new segments.
        dropped: keys of the segments that nothing needs now, for gc; `dropped_nbytes`: their bytes.
        damaged: refused, because the data it reads is not what was saved.
        asked: refused by the live writer.
    """

    kind: Kind
    why: str
    stored: dict[str, str]
    result: Result
    reason: str
    bytes_before: int
    bytes_after: int
    seconds_before: float
    seconds_after: float
    written: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    dropped_nbytes: int = 0
    damaged: bool = False
    asked: bool = False


@dataclass(frozen=True, slots=True)
class CompactReport(HtmlTable):
    """The result of a compaction, or with ``dry_run`` its plan.

    Attributes:
        moves: in the order in which they were made.
        bytes_before, bytes_after: bytes of all segments that the log names. Dropped ones take space until gc.
        restore_seconds_before, restore_seconds_after: of the kept checkpoint that takes longest to restore, computed
            from this machine's rates of reading and decoding.
        kept: REFs of all checkpoints, by term and step. Compaction retires none.
        unmet: limits that stay exceeded, with the checkpoint and the reason.
        collectable_nbytes: bytes that these moves leave to gc.
        dry_run: nothing was changed; sizes and times are estimated from samples.
    """

    moves: tuple[CompactMove, ...]
    bytes_before: int
    bytes_after: int
    restore_seconds_before: float
    restore_seconds_after: float
    kept: tuple[str, ...]
    unmet: tuple[Unmet, ...]
    collectable_nbytes: int
    dry_run: bool = False

    def __repr__(self) -> str:
        return f"<CompactReport: {self._summary()}>"

    def _repr_html_(self) -> str:
        rows = [
            (
                move.kind,
                ", ".join(f"{ref} on {base}" if base else ref for ref, base in move.stored.items()),
                move.why,
                f"{move.bytes_after - move.bytes_before:+,}",
                f"{move.result}: {move.reason}" if move.reason else move.result,
            )
            for move in self.moves
        ]
        return table(self._summary(), ("move", "checkpoints", "why", "stored bytes", "result"), rows)

    def _summary(self) -> str:
        would = "would be " if self.dry_run else ""
        return (
            f"{counted(len(self.moves), 'move')}, {counted(len(self.kept), 'checkpoint')} {would}kept, "
            f"{self.bytes_before:,} -> {self.bytes_after:,} bytes"
        )

    @property
    def complete(self) -> bool:
        """Whether every move was made (of a dry run: True)."""
        return all(move.result in ("planned", "done") for move in self.moves)
