"""Deltas and step diffs under a byte budget: the caller copies unit by unit as the committer's thread compresses.

A save waits for its turn: what came before is compressed, and a full before it durable. From there on the committer's
thread compresses, and the caller copies, until the last byte is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ckptstore.formats.state import FlatState
from ckptstore.host.progress import Progress, Tally
from ckptstore.host.threads import SleepingPool, default_threads
from ckptstore.write.coded import Coded
from ckptstore.write.committer import Committer
from ckptstore.write.feeding import Feed, Feeding
from ckptstore.write.job import Job
from ckptstore.write.snapshot import SnapshotPool
from ckptstore.write.steps.updates import Explaining, Updates, with_sparse_copies

__all__ = ["FedSaves"]


class FedSaves(Coded):
    """Saves of states that are never copied as a whole. What somebody else has copied is saved as `Coded` does."""

    needs_caller = True

    def __init__(
        self,
        memory: int,
        explaining: Explaining,
        snapshots: SnapshotPool,
        copiers: ThreadPoolExecutor,
        *,
        thread: ThreadPoolExecutor,
        tend: Callable[[], object],
        background: Callable[[Callable[[], None]], object],
    ) -> None:
        """
        Args:
            memory: bytes of host memory beside the base.
            explaining, snapshots, copiers, thread, tend: as for `Coded`.
            background: has memory touched while others work.
        """
        super().__init__(explaining, snapshots, copiers, thread=thread, tend=tend)
        self.feeding = Feeding(memory, SleepingPool(default_threads(), "ckptstore-copy"), background)

    def save(
        self, committer: Committer, job: Job, flat: FlatState, updates: Updates | None, progress: Progress | None
    ) -> None:
        """See `SavePath.save`. All of the state is copied when this returns."""
        self._feed(committer, job, flat, updates, progress)

    def begin(self, committer: Committer, job: Job, flat: FlatState, updates: Updates | None) -> None:
        """See `SavePath.begin`. Raises `UsageError`: the memory does not suffice for what is compressed at once."""
        self._feed(committer, job, flat, updates, None)

    def _feed(
        self, committer: Committer, job: Job, flat: FlatState, updates: Updates | None, progress: Progress | None
    ) -> None:
        found = self._explaining.found(updates, flat)
        feed = self.feeding.feed(flat)
        try:
            taken = with_sparse_copies(found)

            def store() -> None:
                if self._with_diffs:
                    Tally(progress, flat.nbytes).advance(flat.nbytes)
                    committer.diff_fed(feed, taken, job)
                    if job.scope is not None:
                        committer.flush()
                else:
                    committer.persist_fed(feed, job, progress=progress)

            self.submit(lambda: self._work_fed(committer, feed, job, store))
            if self._with_diffs:
                job.take()
            job.measured.waited += feed.run()
        except BaseException as error:
            if not job.give_up(error):
                job.wait_over()  # the committer's thread has begun it, and ends it
            raise
        self.feeding.prepare(flat.nbytes)  # for the next one, if this was a full

    def _work_fed(self, committer: Committer, feed: Feed, job: Job, store: Callable[[], None]) -> None:
        """In the committer's thread, as `_work`."""
        started = job.start(final=self._with_diffs)
        try:
            if started:
                store()
        except BaseException as error:  # noqa: BLE001  # its saver hears of it
            committer.fail(job, error, told=feed.told or feed.spoiled)
        finally:
            feed.finish()
            job.finish()

    def prepare(self, flat: FlatState) -> None:
        """See `SavePath.prepare`."""
        super().prepare(flat)
        self.feeding.prepare(flat.nbytes)

    def wake(self) -> None:
        """See `SavePath.wake`."""
        self.feeding.wake()

    def close(self) -> None:
        """See `SavePath.close`."""
        self.feeding.close()
