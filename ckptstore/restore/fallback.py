"""Another way to a checkpoint: every encoding is one (SPEC 7.4), and damage of one of them costs nothing but time."""

from __future__ import annotations

from collections.abc import Collection

from ckptstore.backends.system_errors import is_bad_medium
from ckptstore.errors import CkptError, CorruptionError, StorageError
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.records import CheckpointId
from ckptstore.host.caller_warnings import FallbackWarning, warn
from ckptstore.restore.plan import Plan, plan

__all__ = ["around"]


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
        `error`: it is no damage, or there is no other way.
    """
    text = str(error)
    guilty = tuple(segment for segment in chosen.segments if segment in text)
    if isinstance(error, StorageError) and not (guilty and is_bad_medium(error)):
        raise error
    guilty = guilty or chosen.encodings[-1].segments
    avoid = avoid.union(guilty)
    try:
        other = plan(catalog, chosen.target, avoid=avoid, held=held)
    except CorruptionError:
        raise error from None
    kinds = " and ".join(dict.fromkeys(edge.kind for edge in other.encodings))
    warn(f"{text}; checkpoint {chosen.target.ref} is restored by another of its encodings ({kinds})", FallbackWarning)
    return avoid
