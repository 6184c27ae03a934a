"""Compacts a store: rewrites kept checkpoints, so that bases that are only held can be deleted (`ckpt compact`).

Imports what `maintenance` may import.
"""

from __future__ import annotations

from ckptstore.maintenance.compact.compaction import compact
from ckptstore.maintenance.compact.compaction_plan import plan_moves
from ckptstore.maintenance.compact.compaction_report import CompactMove, CompactReport
from ckptstore.maintenance.compact.moves import CompactLimits, Move, Planned, Rewrite, Unmet
from ckptstore.maintenance.compact.size_estimates import Samples, Sizes

__all__ = [
    "CompactLimits",
    "CompactMove",
    "CompactReport",
    "Move",
    "Planned",
    "Rewrite",
    "Samples",
    "Sizes",
    "Unmet",
    "compact",
    "plan_moves",
]
