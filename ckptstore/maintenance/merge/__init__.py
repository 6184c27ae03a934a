"""Merging: the diffs of a range of checkpoints written anew, into one segment (`ckpt merge`).

Imports what `maintenance` may.
"""

from __future__ import annotations

from ckptstore.maintenance.merge.costs import RestoreCost
from ckptstore.maintenance.merge.merging import Merged, merge
from ckptstore.maintenance.merge.ranges import Range, Selection, select_range

__all__ = ["Merged", "Range", "RestoreCost", "Selection", "merge", "select_range"]
