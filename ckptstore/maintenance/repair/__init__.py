"""What is intact of a damaged store, as a new one: the log is read as far as it can be, and made again from segments.

`store_repair` has the order; nothing is ever changed in place. Imports what `maintenance` may.
"""

from __future__ import annotations

from ckptstore.maintenance.repair.store_repair import Repaired, repair

__all__ = ["Repaired", "repair"]
