"""Named points in the code at which the crash tests kill the process.

``CKPTSTORE_CRASH_AT=name[:n]`` kills this process with SIGKILL at the n-th call (default: the first) of `crash_point`
with `name`. Without the variable a call only tests one global. Every name is registered below, so that a test can visit
all of them, and an unregistered name fails at once. A harness that forks uses `arm` instead.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Final

CRASH_POINTS: Final[Mapping[str, str]] = {
    "save.begin": "the segment's file is not there yet",
    "save.first-block": "a block of data is written, the file has no header",
    "save.before-header": "all data is written, the file has no header",
    "save.before-seal": "the header is written, nothing is synced",
    "save.sealed": "the segment is durable, no record names it",
    "commit.before-create": "a COMMIT is about to be sent",
    "create.temp-written": "an object's bytes are in a temporary file, not synced",
    "create.before-link": "the temporary file is durable, its name is not there",
    "create.linked": "the name can be seen, and is not durable",
    "create.synced": "the object is durable, the temporary file still there",
    "commit.created": "the slot exists; the writer does not know yet whose it is",
    "commit.acknowledged": "the commit is durable, its caller does not know yet",
    "open.read": "READ is done, no OPEN is sent",
    "open.created": "the OPEN is there, the anchor above it was not checked",
    "open.verified": "the term has begun, its writer does not know yet",
    "fold.before-create": "the log that a fold covers is durable, the fold is not there",
    "fold.created": "the fold is durable",
    "fold.before-delete": "what folds replace is about to be deleted",
    "fold.deleted": "slots and folds are deleted, their manifests are not",
    "pin.created": "a pin is there, and nobody renews it",
    "merge.verified": "merged segments are durable and read back, nobody knows of them",
    "compact.rewritten": "one checkpoint of a move is rewritten and read back, others are not",
    "compact.verified": "everything that a move writes is durable and read back, nobody knows of it",
    "compact.committed": "the record of a move is answered, the next move has not begun",
    "request.posted": "a request is posted, nobody waits for the answer",
    "gc.surveyed": "the pins are listed, nothing is deleted",
    "gc.before-delete": "a segment is about to be deleted",
    "gc.deleted": "a segment is deleted, others are not",
    "recycle.kept": "a segment that gc released is a spare file, its name gone",
    "recycle.taken": "a spare file has a new segment's name, and the old one's bytes",
    "recycle.cleared": "its old header is erased durably, nothing else is written",
}
"""Crash points of a single process: name -> what is true at that instant."""
UPKEEP_POINTS: Final[Mapping[str, str]] = {
    "prune.planned": "the rules can be applied, nothing is requested",
    "prune.retired": "a record that retires is durable, more checkpoints may be superfluous",
    "copy.claimed": "the place is claimed, and empty",
    "copy.before-header": "a segment's bytes are written and verified, all but its header",
    "copy.sealed": "a segment is durable, and was not compared once more",
    "copy.brought": "a batch of segments is durable, no record names it",
    "copy.before-format": "the history is complete and durable, the place is not a store yet",
    "copy.finished": "it is a store, and still says that it is being made",
    "repair.judged": "what is intact is known, nothing is written of it",
    "repair.rewritten": "a rewritten segment is durable and read back, no record names it",
}
"""Further crash points of prune, copy and repair."""
RANK_POINTS: Final[Mapping[str, str]] = {
    "ranks.joined": "a rank has asked to join, and has no answer",
    "ranks.opened": "rank 0 has opened the term, no other rank knows",
    "ranks.heard": "all ranks see the term, none knows that the others do",
    "ranks.divided": "a rank knows what it writes, and has written nothing",
    "ranks.ordered": "rank 0 has said how a step is stored",
    "ranks.coded": "a rank has compressed a step diff, which waits in its memory",
    "ranks.ended": "rank 0 has ended a batch between two steps",
    "ranks.shared": "a rank has told what it has compressed of a batch, and written nothing",
    "ranks.states": "rank 0 has sent the states of a batch",
    "ranks.before-part": "a rank's segments are durable, nobody knows of them",
    "ranks.part-sent": "its part is sent",
    "ranks.gathered": "rank 0 has all parts, and has committed nothing",
    "ranks.committed": "the commit is durable, no other rank knows",
    "ranks.told": "the other ranks know, rank 0's caller does not",
}
"""Further crash points of ranks that save together."""
TIER_POINTS: Final[Mapping[str, str]] = {
    "drain.read": "a drain knows what the remote lacks, and has copied nothing",
    "drain.segments": "segments are durable in the remote, no slot names them",
    "replica.before-slot": "the next slot of a remote, or of a copy, is about to be sent",
    "replica.slot-created": "it is durable, the drain or copy does not know yet",
    "drain.done": "the remote has everything, nobody knows",
    "tiers.drained": "the rest is drained, no OPEN is sent",
    "tiers.remote-opened": "the term is open in the remote, the store does not have it",
    "tiers.filled": "the store has what the term continues from, but not the term",
}
"""Further crash points of a store with a second tier. Copies pass those of ``replica``, too."""
PUBLISH_POINTS: Final[Mapping[str, str]] = {
    "publish.claimed": "the number of a version is claimed, nothing of it is written",
    "publish.before-header": "the tensors of a file are written, it has no header",
    "publish.written": "all files of a version are durable, it has no manifest",
    "publish.complete": "the manifest is durable, the pointer names the version before",
    "publish.pointed": "the pointer names the version, and is not durable",
    "publish.committed": "the pointer is durable, nothing is removed",
    "publish.removing": "the manifest of an old version is removed, its files are there",
}
"""Further crash points of a publisher of weights."""
_POINTS: Final = (*CRASH_POINTS, *UPKEEP_POINTS, *RANK_POINTS, *TIER_POINTS, *PUBLISH_POINTS)
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
