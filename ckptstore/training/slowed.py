"""Whether saving slows training down to less than half of its pace: said once, with what to choose instead."""

from __future__ import annotations

from typing import Final

__all__ = ["Slowed"]

_FIRST: Final = 3
"""Steps that do not count: the first ones open the store and make memory ready."""
STEPS: Final = 20
LONG: Final = 10.0
"""Steps, and seconds that were waited in them, after which the share of the waiting is no accident."""


class Slowed:
    """Adds up what iterations take and what saving keeps training waiting."""

    def __init__(self) -> None:
        """Nothing measured yet."""
        self._count = 0
        self._trained = self._waited = 0.0
        self._said = False

    def stepped(self, trained: float, waited: float) -> None:
        """A step is over.

        Args:
            trained: seconds from the end of the call of `Checkpointer.step` before to this one.
            waited: seconds that this call took.
        """
        self._count += 1
        if self._count > _FIRST:
            self._trained += trained
            self._waited += waited

    def remark(self, url: str, strategy: str, every: int | None, *, bucket: bool) -> str | None:
        """What is to be said, once; None: nothing.

        Args:
            url, strategy: of the run.
            every: steps from one save to the next; None: a controller says when, and it knows what saves take.
            bucket: the store is in an object store.
        """
        enough = self._count >= STEPS and self._waited >= LONG and self._waited > self._trained
        if self._said or every is None or not enough:
            return None
        self._said = True
        total = self._trained + self._waited
        advice = ["save_every=N, or save_every=IntervalController(slowdown=1.05), saves less often"]
        if bucket:
            tiers = f"ckptstore.open(FOLDER, remote={url!r}) in place of the URL saves to a disk, then to the bucket"
            advice.insert(0, tiers)
        if strategy == "full":
            advice.append("strategy='gradient' or 'delta' stores less")
        return (
            f"{url}: training runs at {self._trained / total:.0%} of its pace: saving took {self._waited:.0f} s of the "
            f"last {total:.0f} s. {'; '.join(advice)}"
        )
