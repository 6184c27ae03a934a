"""Retention of a `Checkpointer`: passes its rules to the store, tags the best checkpoint, deletes retired ones.

The rules decide which checkpoints are retired (`formats.history.retention_rules`), and the writer retires them. A
thread here moves the tag `BEST` and deletes what nothing needs any more (`Store.gc`), for a small part of the time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from ckptstore.errors import CkptError, UsageError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import CheckpointEntry
from ckptstore.formats.history.retention_rules import checked
from ckptstore.formats.history.rule_rankings import line, metric
from ckptstore.host.option_checks import whole
from ckptstore.host.threads import started_pool
from ckptstore.store import Store
from ckptstore.write.writer import Writer

__all__ = ["BEST", "Keep", "Retention"]

_LOG: Final = logging.getLogger("ckptstore.training")

BEST: Final = "best"
"""The tag of the best checkpoint."""
_SHARE: Final = 40
"""A round may take 1/40 of the time: reading the log takes the interpreter's lock from training."""
_SHARE_IDLE: Final = 200
"""The same without rules, when a round only checks whether there are some now."""
_PAUSE_IDLE: Final = 1.0
"""Minimum seconds between such rounds."""
_PAUSE_IDLE_MOST: Final = 20.0
"""Maximum seconds between them: one slow round, often the first, must not delay later ones for long."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Which checkpoints are kept. If nothing is set, the store's own rules apply.

    Attributes:
        last: this many newest ones.
        every: those whose step is a multiple of it.
        best: a metric. The checkpoint with its lowest value (``NAME`` or ``min:NAME``) or highest value (``max:NAME``)
            is kept, too, and tagged `BEST`.
        rules: rules as `Store.keep` takes them, instead of `last` and `every`.
    """

    last: int | None = None
    every: int | None = None
    best: str | None = None
    rules: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.last is not None:
            whole("keep_last", self.last, 1)
        if self.every is not None:
            whole("keep_every", self.every, 1)
        if self.best is not None and (not isinstance(self.best, str) or not self.metric):
            raise UsageError(f"keep_best: {self.best!r}; the name of a metric, or 'max:NAME'")
        if self.rules is not None and (self.last is not None or self.every is not None):
            raise UsageError("keep: it replaces keep_last and keep_every: write ['last:N', 'every:N']")
        checked(self.store_rules or ())  # rules do not allow every name of a metric

    @property
    def store_rules(self) -> tuple[str, ...] | None:
        """The rules for the store; None: it keeps its own. With `best` alone the checkpoint is only tagged."""
        if self.rules is not None:
            return checked(self.rules)
        found = [f"last:{self.last}"] if self.last is not None else []
        found += [f"every:{self.every}"] if self.every is not None else []
        if not found:
            return None
        if self.best is not None:
            found.append(f"best:{self.metric}:1" + (":max" if self._highest else ""))
        return (*found, "branches")  # after a rollback the abandoned checkpoints stay

    @property
    def _highest(self) -> bool:
        return self.best is not None and self.best.startswith("max:")

    @property
    def metric(self) -> str | None:
        """The name of the metric of `best`."""
        return None if self.best is None else self.best.removeprefix("max:").removeprefix("min:")

    def best_of(self, catalog: Catalog) -> CheckpointEntry | None:
        """The best checkpoint of the newest one's line; among equals the newest. None: no metric, or no values."""
        wanted = self.metric
        if wanted is None:
            return None
        on_line, sign = line(catalog), -1 if self._highest else 1
        rated = [
            (sign * value, -entry.step, entry)
            for node, entry in catalog.checkpoints.items()
            if on_line(node) and (value := metric(entry, wanted)) is not None
        ]
        return min(rated, key=lambda one: one[:2])[2] if rated else None


class Retention:
    """Tags and deletes in its own thread, one round at a time; also without rules, because rules may be added."""

    def __init__(self, store: Store, writer: Writer, keep: Keep) -> None:
        """
        Args:
            store: of `writer`.
            writer: of this process; it applies the store's rules.
        """
        self._store = store
        self._writer = writer
        self._keep = keep
        self._pool: ThreadPoolExecutor | None = started_pool(1, "ckptstore-retention")
        self._lock = threading.Lock()
        self._round: Future[None] | None = None
        self._not_before = 0.0
        self._idle = False  # the last round found no rules and nothing to delete
        self._free = store.backend.free_bytes()  # after the last round
        self._warned = False

    def durable(self, is_durable: bool) -> None:
        """A save has ended (`PendingSave.when_done`): start a round if it is time for one."""
        with self._lock:
            if not is_durable or self._pool is None or self._round is not None:
                return
            if time.monotonic() >= self._not_before or self._short():
                self._round = self._pool.submit(self._rounds)

    def _short(self) -> bool:
        """Whether more was written since the last round than there is free space now.

        Prevents: training that fails on a full medium while enough space could be freed.
        """
        free = self._store.backend.free_bytes()
        return free is not None and self._free is not None and self._free - free > free

    def close(self) -> None:
        """Run the last round, then end. Call it when all saves are durable, before the writer is closed."""
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
            # That loses no checkpoint, and the next round tries again.
            level, self._warned = (logging.DEBUG if self._warned else logging.WARNING), True
            _LOG.log(level, "%s: superfluous checkpoints stay for now: %s", self._store.url, error)
        finally:
            ended, free = time.monotonic(), self._store.backend.free_bytes()
            with self._lock:
                self._free = free
                pause = _SHARE * (ended - began)
                if self._idle:
                    pause = min(max(_PAUSE_IDLE, _SHARE_IDLE * (ended - began)), _PAUSE_IDLE_MOST)
                self._not_before = ended + pause
                self._round = None

    def _once(self) -> None:
        from ckptstore.maintenance.garbage_collection import collect_patiently

        view = self._store.view()
        catalog = view.catalog
        best = self._keep.best_of(catalog)
        if best is not None and catalog.tags.get(BEST) != best.node:
            self._writer.tag(BEST, best.ref)
            self._writer.poll()  # so that it can retire the previous best
            view = self._store.view()
            catalog = view.catalog
        # Also without rules: they may have been removed again, or come with the next request.
        self._idle = not catalog.keep and not catalog.dropped and self._keep.best is None
        if catalog.dropped:
            collect_patiently(self._store.journal, since=view)
