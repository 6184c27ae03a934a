"""Warns of damage of the log: once for each process and handle of a store, from one place (READ)."""

from __future__ import annotations

import os
import weakref
from typing import Final

from ckptstore.backends.base import Backend
from ckptstore.formats.history.catalog import Catalog
from ckptstore.host.caller_warnings import DamagedLogWarning, warn

__all__ = ["share_warnings", "warn_of_damage"]

_SHOWN: Final = 8

_told: weakref.WeakKeyDictionary[Backend, set[tuple[int, int, int]]] = weakref.WeakKeyDictionary()
"""Handle -> (process, slot, 0) or (process, -1, lost term) of every warning that was given. A fork warns again."""


def share_warnings(new: Backend, old: Backend) -> None:
    """Share the record of warnings: `new` reaches the same place as `old` for the same caller."""
    _told[new] = _told.setdefault(old, set())


def warn_of_damage(backend: Backend, catalog: Catalog) -> None:
    """Warn of slots that are damaged or lost, if this handle has not warned of them yet.

    Prevents: checkpoints that are missing from a list, or an older one mistaken for the newest, silently.
    """
    lost = catalog.lost if catalog.lost > catalog.term else 0
    if not (catalog.damage or lost):
        return
    process, told = os.getpid(), _told.setdefault(backend, set())
    found = {(process, seq, 0) for seq in catalog.damage} | ({(process, -1, lost)} if lost else set())
    if found <= told:
        return
    told |= found  # before the warning, which may be raised as an error: the next call must not raise it again
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
