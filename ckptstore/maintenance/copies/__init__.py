"""Writes a store's history to another place: segments are copied unchanged, and the log is written again around them.

`store_copy` implements ``ckpt copy``. `transfer` does the work for it and for ``ckpt repair``. Imports what
`maintenance` may import.
"""

from __future__ import annotations

from ckptstore.maintenance.copies.store_copy import Copied, copy

__all__ = ["Copied", "copy"]
