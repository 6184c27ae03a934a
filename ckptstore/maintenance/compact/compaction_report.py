"""What a compaction did, or would do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckptstore.formats.html_tables import HtmlTable, counted, table
from ckptstore.maintenance.compact.moves import Kind, Unmet

__all__ = ["CompactMove", "CompactReport", "Result"]

Result = Literal["planned", "done", "refused", "waiting", "left"]


@dataclass(frozen=True, slots=True)
class CompactMove(HtmlTable):
    """What became of one move.

    Attributes:
        kind: ``drop``: what nothing needs is given up; ``materialize``: a kept checkpoint coded anew, apart from what
            it built on; ``re-encode``: a kept full as a delta, or compressed; ``merge``: diffs copied into one segment.
        why: what for.
        stored: REF of each checkpoint that is stored anew -> REF of what it is coded against; empty: a full.
        result: ``planned``: a dry run; ``done``; ``refused``: nothing was changed by it; ``waiting``: nobody answered
            yet, and it may still be done; ``left``: not begun, because nobody answered before.
        reason: why it was refused, or what is known of it; else empty.
        bytes_before, bytes_after: of all segments of the store, without it and with it, so that their difference is
            the move's own. Before it is done: about.
        seconds_before, seconds_after: to restore the slowest of `stored`, at the rates of this machine.
        written: keys of the new segments.
        dropped: keys of the segments that nothing needs any more, for gc; `dropped_nbytes`: their bytes.
        damaged: refused, because what it reads is not what was saved.
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
    """What a compaction did, or with ``dry_run`` would do.

    Attributes:
        moves: in the order in which they were made.
        bytes_before, bytes_after: of all segments that the log has. What was dropped takes space until gc.
        restore_seconds_before, restore_seconds_after: of the kept checkpoint that takes longest to restore, reckoned by
            what this machine reads and decodes in a second.
        kept: REFs of all checkpoints, by term and step. Compaction retires none.
        unmet: limits that stay exceeded, of which checkpoint, and why.
        collectable_nbytes: bytes that these moves leave to gc.
        dry_run: nothing was changed; sizes and times are guessed from samples.
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
        return f"<CompactReport: {self._said()}>"

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
        return table(self._said(), ("move", "checkpoints", "why", "stored bytes", "result"), rows)

    def _said(self) -> str:
        would = "would be " if self.dry_run else ""
        return (
            f"{counted(len(self.moves), 'move')}, {counted(len(self.kept), 'checkpoint')} {would}kept, "
            f"{self.bytes_before:,} -> {self.bytes_after:,} bytes"
        )

    @property
    def complete(self) -> bool:
        """Whether every move was made (of a dry run: True)."""
        return all(move.result in ("planned", "done") for move in self.moves)
