"""Where the time of a step with a save goes: the phases of the loop, and parts of ckptstore in the training thread.

`every_step_turns --profile` shows the difference of each phase between the loop with saves and the one without. Nothing
of ckptstore runs in forward and backward: what they lose, they lose to another process, for its share of a core, of
the caches and of the memory's bandwidth. The parts are measured by wrapping functions (`_PARTS`); a part within another
one counts for itself alone.
"""

from __future__ import annotations

import functools
import importlib
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rich.table import Table

__all__ = ["PHASES", "Phases", "Spent", "StepParts", "means", "shown"]

PHASES: Final = ("forward, backward", "optimizer", "save", "clear")
"""The phases of a step: the optimizer's includes hooks, the save's is `Checkpointer.step`."""

_PARTS: Final = (
    ("entries of gradients", "ckptstore.training.optimizers.topk", "TopKHook", "consumed"),
    ("entries of gradients", "ckptstore.training.optimizers.topk", "TopKHook", "consumed_later"),
    ("entries to the agent", "ckptstore.training.replica.consumed_gradients", None, "write_entries"),
    ("memory of the agent", "ckptstore.agent.client.replica_client", "ReplicaClient", "area"),
    ("memory of the agent", "ckptstore.agent.client.buffer_client", "BufferClient", "lend"),
    ("plan", "ckptstore.training.capture.capture_plan", "StatePlan", "taken"),
    ("copies", "ckptstore.training.capture.capture_plan", "StateCopy", "filled"),
    ("copies", "ckptstore.host.batched_copies", "BatchedCopies", "run"),
    ("digests", "ckptstore.agent.protocol.replica_recipe", "Proof", "into"),
    ("updates", "ckptstore.training.capture.predicted_updates", "PredictedUpdates", "updates"),
    ("messages", "ckptstore.agent.client.agent_link", "AgentLink", "ask"),
)
"""Label, module, class (None: a function of the module), name."""

Spent = dict[str, tuple[float, float]]
"""By phase or part: wall seconds, and processor seconds of the training thread."""


class StepParts:
    """Measures the parts in the thread that made it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._spent: dict[str, list[float]] = {}
        self._stack: list[list[float]] = []  # for each part under way, the time of the parts within it

    def install(self) -> None:
        """Wrap the functions, until the process ends."""
        for label, module, owner, name in _PARTS:
            place: Any = importlib.import_module(module)
            place = place if owner is None else getattr(place, owner)
            setattr(place, name, self.timed(label, getattr(place, name)))

    def take(self) -> Spent:
        """What was spent since the last call."""
        spent, self._spent = self._spent, {}
        return {label: (wall, processor) for label, (wall, processor) in spent.items()}

    def timed(self, label: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The function, measured."""

        @functools.wraps(call)
        def timed(*args: Any, **named: Any) -> Any:
            if threading.get_ident() != self._thread:
                return call(*args, **named)
            within = [0.0, 0.0]
            self._stack.append(within)
            began, busy = time.perf_counter(), time.thread_time()
            try:
                return call(*args, **named)
            finally:
                spent = time.perf_counter() - began, time.thread_time() - busy
                self._stack.pop()
                own = self._spent.setdefault(label, [0.0, 0.0])
                for place, seconds in enumerate(spent):
                    own[place] += seconds - within[place]
                    if self._stack:
                        self._stack[-1][place] += seconds

        return timed


def means(steps: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """The mean of each phase or part over steps; a step in which it is missing counts as 0."""
    names = dict.fromkeys(name for one in steps for name in one)

    def mean(name: str, place: int) -> float:
        return sum(one.get(name, (0.0, 0.0))[place] for one in steps) / len(steps)

    return {name: [mean(name, 0), mean(name, 1)] for name in names}


@dataclass(slots=True)
class Phases:
    """By pair of turns, what each phase took without saves and with them, and what each part took."""

    plain: list[dict[str, list[float]]] = field(default_factory=list)
    saving: list[dict[str, list[float]]] = field(default_factory=list)
    parts: list[dict[str, list[float]]] = field(default_factory=list)

    def differences(self, phase: str, place: int) -> list[float]:
        """What a phase took more with saves, by pair: of wall seconds (0) or processor seconds (1)."""
        pairs = zip(self.plain, self.saving, strict=True)
        return [mine[phase][place] - its[phase][place] for its, mine in pairs]

    def whole(self, place: int) -> list[float]:
        """The sum of the phases' differences, by pair."""
        each = [self.differences(phase, place) for phase in PHASES]
        return [sum(one) for one in zip(*each, strict=True)]


def shown(title: str, phases: Phases, interval_of: Callable[[Sequence[float]], tuple[float, float]]) -> Table:
    """The table of a strategy: milliseconds a step, medians over pairs.

    Args:
        interval_of: the 95 % interval of a median.
    """
    table = Table(title=title, title_justify="left")
    table.add_column("a step's", no_wrap=True)
    for name in ("ms without", "ms with", "more", "with 95 %", "processor more", "of the step"):
        table.add_column(name, justify="right", no_wrap=True)
    step = statistics.median(sum(one[phase][0] for phase in PHASES) for one in phases.plain)

    def row(name: str, columns: Sequence[str], more: Sequence[float], busy: Sequence[float]) -> None:
        low, high = interval_of(more)
        mid = statistics.median(more)
        said = (f"{1e3 * mid:+.1f}", f"{1e3 * low:+.1f} to {1e3 * high:+.1f}", f"{1e3 * statistics.median(busy):+.1f}")
        table.add_row(name, *columns, *said, f"{mid / step:+.1%}")

    for phase in PHASES:
        medians = [statistics.median(one[phase][0] for one in each) for each in (phases.plain, phases.saving)]
        columns = [f"{1e3 * one:.1f}" for one in medians]
        row(phase, columns, phases.differences(phase, 0), phases.differences(phase, 1))
    row("all", ["", ""], phases.whole(0), phases.whole(1))
    for part in dict.fromkeys(name for one in phases.parts for name in one):
        spent = [one.get(part, [0.0, 0.0]) for one in phases.parts]
        row(f"  of these: {part}", ["", ""], [one[0] for one in spent], [one[1] for one in spent])
    return table
