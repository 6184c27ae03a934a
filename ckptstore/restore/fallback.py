"""Restores a checkpoint by another of its encodings after one failed (SPEC 7.4), so that damage of one costs only time.

`alternatives` finds the ways that are left. This module derives from an error which ways fail with it.
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
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import CheckpointId, Encoding
from ckptstore.host.caller_warnings import FallbackWarning, warn
from ckptstore.restore.alternatives import FailedWays, next_way
from ckptstore.restore.restore_plan import edge_of, plan

__all__ = ["FAULTS", "record_failure"]

FAULTS: Final = (CorruptSegmentError, FormatError, StorageError)
"""Errors of an encoding after which another may restore the checkpoint: damage, a form that this version does not know,
a medium that does not return the bytes."""
_MOST_EXAMINED: Final = 1000
"""Maximum number of checkpoints of a term that are examined: an error must not wait for the plans of a long history."""


def record_failure(
    catalog: Catalog,
    target: CheckpointId,
    used: Sequence[Encoding],
    tried: FailedWays,
    error: CkptError,
    held: Collection[CheckpointId] = (),
    unreadable: str | None = None,
    *,
    quiet: bool = False,
) -> FailedWays:
    """Record a failed way to `target`, if another is left, and warn -> what is known of the ways now.

    Args:
        used: the encodings of the failed way, in the order of application, as far as they were opened.
        tried: what was known before, including which of `used` need their base.
        error: the error of the way, which names the segment; if it names none, what is stored of the checkpoint itself
            is at fault.
        held: see `restore_plan`.
        unreadable: the segment that could not be opened, if that is what failed.
        quiet: do not warn.

    Raises:
        `error`: it is not damage, or there is no other way; ``nearest`` and a note then name a checkpoint that has one.
    """
    if isinstance(error, StateMismatchError):  # about the caller's objects, not about what is stored
        raise error
    text = str(error)
    named = [segment for encoding in used for segment in encoding.segments if segment in text]
    if isinstance(error, StorageError) and not (named and is_bad_medium(error)):
        raise error
    lacking = error.lacking if isinstance(error, CorruptSegmentError) else None
    if unreadable is not None:
        after = tried.failed((), (unreadable,), unreadable=(unreadable,))
    else:
        after = _with_failure(used, tried, error, held, named)
    try:
        other = next_way(catalog, target, after, held=held)
    except CorruptionError:
        if (near := _nearest(catalog, target, after.suspects)) is not None:
            error.nearest = near
            error.add_note(
                f"{near} is the nearest before {target.ref} that does not need the damaged data: load({near!r}), or "
                f"resume({near!r}) of a Checkpointer; `ckpt verify` says what else is damaged"
            )
        raise error from None
    if lacking is None and not quiet:  # else nothing is damaged
        kinds = " and ".join(dict.fromkeys(edge.kind for edge in other.encodings))
        warn(f"{text}; checkpoint {target.ref} is restored by another of its encodings ({kinds})", FallbackWarning)
    return after


def _with_failure(
    used: Sequence[Encoding], tried: FailedWays, error: CkptError, held: Collection[CheckpointId], named: Sequence[str]
) -> FailedWays:
    """What is known once an opened way has failed."""
    lacking = error.lacking if isinstance(error, CorruptSegmentError) else None
    computed = isinstance(error, CorruptSegmentError) and error.computed
    lowest = used[0]
    on_held = lowest.base in held and edge_of(lowest) in tried.based
    # Prevents: an intact checkpoint reported as damaged because the encoding of its base that was read first lacks
    # a tensor that is not part of the base's state but that the checkpoint needs.
    suspects = named if lacking is None else lacking
    at = [number for number, encoding in enumerate(used) if not set(suspects).isdisjoint(encoding.segments)]
    if computed or (lacking is not None and not at):
        # Prevents: an intact checkpoint reported as damaged because its base was decoded to wrong bytes. It is unknown
        # which encoding was at fault: the hashes of decoded bytes may be wrong in all of them but the last.
        fault = 0
    elif at:
        fault = at[0]
    else:
        fault = len(used) - 1
    if on_held and not fault and (computed or not at):
        return tried.failed((), (), without_memory=True)
    return tried.failed(reversed(used[fault:]), suspects or used[-1].segments)


def _nearest(catalog: Catalog, target: CheckpointId, avoid: frozenset[str]) -> str | None:
    """REF of the newest checkpoint before `target` on its line that needs none of the segments `avoid`, or None."""
    term, below = target.node
    while (opened := catalog.terms.get(term)) is not None:
        steps = sorted((node for node in catalog.checkpoints if node[0] == term and node[1] < below), reverse=True)
        for node in steps[:_MOST_EXAMINED]:
            try:
                plan(catalog, catalog.checkpoints[node].id, avoid=avoid)
            except CorruptionError:
                continue
            return catalog.checkpoints[node].ref
        if opened.parent is None:
            return None
        term, below = opened.parent.term, opened.parent.step + 1
    return None
