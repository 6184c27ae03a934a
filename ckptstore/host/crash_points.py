"""Named points in the code at which the crash tests kill the process.

``CKPTSTORE_CRASH_AT=name[:n]`` kills this process with SIGKILL at the n-th call (default: the first) of `crash_point`
with `name`. Without the variable a call only tests one global. Every name is registered below, so that a test can visit
all of them, and an unregistered name fails at once. A harness that forks uses `arm` instead.
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
"""Crash points of a single process."""
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
"""Further crash points of prune, copy and repair."""
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
"""Further crash points of ranks that save together."""
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
"""Further crash points of a store with a second tier. Copies pass those of ``replica``, too."""
_POINTS: Final = (*CRASH_POINTS, *UPKEEP_POINTS, *RANK_POINTS, *TIER_POINTS)
_ALL: Final = frozenset(_POINTS)
_ENVIRONMENT: Final = "CKPTSTORE_CRASH_AT"
_name = ""
_left = 0


def arm(name: str, count: int = 1) -> None:
    """Kill this process at the `count`-th call of `crash_point` with `name`. An empty name disarms.

    Raises:
        ValueError: no crash point has this name.
    """
    global _name, _left
    if name and name not in _ALL:
        raise ValueError(f"{_ENVIRONMENT}: no crash point named {name!r}; known: {', '.join(_POINTS)}")
    _name, _left = name, count


def crash_point(name: str) -> None:
    """Kill this process if it was armed for this call."""
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
