"""Decide which of the next checkpoints to store as a full, so that retention rules do not keep long chains for one.

A step diff or delta needs everything that it builds on. If a rule keeps such a checkpoint for good (``every:N``), its
chain stays stored as long, although nothing else in the chain can be loaded any more. If that would keep more bytes
than a full has, the checkpoint is stored as a full, and its predecessors can be deleted. Every writer asks this module:
for step diffs and deltas, in one process, in an agent, and on many ranks (where rank 0 asks).

``last`` and ``newer-than`` keep a checkpoint only for a while; its chain is deleted when the window moves on. But a
chain stays stored until a full ends it, and a small medium may fill up first. If space is short, a full still fits
and most of the stored checkpoints are retired, a chain therefore ends as soon as it is larger than a full. Under a
limit on space (rule ``space``) a chain ends while the fulls that release it certainly fit.

Nobody can predict which checkpoints will be the best or will get a tag. What those keep stored is counted by
`ckptstore.formats.history.commit_checks.pinned`, and compaction frees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ckptstore.formats.history.rule_windows import window_of

__all__ = ["Chains", "kept_for_good"]

_REMEMBERED: Final = 1024
"""Number of steps whose chains are remembered; it exceeds the number of bases at any time."""


def kept_for_good(rules: Sequence[str], step: int) -> bool:
    """Whether the rules keep a checkpoint of this step for good, whatever is saved after it.

    Also False if this version does not know one of the rules: then nothing is retired, so a full would free nothing.
    """
    windows = [window_of(rule) for rule in rules]
    if any(window is None for window in windows):
        return False
    return any(window.for_good(step) for window in windows if window is not None)


class Chains:
    """What the checkpoints of a term would keep stored although no rule keeps it. Sizes are fractions of a full."""

    def __init__(
        self,
        rules: Callable[[], Sequence[str]],
        short: Callable[[], bool] = lambda: False,
        tight: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            rules: returns the present rules of the store.
            short: returns whether space is short, a full still fits, and most of the stored checkpoints are retired.
            tight: returns whether the store's limit on space leaves no room for a longer chain.
        """
        self._rules = rules
        self._short = short
        self._tight = tight
        self._chain: dict[int, float] = {}  # step -> size of its chain above the full
        self._kept: dict[int, float] = {}  # step -> size of what is stored only for it, including itself

    def wants_full(self, step: int, base: int, size: float) -> bool:
        """Whether the next checkpoint should be a full, rather than encoded against another.

        Args:
            step: the step of the next checkpoint.
            base: the step on which it would build.
            size: its size if it builds on that, as a fraction of a full.
        """
        # Prevents: a chain larger than a full that stays stored forever for one checkpoint.
        if kept_for_good(self._rules(), step) and self._kept.get(base, 0.0) + size > 1.0:
            return True
        # Prevents: a run that dies of a limit which its own chain fills, because no full fits that would end the chain.
        if self._tight():
            return True
        # Prevents: a run that dies of a full medium that is filled with retired steps on which the newest builds.
        return self._chain.get(base, 0.0) + size > 1.0 and self._short()

    def stored(self, step: int, base: int | None, size: float) -> None:
        """Note that a checkpoint is stored.

        Args:
            step: its step.
            base: the step on which it builds; None: it is a full.
            size: its size as a fraction of a full.
        """
        below = 0.0 if base is None else self._kept.get(base, 0.0)
        self._kept.pop(step, None)
        self._kept[step] = 0.0 if kept_for_good(self._rules(), step) else below + size
        self._chain.pop(step, None)
        self._chain[step] = 0.0 if base is None else self._chain.get(base, 0.0) + size
        for known in (self._kept, self._chain):
            while len(known) > _REMEMBERED:
                del known[next(iter(known))]
