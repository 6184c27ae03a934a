"""The public interface: a store at a path or URL, and every operation on it.

The methods of `Store` are in the modules `..._methods`, each a class derived from `store_handle`'s; `open_store` opens
a store. Imports `following`, `tiers` and the rooms below them.
"""

from ckptstore.store.open_store import open, repair, verify
from ckptstore.store.store import Store

__all__ = ["Store", "open", "repair", "verify"]
