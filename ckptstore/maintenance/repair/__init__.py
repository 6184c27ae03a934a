"""Repairs a damaged store into a new one: reads the log as far as possible, and rebuilds the rest from segments.

`store_repair` lists the steps. Nothing is changed in place. Imports what `maintenance` may import.
"""

from __future__ import annotations

from ckptstore.maintenance.repair.store_repair import Repaired, repair

__all__ = ["Repaired", "repair"]
