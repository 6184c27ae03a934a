"""Damage of the log is told to whoever reads it: once for each handle of a store and process, from one place (READ)."""

from __future__ import annotations

import os
import weakref
from typing import Final

from ckptstore.backends.base import Backend
from ckptstore.formats.catalog import Catalog
from ckptstore.host.caller_warnings import DamagedLogWarning, warn

__all__ = ["same_handle", "tell_damage"]

_SHOWN: Final = 8

_told: weakref.WeakKeyDictionary[Backend, set[tuple[int, int, int]]] = weakref.WeakKeyDictionary()
"""Handle -> (process, slot, 0) or (process, -1, lost term), of all that was told. A fork tells it again."""


def same_handle(new: Backend, old: Backend) -> None:
    """What was told of `old` was told of `new`, which reaches the same place for the same caller."""
    _told[new] = _told.setdefault(old, set())


def tell_damage(backend: Backend, catalog: Catalog) -> None:
    """Warn of slots that are damaged or lost, if that was not told of this handle yet.

    Prevents: checkpoints that are missing from a list, or an older one taken for the newest, without a word.
    """
    lost = catalog.lost if catalog.lost > catalog.term else 0
    if not (catalog.damage or lost):
        return
    process, told = os.getpid(), _told.setdefault(backend, set())
    found = {(process, seq, 0) for seq in catalog.damage} | ({(process, -1, lost)} if lost else set())
    if found <= told:
        return
    told |= found  # before the warning, which may be an error: the next call is not stopped by it
    parts = []
    if slots := catalog.damage:
        shown = ", ".join(map(str, slots[:_SHOWN])) + (f" and {len(slots) - _SHOWN:,} more" if slots[_SHOWN:] else "")
        parts.append(f"log slot{'s' if slots[1:] else ''} {shown} {'are' if slots[1:] else 'is'} damaged or missing")
    if lost:
        parts.append(f"the end of the log is lost, with term {lost}")
    warn(
        f"{backend.url}: {'; '.join(parts)}: what was recorded there is not known (checkpoints, tags, rules); "
        f"`ckpt verify {backend.url}` says what is damaged, `ckpt repair` makes a store of what is intact",
        DamagedLogWarning,
    )
