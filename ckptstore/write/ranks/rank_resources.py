"""The memory, threads and options of a rank's writer, which all of its terms share."""

from __future__ import annotations

import os
from collections.abc import Callable

from ckptstore.host.buffers import Staging
from ckptstore.host.threads import WORTH_THREADS, SleepingPool, Workers, started_pool
from ckptstore.log.journal import Journal
from ckptstore.segments.write_session import SegmentSession
from ckptstore.write.capture.snapshot import SnapshotPool
from ckptstore.write.ranks.messages.key_value_store import Group
from ckptstore.write.ranks.rank_options import RankOptions
from ckptstore.write.ranks.share_budget import ShareBudget
from ckptstore.write.saves.in_flight import Places
from ckptstore.write.saves.ledger import Failures
from ckptstore.write.saves.save_metrics import Meter
from ckptstore.write.writer_options import WriterOptions

__all__ = ["RankResources"]


class RankResources:
    """Memory, threads and options of one rank.

    Attributes:
        journal: the store's.
        group: the ranks.
        options: of this writer. `ranks`: how the ranks save together.
        failures: those that no call has raised yet. `places`: of saves in flight.
        snapshots: memory for copies. `staging`: between state and medium.
        bounded: what shares are copied through under a budget; None: there is none.
        blocks: threads that write. `workers`: threads that copy, hash and code.
        write_thread: writes and hands in. `commit_thread`: waits for what becomes of that.
        meter: tells of every save.
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
        self.bounded: ShareBudget | None = None
        if options.memory is not None:
            self.bounded = ShareBudget(
                options.memory,
                options.max_in_flight,
                coded=not options.plain,
                background=self._background.submit,
                segment_bytes=journal.backend.segment_bytes,
            )
        self.blocks = SleepingPool(options.threads, "ckptstore-write")
        self.workers = Workers.sleeping(min(os.cpu_count() or 1, self.staging.blocks - 1), "ckptstore-hash")
        self.write_thread = started_pool(1, "ckptstore-part")
        self.commit_thread = started_pool(1, "ckptstore-settle")
        self.meter = Meter(options.on_metrics)

    def wake_for(self, nbytes: int) -> None:
        """Start the threads that copy, hash and write, if a state of so many bytes is worth it.

        Raises:
            RuntimeError: so many threads are not to be had.
        """
        if nbytes >= WORTH_THREADS:
            self._background.wake()
            self.blocks.wake()
            self.workers.wake()
            if self.bounded is not None:
                self.bounded.wake()

    def session(self, begun: Callable[[str], None], advance: Callable[[int], None] = lambda _: None) -> SegmentSession:
        """What segments are written with.

        Args:
            begun: told the id of each, before it exists.
            advance: told the logical bytes that are done.
        """
        return SegmentSession(self.journal.backend, self.staging, self.blocks, self.workers, begun, advance)

    def close_threads(self) -> None:
        """Wait for those that work."""
        for pool in (self.write_thread, self.commit_thread, self.blocks, self.workers.pool):
            pool.shutdown()

    def close(self) -> None:
        """Let go of memory, and tell of every save."""
        if self.bounded is not None:
            self.bounded.close()
        self.snapshots.close()
        self._background.shutdown(cancel_futures=True)
        self.meter.close()
