"""A store as the medium of ``torch.distributed.checkpoint``: `CkptstoreWriter` and `CkptstoreReader`.

Imports `store` and what is below; importing the package itself imports nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptstore.integrations.dcp.storage_reader import CkptstoreReader as CkptstoreReader
    from ckptstore.integrations.dcp.storage_writer import CkptstoreWriter as CkptstoreWriter

__all__ = ["CkptstoreReader", "CkptstoreWriter"]

_HOMES = {"CkptstoreReader": "storage_reader", "CkptstoreWriter": "storage_writer"}


def __getattr__(name: str) -> object:
    """Import a public name when it is asked for, so that the package needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
