"""Which checkpoints of a run are kept: the newest, every so many steps, the best.

The others are retired beside training. The rules are a union, over the checkpoints of this run's own line: branches
that were gone back from, and what has a tag, are left alone. The newest is never retired. What is retired is deleted
once nothing builds on it (`Store.gc`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from ckptstore.errors import CkptError, RequestTimeoutError, UsageError
from ckptstore.host.checks import whole
from ckptstore.host.threads import started_pool
from ckptstore.log.checkpoints import CheckpointInfo, TermInfo
from ckptstore.store import Store
from ckptstore.training.writing import PollsRequests, StateWriter

__all__ = ["BEST", "Keep", "Retention", "line_of"]

_LOG: Final = logging.getLogger("ckptstore.training")

BEST: Final = "best"
"""The tag of the best checkpoint."""
_SHARE: Final = 20
"""A round may take one part in so many of the time: reading the log takes the interpreter's lock from training."""
_AT_ONCE: Final = 1000
"""Checkpoints that one record retires; a request has to fit into a slot of the log."""


@dataclass(frozen=True, slots=True)
class Keep:
    """What is kept; nothing set: everything.

    Attributes:
        last: so many newest ones.
        every: those whose step is a multiple of it.
        best: the metric by which one more is kept, and tagged `BEST`: the lowest, or with ``max:NAME`` the highest.
    """

    last: int | None = None
    every: int | None = None
    best: str | None = None

    def __post_init__(self) -> None:
        if self.last is not None:
            whole("keep_last", self.last, 1)
        if self.every is not None:
            whole("keep_every", self.every, 1)
        if self.best is not None and (not isinstance(self.best, str) or not self.best.removeprefix("max:")):
            raise UsageError(f"keep_best: {self.best!r}; the name of a metric, or 'max:NAME'")

    @property
    def highest(self) -> bool:
        """Whether a higher metric is better."""
        return isinstance(self.best, str) and self.best.startswith("max:")

    @property
    def retires(self) -> bool:
        """Whether anything is ever retired; the best alone is only tagged."""
        return self.last is not None or self.every is not None

    @property
    def wanted(self) -> bool:
        """Whether there is anything to do."""
        return self.retires or self.best is not None

    def metric(self, info: CheckpointInfo) -> float | None:
        """How good a checkpoint is, lower being better; None: nobody said."""
        if self.best is None:
            return None
        value = info.metadata.get("metrics", {}).get(self.best.removeprefix("max:"))
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            return None
        return -value if self.highest else value

    def best_of(self, line: Iterable[CheckpointInfo]) -> CheckpointInfo | None:
        """The best; of equals the newest."""
        rated = [(metric, -info.step, info) for info in line if (metric := self.metric(info)) is not None]
        return min(rated, key=lambda one: one[:2])[2] if rated else None

    def superfluous(self, line: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
        """What no rule keeps, of a line in ascending order. Never the newest."""
        if not self.retires or not line:
            return []
        kept = {line[-1].step} | {info.step for info in line[-(self.last or 1) :]}
        if self.every is not None:
            kept |= {info.step for info in line if info.step % self.every == 0}
        if (best := self.best_of(line)) is not None:
            kept.add(best.step)
        return [info for info in line if info.step not in kept and not info.tags]


def line_of(checkpoints: Iterable[CheckpointInfo], terms: Iterable[TermInfo], term: int) -> list[CheckpointInfo]:
    """The checkpoints that a term's newest continues from, ascending by step: no branch that was gone back from."""
    parents = {one.term: one.parent for one in terms}
    until: dict[int, float] = {}
    step = math.inf
    while term in parents:
        until[term] = step
        parent = parents[term]
        if parent is None:
            break
        number, _, above = parent.partition("@")
        step, term = int(number), int(above)
    found = [info for info in checkpoints if info.step <= until.get(info.term, -1)]
    return sorted(found, key=lambda info: info.step)


class Retention:
    """Keeps the rules in a thread of its own, one round at a time."""

    def __init__(self, store: Store, writer: StateWriter, keep: Keep) -> None:
        """
        Args:
            store: of `writer`.
            writer: of this process; it commits what is retired.
        """
        self._store = store
        self._writer = writer
        self._keep = keep
        self._pool: ThreadPoolExecutor | None = started_pool(1, "ckptstore-retention")
        self._lock = threading.Lock()
        self._round: Future[None] | None = None
        self._not_before = 0.0
        self._warned = False

    def durable(self, is_durable: bool) -> None:
        """A checkpoint is there (`PendingSave.when_done`): see what it makes superfluous, if it is time for a round."""
        with self._lock:
            if is_durable and self._pool is not None and self._round is None and time.monotonic() >= self._not_before:
                self._round = self._pool.submit(self._rounds)

    def close(self) -> None:
        """The last round, then the end. Call it when everything is durable, and before the writer is closed."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.submit(self._rounds)
            pool.shutdown()

    def abandon(self) -> None:
        """End without a last round."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)

    def _rounds(self) -> None:
        began = time.monotonic()
        try:
            self._once()
        except CkptError as error:
            # No checkpoint is lost by that, and the next round tries again.
            level, self._warned = (logging.DEBUG if self._warned else logging.WARNING), True
            _LOG.log(level, "%s: superfluous checkpoints stay for now: %s", self._store.url, error)
        finally:
            ended = time.monotonic()
            with self._lock:
                self._not_before = ended + _SHARE * (ended - began)
                self._round = None

    def _once(self) -> None:
        line = line_of(self._store.checkpoints(), self._store.terms(), self._writer.term)
        best = self._keep.best_of(line)
        if best is not None and BEST not in best.tags:
            self._writer.tag(BEST, best)
            line = line_of(self._store.checkpoints(), self._store.terms(), self._writer.term)
        refs = [info.ref for info in self._keep.superfluous(line)]
        for first in range(0, len(refs), _AT_ONCE):
            self._retire(refs[first : first + _AT_ONCE])
        if refs:
            self._store.gc()

    def _retire(self, refs: Sequence[str]) -> None:
        """Ask the writer as any process would; then have it look."""
        writer: Any = self._writer
        if not isinstance(writer, PollsRequests):
            self._store.retire(*refs)
            return
        try:
            self._store.retire(*refs, timeout=0.0)
        except RequestTimeoutError:
            writer.poll()
