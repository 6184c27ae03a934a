"""The public interface: a store at a path or URL, and everything that can be done with it, by what it is for.

The methods of `Store` are in the modules `..._methods`, all on a `store_handle`; `open_store` makes one.
Imports `following`, `tiers` and what is below them.
"""

from ckptstore.store.open_store import open, repair, verify
from ckptstore.store.store import Store

__all__ = ["Store", "open", "repair", "verify"]
