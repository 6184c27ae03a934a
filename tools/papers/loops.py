"""Training loops that pay for saves: what a save costs a loop, measured in turns with the loop without saves.

The loops are those of `tools.bench.training`: a GPT on one core, everything that saves on the other. All ways of one
experiment live side by side, and each trains a few steps while the others pause, so that drift of the machine affects
all alike. In the end each restores its newest checkpoint, which is compared with the trained state bit by bit.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tools.bench.storage.rounds import WorkerError
from tools.bench.training.every_step import base_of
from tools.bench.training.every_step_turns import Worker, interval_of
from tools.bench.training.strategy_comparison import LABELS as LOOPS
from tools.bench.training.training_cases import BASELINES, LOSSY, Case, Plan, environment, finished
from tools.papers.limited_disk import Disk, limited_to, throttled
from tools.papers.result import Asked, Compared
from tools.warm import MODULES, Warm

__all__ = ["LABELS", "Cost", "Slow", "compared", "costs", "disk_of", "planned", "shared", "text_of"]

LABELS: Final = (
    LOOPS
    | BASELINES
    | {
        "none-topk": "none, top-k",
        "full-agent": "Checkpointer, fulls by an agent",
        "dense": "Checkpointer, step diffs",
        "dense-agent": "Checkpointer, step diffs by an agent",
        "dense-replica": "Checkpointer, replica",
        "topk": "Checkpointer, top-k step diffs",
        "topk-agent": "Checkpointer, top-k step diffs by an agent",
        "topk-replica": "Checkpointer, top-k, replica",
    }
)


@contextlib.contextmanager
def planned(asked: Asked, shape: tuple[int, int, int, int], *, steps: int = 8, full_every: int = 100) -> Iterator[Plan]:
    """A plan whose processes start warm. `shape`: width, layers, batch, context."""
    with Warm(MODULES, env=environment()) as nursery:
        width, layers, batch, context = shape
        yield Plan(width, layers, batch, context, steps, full_every, "cpu", True, asked.scratch, warm=nursery)


@dataclass(slots=True)
class Cost:
    """What saving costs a loop.

    Attributes:
        case: the way, and the iterations from one save to the next.
        steps: counted in each turn.
        plain: seconds a step of the loop without saves, beside each turn.
        saving: seconds a step of this loop, by turn.
        absent: why it is not measured; empty: it is.
        result: its restored state was compared.
    """

    case: Case
    steps: int
    plain: list[float] = field(default_factory=list)
    saving: list[float] = field(default_factory=list)
    absent: str = ""
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """For tables."""
        return LABELS.get(self.case.strategy, self.case.strategy)

    @property
    def overhead(self) -> float:
        """The slowdown, median of the turns: 0.05 is 5 %."""
        return statistics.median(mine / its - 1 for mine, its in zip(self.saving, self.plain, strict=True))

    @property
    def spread(self) -> tuple[float, float]:
        """The 95 % interval of the overhead."""
        return interval_of([mine / its - 1 for mine, its in zip(self.saving, self.plain, strict=True)])

    @property
    def iteration(self) -> float:
        """Seconds a step without saves."""
        return statistics.median(self.plain)

    @property
    def loss(self) -> float:
        """Seconds that one save costs the loop, not below 0."""
        return max(0.0, self.overhead) * self.iteration * self.case.interval

    def interval(self, bound: float) -> int:
        """The fewest iterations between saves that slow the loop by no more than the bound."""
        return max(1, math.ceil(self.loss / (bound * self.iteration) - 1e-9))

    def numbers(self) -> dict[str, Any]:
        """For the JSON."""
        if self.absent:
            return {"strategy": self.case.strategy, "absent": self.absent}
        return {
            "strategy": self.case.strategy,
            "interval": self.case.interval,
            "overhead": self.overhead,
            "interval_95": self.spread,
            "iteration_s": self.iteration,
            "loss_s": self.loss,
            "plain": self.plain,
            "saving": self.saving,
            "restore_s": self.result.get("restore_s"),
        }


def costs(asked: Asked, plan: Plan, ways: Sequence[tuple[str, int]], turns: int) -> list[Cost]:
    """Measure (strategy, interval) of each way in turns of `plan.steps` counted steps, or of one interval if longer.

    Raises:
        WorkerError: a worker ended, or a restored state is not the trained one.
    """
    found = [Cost(Case("loop", name, interval), _counted(plan.steps, interval)) for name, interval in ways]
    bases = {base_of(one.case.strategy): Case("loop", base_of(one.case.strategy), 1) for one in found}
    with contextlib.ExitStack() as stack:
        plain = {name: Worker(plan, case) for name, case in bases.items()}
        workers = [Worker(plan, one.case) for one in found]
        for worker in (*plain.values(), *workers):
            stack.callback(worker.__exit__)
            worker.start()
        for worker in plain.values():
            worker.ready()
        for one, worker in zip(found, workers, strict=True):
            try:
                worker.ready()
            except WorkerError as error:
                one.absent = str(error)
        for turn in range(turns):
            _turn(found, workers, plain, turn)
            now = ", ".join(
                f"{one.case.strategy}/{one.case.interval} {one.saving[-1] / one.plain[-1] - 1:+.0%}"
                for one in found
                if not one.absent
            )
            asked.told(f"turn {turn + 1}/{turns}: {now}")
        for one, worker in zip(found, workers, strict=True):
            one.result = {} if one.absent else worker.ask(0)
    return found


def _counted(steps: int, interval: int) -> int:
    """Steps of a turn: whole intervals."""
    return -(-steps // interval) * interval


def _turn(found: Sequence[Cost], workers: Sequence[Worker], plain: dict[str, Worker], turn: int) -> None:
    """One turn of every way, each between two turns of its loop without saves."""
    steps = min(one.steps for one in found)
    order = [(place + turn) % len(found) for place in range(len(found))]
    for base, worker in plain.items():
        before = _seconds(worker, steps)
        for place in order:
            one = found[place]
            if one.absent or base_of(one.case.strategy) != base:
                continue
            mine = _seconds(workers[place], one.steps)
            after = _seconds(worker, steps)
            one.plain.append((before + after) / 2)
            one.saving.append(mine)
            before = after


def _seconds(worker: Worker, steps: int) -> float:
    """A step's, of one turn; the first step does not count: in it a saver has no work of earlier steps."""
    return statistics.fmean(worker.ask(steps + 1)["iterations"][1:])


