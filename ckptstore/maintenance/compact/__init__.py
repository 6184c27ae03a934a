"""Compaction: kept checkpoints stored anew, so that bases that nobody keeps can go (`ckpt compact`).

Imports what `maintenance` may.
"""

from __future__ import annotations

from ckptstore.maintenance.compact.compaction import compact
from ckptstore.maintenance.compact.compaction_plan import plan_moves
from ckptstore.maintenance.compact.compaction_report import CompactMove, CompactReport
from ckptstore.maintenance.compact.moves import Limits, Move, Planned, Rewrite, Unmet
from ckptstore.maintenance.compact.size_estimates import Samples, Sizes

__all__ = [
    "CompactMove",
    "CompactReport",
    "Limits",
    "Move",
    "Planned",
    "Rewrite",
    "Samples",
    "Sizes",
    "Unmet",
    "compact",
    "plan_moves",
]
