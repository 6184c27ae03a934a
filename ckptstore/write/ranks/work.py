"""One rank's work in one term: its thread that writes and its thread that settles, put together."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future

from ckptstore.errors import UsageError, WriterError
from ckptstore.formats.checkpoint_ref import Ref
from ckptstore.formats.retention_forecast import Chains
from ckptstore.host.background_threads import Periodic
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.restore.stored_base import open_base
from ckptstore.write.committer import may_mean
from ckptstore.write.order_policy import OrderPolicy
from ckptstore.write.ranks.batches import LOOK_SECONDS, Batches
from ckptstore.write.ranks.committing import RankCommitter
from ckptstore.write.ranks.diffs import RankDiffs
from ckptstore.write.ranks.means import Means
from ckptstore.write.ranks.ordering import Ordering
from ckptstore.write.ranks.saving import RankSave
from ckptstore.write.ranks.settling import Settling
from ckptstore.write.ranks.tenure import Tenure
from ckptstore.write.ranks.writing import Writing
from ckptstore.write.resident_bases import ResidentBases
from ckptstore.write.retaining import short_of_space

__all__ = ["Work"]


class Work:
    """What a term has of its own on a rank. All but `write`, `flush` and `finish` may be called by any thread.

    Attributes:
        tenure: the term.
    """

    def __init__(self, means: Means, tenure: Tenure) -> None:
        options = means.options
        self.tenure = tenure
        self._means = means
        # Rank 0 alone has the log, and decides.
        chains = Chains(
            lambda: () if tenure.committer is None else tenure.committer.log.catalog.keep,
            lambda: (
                tenure.committer is not None
                and short_of_space(tenure.committer.log.catalog, means.journal.backend.free_bytes)
            ),
        )
        policy = self._policy = OrderPolicy(options.deltas, options.diffs, chains)
        self._bases: ResidentBases | None = None
        if options.deltas is not None:
            self._bases = ResidentBases(
                options.deltas.memory,
                means.snapshots,
                means.workers,
                lambda identity, share: open_base(means.journal, identity, share),
            )
        self._diffs = None
        if options.diffs is not None:
            self._diffs = RankDiffs(options.diffs, means.workers, means.snapshots, policy)
        self._settling = Settling(means, tenure, policy, self._bases, self._diffs)
        self._batches: Batches | None = None
        self._looking: Periodic | None = None
        if self._diffs is not None:
            batches = self._batches = Batches(means, tenure, policy, self._diffs, self._settling)
            self._settling.busy = lambda: batches.busy
            self._settling.flush_later = lambda: means.writing.submit(self._flush_and_tend)
            self._looking = Periodic(LOOK_SECONDS, batches.look, "batches")
            self._looking.start()
        ordering: Ordering | None = None
        if self._bases is not None or self._diffs is not None:
            ordering = Ordering(means, tenure, policy, self._bases, self._diffs, self._batches)
        self._writing = Writing(means, tenure, self._settling, self._bases, ordering, self._batches)

    def submit(self, one: RankSave) -> Future[None]:
        """Have a step written."""
        return self._means.writing.submit(self._writing.write, one)

    def lost(self) -> None:
        """Rank 0: a step was not saved, and its share was not submitted."""
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._means.writing.submit(self._policy.lost)

    def hurry(self, step: int) -> None:
        """Somebody waits for a step: if it waits for its batch, that is written now."""
        batches = self._batches
        if batches is None:
            return
        if self.tenure.committer is not None:
            batches.hurry(step)  # the thread that writes may be waiting for another rank
        self._means.writing.submit(batches.end_early_for, step)

    def drain(self) -> list[RankSave]:
        """Wait until everything given so far is durable or has failed -> but what waits for rank 0 to end a batch."""
        return self._means.writing.submit(self._drained).result()

    def _drained(self) -> list[RankSave]:
        if self._batches is not None:
            self._batches.end_early()
        self._means.settling.submit(lambda: None).result()
        return [] if self._batches is None else self._batches.waiting

    def name(self, tag: str, ref: Ref | None) -> CheckpointInfo | None:
        """Rank 0: name a checkpoint; None: remove the name. What waits is written first, if it may be meant."""
        return self._means.writing.submit(self._named, tag, ref).result()

    def _named(self, tag: str, ref: Ref | None) -> CheckpointInfo | None:
        committer = self.tenure.committer
        assert committer is not None
        for one in [] if self._batches is None else self._batches.waiting:
            if tag in one.labels.tags if ref is None else may_mean(ref, one.step, one.labels):
                self._flush()
                break
        if ref is None:
            self._means.settling.submit(committer.unname, tag).result()
            return None
        return self._means.settling.submit(committer.name, tag, ref).result()

    def tend(self) -> None:
        """Rank 0: upkeep of the log."""
        self._means.settling.submit(self._settling.housekeeping).result()

    def _flush_and_tend(self) -> None:
        self._flush()
        self._means.settling.submit(self._settling.housekeeping).result()

    def _flush(self) -> None:
        if self._batches is not None:
            self._batches.flush()

    def settle_all(self) -> None:
        """Write what waits, and note in the log that nothing is missing if the process ends now."""
        self._means.writing.submit(self._end_batch).result()
        committer, diffs = self.tenure.committer, self._diffs
        if committer is not None and diffs is not None and diffs.options.waits:
            self._means.settling.submit(committer.note_end).result()

    def _end_batch(self) -> None:
        if self._batches is not None:
            self._batches.wait_for_end()

    def finish(self) -> Future[Future[None]]:
        """The end of the term, once everything is written that was given -> done when it is."""
        if self._looking is not None:
            self._looking.stop()

        def last() -> Future[None]:
            self._end_batch()
            return self._means.settling.submit(self._settling.finish)

        return self._means.writing.submit(last)

    def give_way(self, error: WriterError) -> None:
        """Another term takes the place of this one: what comes too late fails with `error`."""
        if self._looking is not None:
            self._looking.stop()
        self._means.settling.submit(self._settling.give_way, error).result()

    def release(self) -> None:
        """Give memory back, when no thread is at work any more."""
        self._settling.restart()

    def only_rank_0(self, what: str) -> RankCommitter:
        """The committer. Raises `UsageError` on other ranks, which may not do `what`."""
        if self.tenure.committer is None:
            raise UsageError(f"rank {self._means.group.rank}: only rank 0 of the group {what}")
        return self.tenure.committer
