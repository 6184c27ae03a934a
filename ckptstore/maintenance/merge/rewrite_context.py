"""Provides threads and memory for rewriting checkpoints, and removes segments that are not committed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

from ckptstore.backends.base import Backend
from ckptstore.backends.nowhere import Nowhere
from ckptstore.errors import CorruptSegmentError, FencedError, StorageError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import Encoding, SegmentEntry, segment_key
from ckptstore.host.buffers import DEFAULT_BUDGET, Staging
from ckptstore.host.progress import Advance, Progress, Tally
from ckptstore.host.threads import default_threads, workers
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import read
from ckptstore.maintenance.merge.merge_check import check_copies, check_state
from ckptstore.restore.open_checkpoint import OpenCheckpoint
from ckptstore.segments.write_session import SegmentSession

__all__ = ["RewriteContext"]


class RewriteContext:
    """Threads and memory for rewriting, for the length of a ``with``.

    Attributes:
        term: the term to write in. The caller sets it once it has read the log.
        tally: counts progress and reports it.
        advance: reports progress, and may block to limit the speed.
        session: the session that segments are written with.
    """

    def __init__(
        self,
        journal: Journal,
        progress: Progress | None,
        *,
        dry_run: bool,
        held_back: Callable[[Advance], Advance] = lambda advance: advance,
    ) -> None:
        """Take threads and memory.

        Args:
            progress: called with (bytes done, bytes in all).
            dry_run: write nothing.
            held_back: wraps `advance`, which is called after every piece of work; the wrapper may sleep, to limit the
                speed.
        """
        self.term = 0
        self.tally = Tally(progress)
        self.advance = held_back(self.tally.advance)
        self._journal = journal
        self._backend = journal.backend
        self._dry_run = dry_run
        self._stack = contextlib.ExitStack()
        blocks = self._stack.enter_context(workers(2, "write"))
        coders = self._stack.enter_context(workers(default_threads(), "merge"))
        self._staging = Staging.for_chunks(2 * coders.threads, DEFAULT_BUDGET)
        self._pool = coders.pool
        self._begun: list[str] = []
        target: Backend = Nowhere() if dry_run else journal.backend
        self.session = SegmentSession(target, self._staging, blocks.pool, coders, self._begun.append, self.advance)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def removing_on_failure(self) -> Iterator[None]:
        """Remove written segments if the block raises: no log or writer knows of them."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(StorageError):  # gc deletes them another time
                self.remove(set())
            raise

    @contextlib.contextmanager
    def fenced_if_newer_term(self) -> Iterator[None]:
        """Raise `FencedError` if the block fails because a newer term began and gc took uncommitted segments."""
        try:
            yield
        except (CorruptSegmentError, StorageError) as error:
            newest = read(self._journal).catalog.term
            if newest > self.term:
                raise FencedError(
                    f"{self._journal.url}: term {newest} began while the merge was prepared in term {self.term}"
                ) from error
            raise

    def remove(self, keep: set[str]) -> None:
        """Delete the segments that were begun, except `keep`."""
        for segment in [begun for begun in self._begun if begun not in keep]:
            if not self._dry_run:
                self._backend.delete(segment_key(self.term, segment))
            self._begun.remove(segment)

    def release(self) -> None:
        """Stop tracking the begun segments: other processes may know of them now, so they are not removed."""
        self._begun.clear()

    def check(self, found: OpenCheckpoint) -> None:
        """Decode every tensor of a checkpoint, and compare. Raises as `check_state`."""
        check_state(found, self._pool, self._staging, self.advance)

    def check_copies(self, catalog: Catalog, segments: Sequence[SegmentEntry], encodings: Sequence[Encoding]) -> None:
        """Read back copied segments. Raises as `merge_check.check_copies`."""
        check_copies(self._backend, catalog, segments, encodings, self._pool, self._staging, self.advance)
