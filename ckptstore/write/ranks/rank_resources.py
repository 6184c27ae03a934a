"""Hold the memory, threads and options of a rank's writer, which all of its terms share."""

from __future__ import annotations

import os
from collections.abc import Callable

from ckptstore.host.buffers import Staging
from ckptstore.host.threads import WORTH_THREADS, SleepingPool, Workers, started_pool
from ckptstore.log.journal import Journal
from ckptstore.segments.write_session import SegmentSession
from ckptstore.write.capture.bounded_capture import Feeding
from ckptstore.write.capture.snapshot import SnapshotPool
from ckptstore.write.capture.unit_copy import CopyMemory, StagedMemory
from ckptstore.write.ranks.messages.key_value_store import Group
from ckptstore.write.ranks.rank_options import RankOptions
from ckptstore.write.recomputed_states import RecomputedStates
from ckptstore.write.saves.in_flight import Places
from ckptstore.write.saves.ledger import Failures
from ckptstore.write.saves.save_metrics import Meter
from ckptstore.write.steps.recomputed_steps import Recomputing
from ckptstore.write.writer_options import WriterOptions

__all__ = ["RankResources"]


class RankResources:
    """Memory, threads and options of one rank.

    Attributes:
        journal: the store's journal.
        group: the ranks.
        options: the options of this writer. `ranks`: how the ranks save together.
        failures: errors that no call has raised yet. `places`: places for saves in flight.
        snapshots: memory for copies. `staging`: buffers between state and medium.
        bounded: memory with a byte budget, to which shares are copied unit by unit; None: there is no budget.
        blocks: threads that write. `workers`: threads that copy, hash and compress.
        write_thread: writes shares and hands them in. `commit_thread`: waits for the results.
        recomputed: computes shares from those of the save before, so that devices need not send them.
        meter: reports the metrics of every save.
    """

    def __init__(self, journal: Journal, group: Group, options: WriterOptions, ranks: RankOptions) -> None:
        self.journal = journal
        self.group = group
        self.options = options
        self.ranks = ranks
        self.failures = Failures()
        self.staging = Staging.for_chunks(budget=options.staging_bytes)
        self._background = SleepingPool(1, "ckptstore-touch")
        self.places = Places(options.max_in_flight, self.failures)
        self.snapshots = SnapshotPool(options.max_in_flight, self._background.submit, journal.backend.segment_bytes)
        self.bounded: CopyMemory | None = None
        if options.memory is not None:
            background, segment_bytes = self._background.submit, journal.backend.segment_bytes
            self.bounded = (
                StagedMemory(options.memory, options.max_in_flight, background, segment_bytes)
                if options.plain
                else Feeding(options.memory, background)
            )
        self.blocks = SleepingPool(options.threads, "ckptstore-write")
        self.workers = Workers.sleeping(min(os.cpu_count() or 1, self.staging.blocks - 1), "ckptstore-hash")
        recompute = options.diffs is not None and options.diffs.recompute
        self.recomputed = RecomputedStates(Recomputing(self.workers) if recompute else None)
        self.write_thread = started_pool(1, "ckptstore-part")
        self.commit_thread = started_pool(1, "ckptstore-settle")
        self.meter = Meter(options.on_metrics)

    def wake_for(self, nbytes: int) -> None:
        """Start the threads that copy, hash and write, if a state of `nbytes` is large enough to need them.

        Raises:
            RuntimeError: so many threads cannot be started.
        """
        if nbytes >= WORTH_THREADS:
            self._background.wake()
            self.blocks.wake()
            self.workers.wake()
            if self.bounded is not None:
                self.bounded.wake()

    def session(self, begun: Callable[[str], None], advance: Callable[[int], None] = lambda _: None) -> SegmentSession:
        """Return a session that writes segments.

        Args:
            begun: called with the id of each segment, before it exists.
            advance: called with the logical bytes that are done.
        """
        return SegmentSession(self.journal.backend, self.staging, self.blocks, self.workers, begun, advance)

    def close_threads(self) -> None:
        """Wait until the threads have finished their work, and end them."""
        for pool in (self.write_thread, self.commit_thread, self.blocks, self.workers.pool):
            pool.shutdown()
        self.recomputed.close()

    def close(self) -> None:
        """Free the memory, and report the metrics of every save."""
        if self.bounded is not None:
            self.bounded.close()
        self.snapshots.close()
        self._background.shutdown(cancel_futures=True)
        self.meter.close()
