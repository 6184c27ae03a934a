"""Two runs, step by step: their metrics, their bytes, and up to where their states are the same. Reads both logs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptstore.formats.rule_rankings import number
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.reports.lineage import Lineage, lineage

if TYPE_CHECKING:
    from ckptstore.log.journal import Journal

__all__ = ["Pair", "Parting", "SideBySide", "side_by_side"]


@dataclass(frozen=True, slots=True)
class Pair:
    """What both runs have of one step.

    Attributes:
        step: the step.
        infos: the checkpoint of each run, on the line of its newest one; None: it has none.
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
class Parting:
    """Where the states of two runs part.

    Attributes:
        common: how many steps both have.
        same_until: the last step up to which all of them are the same; None: the first is not.
        differ_from: the first that is not; None: all are.
    """

    common: int
    same_until: int | None
    differ_from: int | None


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Two runs beside each other.

    Attributes:
        runs: what `lineage` says of each.
        metric: the name of the number that is compared.
        pairs: every step that one of them has on the line of its newest checkpoint, ascending.
    """

    runs: tuple[Lineage, Lineage]
    metric: str
    pairs: tuple[Pair, ...]

    @property
    def parting(self) -> Parting:
        """Where their states part."""
        common = [pair for pair in self.pairs if pair.same is not None]
        until, differ = None, None
        for pair in common:
            if not pair.same:
                differ = pair.step
                break
            until = pair.step
        return Parting(len(common), until, differ)

    @property
    def last_common(self) -> Pair | None:
        """The highest step of which both have the metric; None: there is none."""
        return next((pair for pair in reversed(self.pairs) if None not in pair.values), None)

    def lowest(self, run: int) -> Pair | None:
        """The step at which a run (0 or 1) has the lowest metric; None: it has none."""
        found = [(value, pair) for pair in self.pairs if (value := pair.values[run]) is not None]
        return min(found, key=lambda one: one[0])[1] if found else None


def side_by_side(first: Journal, second: Journal, metric: str = "loss") -> SideBySide:
    """Put two runs beside each other.

    Args:
        metric: a number of the metadata, or of their ``metrics``.

    Raises:
        CorruptLogError: nothing of a log can be read.
        StorageError: a medium failed.
    """
    runs = lineage(first), lineage(second)
    sides = [{info.step: info for info in _line(run)} for run in runs]
    steps: Sequence[int] = sorted(sides[0].keys() | sides[1].keys())
    pairs = [
        Pair(step, (a := sides[0].get(step), b := sides[1].get(step)), (_value(a, metric), _value(b, metric)))
        for step in steps
    ]
    return SideBySide(runs, metric, tuple(pairs))


def _line(run: Lineage) -> list[CheckpointInfo]:
    """The newest checkpoint and all that it continues from."""
    infos = {info.ref: info for info in run.checkpoints}
    ref = run.latest if run.latest is not None else next(iter(infos), None)
    found = []
    while ref is not None and ref in infos:
        found.append(infos[ref])
        ref = run.parents[ref]
    return found


def _value(info: CheckpointInfo | None, metric: str) -> float | None:
    return None if info is None else number(info.metadata, metric)
