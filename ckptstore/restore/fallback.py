"""Another way to a checkpoint: every encoding is one (SPEC 7.4), and damage of one of them costs nothing but time.

`alternatives` says which are left. Here an error becomes the knowledge which ways fail with it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
from ckptstore.formats.records import CheckpointId, Encoding
from ckptstore.host.caller_warnings import FallbackWarning, warn
from ckptstore.restore.alternatives import Tried, next_way
from ckptstore.restore.restore_plan import edge_of, plan

__all__ = ["FAULTS", "around"]

FAULTS: Final = (CorruptSegmentError, FormatError, StorageError)
"""What an encoding fails with where another may lead to the checkpoint: damage, a form that this version does not know,
a medium that does not give the bytes."""
_LOOKED_AT: Final = 1000
"""Checkpoints of a term: who waits for an error should not wait for the plans of a long history."""


def around(
    catalog: Catalog,
    target: CheckpointId,
    used: Sequence[Encoding],
    tried: Tried,
    error: CkptError,
    held: Collection[CheckpointId] = (),
    unreadable: str | None = None,
    *,
    quiet: bool = False,
) -> Tried:
    """What is known of the ways to `target` after one has failed, if another is left; and a warning.

    Args:
        used: the encodings of the way that failed, in the order of application, as far as they were opened.
        tried: what was known of the ways before, and which of `used` need their base.
        error: what it failed with, which names the segment; if it names none, what is stored of the checkpoint itself
            is at fault.
        held: see `restore_plan`.
        unreadable: the segment that could not be opened, if that is what failed.
        quiet: nobody is warned.

    Raises:
        `error`: it is no damage, or there is no other way; ``nearest`` and a note then name what has one.
    """
    if isinstance(error, StateMismatchError):  # of the caller's objects, not of what is stored
        raise error
    text = str(error)
    named = [segment for encoding in used for segment in encoding.segments if segment in text]
    if isinstance(error, StorageError) and not (named and is_bad_medium(error)):
        raise error
    lacking = error.lacking if isinstance(error, CorruptSegmentError) else None
    if unreadable is not None:
        after = tried.failed((), (unreadable,), unreadable=(unreadable,))
    else:
        after = _after(used, tried, error, held, named)
    try:
        other = next_way(catalog, target, after, held=held)
    except CorruptionError:
        if (near := _nearest(catalog, target, after.suspects)) is not None:
            error.nearest = near
            error.add_note(
                f"{near} is the nearest before {target.ref} that needs nothing of this: load({near!r}), or "
                f"resume({near!r}) of a Checkpointer; `ckpt verify` says what else is damaged"
            )
        raise error from None
    if lacking is None and not quiet:  # else nothing is damaged
        kinds = " and ".join(dict.fromkeys(edge.kind for edge in other.encodings))
        warn(f"{text}; checkpoint {target.ref} is restored by another of its encodings ({kinds})", FallbackWarning)
    return after


def _after(
    used: Sequence[Encoding], tried: Tried, error: CkptError, held: Collection[CheckpointId], named: Sequence[str]
) -> Tried:
    """What is known once a way that was opened has failed."""
    lacking = error.lacking if isinstance(error, CorruptSegmentError) else None
    computed = isinstance(error, CorruptSegmentError) and error.computed
    lowest = used[0]
    on_held = lowest.base in held and edge_of(lowest) in tried.based
    # Prevents: an intact checkpoint called damaged, because the encoding of its base that was read first lacks a tensor
    # that the state of the base does not name, and that what builds on it needs.
    suspects = named if lacking is None else lacking
    at = [number for number, encoding in enumerate(used) if not set(suspects).isdisjoint(encoding.segments)]
    if computed or (lacking is not None and not at):
        # Prevents: an intact checkpoint called damaged, because its base was decoded to wrong bytes. Which encoding was
        # at fault nobody can say: the hashes of what is decoded may be wrong in all of them but the last.
        fault = 0
    elif at:
        fault = at[0]
    else:
        fault = len(used) - 1
    if on_held and not fault and (computed or not at):
        return tried.failed((), (), unheld=True)
    return tried.failed(reversed(used[fault:]), suspects or used[-1].segments)


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
