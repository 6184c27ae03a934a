"""Compaction: kept checkpoints stored anew, so that bases that nobody keeps can go (`ckpt compact`).

Imports what `maintenance` may.
"""

from __future__ import annotations

from ckptstore.maintenance.compact.compacting import compact
from ckptstore.maintenance.compact.moves import Limits, Move, Planned, Rewrite, Unmet
from ckptstore.maintenance.compact.planning import plan_moves
from ckptstore.maintenance.compact.report import CompactMove, CompactReport
from ckptstore.maintenance.compact.sizes import Samples, Sizes

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
