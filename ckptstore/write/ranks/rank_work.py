"""Connect the write thread and the commit thread of one rank in one term."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future

from ckptstore.errors import UsageError, WriterError
from ckptstore.formats.history.checkpoint_ref import Ref
from ckptstore.formats.history.retention_forecast import Chains
from ckptstore.host.background_threads import Periodic
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.restore.stored_base import open_base
from ckptstore.write.committer import may_mean
from ckptstore.write.policy.order_policy import OrderPolicy
from ckptstore.write.ranks.commit_coordinator import CommitCoordinator
from ckptstore.write.ranks.rank_batches import LOOK_SECONDS, RankBatches
from ckptstore.write.ranks.rank_committer import RankCommitter
from ckptstore.write.ranks.rank_diffs import RankDiffs
from ckptstore.write.ranks.rank_orders import RankOrders
from ckptstore.write.ranks.rank_resources import RankResources
from ckptstore.write.ranks.rank_save import RankSave
from ckptstore.write.ranks.rank_term import RankTerm
from ckptstore.write.ranks.share_writer import ShareWriter
from ckptstore.write.resident_bases import ResidentBases
from ckptstore.write.retainer import short_of_space

__all__ = ["RankWork"]


class RankWork:
    """The parts that belong to one term on one rank. Any thread may call its methods, except `finish`.

    Attributes:
        rank_term: the term.
    """

    def __init__(self, resources: RankResources, rank_term: RankTerm) -> None:
        options = resources.options
        self.rank_term = rank_term
        self._resources = resources
        # Only rank 0 has the log and decides.
        chains = Chains(
            lambda: () if rank_term.committer is None else rank_term.committer.log.catalog.keep,
            lambda: (
                rank_term.committer is not None
                and short_of_space(rank_term.committer.log.catalog, resources.journal.backend.free_bytes)
            ),
        )
        policy = self._policy = OrderPolicy(options.deltas, options.diffs, chains)
        self._bases: ResidentBases | None = None
        if options.deltas is not None:
            self._bases = ResidentBases(
                options.deltas.memory,
                resources.snapshots,
                resources.workers,
                lambda identity, share: open_base(resources.journal, identity, share),
            )
        self._diffs = None
        if options.diffs is not None:
            self._diffs = RankDiffs(options.diffs, resources.workers, resources.snapshots, policy)
        self._coordinator = CommitCoordinator(resources, rank_term, policy, self._bases, self._diffs)
        self._batches: RankBatches | None = None
        self._looking: Periodic | None = None
        if self._diffs is not None:
            batches = self._batches = RankBatches(resources, rank_term, policy, self._diffs, self._coordinator)
            self._coordinator.busy = lambda: batches.busy
            self._coordinator.flush_later = lambda: resources.write_thread.submit(self._flush_and_tend)
            self._looking = Periodic(LOOK_SECONDS, batches.look, "batches")
            self._looking.start()
        ordering: RankOrders | None = None
        if self._bases is not None or self._diffs is not None:
            ordering = RankOrders(resources, rank_term, policy, self._bases, self._diffs, self._batches)
        self._share_writer = ShareWriter(resources, rank_term, self._coordinator, self._bases, ordering, self._batches)

    def submit(self, one: RankSave) -> Future[None]:
        """Submit a step to the write thread."""
        return self._resources.write_thread.submit(self._share_writer.write, one)

    def lost(self) -> None:
        """Rank 0: note that a step was not saved, and that its share was not submitted."""
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._resources.write_thread.submit(self._policy.lost)

    def hurry(self, step: int) -> None:
        """Note that a caller waits for a step: if the step waits for its batch, the batch is written now."""
        batches = self._batches
        if batches is None:
            return
        if self.rank_term.committer is not None:
            batches.hurry(step)  # the write thread may be waiting for another rank
        self._resources.write_thread.submit(batches.end_early_for, step)

    def drain(self) -> list[RankSave]:
        """Wait until every earlier save is durable or has failed -> the steps that wait for rank 0 to end a batch."""
        return self._resources.write_thread.submit(self._drain_batch).result()

    def _drain_batch(self) -> list[RankSave]:
        if self._batches is not None:
            self._batches.end_early()
        self._resources.commit_thread.submit(lambda: None).result()
        return [] if self._batches is None else self._batches.waiting

    def name(self, tag: str, ref: Ref | None) -> CheckpointInfo | None:
        """Rank 0: tag a checkpoint; with None, remove the tag.

        The waiting steps are written first if the ref or tag may refer to one of them.
        """
        return self._resources.write_thread.submit(self._name_in_turn, tag, ref).result()

    def _name_in_turn(self, tag: str, ref: Ref | None) -> CheckpointInfo | None:
        committer = self.rank_term.committer
        assert committer is not None
        for one in [] if self._batches is None else self._batches.waiting:
            if tag in one.labels.tags if ref is None else may_mean(ref, one.step, one.labels):
                self._flush()
                break
        if ref is None:
            self._resources.commit_thread.submit(committer.unname, tag).result()
            return None
        return self._resources.commit_thread.submit(committer.name, tag, ref).result()

    def tend(self) -> None:
        """Rank 0: answer requests and begin a fold of the log."""
        self._resources.commit_thread.submit(self._coordinator.housekeeping).result()

    def _flush_and_tend(self) -> None:
        self._flush()
        self._resources.commit_thread.submit(self._coordinator.housekeeping).result()

    def _flush(self) -> None:
        if self._batches is not None:
            self._batches.flush()

    def settle_all(self) -> None:
        """Write the waiting steps, and note in the log that nothing is missing if the process ends now."""
        self._resources.write_thread.submit(self._end_batch).result()
        committer, diffs = self.rank_term.committer, self._diffs
        if committer is not None and diffs is not None and diffs.options.waits:
            self._resources.commit_thread.submit(committer.note_end).result()

    def _end_batch(self) -> None:
        if self._batches is not None:
            self._batches.wait_for_end()

    def finish(self) -> Future[Future[None]]:
        """End the term once every earlier save is written -> a future of the future that is done when it has ended."""
        if self._looking is not None:
            self._looking.stop()

        def last() -> Future[None]:
            self._end_batch()
            return self._resources.commit_thread.submit(self._coordinator.finish)

        return self._resources.write_thread.submit(last)

    def give_way(self, error: WriterError) -> None:
        """End this term because another one replaces it: late saves fail with `error`."""
        if self._looking is not None:
            self._looking.stop()
        self._resources.commit_thread.submit(self._coordinator.give_way, error).result()

    def release(self) -> None:
        """Free memory, once no thread works any more."""
        self._coordinator.restart()

    def only_rank_0(self, what: str) -> RankCommitter:
        """Return the committer. Raises `UsageError` on other ranks, which may not do `what`."""
        if self.rank_term.committer is None:
            raise UsageError(f"rank {self._resources.group.rank}: only rank 0 of the group {what}")
        return self.rank_term.committer
