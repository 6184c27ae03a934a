"""Keep a rank within its byte budget: copy its share in units, as it is written or compressed.

`share_units` copies units that are written, `write.capture.bounded_capture` those that are compressed. Each rank has
its own memory, so no rank waits for another's memory. It waits for its own medium and its own compression, which take
the steps in turn.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait

from ckptstore.formats import uncached_copy
from ckptstore.formats.sources import place_of
from ckptstore.formats.states.state import FlatState
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
        memory: the memory that shares are copied to.
        coded: shares are deltas, gradient diffs, or the fulls that these need.
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
            budget: bytes of host memory; with `coded`, in addition to the state that is compressed against.
            limit: places in flight.
            background: runs a function in the background: it touches memory while other threads work.
            segment_bytes: `Backend.segment_bytes` of the medium.
        """
        self.coded = coded
        self._copiers = SleepingPool(default_threads(), "ckptstore-copy")
        self._feeding = Feeding(budget, self._copiers, background) if coded else None
        self.memory = Arenas(budget) if self._feeding is None else self._feeding.memory
        self._limit = limit
        self._background = background
        self._segment_bytes = segment_bytes
        # Prevents: two callers that each copy into memory that the other one waits for, while one thread writes.
        self._turn = threading.Lock()

    def wake(self) -> None:
        """Start the threads that copy. Raises `RuntimeError` if no more threads can be started."""
        self._copiers.wake()

    def take(self, share: FlatState, digests: Mapping[str, int]) -> Feed | ArrivingShare:
        """Return the object that copies a share.

        Args:
            digests: known state digests of its tensors, by name.
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
        """Submit a share to be written, and copy it: training continues when this returns.

        Args:
            submit: submits it to the write thread.

        Raises:
            whatever copying or `submit` raised. The step may be saved again, unless the call was interrupted.
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
                wait([one.done])  # by then the other ranks have been told, and the step is free to be saved again
            raise
        self._prepare(nbytes)
        return written[0]

    def _prepare(self, nbytes: int) -> None:
        """Touch the memory that the next share needs, while this one is written."""
        if self._feeding is not None:
            self._feeding.prepare(nbytes)
            return
        with contextlib.suppress(RuntimeError):  # closed meanwhile: not a reason to fail a save
            for run in self.memory.touch():
                self._background(run)
            if nbytes >= uncached_copy.LARGE:
                self._background(uncached_copy.prepare)

    def close(self) -> None:
        """Free the memory. May be repeated."""
        self._copiers.shutdown()
        self.memory.close()
