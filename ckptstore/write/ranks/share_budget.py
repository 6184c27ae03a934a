"""The byte budget of a rank: its share is copied in units, as it is written (`share_units`) or compressed (`feeding`).

Each rank has memory of its own, so no rank waits for another's memory. It waits for its own medium and its own
compression, which take the steps in turn.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait

from ckptstore.formats import uncached_copy
from ckptstore.formats.sources import place_of
from ckptstore.formats.state import FlatState
from ckptstore.host.arenas import Arenas
from ckptstore.host.threads import SleepingPool, default_threads
from ckptstore.segments.units import plan_units
from ckptstore.write.capture.bounded_capture import Feed, Feeding
from ckptstore.write.ranks.rank_save import RankSave
from ckptstore.write.ranks.share_units import ArrivingShare

__all__ = ["ShareBudget"]


class ShareBudget:
    """The budget of one rank.

    Attributes:
        memory: what shares are copied to.
        coded: shares are deltas or gradient diffs, and the fulls that these need.
    """

    def __init__(
        self,
        budget: int,
        limit: int,
        *,
        coded: bool,
        background: Callable[[Callable[[], None]], object],
        segment_bytes: int,
    ) -> None:
        """
        Args:
            budget: bytes of host memory; with `coded` beside the state that is coded against.
            limit: places in flight.
            background: has memory touched while others work.
            segment_bytes: `Backend.segment_bytes` of the medium.
        """
        self.coded = coded
        self._copiers = SleepingPool(default_threads(), "ckptstore-copy")
        self._feeding = Feeding(budget, self._copiers, background) if coded else None
        self.memory = Arenas(budget) if self._feeding is None else self._feeding.memory
        self._limit = limit
        self._background = background
        self._segment_bytes = segment_bytes
        # Prevents: two callers who copy to what the other one waits for, while one thread writes.
        self._turn = threading.Lock()

    def wake(self) -> None:
        """Start the threads that copy. Raises `RuntimeError`: there are no more."""
        self._copiers.wake()

    def take(self, share: FlatState, digests: Mapping[str, int]) -> Feed | ArrivingShare:
        """What a share is copied through.

        Args:
            digests: state digests of its tensors that are known, by name.
        """
        if self._feeding is not None:
            return self._feeding.feed(share)
        tensors = tuple(
            (name, source.dtype, tuple(source.shape), *place_of(source)) for name, source in share.tensors.items()
        )
        plan = plan_units(tensors, self._segment_bytes)
        self.memory.expect(plan.space, self._limit)
        return ArrivingShare(share, plan, digests, self.memory, self._copiers)

    def hand_over(self, one: RankSave, submit: Callable[[RankSave], Future[None]]) -> Future[None]:
        """Have a share written that is to be copied, and copy it: training goes on when this returns.

        Args:
            submit: has it written.

        Raises:
            whatever copying or `submit` raised. The step may be given again, unless the call was interrupted.
        """
        feed = one.feed
        assert feed is not None
        assert one.share is not None
        nbytes = one.share.nbytes
        written: list[Future[None]] = []
        try:
            if isinstance(feed, ArrivingShare):
                with self._turn:
                    one.measured.waited += feed.run(lambda: written.append(submit(one)))
            else:
                written.append(submit(one))
                one.measured.waited += feed.run()
        except Exception:
            if written:
                wait([one.done])  # the other ranks have been told by then, and the step is nobody's
            raise
        self._prepare(nbytes)
        return written[0]

    def _prepare(self, nbytes: int) -> None:
        """Touch what the next share needs, while this one is written."""
        if self._feeding is not None:
            self._feeding.prepare(nbytes)
            return
        with contextlib.suppress(RuntimeError):  # closed meanwhile: that is no reason to fail a save
            for run in self.memory.touch():
                self._background(run)
            if nbytes >= uncached_copy.LARGE:
                self._background(uncached_copy.prepare)

    def close(self) -> None:
        """Let go of memory. May be repeated."""
        self._copiers.shutdown()
        self.memory.close()
