"""Numbers from a finished run: the saves, their speed, and their cost to the training loop."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise

from tools.demo.supervisor import Attempt


@dataclass(frozen=True, slots=True)
class SaveCosts:
    """The checkpoints of one mode (``save`` or ``save_async``). Medians; seconds and bytes."""

    mode: str
    checkpoints: int
    nbytes: int
    stored: int
    durable_seconds: float
    """From the call until the store acknowledged."""
    stall_seconds: float
    """How long the training loop was blocked by one checkpoint."""
    step_seconds: float
    """From the start of one step to the start of the next, checkpoint included."""
    baseline_seconds: float
    """The same in the reference run, without its hashing."""

    @property
    def bytes_per_second(self) -> float:
        """Stored bytes over the time to durable."""
        return self.stored / self.durable_seconds

    @property
    def stall_share(self) -> float:
        """Share of a step's time that is stall."""
        return self.stall_seconds / self.step_seconds

    @property
    def loss_share(self) -> float:
        """Whole cost to the loop: the increase of a step's time relative to no store."""
        return self.step_seconds / self.baseline_seconds - 1.0


def compute_seconds(attempt: Attempt) -> float:
    """Median seconds that the computation of one step takes."""
    seconds: list[float] = [event.fields["seconds"] for event in attempt.events if event.kind == "computed"]
    return statistics.median(seconds)


def save_costs(attempts: list[Attempt], reference: Attempt) -> list[SaveCosts]:
    """One entry for each mode that acknowledged a checkpoint and released the loop at least twice."""
    modes = dict.fromkeys(
        event.fields["mode"] for attempt in attempts for event in attempt.events if event.kind == "resumed"
    )
    baseline = compute_seconds(reference)
    found = [_costs_of(mode, attempts, baseline) for mode in sorted(modes)]
    return [costs for costs in found if costs is not None]


def _costs_of(mode: str, attempts: list[Attempt], baseline: float) -> SaveCosts | None:
    durable, stalls, cycles = [], [], []
    for attempt in attempts:
        resumed = attempt.first("resumed")
        if resumed is None or resumed.fields["mode"] != mode:
            continue
        durable += [event.fields for event in attempt.events if event.kind == "durable"]
        stalls += [event.fields["seconds"] for event in attempt.events if event.kind == "released"]
        begins = [event.at for event in attempt.events if event.kind == "begin"]
        cycles += [later - earlier for earlier, later in pairwise(begins)]
    if not durable or not stalls or not cycles:
        return None
    return SaveCosts(
        mode=mode,
        checkpoints=len(durable),
        nbytes=int(statistics.median(fields["nbytes"] for fields in durable)),
        stored=int(statistics.median(fields["stored"] for fields in durable)),
        durable_seconds=statistics.median(fields["seconds"] for fields in durable),
        stall_seconds=statistics.median(stalls),
        step_seconds=statistics.median(cycles),
        baseline_seconds=baseline,
    )


def losses_of(attempts: list[Attempt]) -> dict[int, list[float]]:
    """Every computed loss of a step; a step that was lost and computed again has several."""
    found: dict[int, list[float]] = {}
    for attempt in attempts:
        for step, event in attempt.steps("computed").items():
            found.setdefault(step, []).append(event.fields["loss"])
    return found
