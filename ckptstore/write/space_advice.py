"""Adds advice to the error of a save that found no space: the space of retired checkpoints, and how to free it."""

from __future__ import annotations

import errno
import shlex
from collections.abc import Callable
from typing import Final

from ckptstore.backends.base import Backend
from ckptstore.errors import CkptError, StorageError
from ckptstore.formats.byte_text import size
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.commit_checks import users
from ckptstore.formats.history.retention_rules import known

__all__ = ["tell_what_holds_space"]

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_TOLD: Final = "; in this store "


def tell_what_holds_space(error: BaseException, catalog: Callable[[], Catalog], backend: Backend) -> None:
    """Extend the text of an error if it is the error of a full medium. Raises nothing.

    Args:
        catalog: returns the present catalog of the term.
    """
    if not isinstance(error, StorageError) or error.errno not in _FULL or _TOLD in str(error.strerror):
        return
    error.strerror = f"{error.strerror}{_TOLD}{'; '.join(_holding(catalog(), backend))}"


def _holding(catalog: Catalog, backend: Backend) -> list[str]:
    place = shlex.quote(backend.url)
    told = []
    if left := _not_deleted(catalog, backend):
        told.append(
            f"retired checkpoints that are not deleted yet take {size(left)}: `ckpt gc {place}` frees that, as soon as "
            "no reader has pinned it"
        )
    held = sum(
        entry.size
        for segment, entry in catalog.segments.items()
        if (nodes := list(users(catalog, segment))) and all(node in catalog.held for node in nodes)
    )
    if held:
        told.append(f"{size(held)} of retired checkpoints stay, because others build on them")
    if not catalog.keep:
        told.append(
            "no rules say what may go, so every checkpoint is kept: "
            f"`ckpt prune {place} --keep last:3 --gc` keeps three"
        )
    elif not known(catalog.keep):
        told.append(f"of the rules {', '.join(catalog.keep)} this version does not know all, so it retires nothing")
    elif not told:
        told.append("nothing is retired that could be deleted")
    return told


def _not_deleted(catalog: Catalog, backend: Backend) -> int:
    """The bytes of segments that nothing needs and that are not deleted yet."""
    found = 0
    try:
        for key in backend.list("seg/"):
            if catalog.collectable(key):
                found += backend.size(key)
    except CkptError:  # deleted meanwhile, or the medium fails: use what is known
        pass
    return found
