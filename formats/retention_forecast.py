"""Which of the checkpoints to come is stored by itself, because the rules of retention keep it for good.

A step diff or delta needs all that it builds on. What the rules keep for good (``every:N``) keeps its chain stored for
as long, although nobody can load the rest of it any more. So where such a checkpoint would keep more than a full takes,
it becomes a full, and what came before it can go. Every writer asks this: for step diffs and deltas, of one process, of
an agent, of many ranks (where rank 0 asks).

``last`` and ``newer-than`` keep for a while only: their chains go when the window moves on. But a chain stays stored
until a full ends it, and a small medium may be full before. So where space is short but a full still fits, and most of
the stored checkpoints are retired, a chain ends as soon as it takes more than a full.

Which checkpoints are the best, and which will get a tag, nobody knows beforehand: what those keep stored,
`ckptstore.formats.commit_checks.pinned` counts and compaction frees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ckptstore.formats.rule_windows import window_of

__all__ = ["Chains", "kept_for_good"]

_REMEMBERED: Final = 1024
"""Steps whose chains are known: more than there are bases at any time."""


def kept_for_good(rules: Sequence[str], step: int) -> bool:
    """Whether rules keep a checkpoint of this step whatever comes after it.

    False also where this version does not know a rule: then nothing is retired, and nothing is gained.
    """
    windows = [window_of(rule) for rule in rules]
    if any(window is None for window in windows):
        return False
    return any(window.for_good(step) for window in windows if window is not None)


class Chains:
    """What the checkpoints of a term would keep stored that no rule keeps. Sizes are parts of a full."""

    def __init__(self, rules: Callable[[], Sequence[str]], short: Callable[[], bool] = lambda: False) -> None:
        """
        Args:
            rules: gives the store's rules as they are now.
            short: whether space is short but a full still fits, and most of the stored checkpoints are retired.
        """
        self._rules = rules
        self._short = short
        self._chain: dict[int, float] = {}  # by step: what its chain takes above the full
        self._kept: dict[int, float] = {}  # by step: what is stored for it alone, itself included

    def wants_full(self, step: int, base: int, size: float) -> bool:
        """Whether the next checkpoint is to be a full, and not coded against another.

        Args:
            step: its step.
            base: the step that it would build on.
            size: what it would take then, as a part of a full.
        """
        # Prevents: a chain that stays stored for ever for one checkpoint, and takes more than a full.
        if kept_for_good(self._rules(), step) and self._kept.get(base, 0.0) + size > 1.0:
            return True
        # Prevents: a run that dies of a full medium, while what fills it are retired steps that the newest builds on.
        return self._chain.get(base, 0.0) + size > 1.0 and self._short()

    def stored(self, step: int, base: int | None, size: float) -> None:
        """A checkpoint is stored.

        Args:
            base: the step that it builds on; None: it is a full.
            size: what it takes, as a part of a full.
        """
        below = 0.0 if base is None else self._kept.get(base, 0.0)
        self._kept.pop(step, None)
        self._kept[step] = 0.0 if kept_for_good(self._rules(), step) else below + size
        self._chain.pop(step, None)
        self._chain[step] = 0.0 if base is None else self._chain.get(base, 0.0) + size
        for known in (self._kept, self._chain):
            while len(known) > _REMEMBERED:
                del known[next(iter(known))]
