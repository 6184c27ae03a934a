"""The public interface: a store at a path or URL, and everything that can be done with it, by what it is for.

`Store` has a part in each of `writing`, `reading`, `looking`, `listing`, `upkeep`, `second_tier`, all on a `handle`;
`opening` makes one. Imports `following`, `tiers` and what is below them.
"""

from ckptstore.store.opening import open, repair, verify
from ckptstore.store.store import Store

__all__ = ["Store", "open", "repair", "verify"]
