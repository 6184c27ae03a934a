"""What can be asked about a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Self

from ckptstore.formats.html_tables import Rows
from ckptstore.host.progress import as_progress
from ckptstore.store.restore_methods import Reading

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

__all__ = ["Looking"]


class Looking(Reading):
    """The part of `Store` that answers questions: how a checkpoint is stored, how two differ, where something began."""

    def inspect(
        self, ref: str | int = "latest", select: str | Sequence[str] | None = None, *, explain: bool = False
    ) -> CheckpointDescription:
        """Take a checkpoint apart: its tensors and how each is stored, its chain, the rest of its state.

        Reads and verifies the headers of its chain, no tensor.

        Args:
            select: describe only tensors that match one of these globs.
            explain: also say how it would be restored (`plan`), as `explain` does; of the rates of this machine only
                those are measured that it takes.

        Raises:
            CheckpointNotFoundError, TensorNotFoundError: nothing answers to `ref`, or matches `select`.
            CorruptionError: a segment of the chain is missing or its header is damaged.
        """
        from ckptstore.reports.inspection import inspect

        return inspect(self.journal, ref, select, explain=explain)

    def statistics(self, ref: str | int, tensor: str, *, progress: Progress | bool | None = None) -> TensorStatistics:
        """Count, range, mean, norm and magnitudes of one tensor's values, in one pass. Bytes are verified.

        Args:
            tensor: its name.
            progress: told (bytes done, bytes in all).

        Raises:
            CheckpointNotFoundError, TensorNotFoundError: there is none.
            CorruptionError: its bytes are damaged.
        """
        from ckptstore.reports.inspection import statistics

        return statistics(self.journal, ref, tensor, as_progress(progress))

    def stats(self) -> StoreStats:
        """Where the store's bytes are: by kind, term and class of tensor; growth; what prune and gc would free.

        Reads the log, lists the segments, and reads the headers of the newest checkpoint's chain.

        Raises:
            CorruptLogError: nothing of the log can be read.
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
        """Follow the run: how it is doing now, and from then on whenever something has changed. Ends with an error.

        Takes no lock and no pin, and reads no segment. A look fetches only what is new: of a store at rest it takes
        four requests, and one more for each record that came.

        Args:
            every: seconds between two looks, 0.01 to 86,400.
            metric: name of a number in the metadata (or in their ``metrics``) to follow.
            wait: where there is no store yet, wait until there is one.
            quiet: give the status after every look, whether something has changed or not.

        Raises:
            UsageError: at once: `every` is no such time, or `metric` no name.
            StoreNotFoundError: there is no store here; or it was deleted or moved away.
            StoreReplacedError: it was, and another run's, or another history of the run, is in its place.
            CorruptLogError: the log is damaged where the newest is decided, or what was read of it is gone.
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
        """What restoring a checkpoint (or the tensors of it that `select` names) will read and decode, and how long
        that should take here.

        Reads headers, and at most 16 MiB to measure the medium; no tensor is restored.

        Raises:
            as `load`.
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

        Tensors of equal hash are the same and are not read; the others are read chunk by chunk and verified. Tensors in
        shards are compared as whole ones, however each side is cut.

        Args:
            select: only tensors at places that match one of these patterns, in either checkpoint.
            other: the store that `ref_b` is in; None: this one.
            progress: told (bytes done, bytes in all).

        Returns:
            a difference for each tensor, the same ones included, in the order of B's state; what only A has comes last.

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
        """How two checkpoints differ in what is not a tensor: numbers, strings, RNG states.

        Args:
            other: the store that `ref_b` is in; None: this one.

        Raises:
            CheckpointNotFoundError, CorruptionError, FormatError.
        """
        from ckptstore.reports.comparison import compare_state

        found = compare_state(self.journal, ref_a, ref_b, None if other is None else other.journal)
        return Rows(found, "difference", ("path", "status", "before", "after"))

    def side_by_side(self, other: Self, metric: str = "loss") -> SideBySide:
        """This run and another, step by step: the metric of both, their bytes, up to where their states are the same.

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
        """Find the checkpoint at which something began, by binary search: 14 restores for 10,000 checkpoints.

        Searched is the history of one checkpoint: of a fork its own line alone. What is damaged is skipped.

        Args:
            predicate: called with each state, arrays of numpy: True if it is bad, False if it is good, None if that
                cannot be said. Or a shell command that gets a safetensors file as ``$1``, and exits with 0 (good), 125
                (cannot be said) or another code up to 127 (bad).
            ref: the end of the history.
            select: restore only tensors at places that match one of these patterns.
            good: a checkpoint that is known to be good: only what is after it is searched.
            bad: one that is known to be bad: only what is before it is; instead of `ref`.
            checks: look at so many checkpoints more on either side: does it go on, once it began?
            on_probe: told of every checkpoint that was looked at.

        Raises:
            CheckpointNotFoundError, TensorNotFoundError: there is none.
            UsageError: `good` is not before the end; or the command was killed, or exited with more than 127.
            StorageError: the medium failed. And anything that `predicate` raises.
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
        """What restoring a checkpoint (or the tensors of it that `select` names) takes of an object store, and what
        this handle has spent so far; None: requests of this medium cost nothing.

        Reads headers; no tensor is restored.

        Raises:
            as `load`.
        """
        from ckptstore.reports.request_costs import request_costs

        return request_costs(self.journal, ref, select)
