"""Copies segments from one medium to another, several at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ckptstore.backends.base import Backend
from ckptstore.formats.history.records import SegmentEntry
from ckptstore.host.buffers import Staging
from ckptstore.host.progress import Advance
from ckptstore.host.task_pool import Task, sweep
from ckptstore.maintenance.copies.segment_copy import BLOCKS, copy_segment

__all__ = ["SegmentCopies"]


@dataclass
class SegmentCopies:
    """A `Supply` that copies from another store.

    Attributes:
        brought: number of copied segments; `nbytes`: their bytes.
    """

    source: Backend
    target: Backend
    run: str
    threads: int
    advance: Advance
    brought: int = 0
    nbytes: int = 0
    _staging: Staging = field(init=False)

    def __post_init__(self) -> None:
        self._staging = Staging.for_chunks(BLOCKS * self.threads)

    def bring(self, segments: Sequence[SegmentEntry]) -> None:
        """Copy the segments. See `transfer.Supply`."""

        def task(entry: SegmentEntry) -> Task:
            def work() -> Iterable[Task]:
                copy_segment(self.source, self.target, entry, self.run, self._staging, self.advance)
                return ()

            return work

        sweep([task(entry) for entry in segments], min(self.threads, len(segments)), "ckptstore-copy")
        self.brought += len(segments)
        self.nbytes += sum(entry.size for entry in segments)
