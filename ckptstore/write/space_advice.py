"""Adds advice to the error of a save that found no space: what holds it, and how to free it."""

from __future__ import annotations

import errno
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ckptstore.backends.base import Backend
from ckptstore.errors import CkptError, StorageError
from ckptstore.formats.byte_text import size
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.commit_checks import needed, users
from ckptstore.formats.history.records import Node, object_of, ref_of
from ckptstore.formats.history.retention_rules import known, reasons_of
from ckptstore.formats.history.space_limits import space_of

__all__ = ["tell_what_holds_space"]

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_NAMED: Final = 3
_WHO: Final = ("host", "pid")
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
    if (limit := space_of(catalog.keep)) is not None:
        told += [*_kept(catalog), *_pinned(catalog, backend)]
        told.append(
            f"change {limit.rule} with `ckpt keep {place} RULE...`, or name what may go: `ckpt retire {place} REF...`"
        )
    return told


def _kept(catalog: Catalog) -> list[str]:
    """What each rule and tag keeps, with its bytes; what checkpoints share is counted for each."""
    told = []
    for reason, nodes in reasons_of(catalog, catalog.keep)[0].items():
        names = sorted(name for name, node in catalog.tags.items() if node in nodes) if reason == "tagged" else []
        what = f"tags {', '.join(names[:_NAMED])}" if names else reason
        if nodes and reason != "newest":
            told.append(f"{what} keep {_named(nodes)}: {size(_stored(catalog, nodes))}")
    return told


def _named(nodes: Sequence[Node]) -> str:
    some = ", ".join(map(ref_of, nodes[-_NAMED:]))
    return some if len(nodes) <= _NAMED else f"{len(nodes)} checkpoints up to {ref_of(nodes[-1])}"


def _stored(catalog: Catalog, nodes: Iterable[Node]) -> int:
    """The bytes of all segments that checkpoints need, with their bases."""
    segments = {
        segment
        for node in needed(catalog, nodes)
        for edge in catalog.encodings.get(node, ())
        for segment in edge.segments
    }
    return sum(catalog.segments[segment].size for segment in segments if segment in catalog.segments)


def _pinned(catalog: Catalog, backend: Backend) -> list[str]:
    """The readers that hold segments which nothing else needs."""
    from ckptstore.log.pins import PinWatch

    told = []
    try:
        garbage = {found[1] for key in backend.list("seg/") if catalog.collectable(key) and (found := object_of(key))}
        for record in PinWatch(backend).survey().records.values():
            if count := len(garbage.intersection(record.segments)):
                who = ", ".join(f"{name} {value}" for name, value in sorted(record.reader.items()) if name in _WHO)
                told.append(f"a reader ({who}) has pinned {count} deleted segment{'s' if count > 1 else ''}")
    except CkptError:
        pass
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