@dataclass(frozen=True, slots=True)
class Slow:
    """A disk and a link as slow as a paper's, in iterations.

    Attributes:
        save: that one stream takes to write a full.
        copy: that the link to a peer takes for one.
        said: a sentence that says which of the paper's numbers these are.
    """

    save: float
    copy: float
    said: str


_known: dict[tuple[Any, ...], Cost] = {}
"""Measured before in this process: experiments share ways."""
_disks: dict[tuple[Any, ...], Disk] = {}


def disk_of(plan: Plan, slow: Slow | None) -> Disk:
    """The limit for this plan's loop; it measures an iteration once in this process. None: this disk as it is."""
    if slow is None:
        return Disk()
    key = (slow, plan.width, plan.layers, plan.batch, plan.context)
    if key not in _disks:
        found = finished(plan, "loop", Case("loop", "none", 4), plan.scratch / "iteration")
        _disks[key] = limited_to(found["state_bytes"], found["median_iteration_s"], slow.save, slow.copy)
    return _disks[key]


def shared(
    asked: Asked,
    shape: tuple[int, int, int, int],
    ways: Sequence[tuple[str, int]],
    turns: int,
    steps: int = 4,
    slow: Slow | None = None,
) -> list[Cost]:
    """As `costs`, but what another experiment of this run has measured in the same setting is not measured again."""
    keys = {way: (shape, turns, steps, slow, *way) for way in ways}
    if missing := [way for way in ways if keys[way] not in _known]:
        with planned(asked, shape, steps=steps) as plan, throttled(disk_of(plan, slow)):
            for one in costs(asked, plan, missing, turns):
                _known[keys[one.case.strategy, one.case.interval]] = one
    return [_known[keys[way]] for way in ways]


def compared(found: Sequence[Cost]) -> list[Compared]:
    """That each way restored its last state; a worker whose state differs raises, unless its way is lossy."""
    there = [one for one in found if not one.absent]
    exact = [one for one in there if one.case.strategy not in LOSSY]
    equal = sum("restore_s" in one.result for one in exact)
    lost = [
        Compared(
            f"the last checkpoint of {one.label}", 1, 0, f"weights differ by {one.result['distance']:.1e} of their norm"
        )
        for one in there
        if one.case.strategy in LOSSY
    ]
    return [Compared("the last checkpoint of each loop", len(exact), equal), *lost]


def text_of(cost: Cost) -> str:
    """The overhead and its spread."""
    low, high = cost.spread
    return f"{cost.overhead:.1%} ({low:.0%} to {high:.0%})"
