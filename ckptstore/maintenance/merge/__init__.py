"""Merges the diffs of a range of checkpoints into one new segment (`ckpt merge`).

Imports what `maintenance` may import.
"""

from __future__ import annotations

from ckptstore.maintenance.merge.diff_merge import Merged, merge
from ckptstore.maintenance.merge.merge_range import MergeSelection, Range, select_range
from ckptstore.maintenance.merge.restore_cost import RestoreCost

__all__ = ["MergeSelection", "Merged", "Range", "RestoreCost", "merge", "select_range"]
