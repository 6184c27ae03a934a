"""Measure from a store the job that writes it: sizes, times of commits, cost of restoring."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Final

from ckptstore.errors import CheckpointNotFoundError
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.reports.restore_explanation import explained
from ckptstore.restore.open_checkpoint import opened
from ckptstore.restore.restore_rates import measure_rates
from ckptstore.store import Store

__all__ = ["REPEATS", "JobMeasurement", "measure", "seconds_per_step"]

REPEATS: Final = 5
"""How often the times are measured."""


@dataclass(frozen=True, slots=True)
class JobMeasurement:
    """Measurements of a job. See `Job` for the terms. None: unknown from the store.

    Attributes:
        ref: the checkpoint whose restore was measured.
        fulls, diffs: their numbers.
        full_bytes: median of the fulls' stored bytes.
        diff_bytes: median of the stored bytes of checkpoints that are not fulls.
        write_floor: bytes per second; the medium wrote at least this fast (bytes of a checkpoint over the time since
            the previous one, which includes training). It estimates the bandwidth only if training was bound by it.
        iteration: seconds per step: median over neighbouring checkpoints of a term; includes stalls by saves.
        load_full: seconds to read and decode the full.
        merge_batch: seconds to open one segment of diffs, or None without diffs.
        replay_diff: seconds to read and decode one diff, or None without diffs.
        spread: `load_full`, `merge_batch` and `replay_diff` -> the least and the most that the repeated measurements
            gave. The attributes are their medians.
    """

    ref: str
    fulls: int
    diffs: int
    full_bytes: float
    diff_bytes: float | None
    write_floor: float | None
    iteration: float | None
    load_full: float
    merge_batch: float | None
    replay_diff: float | None
    spread: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def measure(store: Store) -> JobMeasurement:
    """Measure the newest checkpoint that is not a full (or the newest full if there is none), and the history.

    What takes time is measured `REPEATS` times, after a first time that warms caches and kernels and does not count.
    Reads headers, and at most 32 MiB each time.

    Raises:
        CheckpointNotFoundError: the store holds no full.
        CorruptionError, StorageError: an object cannot be read.
    """
    infos = store.checkpoints()
    fulls = [info for info in infos if info.kind == "full"]
    diffs = [info for info in infos if info.kind not in ("full", "lost")]
    if not fulls:
        raise CheckpointNotFoundError(f"{store.url}: holds no full checkpoint to measure")
    ref = (diffs or fulls)[-1].ref
    times = [_times(store, ref) for _ in range(1 + REPEATS)][1:]
    measured = {name: sorted(one[name] for one in times) for name in times[0]}
    neighbours = list(_neighbours(infos))
    return JobMeasurement(
        ref=ref,
        fulls=len(fulls),
        diffs=len(diffs),
        full_bytes=median(info.stored for info in fulls),
        diff_bytes=_median([info.stored for info in diffs]),
        write_floor=max((b.stored / (b.time - a.time) for a, b in neighbours), default=None),
        iteration=seconds_per_step(infos),
        load_full=median(measured["load_full"]),
        merge_batch=_median(measured.get("merge_batch", [])),
        replay_diff=_median(measured.get("replay_diff", [])),
        spread={name: (found[0], found[-1]) for name, found in measured.items()},
    )


def _times(store: Store, ref: str) -> dict[str, float]:
    """Measure once: the seconds of `JobMeasurement`, by name; the last two only with diffs."""
    began = time.perf_counter()
    with opened(store.journal, ref) as found:
        opening = (time.perf_counter() - began) / len(found.readers)
        steps = explained(found, None, measure_rates(found)).steps
    times = {"load_full": sum(step.seconds for step in steps if step.base is None)}
    replays = [step.seconds for step in steps if step.base is not None]
    return times | {"merge_batch": opening, "replay_diff": median(replays)} if replays else times


def seconds_per_step(infos: Sequence[CheckpointInfo]) -> float | None:
    """The median over neighbouring checkpoints of a term, saves included; None without such a pair."""
    return _median([(b.time - a.time) / (b.step - a.step) for a, b in _neighbours(infos)])


def _neighbours(infos: Sequence[CheckpointInfo]) -> Iterable[tuple[CheckpointInfo, CheckpointInfo]]:
    """Pairs of consecutive checkpoints of a term. Omits pairs whose time does not increase (a clock set back)."""
    return (pair for pair in pairwise(infos) if pair[0].term == pair[1].term and pair[0].time < pair[1].time)


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
