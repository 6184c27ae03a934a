"""Compares two runs step by step: metrics, bytes, and up to which step their states are the same. Reads both logs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptstore.formats.history.rule_rankings import number
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.reports.lineage import Lineage, lineage

if TYPE_CHECKING:
    from ckptstore.log.journal import Journal

__all__ = ["Divergence", "SideBySide", "StepPair", "side_by_side"]


@dataclass(frozen=True, slots=True)
class StepPair:
    """The checkpoints of both runs at one step.

    Attributes:
        step: the step.
        infos: the checkpoint of each run, in the history of its newest one; None: the run has none.
        values: the metric of each; None: it has none, or it is NaN.
    """

    step: int
    infos: tuple[CheckpointInfo | None, CheckpointInfo | None]
    values: tuple[float | None, float | None]

    @property
    def same(self) -> bool | None:
        """Whether the two states are the same, bit for bit; None: only one run has the step."""
        first, second = self.infos
        return None if first is None or second is None else first.state == second.state


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where the states of two runs diverge.

    Attributes:
        common: number of steps that both have.
        same_until: the last step up to which all states are the same; None: the first states differ.
        differ_from: the first step with different states; None: all are the same.
    """

    common: int
    same_until: int | None
    differ_from: int | None


@dataclass(frozen=True, slots=True)
class SideBySide:
    """A comparison of two runs.

    Attributes:
        runs: the `lineage` of each.
        metric: the name of the compared number.
        pairs: every step that one of them has in the history of its newest checkpoint, ascending.
    """

    runs: tuple[Lineage, Lineage]
    metric: str
    pairs: tuple[StepPair, ...]

    @property
    def parting(self) -> Divergence:
        """Where their states diverge."""
        common = [pair for pair in self.pairs if pair.same is not None]
        until, differ = None, None
        for pair in common:
            if not pair.same:
                differ = pair.step
                break
            until = pair.step
        return Divergence(len(common), until, differ)

    @property
    def last_common(self) -> StepPair | None:
        """The highest step at which both have the metric; None: there is none."""
        return next((pair for pair in reversed(self.pairs) if None not in pair.values), None)

    def lowest(self, run: int) -> StepPair | None:
        """Return the step at which a run (0 or 1) has the lowest metric; None: it has no metric."""
        found = [(value, pair) for pair in self.pairs if (value := pair.values[run]) is not None]
        return min(found, key=lambda one: one[0])[1] if found else None


def side_by_side(first: Journal, second: Journal, metric: str = "loss") -> SideBySide:
    """Compare two runs.

    Args:
        metric: a number of the metadata, or of its ``metrics``.

    Raises:
        CorruptLogError: no part of a log can be read.
        StorageError: a medium failed.
    """
    runs = lineage(first), lineage(second)
    sides = [{info.step: info for info in _line(run)} for run in runs]
    steps: Sequence[int] = sorted(sides[0].keys() | sides[1].keys())
    pairs = [
        StepPair(step, (a := sides[0].get(step), b := sides[1].get(step)), (_value(a, metric), _value(b, metric)))
        for step in steps
    ]
    return SideBySide(runs, metric, tuple(pairs))


def _line(run: Lineage) -> list[CheckpointInfo]:
    """Return the newest checkpoint and all its ancestors."""
    infos = {info.ref: info for info in run.checkpoints}
    ref = run.latest if run.latest is not None else next(iter(infos), None)
    found = []
    while ref is not None and ref in infos:
        found.append(infos[ref])
        ref = run.parents[ref]
    return found


def _value(info: CheckpointInfo | None, metric: str) -> float | None:
    return None if info is None else number(info.metadata, metric)
