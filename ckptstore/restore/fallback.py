"""Another way to a checkpoint: every encoding is one (SPEC 7.4), and damage of one of them costs nothing but time."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from ckptstore.backends.system_errors import is_bad_medium
from ckptstore.errors import (
    CkptError,
    CorruptionError,
    CorruptSegmentError,
    FormatError,
    StateMismatchError,
    StorageError,
)
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.records import CheckpointId
from ckptstore.host.caller_warnings import FallbackWarning, warn
from ckptstore.restore.plan import Plan, plan

__all__ = ["FAULTS", "around"]

FAULTS: Final = (CorruptSegmentError, FormatError, StorageError)
"""What an encoding fails with where another may lead to the checkpoint: damage, a form that this version does not know,
a medium that does not give the bytes."""
_LOOKED_AT: Final = 1000
"""Checkpoints of a term: who waits for an error should not wait for the plans of a long history."""


def around(
    catalog: Catalog, chosen: Plan, avoid: frozenset[str], error: CkptError, held: Collection[CheckpointId] = ()
) -> frozenset[str]:
    """The segments to avoid from now on, if a plan does without the one that is damaged; and a warning.

    Args:
        chosen: the plan that failed.
        avoid: what it did without already.
        error: what it failed with, which names the segment; if it names none, what is stored of the checkpoint itself
            is at fault.
        held: see `plan`.

    Raises:
        `error`: it is no damage, or there is no other way; ``nearest`` and a note then name what has one.
    """
    if isinstance(error, StateMismatchError):  # of the caller's objects, not of what is stored
        raise error
    text = str(error)
    # Prevents: an intact checkpoint called damaged, because the encoding of its base that was read first lacks a tensor
    # that the state of the base does not name, and that what builds on it needs.
    named: frozenset[str] = error.lacking if isinstance(error, CorruptSegmentError) else frozenset()
    lacking = named.intersection(chosen.segments)
    if lacking and _planned(catalog, chosen, avoid | lacking, held):
        return avoid | lacking
    guilty = tuple(segment for segment in chosen.segments if segment in text)
    if isinstance(error, StorageError) and not (guilty and is_bad_medium(error)):
        raise error
    guilty = guilty or chosen.encodings[-1].segments
    avoid = avoid.union(guilty)
    try:
        other = plan(catalog, chosen.target, avoid=avoid, held=held)
    except CorruptionError:
        if (near := _nearest(catalog, chosen.target, avoid)) is not None:
            error.nearest = near
            error.add_note(
                f"{near} is the nearest before {chosen.target.ref} that needs nothing of this: load({near!r}), or "
                f"resume({near!r}) of a Checkpointer; `ckpt verify` says what else is damaged"
            )
        raise error from None
    kinds = " and ".join(dict.fromkeys(edge.kind for edge in other.encodings))
    warn(f"{text}; checkpoint {chosen.target.ref} is restored by another of its encodings ({kinds})", FallbackWarning)
    return avoid


def _planned(catalog: Catalog, chosen: Plan, avoid: frozenset[str], held: Collection[CheckpointId]) -> bool:
    """Whether there is a plan that does without some segments."""
    try:
        plan(catalog, chosen.target, avoid=avoid, held=held)
    except CorruptionError:
        return False
    return True


def _nearest(catalog: Catalog, target: CheckpointId, avoid: frozenset[str]) -> str | None:
    """REF of the newest checkpoint before `target` on its line that needs none of some segments; None: none is."""
    term, below = target.node
    while (opened := catalog.terms.get(term)) is not None:
        steps = sorted((node for node in catalog.checkpoints if node[0] == term and node[1] < below), reverse=True)
        for node in steps[:_LOOKED_AT]:
            try:
                plan(catalog, catalog.checkpoints[node].id, avoid=avoid)
            except CorruptionError:
                continue
            return catalog.checkpoints[node].ref
        if opened.parent is None:
            return None
        term, below = opened.parent.term, opened.parent.step + 1
    return None
