"""Named instants at which the crash tests kill the process.

``CKPTSTORE_CRASH_AT=name[:n]`` kills this process with SIGKILL the n-th time (default first) `crash_point` passes
`name`. Without the variable a call is one dictionary look-up. Every name is registered below, so that a
test can visit them all and an unregistered name fails at once. A harness that forks uses `arm` instead.
"""

from __future__ import annotations

import os
import signal
from typing import Final

CRASH_POINTS: Final = (
    "save.begin",
    "save.first-block",
    "save.before-header",
    "save.before-seal",
    "save.sealed",
    "commit.before-create",
    "create.temp-written",
    "create.before-link",
    "create.linked",
    "create.synced",
    "commit.created",
    "commit.acknowledged",
    "open.read",
    "open.created",
    "open.verified",
    "fold.before-create",
    "fold.created",
    "fold.before-delete",
    "fold.deleted",
    "pin.created",
    "merge.verified",
    "compact.rewritten",
    "compact.verified",
    "compact.committed",
    "request.posted",
    "gc.surveyed",
    "gc.before-delete",
    "gc.deleted",
    "recycle.kept",
    "recycle.taken",
    "recycle.cleared",
)
"""What one process alone passes."""
UPKEEP_POINTS: Final = (
    "prune.planned",
    "prune.retired",
    "copy.claimed",
    "copy.before-header",
    "copy.sealed",
    "copy.brought",
    "copy.before-format",
    "copy.finished",
    "repair.judged",
    "repair.rewritten",
)
"""What pruning, copying and repairing pass besides."""
RANK_POINTS: Final = (
    "ranks.joined",
    "ranks.opened",
    "ranks.heard",
    "ranks.divided",
    "ranks.ordered",
    "ranks.coded",
    "ranks.ended",
    "ranks.shared",
    "ranks.states",
    "ranks.before-part",
    "ranks.part-sent",
    "ranks.gathered",
    "ranks.committed",
    "ranks.told",
)
"""What ranks that save together pass besides."""
TIER_POINTS: Final = (
    "drain.read",
    "drain.segments",
    "replica.before-slot",
    "replica.slot-created",
    "drain.done",
    "tiers.drained",
    "tiers.remote-opened",
    "tiers.filled",
)
"""What a store with a second tier passes besides; ``replica``: copies, too."""
_POINTS: Final = (*CRASH_POINTS, *UPKEEP_POINTS, *RANK_POINTS, *TIER_POINTS)
_ALL: Final = frozenset(_POINTS)
_ENVIRONMENT: Final = "CKPTSTORE_CRASH_AT"
_name = ""
_left = 0


def arm(name: str, count: int = 1) -> None:
    """Kill this process the `count`-th time it passes `name`; an empty name disarms.

    Raises:
        ValueError: no crash point has this name.
    """
    global _name, _left
    if name and name not in _ALL:
        raise ValueError(f"{_ENVIRONMENT}: no crash point named {name!r}; known: {', '.join(_POINTS)}")
    _name, _left = name, count


def crash_point(name: str) -> None:
    """Kill this process here if it was armed so."""
    global _left
    if not _name:
        return
    assert name in _ALL, name
    if name == _name:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


_place, _, _count = os.environ.get(_ENVIRONMENT, "").partition(":")
arm(_place, int(_count or 1))
