"""The methods of `Store` that answer questions: inspect, compare, watch, explain, bisect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Self

from ckptstore.formats.html_tables import Rows
from ckptstore.host.progress import as_progress
from ckptstore.store.export_methods import ExportMethods
from ckptstore.store.restore_methods import RestoreMethods

if TYPE_CHECKING:
    from ckptstore.host.progress import Progress
    from ckptstore.reports.bisection import Bisected, Predicate, Probe
    from ckptstore.reports.comparison import StateDifference, TensorDifference
    from ckptstore.reports.inspection import CheckpointDescription, TensorStatistics
    from ckptstore.reports.request_costs import RequestCosts
    from ckptstore.reports.restore_explanation import Explanation
    from ckptstore.reports.run_comparison import SideBySide
    from ckptstore.reports.run_status import RunStatus
    from ckptstore.reports.store_stats import StoreStats

__all__ = ["QueryMethods"]


class QueryMethods(RestoreMethods, ExportMethods):
    """The methods of `Store` that say how a checkpoint is stored, how two differ, and where a change began."""

    def inspect(
        self, ref: str | int = "latest", select: str | Sequence[str] | None = None, *, explain: bool = False
    ) -> CheckpointDescription:
        """Describe a checkpoint: its tensors and how each is stored, its chain, the rest of its state.

        Reads and verifies the headers of its chain, but no tensor.

        Args:
            select: describe only tensors that match one of these globs.
            explain: also give the restore plan (`plan`), as `explain` does; measures only those rates of this machine
                that the plan needs.

        Raises:
            CheckpointNotFoundError, TensorNotFoundError: no checkpoint matches `ref`, or no tensor matches `select`.
            CorruptionError: a segment of the chain is missing or its header is damaged.
        """
        from ckptstore.reports.inspection import inspect

        return inspect(self.journal, ref, select, explain=explain)

    def statistics(self, ref: str | int, tensor: str, *, progress: Progress | bool | None = None) -> TensorStatistics:
        """Count, range, mean, norm and magnitudes of one tensor's values, in one pass. Bytes are verified.

        Args:
            tensor: name of the tensor.
            progress: called with (bytes done, total bytes).

        Raises:
            CheckpointNotFoundError, TensorNotFoundError: there is no such checkpoint or tensor.
            CorruptionError: its bytes are damaged.
        """
        from ckptstore.reports.inspection import statistics

        return statistics(self.journal, ref, tensor, as_progress(progress))

    def stats(self) -> StoreStats:
        """The store's bytes by kind, term and class of tensor; its growth; the bytes that prune and gc would free.

        Reads the log, lists the segments, and reads the headers of the newest checkpoint's chain.

        Raises:
            CorruptLogError: no part of the log can be read.
            CorruptionError: the newest checkpoint's chain is damaged.
        """
        from ckptstore.maintenance.garbage_collection import collect
        from ckptstore.maintenance.pruning import prunable_nbytes
        from ckptstore.reports.store_stats import stats

        garbage = collect(self.journal, dry_run=True)
        return stats(
            self.journal,
            prunable_nbytes=prunable_nbytes(self.journal),
            garbage_nbytes=garbage.nbytes + garbage.pinned_nbytes,
            damage=garbage.damage,
        )

    def watch(
        self, every: float = 2.0, *, metric: str = "loss", wait: bool = False, quiet: bool = False
    ) -> Iterator[RunStatus]:
        """Follow the run: yield its status now, and again after every change. Only an error ends the iteration.

        Takes no lock and no pin, and reads no segment. A poll fetches only new records: it makes four requests for an
        unchanged store, and one more for each new record.

        Args:
            every: seconds between two polls, 0.01 to 86,400.
            metric: name of a number in the metadata (or in their ``metrics``) to follow.
            wait: if there is no store yet, wait until there is one.
            quiet: yield the status after every poll, even if nothing changed.

        Raises:
            UsageError: `every` is out of range, or `metric` is not a name. Raised by this call; the others by ``next``.
            StoreNotFoundError: there is no store here; or it was deleted or moved away.
            StoreReplacedError: it was replaced by a store of another run, or by another history of the run.
            CorruptLogError: damage leaves the newest checkpoint undecided, or records that were read before are gone.
            FormatError, StorageError: FORMAT or a record cannot be used; the medium failed.

        Example:
            >>> store = open("memory://watched")
            >>> with store.writer() as writer:
            ...     info = writer.save({"weight": 1.5}, step=1, metadata={"loss": 0.5})
            >>> status = next(store.watch())
            >>> status.latest, status.values
            ('1@1', ((1, 0.5),))
        """
        from ckptstore.reports.run_watch import watch

        return watch(self.journal, every, metric, wait=wait, quiet=quiet)

    def explain(self, ref: str | int = "latest", select: str | Sequence[str] | None = None) -> Explanation:
        """How a checkpoint (or those tensors of it that `select` names) would be restored: what is read and decoded,
        and an estimate of the time on this machine.

        Reads headers, and at most 16 MiB to measure the medium; restores no tensor.

        Raises:
            the errors of `load`.
        """
        from ckptstore.reports.restore_explanation import explain

        return explain(self.journal, ref, select)

    def compare(
        self,
        ref_a: str | int,
        ref_b: str | int,
        select: str | Sequence[str] | None = None,
        *,
        other: Self | None = None,
        progress: Progress | bool | None = None,
    ) -> list[TensorDifference]:
        """How two checkpoints differ, tensor by tensor: bits, elements, norms.

        Tensors of equal hash are the same and are not read; the others are read chunk by chunk and verified. Sharded
        tensors are compared as whole tensors, whatever the shards of either checkpoint are.

        Args:
            select: only tensors at places that match one of these patterns, in either checkpoint.
            other: the store of `ref_b`; None: this one.
            progress: called with (bytes done, total bytes).

        Returns:
            one entry for each tensor, equal ones included, in the order of B's state; tensors that only A has come
            last.

        Raises:
            CheckpointNotFoundError, TensorNotFoundError, CorruptionError.
        """
        from ckptstore.reports.comparison import compare

        found = compare(
            self.journal, ref_a, ref_b, select, as_progress(progress), None if other is None else other.journal
        )
        columns = ("name", "dtype", "shape", "status", "bits_changed", "elements_changed", "norm_diff", "max_abs")
        return Rows(found, "tensor", columns)

    def compare_state(self, ref_a: str | int, ref_b: str | int, *, other: Self | None = None) -> list[StateDifference]:
        """How two checkpoints differ in everything but tensors: numbers, strings, RNG states.

        Args:
            other: the store of `ref_b`; None: this one.

        Raises:
            CheckpointNotFoundError, CorruptionError, FormatError.
        """
        from ckptstore.reports.comparison import compare_state

        found = compare_state(self.journal, ref_a, ref_b, None if other is None else other.journal)
        return Rows(found, "difference", ("path", "status", "before", "after"))

    def side_by_side(self, other: Self, metric: str = "loss") -> SideBySide:
        """Compare this run with another, step by step: the metric and the bytes of both, and the steps at which their
        states are the same.

        Args:
            metric: name of a number in the metadata (or in their ``metrics``).

        Raises:
            StoreNotFoundError, CorruptLogError, StorageError: one of the logs cannot be read.
        """
        from ckptstore.reports.run_comparison import side_by_side

        return side_by_side(self.journal, other.journal, metric)

    def bisect(
        self,
        predicate: Predicate | str,
        *,
        ref: str | int = "latest",
        select: str | Sequence[str] | None = None,
        good: str | int | None = None,
        bad: str | int | None = None,
        checks: int = 0,
        on_probe: Callable[[Probe], object] | None = None,
    ) -> Bisected:
        """Find the checkpoint at which a change began, by binary search: 14 restores for 10,000 checkpoints.

        Searches the history of one checkpoint; after a fork, only its own line. Damaged checkpoints are skipped.

        Args:
            predicate: called with each state, whose tensors are numpy arrays. It returns True for bad, False for good,
                None if it cannot tell. Or a shell command that gets the path of a safetensors file as ``$1`` and exits
                with 0 (good), 125 (cannot tell) or another code up to 127 (bad).
            ref: the end of the history.
            select: restore only tensors at places that match one of these patterns.
            good: a checkpoint that is known to be good: only later ones are searched.
            bad: one that is known to be bad: only earlier ones are searched; instead of `ref`.
            checks: probe this many more checkpoints on either side, to see whether the change lasts once it began.
            on_probe: called with the result of every probe.

        Raises:
            CheckpointNotFoundError, TensorNotFoundError: there is no such checkpoint or tensor.
            UsageError: `good` is not before the end; or the command was killed, or exited with more than 127.
            StorageError: the medium failed. Also anything that `predicate` raises.
        """
        from ckptstore.reports.bisection import bisect, judged
        from ckptstore.reports.predicates import commanded

        if isinstance(predicate, str):
            ask = commanded(predicate, lambda one, path: self.export(one, path, format="safetensors", select=select))
        else:
            ask = judged(lambda one: self.load(one, framework="numpy", select=select), predicate)
        return bisect(self.journal, ask, ref=ref, good=good, bad=bad, checks=checks, on_probe=on_probe)

    def request_costs(
        self, ref: str | int = "latest", select: str | Sequence[str] | None = None
    ) -> RequestCosts | None:
        """What restoring a checkpoint (or those tensors of it that `select` names) costs in requests of an object
        store, and what this handle has spent so far; None: requests of this medium cost nothing.

        Reads headers; restores no tensor.

        Raises:
            the errors of `load`.
        """
        from ckptstore.reports.request_costs import request_costs

        return request_costs(self.journal, ref, select)
