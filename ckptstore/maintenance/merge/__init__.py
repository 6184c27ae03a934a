"""Merging: the diffs of a range of checkpoints written anew, into one segment (`ckpt merge`).

Imports what `maintenance` may.
"""

from __future__ import annotations

from ckptstore.maintenance.merge.diff_merge import Merged, merge
from ckptstore.maintenance.merge.merge_range import Range, Selection, select_range
from ckptstore.maintenance.merge.restore_cost import RestoreCost

__all__ = ["Merged", "Range", "RestoreCost", "Selection", "merge", "select_range"]
