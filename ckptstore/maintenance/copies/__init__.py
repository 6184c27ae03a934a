"""A store's history, written again somewhere else: segments copied as they are, the log made anew around them.

`store_copy` is ``ckpt copy``; `transfer` does the work for it and for ``ckpt repair``. Imports what `maintenance` may.
"""

from __future__ import annotations

from ckptstore.maintenance.copies.store_copy import Copied, copy

__all__ = ["Copied", "copy"]
